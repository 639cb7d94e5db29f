"""Calls of reward functions and their scores, for the tests of reward workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from comlrl_lightning.environment.reward import RewardCall, RewardFunction
from comlrl_lightning.environment.reward_dispatch import _Worker
from comlrl_lightning.environment.reward_workers import RewardWorkers

Backend = Literal["thread", "process"]
WAYS: list[tuple[int, Backend]] = [(0, "thread"), (1, "thread"), (3, "thread"), (2, "process")]
"""Workers and backends that must give the same rewards."""


def calls_of(*items: dict[str, Any], num_agents: int = 1, num_joint: int = 2, turn: int = 3) -> list[RewardCall]:
    """A call per item, at turn 3; items are numbered."""
    texts = [["a" * (1 + joint) for joint in range(num_joint)]] * num_agents
    return [RewardCall(texts, {"number": at, **item}, None, turn, 10 + at) for at, item in enumerate(items)]


def told(*what: str, **more: Any) -> list[RewardCall]:
    return calls_of(*({"do": one, **more} for one in what), num_joint=1)


def score(
    func: Callable[..., Any], calls: Sequence[RewardCall], *settings: Any, **keywords: Any
) -> list[list[list[float]]]:
    reward = RewardFunction(func, len(calls[0].completions), keywords.pop("processor", None))
    return RewardWorkers(*settings, **keywords).score(reward, calls).rows


def limit_only(monkeypatch: pytest.MonkeyPatch, hangs: Callable[[RewardCall], bool]) -> None:
    """Let the time limit hold for these calls alone: a busy machine makes no other one late."""
    begin = _Worker.begin

    def patched(worker: _Worker, index: int, call: RewardCall, seconds: float | None) -> None:
        begin(worker, index, call, seconds if hangs(call) else None)

    monkeypatch.setattr(_Worker, "begin", patched)


def is_told_to_hang(call: RewardCall) -> bool:
    return "hang" in call.item.get("do", "")


def in_child(pid: int) -> bool:
    """Whether a process still runs; a zombie does not."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    return False
