"""Rules that the tests keep themselves: what warns is looked at, and no clock decides."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
MAY_READ_CLOCKS = {
    "waiting.py": "the limit of what is waited for",
    "distributed/launch.py": "the limit of ranks",
    "faults/test_kills.py": "moments at which a run is killed",
}


def test_a_warning_of_this_package_is_an_error_wherever_it_points() -> None:
    with pytest.raises(UserWarning, match="of the user's own doing"):
        warnings.warn("of the user's own doing", stacklevel=10)


@pytest.mark.parametrize(
    "module", ["comlrl_lightning.data.datamodule", "comlrl_lightning.agents.team", "tests.test_data"]
)
@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning, ResourceWarning])
def test_any_warning_from_our_own_lines_is_an_error(module: str, category: type[Warning]) -> None:
    with pytest.raises(category, match="some call"):
        warnings.warn_explicit("some call", category, "file.py", 1, module)


def test_what_other_libraries_say_of_themselves_is_none() -> None:
    with pytest.warns(FutureWarning, match="some call"):
        warnings.warn_explicit("some call", FutureWarning, "file.py", 1, "transformers.modeling")


def reads_a_clock(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" and not CLOCKS.isdisjoint(name.name for name in node.names)
    is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return is_attribute and node.value.id == "time" and node.attr in CLOCKS  # type: ignore[attr-defined]


def test_no_test_reads_a_clock() -> None:
    # On a busy machine everything takes longer: meetings and counts show the same, see tests/waiting.py.
    readers = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if any(map(reads_a_clock, ast.walk(ast.parse(path.read_text()))))
    }
    assert readers == set(MAY_READ_CLOCKS)
