"""Reports that cannot be written or shown: the run goes on."""

from __future__ import annotations

import errno
import io
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning import Callback

from comlrl_lightning.callbacks import CompletionsTable, EvalInterval, JSONExport, PreferenceRounds, RewardCurve
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.files import Place
from tests.callbacks.fakes import FakeModule, data, quiet_trainer
from tests.callbacks.test_preference_rounds import Learner
from tests.faults.registry import Fault, faults

FULL = OSError(errno.ENOSPC, "No space left on device")
AREA = "reports"
GOES_ON = "a warning, once; the run goes on"


@dataclass(frozen=True)
class Unwritten(Fault):
    """A report for which the disk has no room."""

    callback: type[Callback]


@faults(
    Unwritten(AREA, "the disk is full for the metrics of evaluations", GOES_ON, JSONExport),
    Unwritten(AREA, "the disk is full for the completions", GOES_ON, CompletionsTable),
    Unwritten(AREA, "the disk is full for the picture of the rewards", GOES_ON, RewardCurve),
    Unwritten(AREA, "the disk is full for the pairs of a round", GOES_ON, PreferenceRounds),
)
def test_full_disk(fault: Unwritten, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(place: Place, *args: Any) -> None:
        raise FULL

    for method in ("write_whole", "append_text"):
        monkeypatch.setattr(Place, method, full)
    trainer = quiet_trainer(tmp_path, EvalInterval(1), fault.callback(), max_epochs=4)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        trainer.fit(Learner(), data(2, 1))
    told = [str(one.message) for one in heard if "could not write its report" in str(one.message)]
    assert len(told) == 1
    assert told[0].startswith(f"{fault.callback.__name__} could not write its report (OSError: [Errno 28] No space")
    assert trainer.state.finished


class Broken(io.TextIOWrapper):
    """A terminal that was closed."""

    def flush(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


@dataclass(frozen=True)
class Screen(Fault):
    """A screen that shows less than it should."""

    encoding: str = "utf-8"
    is_gone: bool = False


@faults(
    Screen(AREA, "completions in Japanese on a console of Windows", "shown with question marks", "cp1252"),
    Screen(AREA, "the terminal that shows completions is gone", GOES_ON, is_gone=True),
)
def test_screens(fault: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    screen = (Broken if fault.is_gone else io.TextIOWrapper)(raw, fault.encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr("comlrl_lightning.reports._UNWRITABLE", set())
    items = [{"prompt": "日本", "level": 0}]
    trainer = quiet_trainer(tmp_path, EvalInterval(1), CompletionsTable(num_on_screen=1), max_epochs=2)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        trainer.fit(FakeModule(), TaskDataModule(items, items))
    told = [one for one in heard if "takes no text any more" in str(one.message)]
    assert trainer.state.finished
    assert len(told) == fault.is_gone
    assert fault.is_gone or b"??" in raw.getvalue()
