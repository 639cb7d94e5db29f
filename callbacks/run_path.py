"""Where callbacks write: in the folder of the run, with which a resumed run goes on, or where the user says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from weakref import WeakKeyDictionary

from filelock import BaseFileLock
from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn

from comlrl_lightning.callbacks.support import has_fitted, is_rehearsal
from comlrl_lightning.files import Place, claim

_FOLDERS: WeakKeyDictionary[Trainer, Place] = WeakKeyDictionary()


def run_folder(trainer: Trainer) -> Place:
    """Folder of this run alone. Call it on every rank, in `setup` or later.

    It is the logger's folder of this version or run; without a logger, a new ``lightning_logs/version_N`` in the
    trainer's root.
    """
    if trainer not in _FOLDERS:
        logged = _folder_of_logger(trainer)
        new = str(logged or _new_folder(trainer)) if trainer.is_global_zero else ""
        _FOLDERS[trainer] = Place.of(trainer.strategy.broadcast(new))
    return _FOLDERS[trainer]


def _folder_of_logger(trainer: Trainer) -> Place | None:
    folder = trainer.log_dir  # a collective call
    if is_rehearsal(trainer):
        return Place.of(trainer.default_root_dir)
    if not trainer.loggers:
        return None
    first = trainer.loggers[0]
    if isinstance(first, CSVLogger | TensorBoardLogger):
        assert folder is not None
        return Place.of(folder)
    version = first.version if isinstance(first.version, str) else f"version_{first.version}"
    return Place.of(folder or trainer.default_root_dir) / str(first.name) / version


def _new_folder(trainer: Trainer) -> Place:
    """Make the next version, which no other run makes too."""
    root = Place.of(trainer.default_root_dir) / "lightning_logs"
    taken = [place.name.removeprefix("version_") for place in root.glob("version_*")]
    for number in count(max((int(name) for name in taken if name.isdecimal()), default=-1) + 1):
        folder = root / f"version_{number}"
        if not folder.is_local:
            return folder
        try:
            folder.local.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("counting does not end")


class RunPath:
    """The file or folder of a callback.

    What the user gave is taken as it is; None becomes a name in the folder of the run, and a run that resumes goes on
    in the one that its checkpoint names, if that is still there. Where another process writes at the same time, this
    run takes a name with a number.

    Args:
        callback: Name of the callback, for messages.
        given: What the user gave.
        default: The name in the folder of the run.
    """

    def __init__(self, callback: str, given: str | Path | None, default: str) -> None:
        self.given = None if given is None else str(Place.of(given))
        self._callback = callback
        self._default = default
        self._place = Place(default if self.given is None else self.given)
        self._lock: BaseFileLock | None = None
        self._saved: str | None = None

    @property
    def place(self) -> Place:
        """Where to write; known after `settle`."""
        return self._place

    def settle(self, trainer: Trainer) -> None:
        """Find the place, in `setup`. Call it on every rank."""
        if trainer.state.fn != "fit" and has_fitted(trainer):
            return  # evaluations after a fit belong to its files
        self.take(trainer, run_folder(trainer) / self._default if self.given is None else Place(self.given))

    def go_on(self, trainer: Trainer) -> None:
        """Take up the place in the checkpoint that a run resumes, in `on_train_start`. Call it on every rank."""
        if trainer.ckpt_path is None or self._saved is None or self.given is not None:
            return
        if trainer.strategy.broadcast(Place(self._saved).parent.exists()):
            self.take(trainer, Place(self._saved))

    def take(self, trainer: Trainer, place: Place) -> None:
        """Write to a place, or beside it where another process does so right now. Call it on every rank."""
        if trainer.is_global_zero and trainer.state.fn == "fit" and not is_rehearsal(trainer):
            place, self._lock = claim(place, self._callback)
        self._place = Place(trainer.strategy.broadcast(str(place)))

    def leave(self) -> None:
        """Let other processes write there."""
        self._lock = None

    def state(self) -> dict[str, str]:
        """What a checkpoint keeps: nothing of a place that the user gave."""
        return {} if self.given is not None else {"place": str(self._place.absolute)}

    def restore(self, state: dict[str, str]) -> None:
        """Inverse of `state`."""
        self._saved = state.get("place")

    def warn_of_others(self, places: Sequence[Place], outcome: str = "replaces") -> None:
        """Say which files of another run a new one is about to replace."""
        if there := [str(place) for place in places if place.exists()]:
            rank_zero_warn(
                f"{self._callback}: {', '.join(there)} of another run, which this one {outcome}. Give another place, "
                "or none at all for one in the folder of the run."
            )


class Attempts:
    """What is only a report ends no run: where it cannot be written, a warning says so once.

    Args:
        callback: Name of the callback that reports.
    """

    def __init__(self, callback: str) -> None:
        self._callback = callback
        self._has_warned = False

    @contextmanager
    def attempt(self, *others: type[Exception]) -> Iterator[None]:
        """Go on after an error of the disk or network.

        Args:
            *others: Further errors to go on after.
        """
        expected: tuple[type[Exception], ...] = (OSError, *others)
        try:
            yield
        except expected as error:
            if not self._has_warned:
                rank_zero_warn(
                    f"{self._callback} could not write its report ({type(error).__name__}: {error}). "
                    "The run goes on; further failures are not reported."
                )
            self._has_warned = True
