"""When evaluations happen during training."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from comlrl_lightning.callbacks.support import EVAL_PREFIX
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.utilities.calls import short
from comlrl_lightning.utilities.checks import is_whole

NEVER = 10**9


class EvalInterval(Callback, KnownKeywords):
    """Evaluate before the first batch that holds an item whose index in the epoch is a multiple of `interval`.

    Indices count the items of all ranks, in every kind of epoch, from 0: an evaluation comes first in each epoch.
    Lightning's own schedule (sanity check, end of epoch) is switched off. Evaluations change no training result, and
    nothing happens without an evaluation split.

    Args:
        interval: Task items between two evaluations; 0 leaves evaluation to `evaluate` and `Trainer.validate`.
        at_end: Evaluate once more when a fit ends, so that callbacks with a `monitor` see the final agents, too: at its
            last epoch or step, or where it is stopped early, but not by an exception.

    Raises:
        ValueError: If `interval` is not a whole number from 0, or `at_end` is neither True nor False.

    Example::

        trainer = Trainer(max_epochs=1, callbacks=[EvalInterval(4, at_end=True)])
    """

    def __init__(self, interval: int, at_end: bool = False) -> None:
        super().__init__()
        if not is_whole(interval, 0):
            raise ValueError(f"EvalInterval(interval={interval!r}) is not a whole number from 0. Pass 0 for never.")
        if not isinstance(at_end, bool):
            raise ValueError(f"EvalInterval(at_end={at_end!r}) is neither True nor False. Use one of them.")
        self._interval = interval
        self._at_end = at_end
        self._next: tuple[int, int] = (0, 0)
        self._running: tuple[int, int] | None = None
        self._finished: tuple[int, int] | None = None
        self._isolation = ExitStack()

    def is_due(self, start: int, stop: int) -> bool:
        """Whether the items `[start, stop)` of an epoch hold a multiple of the interval."""
        if self._interval == 0:
            return False
        return -(-start // self._interval) * self._interval < stop

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            trainer.num_sanity_val_steps = 0
            trainer.check_val_every_n_epoch = NEVER
            _adapt_checks(trainer)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TaskBatch, batch_idx: int
    ) -> None:
        if not isinstance(batch, TaskBatch):
            raise ValueError(
                f"Trainer.fit(...) got batches like {short(batch)}, which are no task items of known position. "
                "Give it a TaskDataModule."
            )
        place = (batch.epoch, batch.start)
        # A checkpoint saved at the end of an evaluation resumes right here, with that evaluation done.
        if self.is_due(batch.start, batch.stop) and place != self._finished:
            self._evaluate(trainer, place)

    def _evaluate(self, trainer: Trainer, place: tuple[int, int]) -> None:
        """Evaluate before the item at a place, which is an epoch and a position in it."""
        self._running = place
        self._isolation.enter_context(isolate_rng())
        try:
            _validate(trainer)
        finally:
            self._isolation.close()
            self._running = None

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Checkpoint callbacks come after all others: what they save now counts this evaluation as done and holds the
        # random states of training.
        if self._running is not None:
            self._finished = self._running
            self._isolation.close()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TaskBatch, batch_idx: int
    ) -> None:
        self._finished = None
        is_last = trainer.is_last_batch or batch.is_last
        self._next = (batch.epoch + 1, 0) if is_last else (batch.epoch, batch.stop)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A run that goes on from what is saved here has evaluated what it begins with.
        if self._at_end and self._next != self._finished:
            self._evaluate(trainer, self._next)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"finished": self._finished}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        finished = state_dict["finished"]
        self._finished = None if finished is None else (int(finished[0]), int(finished[1]))


def _adapt_checks(trainer: Trainer) -> None:
    """Tell Lightning's callbacks when to look, which they otherwise guess from Lightning's schedule.

    What comes from training is there at the end of an epoch, at an evaluation perhaps not yet, or not any more.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and not _looks_at_evaluations(callback.monitor):
            callback._save_on_train_epoch_end = callback._save_on_train_epoch_end is not False
        elif isinstance(callback, EarlyStopping):
            if _looks_at_evaluations(callback.monitor):
                callback._check_on_train_epoch_end = False
            else:
                callback._check_on_train_epoch_end = callback._check_on_train_epoch_end is not False


def _looks_at_evaluations(monitor: str | None) -> bool:
    return monitor is not None and monitor.startswith(EVAL_PREFIX)


def _validate(trainer: Trainer) -> None:
    """Run the validation loop inside training, as Lightning does between two batches."""
    loop, connector = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector
    first_loop_iter = connector._first_loop_iter
    loop._combined_loader = None  # the split's length is read anew at each evaluation
    trainer.validating = True
    try:
        loop.run()
    finally:
        trainer.training = True
        connector._first_loop_iter = first_loop_iter
