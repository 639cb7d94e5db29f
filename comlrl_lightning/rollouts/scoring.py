"""Scoring of all nodes of a turn: one after the other, or by several threads or processes at the same time."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol, TypeVar

import torch

from comlrl_lightning.reward_function import Measured, RewardCall, RewardFunction
from comlrl_lightning.rollouts.modes import modes_of_thread, use_default_device, user_code
from comlrl_lightning.rollouts.processes import RewardProcess, pickled

T = TypeVar("T")

LONGEST_WAIT = 0.5
"""Seconds after which the main thread looks up: a signal that another thread gets does not wake it."""
Outcome = Measured | BaseException
"""What a call of a reward function came to."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards of several calls, in their order."""

    rows: list[list[list[float]]]
    """`[calls][J][1]` processed rewards; `[calls][J][N]` where each agent has its own."""
    num_late: int
    """Calls that ran out of time."""


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
        """Rewards of all calls.

        An exception of the function is raised as it is, the first one in the order of the calls.

        Args:
            reward: The function.
            calls: What it scores.

        Raises:
            ValueError: If the function returns anything but finite numbers.
            TimeoutError: If a call takes too long and no value stands for that.
        """
        rows, num_late = [], 0
        for call, outcome in zip(calls, self._outcomes(reward, calls), strict=False):
            if isinstance(outcome, BaseException):
                raise outcome
            num_late += outcome.is_late
            with user_code():
                rows.append(reward.processed(call, outcome))
        return Scores(rows, num_late)

    def _outcomes(self, reward: RewardFunction, calls: Sequence[RewardCall]) -> Iterator[Outcome]:
        """What the calls came to, in their order, up to the first exception at least."""
        if self.num_workers == 0 and self.timeout_seconds is None:
            for call in calls:
                with user_code():
                    measured = reward.measure(call)
                yield measured
            return
        with user_code():  # the default dtype is one for all threads
            turn = _Turn(calls, self._runners(reward, len(calls)), self.timeout_seconds, self._late(reward))
            outcomes = turn.run()
        yield from outcomes

    def _runners(self, reward: RewardFunction, num_calls: int) -> Sequence[Runner]:
        count = min(max(self.num_workers, 1), num_calls)
        if self.backend == "thread":
            return [_InThread(reward)] * count
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


class Runner(Protocol):
    """Where calls of a reward function run, one at a time."""

    def prepare(self) -> None:
        """Get ready, which no time limit counts."""
        ...

    def run(self, call: RewardCall) -> Measured:
        """Run a call to its end."""
        ...

    def stop(self) -> None:
        """Give up the running call."""
        ...


class _InThread:
    """Runs calls in whichever thread asks, with the devices of the thread that made this object."""

    def __init__(self, reward: RewardFunction) -> None:
        self._reward = reward
        self._device = torch.get_default_device()
        uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.current_device() if uses_cuda else None

    def prepare(self) -> None:
        use_default_device(self._device)
        if self._cuda is not None:
            torch.cuda.set_device(self._cuda)

    def run(self, call: RewardCall) -> Measured:
        torch.set_default_dtype(torch.float32)  # one for all threads: a former call may have changed it
        with modes_of_thread():
            return self._reward.measure(call)

    def stop(self) -> None:
        """Nothing can end a thread from outside: it stays until its function returns, and nobody waits for it."""


class _Worker:
    """A thread that runs one call after the other, and that nobody has to wait for.

    Args:
        runner: Where the calls run.
        events: Gets this worker with what came of a call, and with None, or with what went wrong, once it is ready.
    """

    def __init__(self, runner: Runner, events: SimpleQueue[tuple[_Worker, Outcome | None]]) -> None:
        self.runner = runner
        self.index: int | None = None
        """Which call runs."""
        self.deadline = math.inf
        self._events = events
        self._inbox: SimpleQueue[RewardCall | None] = SimpleQueue()
        threading.Thread(target=copy_context().run, args=(self._work,), name="reward", daemon=True).start()

    def _work(self) -> None:
        self._events.put((self, _caught(self.runner.prepare)))
        while (call := self._inbox.get()) is not None:
            self._events.put((self, _caught(self.runner.run, call)))

    def begin(self, index: int, call: RewardCall, seconds: float | None) -> None:
        self.index = index
        self.deadline = math.inf if seconds is None else time.monotonic() + seconds
        self._inbox.put(call)

    def end(self) -> None:
        """Take no more calls, and give up the running one."""
        self._inbox.put(None)
        if self.index is not None:
            self.runner.stop()


