"""Checked calls of the user's functions: names, signatures, places and numbers.

A signature is read once, when the function is handed over. Reserved keywords are passed only if it has them, nothing is
guessed from counts, and nothing is tried twice.
"""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import Error as CopyError
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from numbers import Real
from pickle import PickleError, dumps
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Protocol, TypeGuard, runtime_checkable


class _Short(reprlib.Repr):
    def repr1(self, x: Any, level: int) -> str:
        # Others than the builtin types are known by their name alone, which any class may have.
        known = type(x).__module__ in ("array", "builtins", "collections")
        return super().repr1(x, level) if known else self.repr_instance(x, level)

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python refuses to write numbers with thousands of digits
            return f"<int of {x.bit_length()} bits>"


_SHORT = _Short()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple = 3, 4, 4, 4
_SHORT.maxstring = _SHORT.maxother = 60


LARGEST = 3.4028234663852886e38
"""The largest float32, in which updates compute: means and squares of larger numbers overflow somewhere on the way."""


@runtime_checkable
class _ArrayLike(Protocol):
    """A tensor or an array: its numbers come out by `tolist`."""

    def tolist(self) -> Any:
        """Nested lists of numbers, or one number."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """The task item and the turn for which a function of the user runs, for messages."""

    item: Mapping[str, Any]
    index: int | None = None
    """Position of the item in its dataset."""
    turn: int | None = None

    def __str__(self) -> str:
        index = "" if self.index is None else f" {self.index}"
        turn = "" if self.turn is None else f" at turn {self.turn}"
        return f"task item{index} {_SHORT.repr(dict(self.item))}{turn}"


class UserFunction:
    """A function of the user with its name and the reserved keywords that its signature has.

    Args:
        func: The function.
        argument: Name of the argument that it was given as.
        num_positional: How many positional arguments a call passes.
        keywords: Reserved names that a call can pass by keyword.
        passes: What a call passes, in words.

    Raises:
        ValueError: If it is not callable, is a class, or cannot be called so.
    """

    def __init__(
        self, func: Callable[..., Any], argument: str, num_positional: int, keywords: Sequence[str], passes: str
    ) -> None:
        if not callable(func):
            raise ValueError(f"{argument}={func!r} is not callable. Give a function or a callable object.")
        if inspect.isclass(func):
            name = qualified_name(func)
            raise ValueError(f"{argument}={name} is a class. Give an object of it, {func.__name__}(...).")
        if _is_async(func):
            raise ValueError(
                f"{argument}={qualified_name(func)} is an async function, and what it returns would have to be awaited."
                f" Give a function that runs it, for example one that returns asyncio.run(...)."
            )
        self.func = func
        self.label = f"{argument}={qualified_name(func)}"
        self.keywords = self._read(num_positional, keywords, passes)

    def _read(self, num_positional: int, keywords: Sequence[str], passes: str) -> frozenset[str]:
        signature = readable_signature(self.func)
        if signature is None:
            unread = frozenset(keywords if num_positional == 0 else ())
            called = f"with {passes} and {'all' if unread else 'no'} keywords"
            warnings.warn(f"{self.label} has no signature that Python can read: it is called {called}.", stacklevel=4)
            return unread
        accepted = _accepted(signature, keywords)
        try:
            signature.bind(*[None] * num_positional, **dict.fromkeys(accepted))
        except TypeError as error:
            also = f" and the keywords {', '.join(sorted(accepted))}" if accepted else ""
            raise ValueError(
                f"{self.label} cannot be called with {passes}{also}: {error}. "
                f"Its signature is {signature}; {', '.join(keywords)} are passed by keyword if it has them."
            ) from None
        return accepted

    def __call__(self, place: object, /, *args: Any, **keywords: Any) -> Any:
        """Call the function; an exception of it keeps its type and traceback and gets a note."""
        chosen = {name: value for name, value in keywords.items() if name in self.keywords}
        try:
            result = self.func(*args, **chosen)
        except StopIteration as error:  # a training loop would take it for its own end and stop in silence
            raise RuntimeError(
                f"{self.label} raised StopIteration for {place}. Catch it, or give next() a default."
            ) from error
        except Exception as error:
            error.add_note(f"Raised in {self.label} for {place}.")
            raise
        if inspect.iscoroutine(result):
            result.close()
            raise ValueError(f"{self.label} returned a coroutine for {place}. Give a function that runs it to its end.")
        return result


def check_sent(functions: Mapping[str, Any]) -> None:
    """Refuse functions that a strategy cannot send to processes of its own; elsewhere it does nothing.

    Args:
        functions: By setting.

    Raises:
        ValueError: If one cannot be pickled; pickle itself would name neither the setting nor a way out.
    """
    if get_spawning_popen() is None:
        return
    for name, func in functions.items():
        try:
            dumps(func)
        except (PickleError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{name}={qualified_name(func)} cannot be sent to another process: {error}. Define it at the top level"
                " of a module, or use strategy='ddp', 'ddp_fork' or 'ddp_notebook', which need not send it."
            ) from error


def _is_async(func: Callable[..., Any]) -> bool:
    """Whether a call gives something to await or to iterate over with ``async for``."""
    called = func if inspect.isroutine(func) or isinstance(func, functools.partial) else type(func).__call__
    return inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)


def qualified_name(func: Callable[..., Any]) -> str:
    """``module.name`` of a function, of the function inside a partial or wrapper, or of an object's class."""
    if isinstance(func, functools.partial):
        return f"partial({qualified_name(func.func)})"
    inner = inspect.unwrap(func)
    if isinstance(inner, FunctionType | BuiltinFunctionType | MethodType | type):
        return f"{inner.__module__}.{inner.__qualname__}"
    return f"{type(inner).__module__}.{type(inner).__qualname__}"


