"""Checks of the plain numbers that users give. It needs the standard library alone, so that every part may use it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard


def is_whole(value: object, minimum: int) -> bool:
    """Whether it is a whole number of at least `minimum`; booleans are no numbers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_finite(value: object) -> TypeGuard[float]:
    """Whether it is a number that a float can hold, neither NaN nor infinite; booleans are no numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def check_whole(minimum: int, owner: str = "", /, **values: object) -> None:
    """Refuse anything but whole numbers from a minimum on.

    Args:
        minimum: The smallest one that is allowed.
        owner: The class whose arguments they are, if the message is to name it.
        values: The arguments by name.

    Raises:
        ValueError: If one is something else.
    """
    for name, value in values.items():
        if not is_whole(value, minimum):
            raise _out_of_range(owner, name, value, f"a whole number of at least {minimum}")


def check_number(wanted: str, fits: Callable[[float], bool], owner: str = "", /, **values: object) -> None:
    """Refuse anything but finite numbers that fit.

    Args:
        wanted: What to use, in words.
        fits: Whether a finite number is allowed.
        owner: The class whose arguments they are, if the message is to name it.
        values: The arguments by name.

    Raises:
        ValueError: If one is something else.
    """
    for name, value in values.items():
        if not (is_finite(value) and fits(value)):
            raise _out_of_range(owner, name, value, wanted)


def check_finite(**values: float | None) -> None:
    """Refuse what is not a number, NaN and infinity; None passes."""
    check_number("a finite number", is_finite, **_given(values))


def check_at_least(minimum: float, /, **values: float) -> None:
    """Refuse what is not a number, numbers below a minimum, NaN and infinity."""
    check_number(f"a number of at least {minimum:g}", lambda value: value >= minimum, **values)


def check_positive(**values: float | None) -> None:
    """Refuse what is not a finite number above zero; None passes."""
    check_number("a number above 0", lambda value: value > 0, **_given(values))


def check_share(**values: float) -> None:
    """Refuse what is not a number from 0 to 1."""
    check_number("a number from 0 to 1", lambda value: 0 <= value <= 1, **values)


def _given(values: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _out_of_range(owner: str, name: str, value: object, wanted: str) -> ValueError:
    argument = f"{owner}({name}={value!r})" if owner else f"{name}={value!r}"
    return ValueError(f"{argument} is out of range. Use {wanted}.")


def check_kind(*kinds: type, **values: Any) -> None:
    """Refuse objects of other classes."""
    for name, value in values.items():
        if not isinstance(value, kinds):
            wanted = " or ".join(f"{kind.__name__}(...)" for kind in kinds)
            raise ValueError(f"{name}={value!r} is not a setting of that kind. Give {wanted}.")


def check_flag(**values: bool) -> None:
    """Refuse anything but True and False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is neither True nor False. Use one of them.")


def check_choice_of(owner: str, name: str, value: object, allowed: Sequence[object]) -> None:
    """Refuse a setting of a class that is not one of the choices."""
    if not any(isinstance(value, type(choice)) and value == choice for choice in allowed):
        raise ValueError(f"{owner}({name}={value!r}) is unknown. Use one of {', '.join(map(repr, allowed))}.")


def check_choice(choices: Sequence[Any], **values: Any) -> None:
    """Refuse anything that is not one of the choices."""
    for name, value in values.items():
        if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
            allowed = ", ".join(repr(choice) for choice in choices)
            raise ValueError(f"{name}={value!r} is unknown. Use one of {allowed}.")