def _caught(function: Callable[..., T], *args: Any) -> T | BaseException:
    try:
        return function(*args)
    except BaseException as error:  # it goes on in the thread that waits for the outcome
        return error


class _Turn:
    """Calls that run at the same time and are started in their order.

    Args:
        calls: The calls.
        runners: Where they run, each one call at a time.
        seconds: Longest time of a call; None: no limit.
        late: What a call that takes longer comes to.
    """

    def __init__(
        self,
        calls: Sequence[RewardCall],
        runners: Sequence[Runner],
        seconds: float | None,
        late: Callable[[RewardCall], Outcome],
    ) -> None:
        self._calls, self._seconds, self._late = calls, seconds, late
        self._outcomes: dict[int, Outcome] = {}
        self._next, self._end = 0, len(calls)
        self._events: SimpleQueue[tuple[_Worker, Outcome | None]] = SimpleQueue()
        self._workers: list[_Worker] = []
        self._runners = runners

    def run(self) -> list[Outcome]:
        """The outcomes in the order of the calls, up to the first exception."""
        try:
            self._workers += [_Worker(runner, self._events) for runner in self._runners]
            while not all(index in self._outcomes for index in range(self._end)):
                left = min(worker.deadline for worker in self._workers) - time.monotonic()
                try:
                    event = self._events.get(timeout=min(max(left, 0.0), LONGEST_WAIT))
                except Empty:
                    self._give_up_late_ones()
                else:
                    self._receive(*event)
        finally:
            for worker in self._workers:
                worker.end()
        return [self._outcomes[index] for index in range(self._end)]

    def _receive(self, worker: _Worker, outcome: Outcome | None) -> None:
        if worker not in self._workers:
            return  # too late
        if worker.index is not None:
            assert outcome is not None
            self._settle(worker.index, outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        worker.index, worker.deadline = None, math.inf
        if self._next < self._end:
            worker.begin(self._next, self._calls[self._next], self._seconds)
            self._next += 1

    def _give_up_late_ones(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline <= now]:
            assert worker.index is not None
            self._settle(worker.index, self._late(self._calls[worker.index]))
            worker.end()
            self._workers.remove(worker)
            if self._next < self._end:
                self._workers.append(_Worker(worker.runner, self._events))

    def _settle(self, index: int, outcome: Outcome) -> None:
        self._outcomes[index] = outcome
        if isinstance(outcome, BaseException):
            self._end = min(self._end, index + 1)  # later calls change nothing any more


def _check(num_workers: object, backend: object, timeout_seconds: object, timeout_value: object) -> None:
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
        raise ValueError(f"reward_workers={num_workers!r} is out of range. Use a whole number of at least 0.")
    if backend not in ("thread", "process"):
        raise ValueError(f"reward_backend={backend!r} is unknown. Use 'thread' or 'process'.")
    if backend == "process" and num_workers == 0:
        raise ValueError("reward_backend='process' needs workers, and reward_workers=0. Use at least 1.")
    if timeout_seconds is not None and not _is_finite(timeout_seconds, above=0.0):
        raise ValueError(f"reward_timeout_seconds={timeout_seconds!r} is out of range. Use a number above 0.")
    if timeout_value is not None and not _is_finite(timeout_value):
        raise ValueError(f"reward_timeout_value={timeout_value!r} is out of range. Use a finite number.")
    if timeout_value is not None and timeout_seconds is None:
        raise ValueError(f"reward_timeout_value={timeout_value!r} needs reward_timeout_seconds. Give both.")


def _is_finite(value: object, above: float = -math.inf) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf
