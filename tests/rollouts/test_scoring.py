"""Rewards of all nodes of a turn, in place, by threads and by processes."""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from comlrl_lightning.environment.reward import RewardFunction
from comlrl_lightning.environment.reward_processes import WorkerTraceback
from comlrl_lightning.environment.reward_workers import RewardWorkers
from comlrl_lightning.rewards import PartSums, WeightedRewards, part_means
from tests.rollouts.fakes import FakeTeam, make_collector
from tests.rollouts.reward_functions import (
    as_told,
    halves,
    lengths,
    modes,
)
from tests.rollouts.scoring import WAYS, Backend, calls_of, is_told_to_hang, limit_only, score, told
from tests.rollouts.test_user_code import half_precision, product_dtype
from tests.waiting import HANG_SECONDS, PATIENCE_SECONDS, eventually


class TestTheSameRewards:
    def test_eight_calls_at_the_same_time_and_in_order(self) -> None:
        # Each call waits for all the others.
        meeting = threading.Barrier(8, timeout=PATIENCE_SECONDS)

        def reward(first: list[str], batch_items: Any) -> list[float]:
            meeting.wait()
            return [float(batch_items[0]["number"])] * len(first)

        assert score(reward, calls_of(*[{}] * 8), 8) == [[[float(at)]] * 2 for at in range(8)]

    def test_no_more_calls_than_workers_at_a_time(self) -> None:
        running, most, lock = [0], [0], threading.Lock()
        meeting = threading.Barrier(3, timeout=PATIENCE_SECONDS)  # three times three calls

        def reward(first: list[str]) -> list[float]:
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            meeting.wait()
            with lock:
                running[0] -= 1
            return [0.0] * len(first)

        score(reward, calls_of(*[{}] * 9), 3)
        assert most == [3]

    @pytest.mark.parametrize(("num_workers", "backend"), WAYS)
    def test_parts_and_sums(self, num_workers: int, backend: Backend) -> None:
        calls = calls_of(*[{}] * 7, num_agents=2, num_joint=3)
        weighted = WeightedRewards({"halves": halves, "lengths": lengths}, [0.1, 0.7])
        reward = RewardFunction(weighted, 2, processor=lambda value: value * 10)
        scores = RewardWorkers(num_workers, backend).score(reward, calls)
        rows = scores.rows
        # Joint completions of 2, 4 and 6 characters: item 1 gets 10 * (0.1 * (1 + 2/3) + 0.7 * 2) = 15.67 first,
        # then 10 * (0.1 * (1 + 4/3) + 0.7 * 4) = 30.33 and 10 * (0.1 * 3 + 0.7 * 6) = 45.
        assert [value for (value,) in rows[1]] == pytest.approx([15.6667, 30.3333, 45.0], abs=1e-3)
        # Halves: the mean number 3 plus the mean length 4 / 3.
        parts = part_means(scores.parts)
        assert parts == pytest.approx({"halves": 3 + 4 / 3, "lengths": 4.0})
        plain = RewardFunction(WeightedRewards({"halves": halves, "lengths": lengths}, [0.1, 0.7]), 2, lambda x: x * 10)
        in_place = RewardWorkers().score(plain, calls)
        assert rows == in_place.rows
        assert parts == part_means(in_place.parts)  # to the last bit

    @pytest.mark.parametrize("num_workers", [0, 4])
    def test_processors_run_in_the_order_of_the_nodes(self, num_workers: int) -> None:
        seen: list[float] = []

        def running_sum(value: float) -> float:
            seen.append(value)
            return sum(seen)

        calls = calls_of(*({"after": 0.06 - 0.02 * at} for at in range(4)), num_joint=1)
        assert score(as_told, calls, num_workers, processor=running_sum) == [[[0.0]], [[1.0]], [[3.0]], [[6.0]]]
        assert seen == [0.0, 1.0, 2.0, 3.0]

    @pytest.mark.parametrize("trajectories", [False, True])
    def test_a_rollout(self, trajectories: bool) -> None:
        def reward(first: list[str], second: list[str], batch_items: Any, turn: int) -> list[float]:
            time.sleep(random.random() / 100)
            words = [batch_items[0]["prompt"] + a + b for a, b in zip(first, second, strict=True)]
            return [turn + sum(map(ord, word)) * 31 % 7 for word in words]

        items = [{"prompt": text} for text in "pqr"]
        shape: dict[str, Any] = {"num_turns": 3, "trajectories": trajectories, "early_termination_threshold": 7.0}
        nodes = [
            make_collector(FakeTeam(2), reward, workers=RewardWorkers(workers), **shape).collect(items, [4, 5, 6]).nodes
            for workers in (0, 8)
        ]
        assert nodes[0] == nodes[1]
        assert len(nodes[0]) > 10

    def test_a_reward_that_changes_its_mind_is_asked_once(self) -> None:
        given: dict[str, list[float]] = {}

        def reward(first: list[str], batch_items: Any) -> list[float]:
            assert batch_items[0]["prompt"] not in given
            return given.setdefault(batch_items[0]["prompt"], [random.random() for _ in first])

        items = [{"prompt": text} for text in "abcdefgh"]
        rollouts = make_collector(FakeTeam(1), reward, workers=RewardWorkers(4)).collect(items, range(8))
        assert [list(node.rewards) for node in rollouts.nodes] == [given[text] for text in "abcdefgh"]

    def test_nothing_to_score(self) -> None:
        assert RewardWorkers(4).score(RewardFunction(lengths, 1), []).rows == []


