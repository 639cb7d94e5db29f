"""Lightning's callbacks that copy, freeze or average a module act on the agents' trained weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR

from comlrl_lightning.algorithms import IAC, MADPO, MAGRPO, CooperativeModule
from comlrl_lightning.callbacks import BatchCheckpoint, EvalInterval, SaveAgents
from comlrl_lightning.data import TaskDataModule
from tests.algorithms.support import ITEMS, fit, make_module, make_trainer, tiny_agents

RATE = 0.02
QUICK: dict[str, Any] = {"agent_learning_rate": RATE}


def trained(module: CooperativeModule) -> dict[str, Tensor]:
    """Copies of everything that is trained."""
    return {name: one.detach().clone() for name, one in module.named_parameters() if name in module.trained_names}


def run(folder: Path, callback: Callback, ckpt: Path | None = None, epochs: int = 3, **settings: Any) -> Any:
    """Three epochs of two batches with a checkpoint of each batch; the weights at the end and the learning rates."""
    algorithm = settings.pop("algorithm", MAGRPO)
    module = make_module(algorithm, **{**QUICK, **settings})
    rates = LearningRates()
    callbacks = [callback, BatchCheckpoint(keep=None, dirpath=folder), rates]
    trainer = make_trainer(callbacks, max_epochs=epochs, enable_checkpointing=True)
    trainer.fit(module, TaskDataModule(ITEMS[:2]), ckpt_path=ckpt)
    return trained(module), rates.seen


class LearningRates(Callback):
    """The first group's learning rate of each batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


AVERAGES: dict[str, Callable[[], Callback]] = {
    "EMA": partial(EMAWeightAveraging, decay=0.5),
    "EMA by epoch": partial(EMAWeightAveraging, decay=0.5, update_every_n_steps=0, update_starting_at_epoch=0),
    "mean": WeightAveraging,
    "SWA": partial(StochasticWeightAveraging, 0.01, swa_epoch_start=1, annealing_epochs=2, annealing_strategy="linear"),
}
SCHEDULED: dict[str, Any] = {"algorithm": IAC, "lr_scheduler": partial(LinearLR, total_iters=4)}


@pytest.mark.parametrize(
    ("average", "settings"),
    [*((one, {}) for one in AVERAGES.values()), (AVERAGES["EMA"], SCHEDULED), (AVERAGES["SWA"], SCHEDULED)],
    ids=[*AVERAGES, "EMA with critics and a schedule", "SWA with critics and a schedule"],
)
def test_average_resumes_exactly(tmp_path: Path, average: Callable[[], Callback], settings: dict[str, Any]) -> None:
    # From the last batch of the first epoch, and from the middle of the second.
    whole, rates = run(tmp_path / "whole", average(), **settings)
    for batch in (2, 3):
        path = tmp_path / "whole" / f"batch-{batch:06d}.ckpt"
        resumed, rates_after = run(tmp_path / f"from {batch}", average(), path, **settings)
        assert rates_after == rates[batch:]
        assert equal(resumed, whole), batch
