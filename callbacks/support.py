"""What several callbacks need: the module behind its protocol, evaluation metrics, numbers of users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real

from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor

from comlrl_lightning.files import Place
from comlrl_lightning.loggers import TaskWandbLogger
from comlrl_lightning.types import RolloutSource
from comlrl_lightning.utilities.calls import check_unicode, short
from comlrl_lightning.utilities.checks import is_whole

EVAL_PREFIX = "eval/"


def rollout_source(pl_module: LightningModule, callback: object) -> RolloutSource:
    """The module as the source of rollouts that it must be.

    Raises:
        ValueError: If the module keeps no rollouts.
    """
    if not isinstance(pl_module, RolloutSource):
        raise ValueError(
            f"{type(callback).__name__} needs a module that keeps its rollouts, got {type(pl_module).__name__}. "
            "Use it with an algorithm of comlrl_lightning."
        )
    return pl_module


def evaluation_metrics(trainer: Trainer) -> dict[str, float]:
    """The metrics of the running evaluation, ``eval/`` prefix included, sorted by name."""
    return {key: float(value) for key, value in sorted(trainer.callback_metrics.items()) if key.startswith(EVAL_PREFIX)}


def forget_evaluation_metrics(trainer: Trainer) -> None:
    """Drop the last evaluation's metrics, so that a turn that nobody reaches this time leaves no old value behind."""
    for key in [key for key in trainer.callback_metrics if key.startswith(EVAL_PREFIX)]:
        del trainer.callback_metrics[key]


def log_evaluation(pl_module: LightningModule, metrics: Mapping[str, float]) -> None:
    """Log metrics of the running evaluation, which are the same on every rank; call it on every rank.

    Args:
        pl_module: The module.
        metrics: Names without ``eval/``, and values.
    """
    named = {EVAL_PREFIX + key: value for key, value in metrics.items()}
    pl_module.log_dict(named, sync_dist=True, reduce_fx="max")  # the maximum of equal values is exact


def may_print(trainer: Trainer) -> bool:
    """Whether reports on screen are wanted on this rank: `config_sections.output.verbose` is not false."""
    verbose = (logger.verbose for logger in trainer.loggers if isinstance(logger, TaskWandbLogger))
    return trainer.is_global_zero and all(verbose)


def is_rehearsal(trainer: Trainer) -> bool:
    """Whether this is a `fast_dev_run`, which leaves no files behind."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def has_fitted(trainer: Trainer) -> bool:
    """Whether this trainer has trained, or trains right now."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready > 0 or trainer.state.fn == "fit"


def outside_of_fit(path: Place, trainer: Trainer) -> Place:
    """Name of a file for a trainer that never fitted: ``metrics-validate.json`` for ``metrics.json``."""
    return path.with_stem_end(f"-{trainer.state.fn and trainer.state.fn.value}")


def batches_trained(trainer: Trainer) -> int:
    """Batches of this rank that were trained since the run began, over all epochs; at its end a batch counts.

    Not `total_batch_idx`: a run that goes on from a checkpoint of an evaluation has counted its next batch there twice.
    """
    processed: int = trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]
    return processed


def wait_for_checkpoints(trainer: Trainer) -> None:
    """Return once all checkpoints are on the disk: `AsyncCheckpointIO` writes them in a thread, which then ends."""
    if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
        trainer.strategy.checkpoint_io.teardown()


def check_count(callback: str, name: str, value: object) -> None:
    """Refuse what is not a number of batches.

    Raises:
        ValueError: If `value` is not a whole number from 1.
    """
    if not is_whole(value, 1):
        raise ValueError(f"{callback}({name}={value!r}) is not a whole number from 1. Use at least 1.")


def check_names(metrics: Mapping[str, float], own: Iterable[str], source: str) -> None:
    """Refuse metrics that would take the place of the library's.

    Args:
        metrics: What a user's function returned.
        own: Names that the library logs itself.
        source: Label of the function.

    Raises:
        ValueError: If a name is taken.
    """
    if taken := sorted({*own, "env_step", "step"} & set(metrics)):
        raise ValueError(f"{source} returned {taken}, which are metrics of the library. Use other names.")


def as_numbers(metrics: object, source: str) -> dict[str, float]:
    """The metrics that a user's function returned, as floats.

    Args:
        metrics: What it returned.
        source: Its label, for the message.

    Raises:
        ValueError: If they are not a dictionary of names and numbers.
    """
    if not isinstance(metrics, Mapping):
        raise ValueError(f"{source} returned {short(metrics)}. Return a dictionary of names and numbers.")
    numbers = {}
    for key, value in metrics.items():
        number = _item(value)
        if not isinstance(key, str) or not key or not isinstance(number, Real):
            raise ValueError(f"{source} returned {short({key: value})}. Return a dictionary of names and numbers.")
        check_unicode(key, source, "a metric")
        try:
            numbers[key] = float(number)
        except OverflowError:
            raise ValueError(f"{source} returned {short({key: value})}, too large for a float. Scale it.") from None
    return numbers


def _item(value: object) -> object:
    """The number in a tensor that holds one; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    try:
        return value.item()
    except (RuntimeError, TypeError):  # it holds several, or no data at all
        return value
