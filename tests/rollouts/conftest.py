"""Fixtures of the tests of rollouts."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.waiting import eventually


@pytest.fixture
def ends() -> Iterator[None]:
    """All threads of rewards that a test starts have ended, once they had time to do so."""
    before = set(threading.enumerate())
    yield

    def left() -> list[threading.Thread]:
        return [one for one in set(threading.enumerate()) - before if one.name in ("reward", "rewards")]

    assert eventually(lambda: not left()), left()
