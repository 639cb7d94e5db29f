"""FAULTS.md is what the tests say."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.registry import Refused, all_faults
from tests.faults.table import PATH, table


def test_the_file_is_up_to_date() -> None:
    assert PATH.read_text() == table(), "run python -m tests.faults.table"


def test_sixty_different_rows() -> None:
    assert len(all_faults()) >= 60
    assert set(Counter(str(fault) for fault, _ in all_faults()).values()) == {1}


def test_messages_are_compared_in_order() -> None:
    case = Refused("area", "tried", "first ... second", lambda _: None)
    case.check_message("the first and the second")
    for message in ("the second and the first", "only the first"):
        with pytest.raises(AssertionError, match="'second' is not in"):
            case.check_message(message)
