"""Errors, interrupts and the end of workers whose calls begin while completions are still being sampled."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.environment.joint_format import TaggedSections
from comlrl_lightning.environment.reward_workers import RewardWorkers
from comlrl_lightning.rollouts.collect import Collector
from tests.agents.helpers import shared_team
from tests.rollouts.fakes import FakeTeam, make_collector
from tests.rollouts.reward_functions import as_told, lengths
from tests.rollouts.scoring import Backend, in_child
from tests.rollouts.telling import Telling, appears, collector_of, fake_team, items, rewards_of
from tests.waiting import HANG_SECONDS, PATIENCE_SECONDS, eventually

WAYS: list[tuple[int, Backend]] = [(1, "thread"), (3, "thread"), (2, "process")]


@pytest.mark.usefixtures("ends")
class TestErrors:
    @pytest.mark.parametrize(("num_workers", "backend"), WAYS)
    def test_the_first_one_in_the_order_of_the_nodes(self, num_workers: int, backend: Backend) -> None:
        # Item 2 comes first and fails at once, item 1 later, item 3 is fine.
        told = items(4)
        told[1] |= {"do": "raise", "after": 0.05}
        told[2] |= {"do": "raise odd"}
        collector = collector_of(Telling(FakeTeam(1)), as_told, RewardWorkers(num_workers, backend))
        with pytest.raises(KeyError, match="1") as caught:
            collector.collect(told, [10, 11, 12, 13])
        assert "for task item 11 " in caught.value.__notes__[0]

    def test_a_split_that_fails_comes_before_rewards_that_fail(self) -> None:
        class Sections(TaggedSections):
            def split_completion(self, completion: str, num_agents: int) -> Any:
                raise KeyError(completion)

        def reward(first: list[str], second: list[str]) -> list[float]:
            raise AssertionError

        team = Telling(fake_team(2, central=True))
        collector = collector_of(team, reward, RewardWorkers(1), joint_format=Sections(), num_generations=1)
        with pytest.raises(KeyError, match="a1") as caught:
            collector.collect(items(2), [3, 4])
        # As without workers.
        plain = make_collector(fake_team(2, True), reward, joint_format=Sections(), num_generations=1)
        with pytest.raises(KeyError) as expected:
            plain.collect(items(2), [3, 4])
        assert caught.value.args == expected.value.args
        assert caught.value.__notes__ == expected.value.__notes__

    @pytest.mark.parametrize("error", [FloatingPointError, KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("do", ["raise", "start and hang"])
    def test_a_generation_that_fails_ends_the_workers(
        self, error: type[BaseException], do: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "pids"

        def meanwhile(request: int) -> None:
            assert do == "raise" or appears(file)
            raise error("while sampling")

        workers = RewardWorkers(1, "process")
        collector = collector_of(Telling(FakeTeam(1), meanwhile), as_told, workers)
        with pytest.raises(error, match="while sampling"):
            collector.collect(items(2, do=do, file=str(file)), range(2))
        pids = [int(pid) for pid in file.read_text().split()] if file.exists() else []
        assert eventually(lambda: not any(map(in_child, pids)))
        # The workers go on afterwards.
        team = Telling(FakeTeam(1))
        assert rewards_of(collector_of(team, as_told, workers).collect(items(2), range(2))) == [0.0, 1.0]

    def test_an_interrupted_thread_ends_with_its_call(self) -> None:
        begun, goes_on = threading.Event(), threading.Event()

        def reward(first: list[str]) -> list[float]:
            begun.set()
            goes_on.wait(HANG_SECONDS)
            return [0.0] * len(first)

        def meanwhile(request: int) -> None:
            assert begun.wait(PATIENCE_SECONDS)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            collector_of(Telling(FakeTeam(1), meanwhile), reward, RewardWorkers(2)).collect(items(3), range(3))
        goes_on.set()

    def test_a_generation_that_fails_before_any_news(self) -> None:
        team = shared_team()
        with torch.no_grad():
            next(iter(team.agent_parameters(1).values())).fill_(float("nan"))
        base = make_collector(FakeTeam(2), lengths, workers=RewardWorkers(2))
        collector = Collector(team, base.functions, base.shape, Sampling(max_new_tokens=20), (7,))
        with pytest.raises(FloatingPointError, match="agent_1 gives logits"):
            collector.collect(items(2), range(2))


SCRIPT = """
import sys, time

if __name__ == "__main__":
    from comlrl_lightning.environment.reward import RewardFunction
    from comlrl_lightning.environment.reward_workers import RewardWorkers
    from tests.rollouts.reward_functions import lengths

    with RewardWorkers(2, "process").open(RewardFunction(lengths, 1), 2):
        time.sleep(float(sys.argv[1]))
        raise FloatingPointError("while sampling")
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3])
def test_a_program_ends_while_its_workers_start(tmp_path: Path, seconds: float) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with (tmp_path / "stderr").open("w") as stderr:
        ended = subprocess.run(
            [sys.executable, str(script), str(seconds)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=stderr,
            timeout=PATIENCE_SECONDS,
        )
    said = (tmp_path / "stderr").read_text()
    assert ended.returncode == 1
    assert said.rstrip().endswith("FloatingPointError: while sampling")
