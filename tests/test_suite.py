"""A rule that the tests keep themselves: no clock decides."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
MAY_READ_CLOCKS = {
    "waiting.py": "the limit of what is waited for",
    "distributed/launch.py": "the limit of ranks",
    "faults/test_kills.py": "moments at which a run is killed",
}


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
