"""What libraries below this one say on screen that helps nobody who trains agents."""

from __future__ import annotations

import logging
import warnings

HINTS = ("litlogger", "litmodels")
"""Products that Lightning recommends at each start."""
WARNINGS = (
    r"No seed found, seed set to 0",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"The number of training batches .* is smaller than the logging interval",
)
"""Warnings about Lightning itself, by the beginning of their text."""


def quiet_libraries() -> None:
    """Silence exactly these messages and the bars of loading weights, for programs of ours; downloads keep theirs."""
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    enable_progress_bars()
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    if _is_news not in logger.filters:
        logger.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not any(hint in record.getMessage() for hint in HINTS)
