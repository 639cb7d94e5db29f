"""Evaluation metrics as files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from comlrl_lightning.callbacks.history import History
from comlrl_lightning.callbacks.support import (
    evaluation_metrics,
    forget_evaluation_metrics,
    has_fitted,
    is_rehearsal,
    outside_of_fit,
    rollout_source,
    write_whole,
)
from comlrl_lightning.keywords import KnownKeywords


class JSONExport(Callback, KnownKeywords):
    """Write each evaluation's metrics to a JSON file, and all of them to a history of JSON lines beside it.

    `path` holds the latest evaluation; the history has the same name with the suffix ``.jsonl`` and one line per
    evaluation, which begins with `env_step` and with the number of batches trained before. A resumed run continues the
    history where its checkpoint stands. An evaluation by the trainer after its fit takes the place of a line that was
    written after the same batch. A trainer that never fitted writes no history, and beside that of a fit its file is
    called ``eval-metrics-validate.json`` (or ``-test``).

    Files appear whole, on rank zero, and never for sanity checks or a `fast_dev_run`; a metric that is not finite
    becomes null.

    Args:
        path: The JSON file, relative to the working folder.

    Raises:
        ValueError: If `path` does not end in ``.json``.

    Example::

        trainer = Trainer(callbacks=[EvalInterval(4), JSONExport("runs/eval-metrics.json")])
    """

    def __init__(self, path: str | Path = "eval-metrics.json") -> None:
        super().__init__()
        if Path(path).suffix != ".json":
            raise ValueError(f"JSONExport(path={str(path)!r}) does not name a JSON file. End it in .json.")
        self._path = Path(path)
        self._history = History(self._path.with_suffix(".jsonl"))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not is_rehearsal(trainer):
            self._history.begin(trainer, rollout_source(pl_module, self))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        forget_evaluation_metrics(trainer)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        forget_evaluation_metrics(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._export(trainer, pl_module)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._export(trainer, pl_module)

    def _export(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or is_rehearsal(trainer):
            return
        metrics = _finite_or_none(evaluation_metrics(trainer))
        text = json.dumps(metrics, indent=2) + "\n"
        write_whole(self._target(trainer), lambda path: path.write_text(text, encoding="utf-8"))
        if has_fitted(trainer):
            env_step = rollout_source(pl_module, self).env_step
            self._history.add(trainer, env_step, [metrics], again=trainer.state.fn != "fit")

    def _target(self, trainer: Trainer) -> Path:
        """The file of this evaluation, never the one that belongs to the fit of another trainer."""
        if has_fitted(trainer) or not self._path.with_suffix(".jsonl").exists():
            return self._path
        return outside_of_fit(self._path, trainer)


def _finite_or_none(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in metrics.items()}
