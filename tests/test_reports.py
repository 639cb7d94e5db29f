"""What is only shown ends no run."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings

import pytest

from comlrl_lightning.reports import say


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comlrl_lightning.reports._UNWRITABLE", set())


def test_a_console_without_the_character_shows_another() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "cp1252")
    say("日本 é\n", stream)
    assert raw.getvalue() == b"?? \xe9\n"


class Gone(io.StringIO):
    """A screen that is not there any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_screen_that_is_gone_is_told_once() -> None:
    with pytest.warns(UserWarning, match="The screen takes no text any more"):
        say("a", Gone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        say("b", Gone())


def test_no_screen_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    say("a", closed)
    monkeypatch.setattr(sys, "stdout", None)
    say("a")


PROGRAM = """
import sys, warnings
from comlrl_lightning.reports import sturdy_output
sys.stdout.reconfigure(encoding="cp1252")
with sturdy_output():
    for _ in range(9):
        print("日本", "a" * 9000, flush=True)
    print("ended", file=sys.stderr)
"""


def run(**where: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM], check=False, text=True, **where)  # type: ignore[call-overload,no-any-return]


def test_a_program_outlives_the_reader_of_its_output() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = run(stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert ended.returncode == 0
    assert ended.stderr.count("Output 1 takes no text any more") == 1
    assert ended.stderr.endswith("ended\n")


def test_a_program_shows_what_its_console_lacks_in_other_words() -> None:
    ended = run(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (0, "ended\n")
    assert ended.stdout.startswith("\\u65e5\\u672c aaa")
