"""Joint completions as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from comlrl_lightning.callbacks.support import is_rehearsal, write_whole
from comlrl_lightning.utilities.distributed import gather_objects


class JSONPredictions(Callback):
    """Write what `Trainer.predict` samples as JSON lines, one record per item and turn, in the order of the items.

    Nothing is written in a `fast_dev_run`.

    Args:
        path: The file.

    Example::

        Trainer(callbacks=[JSONPredictions("predictions.jsonl")]).predict(module, data)
    """

    def __init__(self, path: str | Path = "predictions.jsonl") -> None:
        super().__init__()
        self.path = Path(path)
        self.num_items = 0
        """Items in the file, of all ranks."""
        self._records: list[dict[str, Any]] = []

    @override
    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._records = []

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
            write_whole(self.path, lambda path: path.write_text(text, encoding="utf-8"))
