"""An exception in one of two ranks, and SIGTERM: nobody waits for ever, and the first error can be read."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from comlrl_lightning import TaskDataModule
from tests.algorithms.support import make_trainer, uneven_reward
from tests.distributed.launch import free_port, rank_environment
from tests.faults.registry import Fault, faults
from tests.faults.runs import ITEMS, exit_code, new_module, start

OUTCOME = "both ranks end by themselves; one shows the exception with function and item, the other one points to it"


def fail_on(failing: int, step: int, rank: int, port: int) -> None:
    """A fit as one of two ranks, as `torchrun` would start it, but with nobody who ends the other one."""
    os.environ.update(rank_environment(rank, 2, port))
    calls = 0

    def reward(*completions: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        if rank == failing and calls == step:
            raise RuntimeError(f"rank {rank} is broken")
        return uneven_reward(*completions)

    trainer = make_trainer(strategy="ddp", devices=2, max_epochs=2)
    trainer.fit(new_module(reward_func=reward), TaskDataModule(ITEMS))


@faults(
    Fault("ranks", "the reward of rank 0 raises an exception in the third step", OUTCOME),
    Fault("ranks", "the reward of rank 1 raises an exception in the third step", OUTCOME),
)
def test_all_ranks_end(fault: Fault, tmp_path: Path) -> None:
    failing, port = int("rank 1" in fault.tried), free_port()
    logs = [tmp_path / f"rank_{rank}" for rank in (0, 1)]
    ranks = [start(fail_on, failing, 3, rank, port, log=logs[rank]) for rank in (0, 1)]
    try:
        codes = [exit_code(process) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [1, 1]
    said, others = logs[failing].read_text(), logs[1 - failing].read_text()
    assert f"RuntimeError: rank {failing} is broken\nRaised in reward_func=" in said
    assert f"This is rank {failing} of 2." in said
    assert f"This is rank {1 - failing} of 2; another rank has ended before it, whose error says why." in others
    assert "is broken" not in others


def terminated(rank: int, port: int) -> None:
    """A fit as one of two ranks that get SIGTERM in their third step, rank 1 twice."""
    os.environ.update(rank_environment(rank, 2, port))
    calls = 0

    def reward(*completions: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        for _ in range(rank + 1 if calls == 3 else 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return uneven_reward(*completions)

    trainer = make_trainer(strategy="ddp", devices=2, max_epochs=20)
    trainer.fit(new_module(reward_func=reward), TaskDataModule(ITEMS))


@faults(
    Fault(
        "ranks",
        "SIGTERM to both ranks inside a step, to one of them twice",
        "both stop before the next batch, exit 143",
    )
)
def test_all_ranks_stop_at_sigterm(fault: Fault, tmp_path: Path) -> None:
    port = free_port()
    ranks = [start(terminated, rank, port, log=tmp_path / f"rank_{rank}") for rank in (0, 1)]
    try:
        codes = [exit_code(process) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [143, 143], (tmp_path / "rank_1").read_text()
