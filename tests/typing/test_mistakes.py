"""A type checker reports mistakes in constructors, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parent.parent.parent
MISTAKES = Path(__file__).with_name("mistakes.py")


def lines_with_mistakes(path: Path) -> set[int]:
    """Numbers of the lines that are said to be wrong."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# mistake")}


def test_four_mistakes_of_each_of_four_classes() -> None:
    assert len(lines_with_mistakes(MISTAKES)) == 16


@pytest.mark.timeout(1800)  # without a cache mypy reads torch and lightning first
def test_mypy_reports_the_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    report, errors, _ = api.run([str(MISTAKES.relative_to(ROOT)), "--strict"])
    found = [re.match(r"(?P<path>[^:]+):(?P<line>\d+): error: ", line) for line in report.splitlines()]
    reported = {(one["path"], int(one["line"])) for one in found if one}
    if errors:
        raise RuntimeError(errors)
    assert reported == {(str(MISTAKES.relative_to(ROOT)), line) for line in lines_with_mistakes(MISTAKES)}, report
