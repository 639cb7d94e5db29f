"""What a long rollout is doing, on screen."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from typing_extensions import override

from comlrl_lightning.callbacks.support import may_print, rollout_source
from comlrl_lightning.keywords import KnownKeywords


class RolloutProgress(Callback, KnownKeywords):
    """Show under a live `RichProgressBar` which turn is sampled and how many rows still sample.

    Without such a bar it shows nothing.

    Example::

        trainer = Trainer(callbacks=[RichProgressBar(), RolloutProgress()])
    """

    def __init__(self) -> None:
        super().__init__()
        self._bar: RichProgressBar | None = None
        self._num_turns = 1
        self._task: Any = None
        self._most_rows = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        bar = trainer.progress_bar_callback
        self._bar = bar if isinstance(bar, RichProgressBar) and may_print(trainer) else None
        self._num_turns = rollout_source(pl_module, self).num_turns

    def on_rollout_progress(self, turn: int, rows_running: int) -> None:
        """Move the sub-task to this turn and number of rows that still sample."""
        progress = None if self._bar is None else self._bar.progress
        if progress is None or not progress.live.is_started:
            return
        self._most_rows = max(self._most_rows, rows_running)
        text = f"sampling turn {turn}/{self._num_turns}, {rows_running} left"
        if self._task not in progress.task_ids:
            self._task = progress.add_task(text, total=self._most_rows)
        done = self._most_rows - rows_running
        progress.update(self._task, description=text, total=self._most_rows, completed=done)

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._remove()

    @override
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._remove()

    @override
    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._remove()

    @override
    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._remove()

    def _remove(self) -> None:
        progress = None if self._bar is None else self._bar.progress
        if progress is not None and self._task in progress.task_ids:
            progress.remove_task(self._task)
        self._task, self._most_rows = None, 0