class TestErrors:
    @pytest.mark.parametrize(("num_workers", "backend"), WAYS)
    def test_the_first_one_in_the_order_of_the_nodes(self, num_workers: int, backend: Backend) -> None:
        # Item 1 fails after item 2 has failed at once.
        calls = calls_of({}, {"do": "raise", "after": 0.1}, {"do": "raise odd"}, {}, num_joint=1)
        with pytest.raises(KeyError, match="1") as error:
            score(as_told, calls, num_workers, backend)
        (note,) = error.value.__notes__
        assert re.search(r"Raised in reward_func=\S+as_told for task item 11 \{.*\} at turn 3", note)
        if backend == "thread":
            assert error.traceback[-1].name == "as_told"
        else:
            assert isinstance(error.value.__cause__, WorkerTraceback)
            assert 'in as_told\n    raise KeyError(batch_items[0]["number"])' in str(error.value.__cause__)

    def test_later_calls_are_not_started(self) -> None:
        started = []
        meeting = threading.Barrier(2, timeout=PATIENCE_SECONDS)

        def reward(first: list[str], batch_items: Any) -> list[float]:
            started.append(number := batch_items[0]["number"])
            meeting.wait()
            raise LookupError(number)

        with pytest.raises(LookupError, match="0"):
            score(reward, calls_of(*[{}] * 8), 2)
        assert sorted(started) == [0, 1]

    def test_a_hanging_later_call_holds_nothing_up(self) -> None:
        with pytest.raises(KeyError):
            score(as_told, told("raise", "hang", after=0.05), 2)

    def test_a_processor_that_fails_first(self) -> None:
        def processor(value: float) -> float:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            score(as_told, told("score", "raise"), 2, processor=processor)

    @pytest.mark.parametrize(("num_workers", "backend"), WAYS)
    def test_a_reward_that_quits(self, num_workers: int, backend: Backend) -> None:
        with pytest.raises(SystemExit) as error:
            score(as_told, told("score", "quit"), num_workers, backend)
        assert error.value.code == 4

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_wrong_numbers_name_the_item(self, num_workers: int) -> None:
        with pytest.raises(ValueError, match=r"reward_func=.*<lambda> returned 1 value for 2 joint .* task item 10 "):
            score(lambda first: [1.0], calls_of({}, {}), num_workers)

    def test_ctrl_c(self) -> None:
        def reward(first: list[str], batch_items: Any) -> list[float]:
            if batch_items[0]["number"] == 1:
                signal.raise_signal(signal.SIGINT)
            time.sleep(HANG_SECONDS)
            return []

        with pytest.raises(KeyboardInterrupt):
            score(reward, calls_of({}, {}), 2)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ((-1,), r"reward_workers=-1 is out of range. Use a whole number of at least 0"),
            ((True,), r"reward_workers=True is out of range"),
            ((2.0,), r"reward_workers=2.0 is out of range"),
            ((1, "gpu"), r"reward_backend='gpu' is unknown. Use 'thread' or 'process'"),
            ((0, "process"), r"reward_backend='process' needs workers, and reward_workers=0. Use at least 1"),
            ((0, "thread", 0.0), r"reward_timeout_seconds=0.0 is out of range. Use a number above 0"),
            ((0, "thread", float("nan")), r"reward_timeout_seconds=nan is out of range"),
            ((0, "thread", True), r"reward_timeout_seconds=True is out of range"),
            ((0, "thread", 1.0, float("inf")), r"reward_timeout_value=inf is out of range. Use a finite number"),
            ((0, "thread", None, 0.0), r"reward_timeout_value=0.0 needs reward_timeout_seconds. Give both"),
        ],
    )
    def test_settings(self, settings: tuple[Any, ...], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            RewardWorkers(*settings)


class TestTimeouts:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_hanging_call_is_an_error_in_time(self, num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        limit_only(monkeypatch, is_told_to_hang)
        with pytest.raises(
            TimeoutError,
            match=r"reward_func=\S+as_told takes longer than reward_timeout_seconds=0.2 for task item 11 .* at turn 3. "
            r"Make it faster, allow more time, or give reward_timeout_value",
        ):
            score(as_told, told("score", "hang", "score"), num_workers, timeout_seconds=0.2)

    @pytest.mark.parametrize(("num_workers", "backend"), [(0, "thread"), (3, "thread"), (2, "process")])
    def test_or_earns_the_value(self, num_workers: int, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        limit_only(monkeypatch, is_told_to_hang)
        calls = calls_of(*({"do": "hang" if at in (1, 2, 4) else "score"} for at in range(6)))
        reward = RewardFunction(as_told, 1, processor=lambda value: value + 100)
        scores = RewardWorkers(num_workers, backend, 0.3, -1).score(reward, calls)
        assert scores.rows == [[[value]] * 2 for value in (100.0, 99.0, 99.0, 103.0, 99.0, 105.0)]
        assert scores.num_late == 3

    def test_each_agent_earns_it(self) -> None:
        def reward(first: list[str], second: list[str]) -> list[list[float]]:
            time.sleep(HANG_SECONDS)
            return []

        workers = RewardWorkers(1, "thread", 0.05, -2.0)
        rows = workers.score(RewardFunction(reward, 2, per_agent=True), calls_of({}, num_agents=2, num_joint=3)).rows
        assert rows == [[[-2.0, -2.0]] * 3]

    @pytest.mark.parametrize(("seconds", "num_late"), [(0.04, 0), (0.2, 4)])
    def test_the_limit_is_for_each_call(self, seconds: float, num_late: int, monkeypatch: pytest.MonkeyPatch) -> None:
        # Four calls of 0.04 s by one worker: none takes 0.1 s, all together take 0.16 s. Only they move the clock.
        now, done = [0.0], threading.Event()
        monkeypatch.setattr(
            "comlrl_lightning.environment.reward_dispatch.time", SimpleNamespace(monotonic=lambda: now[0])
        )

        def reward(first: list[str]) -> list[float]:
            now[0] += seconds
            if num_late:
                done.wait(HANG_SECONDS)
            return [0.0] * len(first)

        workers = RewardWorkers(1, "thread", 0.1, 0.0)
        assert workers.score(RewardFunction(reward, 1), calls_of(*[{}] * 4)).num_late == num_late
        done.set()

    @pytest.mark.usefixtures("ends")
    def test_what_comes_too_late_counts_nowhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limit_only(monkeypatch, lambda call: call.item["number"] == 0)
        goes_on, before = threading.Event(), set(threading.enumerate())

        def slow(first: list[str], batch_items: Any) -> list[float]:
            if batch_items[0]["number"] == 0:
                goes_on.wait(HANG_SECONDS)
            return [1.0] * len(first)

        reward = RewardFunction(WeightedRewards({"slow": slow}), 1)
        workers = RewardWorkers(2, "thread", 0.3, 50.0)
        scores = workers.score(reward, calls_of({}, {}))
        assert scores.rows == [[[50.0]] * 2, [[1.0]] * 2]
        goes_on.set()
        assert eventually(lambda: not set(threading.enumerate()) - before)
        # Two joint completions of the second call; the first call's would make it four, with the same mean.
        assert scores.parts == [PartSums({"slow": 2.0}, 2)]

    def test_rollouts_count_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limit_only(monkeypatch, lambda call: (call.turn, call.item["prompt"]) == (2, "q"))

        def reward(first: list[str], batch_items: Any, turn: int) -> list[float]:
            time.sleep(HANG_SECONDS if (turn, batch_items[0]["prompt"]) == (2, "q") else 0)
            return [1.0] * len(first)

        items = [{"prompt": "p"}, {"prompt": "q"}]
        workers = RewardWorkers(4, "thread", 0.3, 0.0)
        rollouts = make_collector(FakeTeam(1), reward, workers=workers, num_turns=2).collect(items, [0, 1])
        # The second item's root has K=2 children.
        assert rollouts.num_late == 2
        assert [node.rewards[0] for node in rollouts.nodes] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
        assert make_collector(FakeTeam(1), workers=RewardWorkers(2)).collect(items, [0, 1]).num_late is None


class TestModes:
    @pytest.mark.parametrize("num_workers", [0, 3])
    def test_every_call_has_the_same(self, num_workers: int) -> None:
        seen: list[tuple[torch.dtype, torch.dtype, bool, bool, torch.device]] = []

        def reward(first: list[str]) -> list[float]:
            inference, device = torch.is_inference_mode_enabled(), torch.get_default_device()
            seen.append((torch.tensor(1.0).dtype, product_dtype(), torch.is_grad_enabled(), inference, device))
            torch.set_grad_enabled(False)
            torch.set_default_device("meta")
            return [0.0] * len(first)

        def processor(value: float) -> float:
            return value + torch.finfo(torch.get_default_dtype()).bits

        with half_precision(), torch.inference_mode():
            assert score(reward, calls_of(*[{}] * 6), num_workers, processor=processor) == [[[32.0]] * 2] * 6
            assert torch.tensor(1.0).dtype == torch.bfloat16
            assert torch.is_inference_mode_enabled()
            assert product_dtype() == torch.bfloat16
        assert seen == [(torch.float32, torch.float32, True, False, torch.device("cpu"))] * 6

    def test_a_changed_default_dtype_stays_with_its_call(self) -> None:
        # One worker: the next call comes after the change.
        assert score(modes, calls_of({}, {}, num_joint=1), 1) == [[[132.0]], [[132.0]]]
        assert torch.get_default_dtype() == torch.float32

    def test_threads_have_the_default_device_of_the_caller(self) -> None:
        seen = []

        def reward(first: list[str]) -> list[float]:
            seen.append(torch.get_default_device())
            return [0.0] * len(first)

        with torch.device("meta"):
            score(reward, calls_of({}, {}), 2)
        assert seen == [torch.device("meta")] * 2

    def test_modules_stay_where_they_are(self) -> None:
        class Length(nn.Module):
            def forward(self, first: list[str]) -> torch.Tensor:
                seen.append(self)
                return torch.tensor([float(len(text)) for text in first])

        seen: list[Any] = []
        module = Length()
        assert score(module, calls_of({}, {}), 2) == [[[1.0], [2.0]]] * 2
        assert seen == [module, module]
        with pytest.raises(
            ValueError, match=r"reward_func=\S+WeightedRewards cannot be sent .*: it holds a Length, and"
        ):
            RewardWorkers(1, "process").check(RewardFunction(WeightedRewards({"a": module}), 1))
