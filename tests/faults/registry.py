"""What was tried to break a run, what has to come of it, and where that is tested."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

GAP = " ... "
"""Stands in an expected message for anything."""


@dataclass(frozen=True)
class Fault:
    """A row of the fault table and a case of the test that has it among its parameters."""

    area: str
    tried: str
    """What somebody does, or what happens to them."""
    outcome: str
    """What comes of it; of a `Refused`, the message, with `GAP` for what does not matter."""

    def __str__(self) -> str:
        return f"{self.area}: {self.tried}"

    @property
    def told(self) -> str:
        """The outcome in words."""
        return self.outcome


@dataclass(frozen=True)
class Refused(Fault):
    """Something that ends with an error that says what to do."""

    attempt: Callable[[Path], object]
    """Does it; gets an empty folder."""
    error: type[BaseException] = ValueError

    @property
    def told(self) -> str:
        return f"`{self.error.__name__}`: {self.outcome}"

    def check(self, folder: Path) -> None:
        """Do it, and compare the error with what is expected."""
        with pytest.raises(self.error) as caught:
            self.attempt(folder)
        self.check_message("\n".join([str(caught.value), *vars(caught.value).get("__notes__", [])]))

    def check_message(self, message: str) -> None:
        """Compare a message with what is expected."""
        rest = message
        for part in self.outcome.split(GAP.strip()):
            assert part.strip() in rest, f"{part.strip()!r} is not in {message!r}"
            rest = rest.partition(part.strip())[2]


def faults(*cases: Fault, slow: frozenset[Fault] = frozenset()) -> pytest.MarkDecorator:
    """Run a test once for each case, as its argument `fault`."""
    marked = [pytest.param(case, marks=pytest.mark.slow if case in slow else ()) for case in cases]
    return pytest.mark.parametrize("fault", marked, ids=[f"{case.area}-{case.tried}"[:60] for case in cases])


def all_faults() -> list[tuple[Fault, str]]:
    """The cases of all tests in this folder with the names of their files, in the order of the files."""
    here = importlib.import_module(__package__)
    names = sorted(info.name for info in pkgutil.iter_modules(here.__path__) if info.name.startswith("test_"))
    modules = {name: importlib.import_module(f"{__package__}.{name}") for name in names}
    return [
        (fault, name) for name, module in modules.items() for test in _tests_of(module) for fault in _cases_of(test)
    ]


def _tests_of(owner: Any) -> Iterator[Any]:
    """Test functions of a module or class, as pytest would find them."""
    for name, value in vars(owner).items():
        if inspect.isfunction(value) and name.startswith("test_"):
            yield value
        elif inspect.isclass(value) and name.startswith("Test"):
            yield from _tests_of(value)


def _cases_of(test: Any) -> Iterator[Fault]:
    for mark in vars(test).get("pytestmark", []):
        if mark.name == "parametrize" and mark.args[0] == "fault":
            yield from (parameter.values[0] for parameter in mark.args[1])
