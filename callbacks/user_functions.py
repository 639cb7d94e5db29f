"""Calls of the user's metric functions: signatures checked at construction, results checked, exceptions annotated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor


def name_of(function: Callable[..., Any]) -> str:
    """How messages call a user's function."""
    if isinstance(function, partial):
        return name_of(function.func)
    if isinstance(function, (FunctionType, MethodType, BuiltinFunctionType, type)):
        return function.__qualname__
    return type(function).__qualname__


def check_signature(argument: str, function: object, positional: int, keywords: Sequence[str]) -> None:
    """Check once that `function` can be called as it will be called.

    Raises:
        ValueError: If it is not callable or its signature does not fit.
    """
    names = [f"{name}=..." for name in keywords]
    call = ", ".join(["rows"] * positional + names)
    if not callable(function):
        raise ValueError(f"{argument}={function!r} cannot be called. Pass a function of ({call}).")
    try:
        inspect.signature(function).bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise ValueError(
            f"{argument}={name_of(function)} does not fit: {error}. It is called with ({call}); change its parameters."
        ) from None


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Let an exception of a user's function keep its type and traceback, with a note that says where it happened."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def as_numbers(metrics: object, source: str) -> dict[str, float]:
    """The metrics that a user's function returned, as floats.

    Raises:
        ValueError: If they are not a dictionary of names and numbers.
    """
    remedy = "Return a dictionary of names and numbers."
    if not isinstance(metrics, Mapping):
        raise ValueError(f"{source} returned {metrics!r}. {remedy}")
    for key, value in metrics.items():
        if not isinstance(key, str) or not _is_number(value):
            raise ValueError(f"{source} returned {{{key!r}: {value!r}}}. {remedy}")
    return {key: float(value) for key, value in metrics.items()}


def _is_number(value: object) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.size == 1 if isinstance(value, np.ndarray) else value.numel() == 1
    return isinstance(value, (int, float, np.number))
