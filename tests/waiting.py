"""Waiting in tests: for what comes, as long as it takes, and for what hangs, never.

No test asserts how long something takes: on a busy machine everything takes longer. What must not be waited for lasts
longer than any test may (`HANG_SECONDS`), so that a test that waits for it fails at the limit of a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 300.0
"""How long something may take that takes a moment on an idle machine; below the limit of a test."""
HANG_SECONDS = 3600.0
"""How long something takes that hangs; above the limit of a test."""


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return met
