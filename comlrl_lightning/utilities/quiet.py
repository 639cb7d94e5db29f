"""What libraries below this one say on screen that helps nobody who trains agents."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

HINTS = ("litlogger", "litmodels")
"""Products that Lightning recommends at each start."""
WARNINGS = (
    r"No seed found, seed set to 0",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"The number of training batches .* is smaller than the logging interval",
)
"""Warnings about Lightning itself, by the beginning of their text."""
MISSING_WIDGETS = (
    "Progress bars do not move in this notebook, as ipywidgets is not installed. Install it (pip install ipywidgets, "
    'or pip install ".[notebook]" in a checkout) and start the kernel anew.'
)


@contextmanager
def without_noise() -> Iterator[None]:
    """Silence what PEFT says about its own inner workings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        yield


def quiet_libraries() -> None:
    """Silence exactly these messages and the bars of loading weights, for programs of ours; downloads keep theirs."""
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    enable_progress_bars()
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    silence_advertising()


def silence_advertising() -> None:
    """Keep Lightning's recommendations of other products off the screen, and nothing else."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    if _is_news not in logger.filters:
        logger.addFilter(_is_news)


def warn_of_still_bars() -> None:
    """Say once in a notebook what its progress bars lack."""
    kernel = sys.modules.get("ipykernel")  # only loaded where a notebook runs
    if kernel is not None and find_spec("ipywidgets") is None:
        warnings.warn(MISSING_WIDGETS, stacklevel=2)


def _is_news(record: logging.LogRecord) -> bool:
    return not any(hint in record.getMessage() for hint in HINTS)
