"""What each flag of Lightning's Trainer does here: the rows of a table in the README."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from comlrl_lightning.algorithms import MAGRPO
from comlrl_lightning.algorithms.checks import check_precision_flag
from comlrl_lightning.callbacks import BatchCheckpoint, EvalInterval, JSONExport
from comlrl_lightning.data.datamodule import TaskDataModule
from tests.algorithms.support import ITEMS, MemoryLogger, make_module, make_trainer, weights
from tests.callbacks.fakes import FakeModule, Trace, data, quiet_trainer

README = Path(__file__).parents[1] / "README.md"


def events(folder: Path, *callbacks: Any, train: int = 4, **flags: Any) -> list[str]:
    """Trained items and evaluations, of a module without language models."""
    trace = Trace()
    settings = {"max_epochs": 2, "num_sanity_val_steps": 0, "check_val_every_n_epoch": 9, **flags}
    quiet_trainer(folder, trace, *callbacks, **settings).fit(FakeModule(), data(train))
    return trace.events


def learned(**flags: Any) -> dict[str, torch.Tensor]:
    """What an agent has learned from two batches, with an evaluation before each."""
    module = make_module(MAGRPO, agent_learning_rate=0.01)
    make_trainer([EvalInterval(1)], **flags).fit(module, TaskDataModule(ITEMS[:2], ITEMS[:1]))
    return weights(module, 0)


def is_same_run(**flags: Any) -> None:
    torch.testing.assert_close(learned(**flags), learned(), rtol=0, atol=0)


def refused(*settings: dict[str, Any]) -> None:
    for flags in settings:
        with pytest.raises(ValueError, match="Leave it out and use"):
            make_trainer(**flags).fit(make_module(MAGRPO), TaskDataModule(ITEMS[:1]))


def fast_dev_run(folder: Path) -> None:
    export = JSONExport(folder / "metrics.json")
    assert events(folder, EvalInterval(1), export, BatchCheckpoint(), fast_dev_run=2, enable_checkpointing=True) == [
        *("V", "T0"),
        *("V", "T1"),
    ]
    assert not list(folder.iterdir())


def limits(folder: Path) -> None:
    assert events(folder, limit_train_batches=1) == events(folder, limit_train_batches=0.25) == ["T0"] * 2
    for flags in ({"limit_val_batches": 2}, {"limit_test_batches": 2}):
        module, trainer = FakeModule(), quiet_trainer(folder, **flags)
        (trainer.validate if "limit_val_batches" in flags else trainer.test)(module, data(evaluation=3), verbose=False)
        assert len(module.evaluation_rollouts().items) == 2


def overfit(folder: Path) -> None:
    trace = Trace()
    with pytest.warns(UserWarning, match="shuffle=True is off"):
        quiet_trainer(folder, trace, EvalInterval(0), max_epochs=2, overfit_batches=2).fit(
            FakeModule(), data(shuffle=True)
        )
    assert trace.events == ["T0", "T1"] * 2


def epochs_and_steps(folder: Path) -> None:
    assert events(folder, train=2, max_epochs=3) == ["T0", "T1"] * 3
    assert events(folder, train=2, max_steps=3) == ["T0", "T1", "T0"]
    assert events(folder, train=2, max_time={"seconds": 0}) == []


def evaluations(folder: Path) -> None:
    own: dict[str, Any] = {"check_val_every_n_epoch": 1, "num_sanity_val_steps": 1}
    often = {**own, "val_check_interval": 2, "max_epochs": 1}
    assert events(folder, train=2, **own) == ["V", *["T0", "T1", "V"] * 2]
    assert events(folder, **often) == ["V", "T0", "T1", "V", "T2", "T3", "V"]
    assert events(folder, EvalInterval(3), **often) == ["V", "T0", "T1", "T2", "V", "T3"]


def logging_interval(folder: Path) -> None:
    logger = MemoryLogger()
    make_trainer(logger=logger, log_every_n_steps=50).fit(make_module(MAGRPO), TaskDataModule(ITEMS[:2]))
    assert [step for step, row in logger.rows if "turn_1/reward_mean" in row] == [2, 4]


def precision(folder: Path) -> None:
    for value in ("16-mixed", "16-true", 16):
        with pytest.raises(ValueError, match="would need a gradient scaler"):
            check_precision_flag(value)
    check_precision_flag("bf16-mixed")


def deterministic(folder: Path) -> None:
    try:
        is_same_run(deterministic=True, benchmark=False)
    finally:
        torch.use_deterministic_algorithms(False)


def profiler(folder: Path) -> None:
    trainer = quiet_trainer(folder, profiler="simple")
    trainer.fit(FakeModule(), data(2))
    assert "training_step" in trainer.profiler.summary()  # type: ignore[attr-defined]


def barebones(folder: Path) -> None:
    trace, module = Trace(), FakeModule()
    trainer = Trainer(barebones=True, max_epochs=1, accelerator="cpu", callbacks=[EvalInterval(2), trace])
    with pytest.warns(UserWarning, match="barebones=True"):
        trainer.fit(module, data(2))
    assert trace.events == ["V", "T0", "T1"]
    assert not trainer.callback_metrics


def same_items(folder: Path) -> None:
    plain = events(folder)
    assert events(folder, reload_dataloaders_every_n_epochs=1) == plain
    assert events(folder, use_distributed_sampler=False) == events(folder, sync_batchnorm=True) == plain


def plugins(folder: Path) -> None:
    checkpoint = BatchCheckpoint(dirpath=folder)
    events(folder, checkpoint, enable_checkpointing=True, plugins=[AsyncCheckpointIO()])
    assert checkpoint.last_path is not None
    assert torch.load(checkpoint.last_path, weights_only=False)["fake"]["env_step"] > 0


def reports(folder: Path) -> None:
    with pytest.raises(Exception, match="enable_checkpointing=False"):
        quiet_trainer(folder, BatchCheckpoint())
    on = {"enable_progress_bar": True, "enable_checkpointing": True, "check_val_every_n_epoch": 1}
    events(folder, **on, enable_autolog_hparams=False)
    assert len(list(folder.rglob("*.ckpt"))) == 1


def others(folder: Path) -> None:
    trainer = quiet_trainer(folder, logger=True, devices=1, num_nodes=1, strategy="auto", model_registry=None)
    trainer.fit(FakeModule(), data(1))
    assert Path(str(trainer.log_dir)).is_relative_to(folder)


@dataclass(frozen=True)
class Flags:
    """A row of the table."""

    names: tuple[str, ...]
    does: str
    check: Callable[[Path], None]

    @property
    def row(self) -> str:
        return f"| {', '.join(f'`{name}`' for name in self.names)} | {self.does} |"


TABLE = (
    Flags(
        ("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time"),
        "epochs count passes over the items, steps count optimizer steps, of which a batch may have none or several",
        epochs_and_steps,
    ),
    Flags(
        ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
        "as in Lightning: steps of each rank, a number below 1 is a share; `eval_num_samples` counts items instead",
        limits,
    ),
    Flags(
        ("overfit_batches",),
        "the first so many steps of the dataset in each epoch, never shuffled; it limits evaluations, too",
        overfit,
    ),
    Flags(
        ("fast_dev_run",),
        "so many batches of training and of evaluation; callbacks of this package write no files",
        fast_dev_run,
    ),
    Flags(
        ("check_val_every_n_epoch", "val_check_interval", "num_sanity_val_steps"),
        "as in Lightning, and without effect beside `EvalInterval`",
        evaluations,
    ),
    Flags(
        ("log_every_n_steps",),
        "what others log; metrics of this package follow `logging_steps`",
        logging_interval,
    ),
    Flags(
        ("gradient_clip_val", "gradient_clip_algorithm"),
        "refused: `max_grad_norm` clips each agent by itself",
        lambda _: refused({"gradient_clip_val": 1.0}, {"gradient_clip_algorithm": "value"}),
    ),
    Flags(
        ("accumulate_grad_batches",),
        "refused: `rollout_buffer_size`, `train_batch_size` and `micro_batch_tokens` say what an update is made of",
        lambda _: refused({"accumulate_grad_batches": 2}),
    ),
    Flags(
        ("precision",),
        '`"32-true"`, `"bf16-mixed"`, `"bf16-true"`; what needs a gradient scaler is refused, see "Number formats"',
        precision,
    ),
    Flags(
        ("deterministic", "benchmark"),
        "as in Lightning; runs repeat on the same machine without them",
        deterministic,
    ),
    Flags(
        ("detect_anomaly",),
        "as in Lightning, the same results, slower",
        lambda _: is_same_run(detect_anomaly=True),
    ),
    Flags(
        ("inference_mode",),
        "the same results with both; off under `ShardedParallel`",
        lambda _: is_same_run(inference_mode=False),
    ),
    Flags(
        ("profiler",),
        "as in Lightning; `training_step` holds rollouts and updates, which `time/...` takes apart",
        profiler,
    ),
    Flags(
        ("barebones",),
        "nothing is logged: `EvalInterval` evaluates, but monitors and files of metrics have no values",
        barebones,
    ),
    Flags(
        ("reload_dataloaders_every_n_epochs", "use_distributed_sampler", "sync_batchnorm"),
        "no effect: `TaskDataModule` deals items out to ranks and keeps its place; models have no such layers",
        same_items,
    ),
    Flags(
        ("plugins",),
        "as in Lightning; with `AsyncCheckpointIO`, `BatchCheckpoint` waits until its file is whole",
        plugins,
    ),
    Flags(
        ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "enable_autolog_hparams"),
        "as in Lightning; `BatchCheckpoint` counts as checkpointing",
        reports,
    ),
    Flags(
        (
            "accelerator",
            "devices",
            "num_nodes",
            "strategy",
            "logger",
            "default_root_dir",
            "callbacks",
            "model_registry",
        ),
        'as in Lightning, see "Several GPUs" and "Lightning\'s callbacks"',
        others,
    ),
)


@pytest.mark.parametrize("flags", TABLE, ids=[flags.names[0] for flags in TABLE])
def test_flags(flags: Flags, tmp_path: Path) -> None:
    flags.check(tmp_path)
    assert flags.row in README.read_text()


def test_the_table_is_complete() -> None:
    names = [name for flags in TABLE for name in flags.names]
    assert sorted(names) == sorted(set(inspect.signature(Trainer.__init__).parameters) - {"self"})
