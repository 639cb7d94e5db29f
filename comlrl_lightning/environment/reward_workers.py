"""Scoring of all nodes of a turn: one after the other, or by several threads or processes at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from comlrl_lightning.environment.reward import Measured, RewardCall, RewardFunction
from comlrl_lightning.environment.reward_dispatch import InThread, Outcome, RewardCalls, Runner
from comlrl_lightning.environment.reward_processes import RewardProcess, pickled
from comlrl_lightning.environment.torch_modes import user_code
from comlrl_lightning.rewards import PartSums
from comlrl_lightning.utilities.checks import check_finite, check_positive, check_whole


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards of several calls, in their order."""

    rows: list[list[list[float]]]
    """`[calls][J][1]` processed rewards; `[calls][J][N]` where each agent has its own."""
    num_late: int
    """Calls that ran out of time."""
    parts: list[PartSums]
    """What the parts of `WeightedRewards` gave, call by call."""


class RewardWorkers:
    """Runs a reward function for many nodes; rewards do not depend on how many workers there are.

    Args:
        num_workers: Calls that run at the same time. 0: in place, one after the other.
        backend: ``"thread"`` or ``"process"``.
        timeout_seconds: Longest time of a call. None: no limit.
        timeout_value: Reward, before processing, of all joint completions of a call that takes longer. None: such a
            call is an error.

    Raises:
        ValueError: If they do not fit together; it names the arguments of the algorithms.
    """

    def __init__(
        self,
        num_workers: int = 0,
        backend: Literal["thread", "process"] = "thread",
        timeout_seconds: float | None = None,
        timeout_value: float | None = None,
    ) -> None:
        _check(num_workers, backend, timeout_seconds, timeout_value)
        self.num_workers = num_workers
        self.backend = backend
        self.timeout_seconds = timeout_seconds
        self.timeout_value = timeout_value
        self._processes: list[RewardProcess] = []
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_processes": []}  # a copy of this object starts its own

    def check(self, reward: RewardFunction) -> None:
        """Refuse a function that the workers cannot run.

        Raises:
            ValueError: If it cannot be sent to another process, and must be.
        """
        if self.backend == "process":
            pickled(reward)

    def score(self, reward: RewardFunction, calls: Sequence[RewardCall]) -> Scores:
        """Rewards of all calls, see `Scoring.scores`.

        Args:
            reward: The function.
            calls: What it scores.
        """
        with self.open(reward, len(calls)) as scoring:
            for index, call in enumerate(calls):
                scoring.add(index, call)
            return scoring.scores()

    @contextmanager
    def open(self, reward: RewardFunction, num_calls: int) -> Iterator[Scoring]:
        """Take calls one by one, in any order; with workers, the first ones run while others are still to come.

        Calls in threads wait for `Scoring.scores` where torch's default dtype is not float32: it is one for all
        threads, and who brings the calls may need it. Whatever still runs at the end is given up.

        Args:
            reward: The function.
            num_calls: How many calls are to come.
        """
        dtype = torch.get_default_dtype()
        scoring = Scoring(self, reward, num_calls)
        try:
            if self.num_workers > 0 and (self.backend == "process" or dtype == torch.float32):
                scoring.begin()
            yield scoring
        finally:
            scoring.end()
            torch.set_default_dtype(dtype)

    @property
    def are_in_place(self) -> bool:
        """Whether nobody but the caller runs the calls."""
        return self.num_workers == 0 and self.timeout_seconds is None

    def begin(self, reward: RewardFunction, num_calls: int) -> RewardCalls:
        """Who runs so many calls, ready for the first."""
        return RewardCalls(num_calls, self._runners(reward, num_calls), self.timeout_seconds, self._late(reward))

    def _runners(self, reward: RewardFunction, num_calls: int) -> Sequence[Runner]:
        count = min(max(self.num_workers, 1), num_calls)
        if self.backend == "thread":
            return [InThread(reward)] * count
        if self._owner != os.getpid() or any(process.reward is not reward for process in self._processes):
            self._processes, self._owner = [], os.getpid()
        self._processes += [RewardProcess(reward) for _ in range(count - len(self._processes))]
        return self._processes[:count]

    def _late(self, reward: RewardFunction) -> Callable[[RewardCall], Outcome]:
        def late(call: RewardCall) -> Outcome:
            if (value := self.timeout_value) is not None:
                return Measured([[value] * reward.width for _ in call.completions[0]], is_late=True)
            return TimeoutError(
                f"{reward.label} takes longer than reward_timeout_seconds={self.timeout_seconds} for {call.place}."
                " Make it faster, allow more time, or give reward_timeout_value, the reward of such a call."
            )

        return late


class Scoring:
    """Calls of a reward function, numbered from 0, that come in any order.

    Args:
        workers: Who runs them.
        reward: The function.
        num_calls: How many there are.
    """

    def __init__(self, workers: RewardWorkers, reward: RewardFunction, num_calls: int) -> None:
        self._workers, self._reward, self._num_calls = workers, reward, num_calls
        self._calls: dict[int, RewardCall] = {}
        self._running: RewardCalls | None = None

    def add(self, index: int, call: RewardCall) -> None:
        """Take the call with this number. Any thread may bring it."""
        self._calls[index] = call
        if self._running is not None:
            self._running.add(index, call)

    def begin(self) -> RewardCalls:
        """Let calls run from now on, those that are there and those that come."""
        self._running = calls = self._workers.begin(self._reward, self._num_calls)
        for index in sorted(self._calls):
            calls.add(index, self._calls[index])
        return calls

    def scores(self) -> Scores:
        """Rewards in the order of the numbers, once all calls are there.

        An exception of the function is raised as it is, the first one in this order.

        Raises:
            ValueError: If the function returns anything but finite numbers.
            TimeoutError: If a call takes too long and no value stands for that.
        """
        rows, num_late, parts = [], 0, list[PartSums]()
        for index, outcome in enumerate(self._outcomes()):
            if isinstance(outcome, BaseException):
                raise outcome
            num_late += outcome.is_late
            parts += outcome.parts
            with user_code():
                rows.append(self._reward.processed(self._calls[index], outcome))
        return Scores(rows, num_late, parts)

    def _outcomes(self) -> Iterator[Outcome]:
        """What the calls came to, in their order, up to the first exception at least."""
        assert len(self._calls) == self._num_calls, "calls are missing"
        if self._workers.are_in_place:
            for index in range(self._num_calls):
                with user_code():
                    measured = self._reward.measure(self._calls[index])
                yield measured
            return
        with user_code():  # the default dtype is one for all threads
            outcomes = (self._running or self.begin()).outcomes()
        yield from outcomes

    def end(self) -> None:
        """Give up what still runs."""
        if self._running is not None:
            self._running.end()


def _check(num_workers: int, backend: str, timeout_seconds: float | None, timeout_value: float | None) -> None:
    check_whole(0, reward_workers=num_workers)
    if backend not in ("thread", "process"):
        raise ValueError(f"reward_backend={backend!r} is unknown. Use 'thread' or 'process'.")
    if backend == "process" and num_workers == 0:
        raise ValueError("reward_backend='process' needs workers, and reward_workers=0. Use at least 1.")
    check_positive(reward_timeout_seconds=timeout_seconds)
    check_finite(reward_timeout_value=timeout_value)
    if timeout_value is not None and timeout_seconds is None:
        raise ValueError(f"reward_timeout_value={timeout_value!r} needs reward_timeout_seconds. Give both.")
