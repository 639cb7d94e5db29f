"""What counts as a whole number and as a finite one."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from comlrl_lightning.utilities.checks import (
    check_at_least,
    check_finite,
    check_number,
    check_positive,
    check_share,
    check_whole,
    is_finite,
    is_whole,
)

NO_NUMBERS: list[Any] = [True, False, "1", None, [1]]


@pytest.mark.parametrize("value", [*NO_NUMBERS, 2.0, 1])
def test_what_is_no_whole_number_of_at_least_two(value: Any) -> None:
    assert not is_whole(value, 2)
    with pytest.raises(ValueError, match=r"^x=.* is out of range. Use a whole number of at least 2.$"):
        check_whole(2, y=2, x=value)


@pytest.mark.parametrize("value", [*NO_NUMBERS, math.nan, math.inf, -math.inf, pytest.param(10**400, id="huge")])
def test_what_is_no_finite_number(value: Any) -> None:
    assert not is_finite(value)
    with pytest.raises(ValueError, match=r"^Owner\(x=.*\) is out of range. Use anything.$"):
        check_number("anything", lambda _: True, "Owner", x=value)
    if value is not None:
        with pytest.raises(ValueError, match=r"^x=.* is out of range. Use a finite number.$"):
            check_finite(x=value)


def test_what_is_one() -> None:
    assert is_whole(2, 2)
    assert not is_whole(True, 0)
    assert is_whole(10**400, -1)
    assert is_finite(0)
    assert is_finite(-1e308)


@pytest.mark.parametrize(
    ("check", "good", "bad", "wanted"),
    [
        (lambda **values: check_at_least(0.5, **values), 0.5, 0.4, "a number of at least 0.5"),
        (check_positive, 1e-9, 0.0, "a number above 0"),
        (check_positive, None, -1, "a number above 0"),
        (check_share, 0, -0.1, "a number from 0 to 1"),
        (check_share, 1, 1.1, "a number from 0 to 1"),
    ],
)
def test_ranges(check: Any, good: Any, bad: Any, wanted: str) -> None:
    check(x=good)
    with pytest.raises(ValueError, match=f"^x={bad} is out of range. Use {wanted}.$"):
        check(y=good, x=bad)


def test_importing_it_loads_the_standard_library_alone() -> None:
    heavy = ("torch", "numpy", "lightning")
    code = f"import sys, comlrl_lightning.utilities.checks; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
