"""The fault table FAULTS.md, out of the tests: ``python -m tests.faults.table``."""

from __future__ import annotations

from pathlib import Path

from tests.faults.registry import all_faults

PATH = Path(__file__).parents[2] / "FAULTS.md"
HEAD = """# What was tried to break it

{count} cases of {areas} kinds. Each row is a test in `tests/faults/`, from which `python -m tests.faults.table`
writes this file; a message is what the test compares, with `...` for what does not matter. `make test` runs them,
`make test-slow` those that take long.
"""


def table() -> str:
    """The text of the file."""
    rows: dict[str, list[str]] = {}
    faults = all_faults()
    for fault, name in faults:
        rows.setdefault(fault.area, []).append(f"| {_cell(fault.tried)} | {_cell(fault.told)} | `{name}` |")
    parts = [HEAD.format(count=len(faults), areas=len(rows))]
    for area, lines in sorted(rows.items(), key=lambda entry: entry[0].lower()):
        title = area[:1].upper() + area[1:]
        parts.append("\n".join([f"## {title}", "", "| what | what comes of it | test |", "|---|---|---|", *lines, ""]))
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", r"\<").replace("\n", " ")


if __name__ == "__main__":
    PATH.write_text(table())
    print(f"{len(all_faults())} rows written to {PATH}")
