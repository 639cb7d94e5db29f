"""Threads for several models: order, errors, interrupts and progress."""

from __future__ import annotations

import time
from threading import Event
from typing import Any

import pytest
import torch

from comlrl_lightning.agents.engine import GenerationRequest
from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.agents.threads import SharedProgress, Stopped, run_together
from tests.algorithms.support import tiny_agents
from tests.waiting import HANG_SECONDS, PATIENCE_SECONDS

CPU = torch.device("cpu")


class TestTogether:
    def test_results_come_in_order_and_errors_too(self) -> None:
        def slow() -> int:
            time.sleep(0.05)
            return 1

        assert run_together([(CPU, slow), (CPU, lambda: 2)]) == [1, 2]

        def fail() -> int:
            raise KeyError("first")

        with pytest.raises(KeyError, match="first"):
            run_together([(CPU, slow), (CPU, fail)])

    def test_a_failing_agent_ends_the_others_work(self) -> None:
        stop, begun = Event(), Event()
        shared = SharedProgress(None, [1, 1], stop)
        steps: list[int] = []

        def work() -> None:
            while True:
                steps.append(1)
                begun.set()
                time.sleep(0.01)
                shared.of(0)(1)

        def fail() -> None:
            assert begun.wait(PATIENCE_SECONDS)
            raise FloatingPointError("logits")

        with pytest.raises(FloatingPointError, match="logits"):
            run_together([(CPU, work), (CPU, fail)], stop)
        assert steps

    def test_an_interrupt_ends_the_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

        stop = Event()
        monkeypatch.setattr("comlrl_lightning.agents.threads.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_together([(CPU, lambda: stop.wait(HANG_SECONDS)), (CPU, lambda: stop.wait(HANG_SECONDS))], stop)
        assert stop.is_set()

    def test_progress_is_the_sum_of_all(self) -> None:
        told: list[int] = []
        stop = Event()
        shared = SharedProgress(told.append, [3, 4], stop)
        shared.of(0)(2)
        shared.of(1)(1)
        # 2 + 4, then 2 + 1.
        assert told == [6, 3]
        stop.set()
        with pytest.raises(Stopped):
            shared.of(0)(1)

    def test_progress_of_a_rollout_ends_at_zero(self) -> None:
        team = build_team(tiny_agents("full", dtype=torch.float32))
        team.concurrent = True
        told: list[int] = []
        requests = [GenerationRequest(agent, "hi", ((1, agent), (2, agent))) for agent in (0, 1)]
        team.generate(requests, Sampling(max_new_tokens=3), told.append)
        assert told[0] in (3, 4)
        assert told == sorted(told, reverse=True)
        assert len(told) >= 2
