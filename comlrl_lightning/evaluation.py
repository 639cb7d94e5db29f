"""Evaluation outside of a fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.utilities.calls import short
from comlrl_lightning.utilities.checks import is_whole

if TYPE_CHECKING:
    from comlrl_lightning.algorithms.module import CooperativeModule


def evaluate(
    module: CooperativeModule,
    data: TaskDataModule,
    num_eval_samples: int | None = None,
    callbacks: Sequence[Callback] | None = None,
    seed: int | None = None,
) -> dict[str, float]:
    """Evaluate a team on the evaluation split, with the trainer and so the metric callbacks of its last fit.

    Before any fit one device does it, or all processes that torchrun or SLURM has started. `limit_val_batches` and
    `fast_dev_run` of the trainer are for the evaluations inside its fit and cut nothing here.

    Args:
        module: The algorithm, before or after a fit.
        data: Holds the evaluation split.
        num_eval_samples: Use the first so many items. None: as the data module says.
        callbacks: More callbacks, for this evaluation only.
        seed: Another draw of the sampled completions. None: the draw of every other evaluation of this module.

    Returns:
        Metric values by key, those of ``trainer.validate``; empty without an evaluation split.

    Raises:
        ValueError: If an argument is of another kind, training runs, or the trainer of the fit is a ``barebones`` one.
    """
    _check(data, callbacks, seed)
    if not data.has_eval:
        return {}
    with _settings(module, data, num_eval_samples, seed):
        trainer = _trainer(module)
        with _unlimited(trainer), _called_back(trainer, callbacks or ()):
            results = trainer.validate(module, data, verbose=False)
    return {key: value for key, value in results[0].items() if key.startswith("eval/")}


def _check(data: object, callbacks: object, seed: object) -> None:
    if not isinstance(data, TaskDataModule):
        raise ValueError(f"data={short(data)} is no TaskDataModule. Use TaskDataModule(..., eval_dataset=...).")
    if callbacks is not None and not isinstance(callbacks, Sequence):
        raise ValueError(f"callbacks={short(callbacks)} is no list. Put it into one.")
    if seed is not None and not is_whole(seed, 0):
        raise ValueError(f"seed={seed!r} is not a seed. Give a whole number from 0 on.")


def _trainer(module: CooperativeModule) -> Trainer:
    """The trainer of the last fit, or a plain one that writes nothing."""
    trainer = module.fit_trainer
    if trainer is not None:
        if trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING:
            raise ValueError("evaluate(...) cannot run inside a fit. Use the callback EvalInterval.")
        if trainer.barebones:
            raise ValueError("Trainer(barebones=True) logs nothing that evaluate(...) could return. Leave it out.")
        return trainer
    return Trainer(
        devices="auto" if _is_launched() else 1,  # for several devices Lightning would run the script again
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _is_launched() -> bool:
    """Whether several processes of a launcher run this script."""
    launchers = TorchElasticEnvironment, SLURMEnvironment
    return any(launcher.detect() and launcher().world_size() > 1 for launcher in launchers)


@contextmanager
def _unlimited(trainer: Trainer) -> Iterator[None]:
    limit = trainer.limit_val_batches  # `fast_dev_run` and `overfit_batches` cut evaluations by it, too
    trainer.limit_val_batches = 1.0
    try:
        yield
    finally:
        trainer.limit_val_batches = limit


@contextmanager
def _called_back(trainer: Trainer, callbacks: Sequence[Callback]) -> Iterator[None]:
    present: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    extra = [callback for callback in callbacks if callback not in present]
    present += extra
    try:
        yield
    finally:
        left: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        left[:] = [callback for callback in left if callback not in extra]


@contextmanager
def _settings(
    module: CooperativeModule, data: TaskDataModule, num_eval_samples: int | None, seed: int | None
) -> Iterator[None]:
    former = module.eval_seed, data.eval_num_samples
    module.eval_seed = seed
    if num_eval_samples is not None:
        data.eval_num_samples = num_eval_samples
    try:
        yield
    finally:
        module.eval_seed, data.eval_num_samples = former
