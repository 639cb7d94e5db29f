"""The harness of the tests of several processes: answers, failures and hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from tests.distributed.launch import RankError, run_ranks
from tests.waiting import HANG_SECONDS


def sum_of_ranks(weight: float) -> tuple[int, float]:
    dist.init_process_group("gloo")
    total = torch.tensor(weight * dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), float(total)


def test_ranks_find_each_other() -> None:
    # 2 * (0 + 1 + 2) on every rank.
    assert run_ranks(sum_of_ranks, 3, 2.0) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_a_trainer_joins() -> None:
    def place() -> tuple[int, int]:
        trainer = Trainer(strategy="ddp", devices=2, accelerator="cpu", logger=False, enable_checkpointing=False)
        return trainer.global_rank, trainer.world_size

    assert run_ranks(place, 2) == [(0, 2), (1, 2)]


def test_the_first_error_is_raised_and_nobody_waits_for_the_others() -> None:
    def fail_on_one() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("rank 1 is broken")
        time.sleep(HANG_SECONDS)

    with pytest.raises(ValueError, match="rank 1 is broken") as caught:
        run_ranks(fail_on_one, 2)
    assert "In rank 1 of 2" in caught.value.__notes__[0]
    assert "fail_on_one" in caught.value.__notes__[0]


def test_a_hang_ends() -> None:
    def hang_on_one() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(HANG_SECONDS)

    # On a busy machine the other one may take longer than a second, too.
    with pytest.raises(TimeoutError, match=r"Ranks \[(0, )?1\] of 2"):
        run_ranks(hang_on_one, 2, timeout=1)


def test_a_death_is_reported() -> None:
    def die() -> None:
        os._exit(3)

    with pytest.raises(RankError, match="died without an answer"):
        run_ranks(die, 1)
