"""Rewards that begin while other completions are still being sampled."""

from __future__ import annotations

import threading
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.environment.joint_format import TaggedSections
from comlrl_lightning.environment.reward import RewardCall, RewardFunction
from comlrl_lightning.environment.reward_workers import RewardWorkers
from comlrl_lightning.rollouts.collect import Collector
from comlrl_lightning.types import Rollouts
from tests.agents.test_generation import ending_team
from tests.rollouts.fakes import FakeTeam, make_collector
from tests.rollouts.reward_functions import as_told, lengths, touches
from tests.rollouts.scoring import Backend, calls_of, is_told_to_hang, limit_only
from tests.rollouts.telling import Telling, appears, collector_of, fake_team, items, rewards_of
from tests.rollouts.test_user_code import half_precision
from tests.waiting import HANG_SECONDS, PATIENCE_SECONDS, eventually


class TestOverlap:
    def test_a_node_is_scored_while_others_are_sampled(self) -> None:
        scored = [threading.Event() for _ in range(3)]
        trace: list[str] = []

        def reward(first: list[str], second: list[str], batch_items: Any) -> list[float]:
            trace.append(f"reward {batch_items[0]['number']}")
            scored[batch_items[0]["number"]].set()
            return [0.0] * len(first)

        def meanwhile(request: int) -> None:
            # Two agents: requests 5 and 4 are those of the third item. With both, its reward must come.
            trace.append(f"sampled {request}")
            if request % 2 == 0:
                assert scored[request // 2].wait(PATIENCE_SECONDS)
            else:
                time.sleep(0.02)
                assert not scored[request // 2].is_set()

        collector_of(Telling(FakeTeam(2), meanwhile), reward, RewardWorkers(1)).collect(items(3), range(3))
        # The reward is called between the news of a request and what the sampler does next, or a moment later.
        assert [entry for entry in trace if entry.startswith("reward")] == ["reward 2", "reward 1", "reward 0"]
        assert trace.index("reward 2") < trace.index("sampled 3")
        assert trace.index("reward 1") < trace.index("sampled 1")

    def test_rewards_during_the_sampling_are_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Four steps of 20 s, and four rewards of 3 s by a clock that stands still in between: three of them run while
        # others are sampled, the last one afterwards.
        now, scored, sampled = [0.0], [threading.Event() for _ in range(4)], threading.Event()
        reads: list[float] = []

        def clock() -> float:
            reads.append(now[0])
            if len(reads) == 2:
                sampled.set()
            return reads[-1]

        monkeypatch.setattr("comlrl_lightning.rollouts.collect.time", SimpleNamespace(perf_counter=clock))

        def reward(first: list[str], batch_items: Any) -> list[float]:
            number = batch_items[0]["number"]
            if number == 0:
                assert sampled.wait(PATIENCE_SECONDS)
                now[0] += 3
            scored[number].set()
            return [float(number)] * len(first)

        def meanwhile(request: int) -> None:
            now[0] += 20
            assert request == 0 or scored[request].wait(PATIENCE_SECONDS)

        collector = collector_of(Telling(FakeTeam(1), meanwhile), reward, RewardWorkers(1))
        rollouts = collector.collect(items(4), range(4))
        assert rewards_of(rollouts) == [0.0, 1.0, 2.0, 3.0]
        assert rollouts.generation_seconds == 80
        assert rollouts.reward_seconds == 3

    def test_trajectories_of_a_task_are_scored_together(self) -> None:
        calls: list[tuple[int, int, int, bool]] = []

        def reward(first: list[str], batch_items: Any, turn: int) -> list[float]:
            calls.append((turn, batch_items[0]["number"], len(first), team.is_sampling))
            return [0.0] * len(first)

        team = Telling(FakeTeam(1), lambda request: time.sleep(0.05))
        shape: dict[str, Any] = {"num_turns": 2, "trajectories": True, "num_generations": 3}
        collector_of(team, reward, RewardWorkers(1), **shape).collect(items(2), range(2))
        assert calls == [(1, 1, 3, True), (1, 0, 3, True), (2, 1, 3, True), (2, 0, 3, True)]

    def test_models_with_rows_that_end_at_different_steps(self) -> None:
        trace: list[str] = []
        begun = threading.Event()
        told: set[int] = set()

        def reward(first: list[str], second: list[str]) -> list[float]:
            trace.append("reward")
            begun.set()
            time.sleep(0.05)
            return [float(len(one) - len(other)) for one, other in zip(first, second, strict=True)]

        def progress(turn: int, running: int) -> None:
            trace.append("token")
            if any({2 * item, 2 * item + 1} <= told for item in range(8)):
                assert begun.wait(PATIENCE_SECONDS)

        class Heard(Telling):
            def generate(self, requests: Any, sampling: Any, progress: Any = None, finished: Any = None) -> Any:
                def heard(number: int, completions: Any) -> None:
                    finished(number, completions)
                    told.add(number)

                return real.generate(requests, sampling, progress, finished and heard)

        real = ending_team()
        plain, early = (make_collector(FakeTeam(2), reward, workers=RewardWorkers(number)) for number in (0, 2))
        sampling = Sampling(max_new_tokens=120, stop=tuple("abcdefghij"))
        found = Collector(Heard(FakeTeam(2)), early.functions, early.shape, sampling, (7,), progress)
        nodes = found.collect(items(8), range(8)).nodes
        assert trace.index("reward") < len(trace) - 1 - trace[::-1].index("token")
        assert Collector(real, plain.functions, plain.shape, sampling, (7,)).collect(items(8), range(8)).nodes == nodes

    def test_without_workers_nothing_is_told(self) -> None:
        def reward(first: list[str]) -> list[float]:
            assert not team.is_sampling
            assert threading.current_thread() is threading.main_thread()
            return [0.0] * len(first)

        team = Telling(FakeTeam(1), lambda request: time.sleep(0.02))
        collector_of(team, reward, RewardWorkers()).collect(items(2), range(2))
        assert not team.is_heard
        # With a limit a thread runs it, but only afterwards.
        seen: list[bool] = []

        def in_thread(first: list[str]) -> list[float]:
            seen.append(team.is_sampling)
            return [0.0] * len(first)

        collector_of(team, in_thread, RewardWorkers(0, "thread", HANG_SECONDS)).collect(items(2), range(2))
        assert seen == [False, False]
        assert not team.is_heard


class TestTheSameResult:
    @pytest.mark.parametrize(
        ("num_workers", "backend", "trajectories", "central"),
        [
            *((workers, "thread", *kind) for workers in (1, 3) for kind in product([False, True], [False, True])),
            (2, "process", False, False),
        ],
    )
    def test_rollouts(self, num_workers: int, backend: Backend, trajectories: bool, central: bool) -> None:
        shape: dict[str, Any] = {"num_turns": 3, "trajectories": trajectories, "num_generations": 2}
        seen: list[list[float]] = []

        def collected(team: Any, workers: RewardWorkers) -> Rollouts:
            processed: list[float] = []
            seen.append(processed)

            def processor(value: float) -> float:
                processed.append(value)
                return value + len(processed)

            collector = make_collector(fake_team(2, central), lengths, processor=processor, workers=workers, **shape)
            collector.team = team
            return collector.collect(items(3), [4, 5, 6])

        expected = collected(fake_team(2, central), RewardWorkers())
        # Some requests of each kind are not told of, as those of other samplers.
        found = collected(Telling(fake_team(2, central), skipped=(1, 2)), RewardWorkers(num_workers, backend))
        assert found.nodes == expected.nodes
        assert (found.num_unparsed, found.num_late) == (expected.num_unparsed, expected.num_late)
        assert seen[0] == seen[1]
        assert len(found.nodes) > 9
        assert bool(found.num_unparsed) == central

    def test_only_the_sampling_thread_calls_other_functions(self) -> None:
        threads: list[str] = []

        class Sections(TaggedSections):
            def split_completion(self, completion: str, num_agents: int) -> Any:
                threads.append(threading.current_thread().name)
                return super().split_completion(completion, num_agents)

        team = Telling(fake_team(2, central=True))
        collector = collector_of(team, lengths, RewardWorkers(2), joint_format=Sections(), num_turns=2)
        collector.collect(items(2), range(2))
        assert set(threads) == {threading.main_thread().name}
        assert len(threads) == 2 * 2 + 4 * 2


class TestTimeouts:
    @pytest.mark.parametrize("backend", ["thread", "process"])
    def test_the_time_of_a_call_counts_while_others_are_sampled(
        self, backend: Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # One worker. Item 2 comes first and hangs; it is late before the others are sampled.
        limit_only(monkeypatch, is_told_to_hang)
        told = items(3)
        told[2]["do"] = "hang"
        rows: list[int] = []
        is_late = threading.Event()

        class Watched(RewardWorkers):
            def _late(self, reward: RewardFunction) -> Any:
                late = super()._late(reward)

                def told(call: RewardCall) -> Any:
                    is_late.set()
                    return late(call)

                return told

        def meanwhile(request: int) -> None:
            assert is_late.wait(PATIENCE_SECONDS)

        def processor(value: float) -> float:
            rows.append(team.is_sampling)
            return value + 100

        team = Telling(FakeTeam(1), meanwhile)
        workers = Watched(1, backend, 0.3, -1.0)
        rollouts = collector_of(team, as_told, workers, processor=processor).collect(told, range(3))
        assert rewards_of(rollouts) == [100.0, 101.0, 99.0]
        assert rollouts.num_late == 1
        assert not any(rows)

    def test_an_error_names_the_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limit_only(monkeypatch, is_told_to_hang)
        told = items(3)
        told[1]["do"] = "hang"
        workers = RewardWorkers(2, "thread", 0.1)
        with pytest.raises(TimeoutError, match=r"takes longer than reward_timeout_seconds=0.1 for task item 11 "):
            collector_of(Telling(FakeTeam(1)), as_told, workers).collect(told, [10, 11, 12])


class TestModes:
    @pytest.mark.parametrize("half", [False, True])
    def test_threads_wait_where_the_default_dtype_is_another(self, half: bool) -> None:
        seen: list[tuple[bool, torch.dtype]] = []
        sampled: list[torch.dtype] = []

        def reward(first: list[str]) -> list[float]:
            seen.append((team.is_sampling, torch.get_default_dtype()))
            return [0.0] * len(first)

        def meanwhile(request: int) -> None:
            time.sleep(0.05)
            sampled.append(torch.get_default_dtype())

        team = Telling(FakeTeam(1), meanwhile)
        collector = collector_of(team, reward, RewardWorkers(2))
        dtype = torch.bfloat16 if half else torch.float32
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            collector.collect(items(2), range(2))
            assert torch.get_default_dtype() == dtype
        finally:
            torch.set_default_dtype(before)
        assert seen == [(not half, torch.float32)] * 2
        assert sampled == [dtype] * 2

    def test_processes_do_not(self, tmp_path: Path) -> None:
        file = tmp_path / "called"
        found: list[bool] = []
        team = Telling(FakeTeam(1), lambda request: found.append(request == 0 or appears(file)))
        with half_precision():
            collector_of(team, touches, RewardWorkers(1, "process")).collect(items(2, file=str(file)), range(2))
            assert torch.get_default_dtype() == torch.bfloat16
        assert found == [True, True]

    def test_a_changed_default_dtype_does_not_outlive_the_turn(self) -> None:
        def reward(first: list[str]) -> list[float]:
            torch.set_default_dtype(torch.float64)
            return [0.0] * len(first)

        def meanwhile(request: int) -> None:
            time.sleep(0.05)
            raise KeyError

        with pytest.raises(KeyError):
            collector_of(Telling(FakeTeam(1), meanwhile), reward, RewardWorkers(1)).collect(items(2), range(2))
        assert torch.get_default_dtype() == torch.float32


@pytest.mark.usefixtures("ends")
class TestScoring:
    def test_calls_in_any_order(self) -> None:
        reward = RewardFunction(as_told, 1)
        calls = calls_of(*[{}] * 4, num_joint=1)
        for num_workers in (0, 1, 3):
            with RewardWorkers(num_workers).open(reward, 4) as scoring:
                for index in (2, 0, 3, 1):
                    scoring.add(index, calls[index])
                assert scoring.scores().rows == [[[float(index)]] for index in range(4)]

    def test_an_error_ends_the_calls_after_it(self) -> None:
        seen: list[int] = []

        def reward(first: list[str], batch_items: Any) -> list[float]:
            seen.append(number := batch_items[0]["number"])
            if number == 1:
                raise KeyError(number)
            return [0.0]

        calls = calls_of(*[{}] * 4, num_joint=1)
        with RewardWorkers(1).open(RewardFunction(reward, 1), 4) as scoring:
            scoring.add(1, calls[1])
            assert eventually(lambda: len(seen) == 1)
            time.sleep(0.05)
            for index in (3, 2, 0):
                scoring.add(index, calls[index])
            with pytest.raises(KeyError, match="1"):
                scoring.scores()
        assert seen == [1, 0]
