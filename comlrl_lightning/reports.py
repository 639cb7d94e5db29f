"""Texts on screen: a console that lacks a character, a full disk or a closed terminal ends no run."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TextIO

from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import Buffer, override

_UNWRITABLE: set[str] = set()
"""Streams of which a warning has told that they take no text."""


def say(text: str, stream: IO[str] | None = None) -> None:
    """Write a text, ``?`` for what the stream's encoding lacks.

    Args:
        text: The text, with its line ends.
        stream: Where to; None takes the standard output.
    """
    target: IO[str] | None = sys.stdout if stream is None else stream
    if target is None or target.closed:  # as in a program without a console
        return
    encoding = (target.encoding if isinstance(target, io.TextIOBase) else None) or "utf-8"
    try:
        target.write(text.encode(encoding, "replace").decode(encoding))
        target.flush()
    except OSError as error:
        _warn_once("The screen", error)


def _warn_once(what: str, error: OSError) -> None:
    if what not in _UNWRITABLE:
        _UNWRITABLE.add(what)
        rank_zero_warn(f"{what} takes no text any more ({error}). The run goes on without it.")


class SturdyFile(io.FileIO):
    """A file whose writes fail once with a warning and then lead nowhere."""

    @override
    def write(self, content: Buffer) -> int:
        try:
            return super().write(content)
        except OSError as error:
            _warn_once(f"Output {self.fileno()}", error)
            return memoryview(content).nbytes


@contextmanager
def sturdy_output() -> Iterator[None]:
    """Let no print, progress bar or log line of a program end it, whoever writes it."""
    former = sys.stdout, sys.stderr
    own = [_sturdy(stream) for stream in former]
    sys.stdout, sys.stderr = own
    try:
        yield
    finally:
        for stream in own:
            if stream not in former:
                stream.flush()
        sys.stdout, sys.stderr = former


def _sturdy(stream: TextIO) -> TextIO:
    """The same stream, or one to the same file that takes every character and outlives the file."""
    if stream not in (sys.__stdout__, sys.__stderr__) or not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    raw = SturdyFile(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=stream.line_buffering
    )
