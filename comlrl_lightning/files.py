"""Places of files: local paths and what fsspec reaches, written whole; folders that list what belongs to them."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from filelock import BaseFileLock, FileLock, Timeout
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol
from lightning.pytorch.utilities import rank_zero_warn

CONTENTS = "contents.json"
"""In a folder of agents: the files that belong to them."""


@dataclass(frozen=True)
class Place:
    """A file or folder: a local path, or an address such as ``s3://bucket/run`` that fsspec reaches."""

    path: str

    @classmethod
    def of(cls, path: str | Path) -> Place:
        """The place that a user names.

        Raises:
            ValueError: If an address went through `Path`, which leaves one of its two slashes out.
        """
        if re.match(r"[a-z][a-z0-9+.-]+:/(?!/)", str(path)):
            raise ValueError(f"{str(path)!r} is an address that lost a slash. Pass it as a text, not as a Path.")
        is_local = get_protocol(str(path)) == "file"
        return cls(url_to_fs(str(path))[1] if is_local and "://" in str(path) else str(path))

    def __str__(self) -> str:
        return self.path

    def __truediv__(self, name: str) -> Place:
        return Place(str(self.local / name) if self.is_local else f"{self.path.rstrip('/')}/{name}")

    @property
    def is_local(self) -> bool:
        """Whether it is a path of this machine."""
        return "://" not in self.path

    @property
    def local(self) -> Path:
        """The path of a local place."""
        assert self.is_local
        return Path(self.path)

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rstrip("/").rpartition("/")[2] if not self.is_local else self.local.name

    @property
    def parent(self) -> Place:
        """The folder that holds it."""
        return Place(str(self.local.parent) if self.is_local else self.path.rstrip("/").rpartition("/")[0])

    def with_suffix(self, suffix: str) -> Place:
        """The same name with another ending."""
        return self.parent / str(Path(self.name).with_suffix(suffix))

    def with_stem_end(self, end: str) -> Place:
        """A name that goes on before its ending: ``metrics-2.json`` for ``metrics.json``."""
        name = Path(self.name)
        return self.parent / f"{name.stem}{end}{name.suffix}"

    @property
    def absolute(self) -> Place:
        """The same from any working folder."""
        return Place(str(self.local.absolute())) if self.is_local else self

    def exists(self) -> bool:
        """Whether there is a file or folder."""
        return self.local.exists() if self.is_local else bool(self._remote.exists(self.path))

    def is_folder(self) -> bool:
        """Whether there is a folder."""
        return self.local.is_dir() if self.is_local else bool(self._remote.isdir(self.path))

    def glob(self, pattern: str) -> list[Place]:
        """Files and folders right in this folder whose names fit, sorted."""
        if self.is_local:
            return sorted((Place(str(path)) for path in self.local.glob(pattern)), key=str)
        found = self._remote.glob(f"{self.path.rstrip('/')}/{pattern}")
        return sorted((Place(self._remote.unstrip_protocol(path)) for path in found), key=str)

    def read_text(self) -> str:
        """The text of a file."""
        return self.local.read_text("utf-8") if self.is_local else self._remote.cat_file(self.path).decode("utf-8")

    def write_text(self, text: str) -> None:
        """Write a text whole."""
        self.write_whole(lambda part: part.write_text(text, encoding="utf-8"))

    def write_whole(self, write: Callable[[Path], Any]) -> None:
        """Let `write` fill a file that then takes this place: readers see the old or the new one, whole."""
        if not self.is_local:
            with tempfile.TemporaryDirectory() as folder:
                write(part := Path(folder, self.name))
                self._remote.pipe_file(self.path, part.read_bytes())
            return
        self.local.parent.mkdir(parents=True, exist_ok=True)
        part = self.local.with_name(f".{self.local.stem}.{uuid4().hex[:8]}.part{self.local.suffix}")
        try:
            write(part)
            os.replace(part, self.local)
        finally:
            part.unlink(missing_ok=True)

    def append_text(self, text: str) -> None:
        """Add a text at the end: all of it, or nothing where the disk is full."""
        if not self.is_local:  # object stores have whole files only
            self.write_text((self.read_text() if self.exists() else "") + text)
            return
        self.local.parent.mkdir(parents=True, exist_ok=True)
        with self.local.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                rest = memoryview(text.encode())
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(size)
                raise

    def remove(self) -> None:
        """Remove a file or a folder with all that is in it; nothing happens where there is none."""
        if not self.is_local:
            if self.exists():
                self._remote.rm(self.path, recursive=True)
        elif self.local.is_dir():
            shutil.rmtree(self.local)
        else:
            self.local.unlink(missing_ok=True)

    @cached_property
    def _remote(self) -> AbstractFileSystem:
        return url_to_fs(self.path)[0]


