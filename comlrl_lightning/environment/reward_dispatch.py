"""Calls of a reward function that run at the same time: threads that run them, and one that hands them out."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from heapq import heappop, heappush
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from comlrl_lightning.environment.reward import Measured, RewardCall, RewardFunction
from comlrl_lightning.environment.torch_modes import modes_of_thread, use_default_device

T = TypeVar("T")

LONGEST_WAIT = 0.5
"""Seconds after which the main thread looks up: a signal that another thread gets does not wake it."""
Outcome = Measured | BaseException
"""What a call of a reward function came to."""


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


class InThread:
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
        tell: Called in this thread with this worker and what came of a call, and with None, or with what went wrong,
            once it is ready.
    """

    def __init__(self, runner: Runner, tell: Callable[[_Worker, Outcome | None], None]) -> None:
        self.runner = runner
        self.index: int | None = None
        """Which call runs."""
        self.deadline = math.inf
        self.is_ready = False
        """Whether it waits for a call."""
        self._tell = tell
        self._inbox: SimpleQueue[RewardCall | None] = SimpleQueue()
        threading.Thread(target=copy_context().run, args=(self._work,), name="reward", daemon=True).start()

    def _work(self) -> None:
        self._tell(self, _caught(self.runner.prepare))
        while (call := self._inbox.get()) is not None:
            self._tell(self, _caught(self.runner.run, call))

    def begin(self, index: int, call: RewardCall, seconds: float | None) -> None:
        self.index, self.is_ready = index, False
        self.deadline = math.inf if seconds is None else time.monotonic() + seconds
        self._inbox.put(call)

    def rest(self) -> None:
        """Wait for the next call."""
        self.index, self.deadline, self.is_ready = None, math.inf, True

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


class RewardCalls:
    """Calls that run at the same time. A free worker begins the first one, by number, of those that are there.

    A thread of its own hands the calls out and watches the time: who brings them is busy until the last has come.

    Args:
        num_calls: How many calls come; they are numbered from 0.
        runners: Where they run, each one call at a time.
        seconds: Longest time of a call; None: no limit.
        late: What a call that takes longer comes to.
    """

    def __init__(
        self,
        num_calls: int,
        runners: Sequence[Runner],
        seconds: float | None,
        late: Callable[[RewardCall], Outcome],
    ) -> None:
        self._runners, self._seconds, self._late = runners, seconds, late
        self._end = num_calls
        self._calls: dict[int, RewardCall] = {}
        self._waiting: list[int] = []
        self._begun: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}
        self._workers: list[_Worker] = []
        self._failure: BaseException | None = None
        self._is_over = threading.Event()
        # What the thread is to do next; all that stands above is its own until it is over.
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="rewards", daemon=True)
        self._thread.start()

    def add(self, index: int, call: RewardCall) -> None:
        """Take a call. Any thread may bring it."""
        self._events.put(partial(self._accept, index, call))

    def outcomes(self) -> list[Outcome]:
        """The outcomes in the order of the calls, up to the first exception, once they are known."""
        while not self._is_over.wait(LONGEST_WAIT):
            pass
        if self._failure is not None:
            raise self._failure
        return [self._outcomes[index] for index in range(self._end)]

    def end(self) -> None:
        """Give up what still runs."""
        self._events.put(self._give_up)
        self._thread.join()

    def _run(self) -> None:
        try:
            for runner in self._runners:
                self._add_worker(runner)
            while not all(index in self._outcomes for index in range(self._end)):
                left = min(worker.deadline for worker in self._workers) - time.monotonic()
                try:
                    event = self._events.get(timeout=min(max(left, 0.0), threading.TIMEOUT_MAX))
                except Empty:
                    self._give_up_late_ones()
                else:
                    event()
        except BaseException as error:  # it goes on in the thread that waits for the outcomes
            self._failure = error
        finally:
            for worker in self._workers:
                worker.end()
            self._is_over.set()

    def _add_worker(self, runner: Runner) -> None:
        self._workers.append(_Worker(runner, lambda *told: self._events.put(partial(self._receive, *told))))

    def _accept(self, index: int, call: RewardCall) -> None:
        self._calls[index] = call
        heappush(self._waiting, index)
        self._hand_out()

    def _receive(self, worker: _Worker, outcome: Outcome | None) -> None:
        if worker not in self._workers:
            return  # too late
        if worker.index is not None:
            assert outcome is not None
            self._settle(worker.index, outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        worker.rest()
        self._hand_out()

    def _hand_out(self) -> None:
        for worker in self._workers:
            # Calls after an exception change nothing any more.
            if worker.is_ready and self._waiting and self._waiting[0] < self._end:
                index = heappop(self._waiting)
                self._begun.add(index)
                worker.begin(index, self._calls[index], self._seconds)

    def _give_up_late_ones(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline <= now]:
            assert worker.index is not None
            self._settle(worker.index, self._late(self._calls[worker.index]))
            worker.end()
            self._workers.remove(worker)
            if not self._begun.issuperset(range(self._end)):
                self._add_worker(worker.runner)

    def _give_up(self) -> None:
        self._end = 0

    def _settle(self, index: int, outcome: Outcome) -> None:
        self._outcomes[index] = outcome
        if isinstance(outcome, BaseException):
            self._end = min(self._end, index + 1)
