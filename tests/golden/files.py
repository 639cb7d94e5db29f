"""The files with golden numbers: how they are written, read and compared."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
WIDTH = 110
"""Longest line for a value that is written on one line."""
DIGITS = 8
"""Significant digits that are written down."""
RELATIVE, ABSOLUTE = 1e-5, 1e-8
"""Largest difference of two numbers that count as equal."""
EXACT = ("steps", "evaluations")
"""Parts of a record whose numbers must be equal to the last bit, unless a model gave the rewards in them."""


def path_of(name: str) -> Path:
    """The file of a record."""
    return FOLDER / f"{name}.json"


def read(name: str) -> Any:
    """A record."""
    return json.loads(path_of(name).read_text(encoding="utf-8"))


def write(name: str, record: Any) -> None:
    """Write a record that a person can read: short values on one line, numbers with few digits."""
    path_of(name).write_text(_text(_rounded(record)) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _text(value: Any, indent: str = "") -> str:
    short = json.dumps(value)
    if not isinstance(value, dict | list) or not value or (len(indent) + len(short) <= WIDTH and not _is_deep(value)):
        return short
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(key)}: {_text(entry, inner)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _text(entry, inner) for entry in value) + f"\n{indent}]"


def _is_deep(value: Any) -> bool:
    """Whether lists or dictionaries lie more than two levels deep."""
    return _depth(value) > 2


def _depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)


def differences(golden: Any, seen: Any, place: str = "", *, exact: bool = False) -> Iterator[str]:
    """Where two records differ, one line per place.

    Args:
        golden: As it was written down.
        seen: As it is now.
        place: Where in the record the two stand.
        exact: Compare numbers to the last bit.
    """
    if isinstance(golden, dict) and isinstance(seen, dict):
        yield from (f"{place}/{key}: is gone, was {golden[key]!r}" for key in golden if key not in seen)
        yield from (f"{place}/{key}: is new, {seen[key]!r}" for key in seen if key not in golden)
        for key in golden.keys() & seen.keys():
            yield from differences(golden[key], seen[key], f"{place}/{key}", exact=exact)
    elif isinstance(golden, list) and isinstance(seen, list):
        if len(golden) != len(seen):
            yield f"{place}: {len(seen)} entries, were {len(golden)}"
        for index, (old, new) in enumerate(zip(golden, seen, strict=False)):
            yield from differences(old, new, f"{place}[{index}]", exact=exact)
    elif not _is_same(golden, seen, exact):
        yield f"{place}: {seen!r}, was {golden!r}"


def _is_same(golden: Any, seen: Any, exact: bool) -> bool:
    if exact or not (isinstance(golden, float) and isinstance(seen, float)):
        return bool(golden == seen)
    if math.isnan(golden) or math.isnan(seen):
        return math.isnan(golden) and math.isnan(seen)
    return math.isclose(golden, seen, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
