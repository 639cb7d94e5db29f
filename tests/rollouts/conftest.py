"""Fixtures of the tests of rollouts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest


@pytest.fixture
def ends() -> Iterator[None]:
    """All threads of rewards that a test starts have ended, once they had time to do so."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while left := [one for one in set(threading.enumerate()) - before if one.name in ("reward", "rewards")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
