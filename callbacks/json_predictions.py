"""Joint completions as a file."""

from __future__ import annotations

import json
from pathlib import Path

from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from comlrl_lightning.callbacks.support import write_whole
from comlrl_lightning.distributed import gather_objects


class JSONPredictions(Callback):
    """Write what `Trainer.predict` samples as JSON lines, one record per item and turn, in the order of the items.

    Args:
        path: The file.

    Example::

        Trainer(callbacks=[JSONPredictions("predictions.jsonl")]).predict(module, data)
    """

    def __init__(self, path: str | Path = "predictions.jsonl") -> None:
        super().__init__()
        self._path = Path(path)

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mine = [record for batch in trainer.predict_loop.predictions for record in batch]
        records = sorted(gather_objects(mine), key=lambda record: (record["index"], record["turn"]))
        if trainer.is_global_zero:
            text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            write_whole(self._path, lambda path: path.write_text(text, encoding="utf-8"))
