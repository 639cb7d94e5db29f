"""Constructors that answer a misspelled keyword with the one that was meant. It needs the standard library alone."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator
from functools import cache, wraps
from typing import Any, Self, TypeVar

C = TypeVar("C", bound=type)

PACKAGE = __name__.partition(".")[0]
MANY = 8
"""So many settings are not listed in a message."""


class KnownKeywords:
    """Base of the public classes: an unknown keyword of their constructors is an error that names a known one."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make the object, once all keywords are known.

        Raises:
            TypeError: If one is not.
        """
        kind: type = cls
        if _is_ours(kind):
            check_keywords(kind, kwargs)
        return super().__new__(cls)


DATACLASSES: list[type] = []
"""Settings that `known_keywords` has seen."""


def known_keywords(cls: C) -> C:
    """Give a dataclass the check of `KnownKeywords` without a base class, which the command line would take for more.

    Args:
        cls: The dataclass.
    """
    init = cls.__init__  # type: ignore[misc]

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        check_keywords(type(self), kwargs)
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    DATACLASSES.append(cls)
    return cls


def check_keywords(cls: type, names: Iterable[str]) -> None:
    """Refuse keywords that a constructor does not take.

    Raises:
        TypeError: If it does not; the message names the one that may have been meant.
    """
    known = keywords_of(cls)
    for name in names:
        if name not in known:
            raise TypeError(f"{cls.__name__}({name}=...) has no such setting. {advice(name, cls)}")


@cache
def keywords_of(cls: type) -> tuple[str, ...]:
    """What a constructor takes by keyword, with what it passes on to its parents' constructors."""
    names: list[str] = []
    for constructor in _constructors(cls):
        parameters = [*inspect.signature(constructor).parameters.values()][1:]
        names += [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return tuple(dict.fromkeys(names))


def advice(name: str, cls: type) -> str:
    """What to write in place of a keyword that a class does not have."""
    known = keywords_of(cls)
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return f"Did you mean {close[0]}?"
    if owners := sorted(
        {other.__name__ for other in (*DATACLASSES, *_classes(KnownKeywords)) if name in keywords_of(other)}
    ):
        return f"It is one of {' or '.join(owners)}: give it there, or leave it out."
    if close := difflib.get_close_matches(name, known, n=1):
        return f"Did you mean {close[0]}?"
    if len(known) < MANY:
        return f"Leave it out; there {'are ' + ', '.join(known) if known else 'is none'}."
    return f"Leave it out; help({cls.__name__}) explains those that there are."


def _is_ours(cls: type) -> bool:
    """Whether the constructor is one of this package: a user's may do with its keywords what it likes."""
    return _is_here(next(base for base in cls.__mro__ if "__init__" in vars(base)))


def _is_here(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == PACKAGE


def _constructors(cls: type) -> Iterator[Any]:
    return (vars(base)["__init__"] for base in cls.__mro__[:-1] if "__init__" in vars(base))


def _classes(cls: type) -> Iterator[type]:
    """The classes of this package that were imported so far, below a class, without those that others build on."""
    children: list[type] = cls.__subclasses__()
    for child in children:
        if not _is_here(child):
            continue
        if not any(map(_is_here, child.__subclasses__())):
            yield child
        yield from _classes(child)
