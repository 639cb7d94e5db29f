"""Several processes that train together, forked from a test: cheap, because all imports are done already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from tests.waiting import PATIENCE_SECONDS

T = TypeVar("T")

GRACE_SECONDS = 2.0
"""How long the other ranks may take to end by themselves once one has failed."""


class RankError(AssertionError):
    """A rank that died without an answer, or an exception of one that cannot be sent."""


def run_ranks(function: Callable[..., T], world_size: int, *args: Any, timeout: float = PATIENCE_SECONDS) -> list[T]:
    """Run `function` in several new processes at once, as `torchrun` would start them.

    Each is forked from this process, so that `function` may be any function, and the arguments any objects. Inside, a
    ``Trainer(strategy="ddp", devices=world_size, accelerator="cpu")`` joins the others over gloo and starts nobody.

    Args:
        function: What each rank does.
        world_size: Number of ranks.
        args: Arguments of `function`.
        timeout: Seconds after which all ranks are killed.

    Returns:
        `[world_size]` what each rank returned, after a journey through pickle.

    Raises:
        Exception: What the first rank to fail has raised, with the traceback as a note; the others are then killed.
        TimeoutError: If one did not end in time.
        RankError: If a rank died without an answer.
    """
    torch.set_num_threads(1)  # a forked child that asks for OpenMP's threads waits for ever: they stayed behind
    context = multiprocessing.get_context("fork")
    port = free_port()
    processes: list[ForkProcess] = []
    connections: list[Connection] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run_rank, args=(theirs, rank, world_size, port, function, args))
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        answers = _answers(connections, time.monotonic() + timeout)
        for process in processes:
            process.join(GRACE_SECONDS)
        return answers
    finally:
        for process in processes:
            process.kill()
            process.join()
        for connection in connections:
            connection.close()


def run_alone(function: Callable[..., T], *args: Any, timeout: float = PATIENCE_SECONDS) -> T:
    """Run `function` in one new process that knows nothing of ranks, for instance to start some by itself."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, "In the process:", function, args))
    process.start()
    theirs.close()
    try:
        result: T = _answers([ours], time.monotonic() + timeout)[0]
        process.join(GRACE_SECONDS)
        return result
    finally:
        process.kill()
        process.join()
        ours.close()


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What `torchrun` tells a process of one machine."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RUN_ID": "tests",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def free_port() -> int:
    """A port that nobody listens to now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _run_rank(
    answer: Connection, rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(rank_environment(rank, world_size, port))
    _answer(answer, f"In rank {rank} of {world_size}:", function, args)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _answer(answer: Connection, place: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        result = function(*args)
        payload = pickle.dumps((True, result))
    # An assertion that fails in a rank is an AssertionError, one that pytest raises is not even an Exception.
    except (Exception, KeyboardInterrupt, SystemExit, pytest.fail.Exception) as error:
        answer.send_bytes(_packed(error, f"{place}\n{traceback.format_exc()}"))
        raise
    answer.send_bytes(payload)


def _packed(error: BaseException, note: str) -> bytes:
    """The answer of a rank that failed: its exception if that survives the journey, its text otherwise."""
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError):
        error = RankError(f"{type(error).__name__}: {error}")
    return pickle.dumps((False, (error, note)))


def _answers(connections: Sequence[Connection], deadline: float) -> list[Any]:
    answers: dict[int, Any] = {}
    failure: BaseException | None = None
    open_ones = dict(zip(connections, range(len(connections)), strict=True))
    while open_ones:
        ready = wait(list(open_ones), max(deadline - time.monotonic(), 0))
        if not ready:
            if failure is not None:
                raise failure
            raise TimeoutError(f"Ranks {sorted(open_ones.values())} of {len(connections)} did not end in time.")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = open_ones.pop(connection)
            error = _received(connection, rank, answers)
            if error is not None and failure is None:
                failure, deadline = error, min(deadline, time.monotonic() + GRACE_SECONDS)
    if failure is not None:
        raise failure
    return [answers[rank] for rank in range(len(connections))]


def _received(connection: Connection, rank: int, answers: dict[int, Any]) -> BaseException | None:
    """Keep the answer of one rank; its exception, if it is one."""
    try:
        succeeded, value = pickle.loads(connection.recv_bytes())
    except EOFError:
        return RankError(f"Rank {rank} died without an answer.")
    if succeeded:
        answers[rank] = value
        return None
    error, note = value
    assert isinstance(error, BaseException)
    error.add_note(note)
    return error
