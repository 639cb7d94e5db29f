"""Rewards that worker processes can import, without anything that is slow to import."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.waiting import HANG_SECONDS

Items = Sequence[Mapping[str, Any]]


def lengths(*completions: list[str]) -> list[float]:
    """Characters of each joint completion."""
    return [float(sum(map(len, joint))) for joint in zip(*completions, strict=True)]


def halves(*completions: list[str], batch_items: Items) -> list[float]:
    """Sums that floats round: the number of the item and a third per character."""
    return [batch_items[0]["number"] + length / 3 for length in lengths(*completions)]


def as_told(first: list[str], batch_items: Items) -> list[float]:
    """What the item says, and its number as the reward."""
    told = batch_items[0].get("do", "score")
    time.sleep(batch_items[0].get("after", 0.0))
    if told == "exit":
        os._exit(3)
    if told == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if told == "raise":
        raise KeyError(batch_items[0]["number"])
    if told == "raise odd":
        raise OddError("left", "right")
    if told == "quit":
        raise SystemExit(4)
    if told == "hang":
        time.sleep(HANG_SECONDS)
    if told == "start and hang":
        child = subprocess.Popen(["sleep", str(HANG_SECONDS)])
        Path(batch_items[0]["file"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(HANG_SECONDS)
    return [float(batch_items[0]["number"])] * len(first)


class OddError(Exception):
    """An exception that pickles and does not load again."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(left + right)


class Counter:
    """Counts the calls that this copy has had."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, first: list[str]) -> list[float]:
        self.calls += 1
        return [float(self.calls)] * len(first)


class PickyState:
    """Pickles, but cannot be loaded anywhere."""

    def __call__(self, first: list[str]) -> list[float]:
        return [0.0] * len(first)

    def __setstate__(self, state: object) -> None:
        raise LookupError("no such dictionary")

    def __getstate__(self) -> dict[str, int]:
        return {"size": 1}


def modes(first: list[str]) -> list[float]:
    """Bits of the default dtype and whether gradients are on, before it changes both."""
    import torch

    seen = float(torch.finfo(torch.get_default_dtype()).bits) + 100.0 * torch.is_grad_enabled()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return [seen] * len(first)


def touches(first: list[str], batch_items: Items) -> list[float]:
    """Zeros; it leaves the file that the item names."""
    Path(batch_items[0]["file"]).write_text("called")
    return [0.0] * len(first)