def short(value: object) -> str:
    """A representation that fits into a message."""
    return _SHORT.repr(value)


def copied_item(item: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """A copy of a task item that a function may change.

    Raises:
        ValueError: If something in it cannot be copied.
    """
    try:
        copied: dict[str, Any] = deepcopy(dict(item))
    except (TypeError, ValueError, RuntimeError, AttributeError, CopyError, PickleError) as error:
        raise ValueError(
            f"{place} cannot be copied: {short(str(error))}. Keep such objects out of task items."
        ) from error
    return copied


def finite_float(value: object, source: str, place: Place) -> float:
    """One number as a float.

    Args:
        value: A Python, numpy or torch number; a boolean counts as 1 or 0.
        source: What returned it, for the message.
        place: Where, for the message.

    Raises:
        ValueError: If it is not a finite number that float32 can hold.
    """
    number = _in_builtins(value, source, place)
    if not isinstance(number, Real):
        raise ValueError(f"{source} gave {short(value)} for {place}, which is not a number. Return a finite float.")
    try:
        result = float(number)
    except (OverflowError, TypeError, ValueError):
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(f"{source} gave {result} for {place}. Return a finite float.")
    if abs(result) > LARGEST:
        raise ValueError(
            f"{source} gave {result} for {place}, which is beyond {LARGEST:.2e}, the largest number that an update can"
            " compute with. Return smaller rewards."
        )
    return result


def finite_floats(values: object, count: int, source: str, place: Place, *, none_as_nan: bool = False) -> list[float]:
    """`[J]` floats out of what a reward function returned.

    Args:
        values: A list, tuple, tensor or array of numbers.
        count: J, how many there must be.
        source: What returned them, for the message.
        place: Where, for the message.
        none_as_nan: NaN stands for None, which is an error otherwise.

    Raises:
        ValueError: If it is something else, of another length, or not all numbers are finite.
    """
    numbers = _in_builtins(values, source, place)
    wanted = f"Return a list of {count} finite float{'s' if count > 1 else ''}, one per joint completion."
    if not isinstance(numbers, list | tuple):
        raise ValueError(f"{source} returned {short(values)} for {place}. {wanted}")
    if (length := len(numbers)) != count:
        raise ValueError(
            f"{source} returned {length} value{'' if length == 1 else 's'} for {count} joint completions of {place}: "
            f"{short(numbers)}. {wanted}"
        )
    return [_number(number, source, place, none_as_nan) for number in numbers]


def rows_of(
    values: object, count: int, num_agents: int, source: str, place: Place, *, none_as_nan: bool = False
) -> list[list[float]]:
    """`[J][N]` floats out of what a reward function with one reward per agent returned.

    Args:
        values: A list, tuple, tensor or array with a row of numbers per joint completion.
        count: J, how many rows there must be.
        num_agents: N, how many numbers each must hold.
        source: What returned them, for the message.
        place: Where, for the message.
        none_as_nan: A row of NaN stands for None in place of a row or of a number of it, which is an error otherwise.

    Raises:
        ValueError: If it is something else, of another shape, or not all numbers are finite.
    """
    outer = _in_builtins(values, source, place)
    rows: list[Any] = [_in_builtins(row, source, place) for row in outer] if _is_list(outer) else []
    if none_as_nan:
        rows = [[None] * num_agents if row is None else row for row in rows]
    if len(rows) != count or not all(_is_list(row) and len(row) == num_agents for row in rows):
        raise ValueError(
            f"{source} returned {short(values)} for {count} joint completions of {place}. Return a list of {count}"
            f" rows with {num_agents} finite floats each, one per agent, or leave per_agent_rewards out."
        )
    numbers = [[_number(number, source, place, none_as_nan) for number in row] for row in rows]
    return [[math.nan] * num_agents if any(map(math.isnan, row)) else row for row in numbers]


def _number(value: object, source: str, place: Place, none_as_nan: bool) -> float:
    if none_as_nan and value is None:
        return math.nan
    try:
        return finite_float(value, source, place)
    except ValueError as error:
        if value is None:
            error.add_note('reward_none="skip" leaves joint completions whose reward is None out of their groups.')
        raise


def check_unicode(text: str, source: str, place: object) -> None:
    """Refuse lone surrogates, which no tokenizer and no file takes.

    Args:
        text: What a function returned.
        source: Its label, for the message.
        place: Where, for the message.

    Raises:
        ValueError: If there is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{source} returned {short(text)} for {place}, with the lone surrogate {text[error.start]!r} at position"
            f" {error.start}. Return valid Unicode, for example text.encode('utf-8', 'replace').decode()."
        ) from None


def _in_builtins(value: object, source: str, place: Place) -> object:
    """The numbers of a tensor or an array as Python's, in nested lists; anything else as it is."""
    if not isinstance(value, _ArrayLike):
        return value
    try:
        return value.tolist()
    except (TypeError, ValueError, RuntimeError) as error:  # tensors without data, for example
        raise ValueError(
            f"{source} gave {short(value)} for {place}, whose numbers cannot be read: {error}. Return finite floats."
        ) from error


def _is_list(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(value, list | tuple)


def readable_signature(func: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a callable; None of one that Python cannot read, as of compiled code."""
    torch = sys.modules.get("torch")  # a module of torch can only be here if torch is
    if torch is not None and isinstance(func, torch.nn.Module) and type(func).__call__ is torch.nn.Module.__call__:
        func = func.forward  # `Module.__call__` takes anything, what it calls does not
    try:
        return inspect.signature(func)
    except (ValueError, TypeError):
        return None


def _accepted(signature: inspect.Signature, keywords: Sequence[str]) -> frozenset[str]:
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return frozenset(keywords)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(keywords) & {parameter.name for parameter in parameters if parameter.kind in by_keyword}
