"""Several ranks that stopped go on as if they had not; another number of ranks goes on with what they have left."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comlrl_lightning.algorithms import ALGORITHMS, IAC, MAAC, MADPO, MAGRPO, MARLHF, CooperativeModule
from comlrl_lightning.callbacks import BatchCheckpoint
from tests.algorithms.support import RecordingSGD, uneven_reward
from tests.algorithms.test_registry import noisy_reward, scramble, shrinking
from tests.distributed.launch import run_ranks
from tests.distributed.support import Fit, Run, all_tokens, assert_in_step, fit_on_rank, tasks


def fit_from_seed(run: Run, world_size: int, seed: int, settings: dict[str, Any]) -> tuple[Fit, float]:
    """Fit with global random states of this rank's own, and the next number from them."""
    scramble(100 * seed + int(os.environ["RANK"]))
    fit = fit_on_rank(run, world_size, settings)
    return fit, random.random() + float(np.random.random()) + float(torch.rand(()))


def saved(folder: Path) -> dict[str, Any]:
    return {"callbacks": [BatchCheckpoint(1, keep=None, dirpath=folder)], "enable_checkpointing": True}


def make_run(algorithm: type[CooperativeModule]) -> Run:
    """Five items per epoch in three steps, rank 1 without one in the last; half-full buffers, a schedule, log gates."""
    settings: dict[str, Any] = {
        "reward_func": noisy_reward,
        "agent_learning_rate": [0.01, 0.003],
        "lr_scheduler": shrinking,
        "logging_steps": 15,
        "train_batch_size": 4,
    }
    if algorithm in (MADPO, MARLHF):
        settings |= {"num_candidates": 3}
    else:
        settings |= {"num_turns": 2, "rollout_buffer_size": 7, "clip_epsilon": 0.2, "reference_kl_coef": 0.05}
        settings |= {} if algorithm in (IAC, MAAC) else {"num_generations": 2}
    epochs = {MADPO: 4, MARLHF: 3}.get(algorithm, 2)
    data = {"train_dataset": tasks(5), "batch_size": 2, "shuffle": True}
    return Run(algorithm, settings, data, {"max_epochs": epochs})


def stops(algorithm: type[CooperativeModule], *batches: int) -> Any:
    marks = () if algorithm in (MAGRPO, MADPO) and len(batches) == 1 else pytest.mark.slow
    return pytest.param(algorithm, batches, marks=marks, id=f"{algorithm.__name__}-{batches}")


@pytest.mark.parametrize(
    ("algorithm", "batches"),
    [stops(MAGRPO, 1), stops(MADPO, 2), stops(MAGRPO, 2, 3, 4, 5), *(stops(one, 1, 4) for one in ALGORITHMS)],
)
def test_two_ranks_go_on_bit_for_bit(
    algorithm: type[CooperativeModule], batches: tuple[int, ...], tmp_path: Path
) -> None:
    run = make_run(algorithm)
    whole = run_ranks(fit_from_seed, 2, run, 2, 0, saved(tmp_path))
    assert_in_step([fit for fit, _ in whole])
    # The ranks' own random states differ, and so must what is restored.
    assert whole[0][1] != whole[1][1]
    for stop in batches:
        settings = {"ckpt_path": tmp_path / f"batch-{stop:06d}.ckpt"}
        for (ours, number), (theirs, other) in zip(
            run_ranks(fit_from_seed, 2, run, 2, 1 + stop, settings), whole, strict=True
        ):
            assert ours.steps == theirs.steps[stop:]
            assert ours.weights == theirs.weights[stop:]
            assert (ours.env_step, ours.update_step) == (theirs.env_step, theirs.update_step)
            assert number == other
            assert ours.metrics == theirs.metrics[len(theirs.metrics) - len(ours.metrics) :]
            assert ours.metrics


def settled(algorithm: type[CooperativeModule]) -> Run:
    """A run whose result does not depend on the number of ranks: no noise, one mini-batch per update."""
    settings = {**make_run(algorithm).settings, "reward_func": uneven_reward, "train_batch_size": None}
    settings |= {"optimizer": RecordingSGD, "lr_scheduler": None, "agent_learning_rate": 0.05}
    run = make_run(algorithm)
    return Run(algorithm, settings, {**run.data, "train_dataset": tasks(7)}, run.trainer, torch.float64)


@pytest.mark.parametrize("algorithm", [MAGRPO, MADPO, pytest.param(MARLHF, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on(
    algorithm: type[CooperativeModule], before: int, after: int, tmp_path: Path
) -> None:
    # Two items per step whoever trains them. Step 1 leaves up to six of seven nodes in the buffers of all ranks and
    # metrics that are not logged yet; for preferences it leaves a part of the round's pairs.
    run = settled(algorithm)
    whole = run_ranks(fit_on_rank, before, run, before, saved(tmp_path))
    resumed = run_ranks(fit_on_rank, after, run, after, {"ckpt_path": tmp_path / "batch-000001.ckpt"})
    assert_in_step(resumed)
    assert all_tokens(resumed) == all_tokens(whole)[1:]
    assert (resumed[0].env_step, resumed[0].update_step) == (whole[0].env_step, whole[0].update_step)
    assert resumed[0].weights[-1] == pytest.approx(whole[0].weights[-1], rel=1e-9, abs=1e-9)
    for (step, row), (other_step, other) in zip(resumed[0].metrics, whole[0].metrics, strict=True):
        assert step == other_step
        assert row == pytest.approx(other, rel=1e-6, abs=1e-9)
    said = [text for text in resumed[0].warned if "processes" in text]
    assert said == [
        f"The checkpoint was saved by {before} processes and {after} go on: buffers are dealt out anew and global"
        " random states start from their seeds."
    ]


def test_other_steps_inside_an_epoch_are_refused(tmp_path: Path) -> None:
    run = settled(MAGRPO)
    run.on(2, **saved(tmp_path))
    run.data["batch_size"] = 1  # one process, one item per step: two ranks had one each
    with pytest.raises(ValueError, match="batch_size times ranks=1, but the checkpoint was saved inside an epoch with"):
        run_ranks(fit_on_rank, 1, run, 1, {"ckpt_path": tmp_path / "batch-000001.ckpt"})
    # At the end of an epoch nothing stands in the way: the next one has seven steps of one item, or three of three.
    for world_size, batch_size, num_steps in ((1, 1, 7), (3, 3, 3)):
        run.data["batch_size"] = batch_size
        settings = {"ckpt_path": tmp_path / "batch-000004.ckpt"}
        resumed = run_ranks(fit_on_rank, world_size, run, world_size, settings)
        assert_in_step(resumed)
        assert len(resumed[0].steps) == num_steps
        assert sorted(index for fit in resumed for step in fit.steps for index in step.indices) == list(range(7))
