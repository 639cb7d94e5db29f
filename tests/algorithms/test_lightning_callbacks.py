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

from comlrl_lightning.algorithms import IAC, MAGRPO, CooperativeModule
from comlrl_lightning.callbacks import BatchCheckpoint, EvalInterval
from comlrl_lightning.data.datamodule import TaskDataModule
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


def test_checkpoints_hold_the_average_and_no_base(tmp_path: Path) -> None:
    whole, _ = run(tmp_path, EMAWeightAveraging(decay=0.5), epochs=1)
    checkpoint = torch.load(tmp_path / "batch-000002.ckpt", weights_only=True)
    assert checkpoint["state_dict"].keys() == checkpoint["current_model_state"].keys() == whole.keys()
    # At the end of a fit the agents are the average.
    assert equal(checkpoint["state_dict"], whole)
    assert not equal(checkpoint["current_model_state"], whole)


def test_a_run_does_not_go_on_with_the_average_alone(tmp_path: Path) -> None:
    run(tmp_path, EMAWeightAveraging(decay=0.5), epochs=1)
    with pytest.raises(ValueError, match=r"averaged weights beside those in training.*Give Trainer\(callbacks="):
        run(tmp_path / "other", Callback(), tmp_path / "batch-000001.ckpt", epochs=1)


class Record(Callback):
    """The weights of the module after each batch and at the end of each evaluation, of which one may fail."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.breaks_at = breaks_at
        self.trained: list[dict[str, Tensor]] = []
        self.evaluated: list[dict[str, Tensor]] = []
        self.at_end: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, CooperativeModule)
        self.trained.append(trained(pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, CooperativeModule)
        self.evaluated.append(trained(pl_module))
        if len(self.evaluated) == self.breaks_at:
            raise RuntimeError("broken")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, CooperativeModule)
        self.at_end = trained(pl_module)


class SaveInEvaluation(Callback):
    """Saves while the average is in the module's place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder / f"in-evaluation-{trainer.global_step}.ckpt")


def evaluated_run(folder: Path, record: Record) -> CooperativeModule:
    """Three batches with an evaluation before each; of two steps, the average is no copy any more."""
    module, average = make_module(MAGRPO, **QUICK), EMAWeightAveraging(decay=0.5)
    best = ModelCheckpoint(folder, "{step}", monitor="eval/final_reward_mean", save_top_k=-1)
    save = SaveInEvaluation(folder)
    trainer = make_trainer([EvalInterval(1), record, average, save, best], enable_checkpointing=True)
    trainer.fit(module, TaskDataModule(ITEMS[:3], ITEMS[:1]))
    return module


def test_what_was_evaluated_is_what_is_saved(tmp_path: Path) -> None:
    record = Record()
    module = evaluated_run(tmp_path, record)
    for name in ("step=2.ckpt", "in-evaluation-2.ckpt"):
        checkpoint = torch.load(tmp_path / name, weights_only=True)
        assert equal(checkpoint["state_dict"], record.evaluated[2]), name
        assert equal(checkpoint["current_model_state"], record.trained[1]), name
    assert not equal(record.evaluated[2], record.trained[1])
    # Callbacks that save agents at the end find the average, wherever they stand in the list.
    assert equal(record.at_end, trained(module))
    assert not equal(record.at_end, record.trained[2])


def test_an_exception_in_an_evaluation_leaves_the_weights_in_training(tmp_path: Path) -> None:
    class Weights(Callback):
        def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
            assert isinstance(pl_module, CooperativeModule)
            left.append(trained(pl_module))

    left: list[dict[str, Tensor]] = []
    record, average = Record(breaks_at=3), EMAWeightAveraging(decay=0.5)
    trainer = make_trainer([EvalInterval(1), Weights(), record, average])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(make_module(MAGRPO, **QUICK), TaskDataModule(ITEMS[:3], ITEMS[:1]))
    assert equal(left[0], record.trained[1])
    assert not equal(left[0], record.evaluated[2])


class FreezeFirst(BaseFinetuning):
    """Freezes the first agent for the first epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze_agent(pl_module, True)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        self.freeze_agent(pl_module, epoch == 0)

    def freeze_agent(self, module: Any, frozen: bool) -> None:
        for parameter in module.team.agent_parameters(0).values():
            parameter.requires_grad_(not frozen)


def test_frozen_agents_rest_and_learn_again(tmp_path: Path) -> None:
    fresh = make_module(MAGRPO, tiny_agents("separate"))
    fresh.configure_model()
    first = trained(fresh)
    whole, _ = run(tmp_path, FreezeFirst(), epochs=2, agents=tiny_agents("separate"))
    frozen = torch.load(tmp_path / "batch-000002.ckpt", weights_only=True)["state_dict"]
    # A checkpoint holds the frozen agent, too.
    assert frozen.keys() == first.keys()
    of_agent = {agent: [name for name in first if f"agent_{agent}" in name] for agent in range(2)}
    assert all(torch.equal(first[name], frozen[name]) for name in of_agent[0])
    assert not all(torch.equal(first[name], frozen[name]) for name in of_agent[1])
    assert not all(torch.equal(first[name], whole[name]) for name in of_agent[0])
    for batch in (2, 3):  # the end of the epoch in which it is frozen, and the middle of the next one
        path = tmp_path / f"batch-{batch:06d}.ckpt"
        resumed, _ = run(tmp_path / f"{batch}", FreezeFirst(), path, epochs=2, agents=tiny_agents("separate"))
        assert equal(resumed, whole)


def test_callbacks_find_the_weights_when_they_are_set_up() -> None:
    class Count(Callback):
        found = 0

        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            self.found = len(list(pl_module.parameters()))

    count = Count()
    module = make_module(MAGRPO)
    fit(module, callbacks=[count])
    assert count.found == len(list(module.parameters())) > 0
