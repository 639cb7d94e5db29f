"""What is kept off the screen, and what is said there once."""

from __future__ import annotations

import logging
import sys
import warnings
from types import ModuleType

import pytest

import comlrl_lightning
from comlrl_lightning.utilities import quiet

assert comlrl_lightning.__version__  # its import silences


def test_importing_the_package_silences_advertising_alone() -> None:
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    texts = ["Tip: try installing [litlogger](https://pypi.org/project/litlogger/)", "GPU available: False"]
    records = [logging.LogRecord(logger.name, logging.INFO, "", 0, text, (), None) for text in texts]
    assert [bool(logger.filter(record)) for record in records] == [False, True]


def test_a_notebook_without_widgets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(quiet, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet.warn_of_still_bars()
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    with pytest.warns(UserWarning, match="Progress bars do not move in this notebook, as ipywidgets is not installed"):
        quiet.warn_of_still_bars()
    monkeypatch.setattr(quiet, "find_spec", lambda name: name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet.warn_of_still_bars()
