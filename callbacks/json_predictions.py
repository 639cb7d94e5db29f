"""Joint completions as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from comlrl_lightning.callbacks.run_path import RunPath
from comlrl_lightning.callbacks.support import is_rehearsal
from comlrl_lightning.files import Place
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.utilities.distributed import gather_objects


class JSONPredictions(Callback, KnownKeywords):
    """Write what `Trainer.predict` samples as JSON lines, one record per item and turn, in the order of the items.

    Nothing is written in a `fast_dev_run`. A warning says so before an existing file is replaced.

    Args:
        path: The file, or an address such as ``s3://bucket/predictions.jsonl`` that fsspec reaches; None takes
            ``predictions.jsonl`` in the folder of the run.

    Example::

        Trainer(callbacks=[JSONPredictions("predictions.jsonl")]).predict(module, data)
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        self._target = RunPath("JSONPredictions", path, "predictions.jsonl")
        self.num_items = 0
        """Items in the file, of all ranks."""
        self._records: list[dict[str, Any]] = []

    @property
    def path(self) -> Place:
        """The file, known once a trainer has set the callback up."""
        return self._target.place

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._target.settle(trainer)

    @override
    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._records = []
        if trainer.is_global_zero and not is_rehearsal(trainer):
            self._target.warn_of_others([self.path])

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._records += outputs

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        records = sorted(gather_objects(self._records), key=lambda record: (record["index"], record["turn"]))
        self._records = []
        self.num_items = len({record["index"] for record in records})
        if trainer.is_global_zero and not is_rehearsal(trainer):
            text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            self.path.write_text(text)