def claim(place: Place, writer: str) -> tuple[Place, BaseFileLock | None]:
    """The place, or one with a number in its name if another process of this machine writes there right now.

    Args:
        place: A file or folder.
        writer: Its label, for the warning.

    Returns:
        The place, and a lock on it, which ends with the process or when nothing refers to it any more; None where
        nothing can be locked: at remote places, and without a folder for temporary files.
    """
    if not place.is_local:
        return place, None
    for number in count(1):
        candidate = place if number == 1 else place.with_stem_end(f"-{number}")
        try:
            (lock := _lock(candidate)).acquire(blocking=False)
        except Timeout:
            continue
        except OSError:
            return candidate, None
        if number > 1:
            rank_zero_warn(f"{writer}: another run is writing {place} right now. This one writes {candidate} instead.")
        return candidate, lock
    raise AssertionError("counting does not end")


def _lock(place: Place) -> BaseFileLock:
    user = "user" if sys.platform == "win32" else str(os.getuid())
    folder = Path(tempfile.gettempdir(), f"comlrl-lightning-{user}")
    folder.mkdir(exist_ok=True)
    name = sha256(os.path.realpath(place.local).encode()).hexdigest()[:32]
    return FileLock(folder / f"{name}.lock", is_singleton=True, thread_local=False)


_WRITTEN: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Per owner, the folders that hold files of its own."""


def own_folder(owner: object, folder: Place) -> None:
    """Note that what lies in a folder is the owner's: it may be replaced without a warning."""
    _WRITTEN.setdefault(owner, set()).add(str(folder.absolute))


@contextmanager
def whole_folder(folder: str | Path, owner: object) -> Iterator[Path]:
    """An empty local folder whose files then go to `folder`, where a list names them.

    Files that the list of an earlier call names and this one does not bring are removed; others stay. Before files of
    another owner are replaced, a warning says so.

    Args:
        folder: Where the files go, also an address of fsspec's.
        owner: Whose files they are.

    Raises:
        ValueError: If `folder` is a file.
    """
    place = Place.of(folder)
    if place.exists() and not place.is_folder():
        raise ValueError(f"{str(folder)!r} is a file, and should be a directory for the agents. Use another folder.")
    with _part_of(place) as part:
        yield part
        files = sorted(path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file())
        former = contents(place)
        _warn_of_others(place, owner, files, former)
        _list(place, sorted({*files, *former}))  # whatever stops us, the list names all that is there
        for name in files:
            (place / name).write_whole(_moving(part / name))
        for name in set(former) - set(files):
            (place / name).remove()
        if place.is_local:
            _remove_empty_folders(place.local, former)
        _list(place, files)
    own_folder(owner, place)


@contextmanager
def _part_of(place: Place) -> Iterator[Path]:
    """A folder of its own for files on their way: on the same disk, for a local place."""
    if place.is_local:
        place.local.mkdir(parents=True, exist_ok=True)
    where = place.local if place.is_local else None
    with tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=where, ignore_cleanup_errors=True) as part:
        yield Path(part)


def _moving(source: Path) -> Callable[[Path], Any]:
    return lambda target: shutil.move(source, target)


def contents(folder: Place) -> list[str]:
    """The files that belong to a folder of agents, by its list; none if it has no list."""
    listing = folder / CONTENTS
    if not listing.exists():
        return []
    try:
        names = json.loads(listing.read_text())["files"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{str(listing)!r} is no list of files that save_agents wrote. Use another folder.") from None
    return [name for name in names if ".." not in Path(name).parts and not Path(name).is_absolute()]


def _list(folder: Place, files: list[str]) -> None:
    (folder / CONTENTS).write_text(json.dumps({"files": files}, indent=2) + "\n")


def _warn_of_others(folder: Place, owner: object, files: list[str], former: list[str]) -> None:
    """Say what of others is replaced, and what nobody lists stays beside the new files."""
    if str(folder.absolute) in _WRITTEN.get(owner, ()):
        return
    replaced = sorted({name.partition("/")[0] for name in {*former, *files} if (folder / name).exists()})
    if replaced:
        rank_zero_warn(f"{folder} holds {', '.join(replaced)} of an earlier save, which this one replaces.")
    own = {name.partition("/")[0] for name in (*files, *former)}
    beside = [one.name for one in folder.glob("*") if _looks_saved(one.name) and one.name not in own]
    if beside:
        rank_zero_warn(
            f"{folder} holds {', '.join(beside)}, which does not belong to what is saved there now and stays. "
            f"{CONTENTS} in it lists what does. Use another folder, or remove the rest."
        )


def _looks_saved(name: str) -> bool:
    return re.fullmatch(r"(agent_|critic_)\d+|critic|reward_model", name) is not None


def _remove_empty_folders(folder: Path, names: list[str]) -> None:
    for path in {folder / Path(name).parent for name in names}:
        while path != folder and path.is_dir() and not any(path.iterdir()):
            path.rmdir()
            path = path.parent
