"""Each of Lightning's callbacks works with a team of agents, or is refused at the start of a fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, callbacks

from comlrl_lightning.algorithms import MAGRPO
from comlrl_lightning.callbacks import EvalInterval
from comlrl_lightning.data.datamodule import TaskDataModule
from tests.algorithms.support import ITEMS, MemoryLogger, make_module, make_trainer
from tests.faults.registry import Fault, Refused, faults

AREA = "Lightning's callbacks"


@dataclass
class Fitted:
    """What a fit with many callbacks has left."""

    folder: Path
    logger: MemoryLogger = field(default_factory=MemoryLogger)
    weights_in_setup: int = 0
    num_trained: int = 0

    def holds_trained_alone(self, average: torch.nn.Module) -> bool:
        return len(list(average.parameters())) == self.num_trained

    def logged(self) -> set[str]:
        return {key for _, row in self.logger.rows for key in row}


class Predictions(callbacks.BasePredictionWriter):
    """Keeps what it is to write."""

    written: int = 0

    def write_on_batch_end(self, *args: Any) -> None:
        self.written += 1


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Fitted, dict[str, Callback]]:
    """Two batches with an evaluation before each, and everything around it that works."""
    fitted = Fitted(tmp_path_factory.mktemp("fit"))

    def count(trainer: Any, module: Any, stage: str) -> None:
        fitted.weights_in_setup = max(fitted.weights_in_setup, sum(1 for _ in module.parameters()))

    made: list[Callback] = [
        callbacks.LambdaCallback(setup=count),
        callbacks.EarlyStopping("eval/final_reward_mean", patience=9),
        callbacks.LearningRateMonitor(),
        callbacks.DeviceStatsMonitor(cpu_stats=True),
        callbacks.ThroughputMonitor(batch_size_fn=len, window_size=2),
        callbacks.Timer(duration="00:01:00:00"),
        callbacks.ModelSummary(),
        callbacks.TQDMProgressBar(),
        callbacks.ModelCheckpoint(fitted.folder, monitor="eval/final_reward_mean", save_last=True),
        callbacks.OnExceptionCheckpoint(fitted.folder),
        Predictions(),
        callbacks.EMAWeightAveraging(decay=0.5),
        callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=1),
    ]
    trainer = make_trainer(
        [EvalInterval(1, at_end=True), *made],
        logger=fitted.logger,
        log_every_n_steps=1,
        enable_checkpointing=True,
        enable_progress_bar=True,
        enable_model_summary=True,
    )
    module, data = make_module(MAGRPO), TaskDataModule(ITEMS[:2], ITEMS[:1])
    trainer.fit(module, data)
    trainer.predict(module, data)
    fitted.num_trained = len(module.trained_names)
    return fitted, {type(one).__name__: one for one in made}


@dataclass(frozen=True)
class Works(Fault):
    """A callback of the fit above, by its name in `tried`, and how to see that it did something."""

    check: Callable[[Fitted, Any], object]

    @property
    def name(self) -> str:
        return self.tried.strip("`")


WORKING = (
    Works(
        AREA,
        "`LambdaCallback`",
        "works; in `setup` any callback finds the models loaded",
        lambda fit, one: fit.weights_in_setup > 0,
    ),
    Works(AREA, "`EarlyStopping`", "works with metrics of `EvalInterval`", lambda fit, one: one.best_score < 100),
    Works(
        AREA,
        "`LearningRateMonitor`",
        "works, a curve per agent and critic",
        lambda fit, one: any("agent_1" in key for key in fit.logged()),
    ),
    Works(AREA, "`DeviceStatsMonitor`", "works", lambda fit, one: any("cpu" in key for key in fit.logged())),
    Works(
        AREA,
        "`ThroughputMonitor`",
        "works; `batch_size_fn=len` counts task items",
        lambda fit, one: any("samples" in key for key in fit.logged()),
    ),
    Works(AREA, "`Timer`", "works", lambda fit, one: one.time_elapsed("train") > 0),
    Works(AREA, "`ModelSummary`", "works", lambda fit, one: one is not None),
    Works(AREA, "`TQDMProgressBar`", "works", lambda fit, one: one.total_train_batches == 2),
    Works(
        AREA,
        "`ModelCheckpoint`",
        "works; a `monitor` sees the agents at the end with `EvalInterval(..., at_end=True)`",
        lambda fit, one: Path(one.best_model_path).exists(),
    ),
    Works(AREA, "`OnExceptionCheckpoint`", "works", lambda fit, one: not Path(one.ckpt_path).exists()),
    Works(AREA, "`Predictions`", "a `BasePredictionWriter` gets each batch", lambda fit, one: one.written == 1),
    Works(
        AREA,
        "`EMAWeightAveraging`",
        "like `WeightAveraging` averages what is trained, without the base; resumes exactly",
        lambda fit, one: fit.holds_trained_alone(one._average_model),
    ),
    Works(
        AREA,
        "`StochasticWeightAveraging`",
        "averages what is trained, without the base; its schedule steps once per epoch; resumes exactly",
        lambda fit, one: fit.holds_trained_alone(one._average_model),
    ),
)


@faults(*WORKING)
def test_works(fault: Works, fitted: tuple[Fitted, dict[str, Callback]]) -> None:
    fit, made = fitted
    assert fault.check(fit, made[fault.name])


def refused(make: Callable[[], Callback], folder: Path) -> None:
    """Models that nobody loads: the refusal comes before."""
    trainer = make_trainer([make()])
    trainer.fit(make_module(MAGRPO), TaskDataModule(ITEMS[:1]))


class Unfreezing(callbacks.BaseFinetuning):
    """Trains the base."""

    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        pl_module.requires_grad_(True)


REFUSED = (
    Refused(
        AREA,
        "`BackboneFinetuning`",
        "BackboneFinetuning freezes a part called 'backbone', and agents have none ... Leave it out",
        partial(refused, callbacks.BackboneFinetuning),
    ),
    Refused(
        AREA,
        "`ModelPruning`",
        "ModelPruning puts masks over the weights of whole models ... prune a base before it is given to agents=",
        partial(refused, partial(callbacks.ModelPruning, "l1_unstructured", amount=0.5)),
    ),
    Refused(
        AREA,
        "`GradientAccumulationScheduler`",
        "GradientAccumulationScheduler does not know of buffers. ... use rollout_buffer_size and train_batch_size",
        partial(refused, partial(callbacks.GradientAccumulationScheduler, {0: 2})),
    ),
    Refused(
        AREA,
        "`SpikeDetection`",
        "SpikeDetection compares the losses of training steps ... use max_grad_norm and on_nonfinite",
        partial(refused, callbacks.SpikeDetection),
    ),
    Refused(
        AREA,
        "`LearningRateFinder`",
        "LearningRateFinder raises the learning rate with every batch ... compare runs with other agent_learning_rate",
        partial(refused, callbacks.LearningRateFinder),
    ),
    Refused(
        AREA,
        "`BatchSizeFinder`",
        "BatchSizeFinder changes the number of task items per step ... use micro_batch_tokens",
        partial(refused, callbacks.BatchSizeFinder),
    ),
    Refused(
        AREA,
        "a `BaseFinetuning` that trains the frozen base",
        "A callback has set requires_grad=True for ... weights that belong to no agent, the first is ... Freeze and"
        " unfreeze only weights that are trained from the start",
        partial(refused, Unfreezing),
    ),
)


@faults(*REFUSED)
def test_refused(fault: Refused, tmp_path: Path) -> None:
    fault.check(tmp_path)


ELSEWHERE = {
    "WeightAveraging": "tests/algorithms/test_lightning_callbacks.py",
    "BaseFinetuning": "tests/algorithms/test_lightning_callbacks.py",
    "RichModelSummary": "a ModelSummary",
    "RichProgressBar": "tests/callbacks/test_screen.py",
    "ProgressBar": "the base of the others",
    "Checkpoint": "the base of the others",
    "Callback": "the base of the others",
    "BasePredictionWriter": "Predictions",
}
"""Where the rest is tested."""


def test_none_is_left_out() -> None:
    named = {fault.tried.strip("`") for fault in (*WORKING, *REFUSED)} | ELSEWHERE.keys()
    assert set(callbacks.__all__) <= named
