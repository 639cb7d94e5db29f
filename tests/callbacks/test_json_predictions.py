"""Predictions as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from comlrl_lightning.callbacks import JSONPredictions
from comlrl_lightning.data.datamodule import TaskBatch
from tests.callbacks.fakes import FakeModule, data, quiet_trainer


class Predicting(FakeModule):
    """One record per item."""

    def predict_step(self, batch: TaskBatch, batch_idx: int) -> list[dict[str, Any]]:
        return [{"index": index, "turn": 1} for index in batch.indices]


@pytest.mark.filterwarnings("ignore:.* of another run:UserWarning")
def test_records_are_written_whether_they_are_returned_or_not(tmp_path: Path) -> None:
    writer = JSONPredictions(tmp_path / "p.jsonl")
    for returned in (True, False):
        quiet_trainer(tmp_path, writer).predict(Predicting(), data(), return_predictions=returned)
        lines = (tmp_path / "p.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [{"index": index, "turn": 1} for index in range(3)]
        assert writer.num_items == 3


def test_rehearsal_writes_nothing(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, JSONPredictions(tmp_path / "p.jsonl"), fast_dev_run=True)
    trainer.predict(Predicting(), data())
    assert not list(tmp_path.iterdir())
