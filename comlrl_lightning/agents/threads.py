"""Work of several language models at the same time, each in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from functools import partial
from threading import Event, Lock
from typing import TypeVar

import torch

T = TypeVar("T")
AUTOCAST_DEVICES = ("cpu", "cuda")
"""Kinds of devices whose autocast goes along into the threads."""


class Stopped(Exception):
    """The work of others failed or was interrupted, and this one's has no use any more."""


def run_together(tasks: Sequence[tuple[torch.device, Callable[[], T]]], stop: Event | None = None) -> list[T]:
    """What the tasks return, in their order; several run at the same time, as if in the calling thread.

    Autograd's and autocast's modes belong to a thread, so each gets those of the caller.

    Args:
        tasks: What to call, and the device that it works on.
        stop: Is set as soon as one fails or the caller is interrupted; long tasks then raise `Stopped`.

    Raises:
        BaseException: What the first failing task raised; it comes once all have ended.
    """
    if len(tasks) < 2:
        return [task() for _, task in tasks]
    enter, stop = _modes(), stop or Event()
    with ThreadPoolExecutor(len(tasks), "agent") as pool:
        futures = [pool.submit(_run, enter, device, task) for device, task in tasks]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            # Asked for now: what fails later may fail only because it was stopped.
            failed = [future for future in futures if future in done and future.exception() is not None]
        except BaseException:
            stop.set()
            raise
        if failed:
            stop.set()
    return [future.result() for future in failed or futures]


def _run(enter: Callable[[ExitStack], None], device: torch.device, task: Callable[[], T]) -> T:
    with ExitStack() as stack:
        enter(stack)
        # Kernels that do not ask their tensors for the device run on the thread's current one.
        stack.enter_context(torch.cuda.device(device) if device.type == "cuda" else nullcontext())
        return task()


def _modes() -> Callable[[ExitStack], None]:
    """What puts another thread in the modes of this one."""
    autocast = [
        partial(torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False)
        for kind in AUTOCAST_DEVICES
        if torch.is_autocast_enabled(kind)
    ]
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def enter(stack: ExitStack) -> None:
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(gradients))
        for make in autocast:
            stack.enter_context(make())

    return enter


class SharedProgress:
    """One progress report for the work of several threads, which also ends those whose work has no use any more.

    Args:
        report: Called with the sum of what all have left; None: nobody listens.
        left: What each has to do at first.
        stop: Ends the work.
    """

    def __init__(self, report: Callable[[int], None] | None, left: Sequence[int], stop: Event) -> None:
        self._report, self._left, self._stop = report, list(left), stop
        self._lock = Lock()

    def of(self, worker: int) -> Callable[[int], None]:
        """The report of one worker, by its number in `left`."""
        return partial(self._tell, worker)

    def _tell(self, worker: int, left: int) -> None:
        if self._stop.is_set():
            raise Stopped
        with self._lock:
            self._left[worker] = left
            if self._report is not None:
                self._report(sum(self._left))
