"""The rows of a dataset in the order of an epoch, and where datasets come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pkgutil import resolve_name
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import IterableDataset

from comlrl_lightning.utilities.calls import qualified_name, short

Row = dict[str, Any]
Indexed = tuple[int, Row]
"""Index of a row in its dataset, or its running number in an iterable, and the row."""


@runtime_checkable
class _Table(Protocol):
    """A dataset with a length and rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class _ShufflingStream(Protocol):
    """An iterable dataset that shuffles itself, anew in each epoch, as `datasets.IterableDataset` does."""

    def __iter__(self) -> Iterator[Any]: ...

    def shuffle(self, seed: int) -> _ShufflingStream: ...

    def set_epoch(self, epoch: int) -> None: ...


class Split:
    """The rows of one dataset, in the order of an epoch.

    Args:
        dataset: `datasets.Dataset`, `datasets.IterableDataset`, a sequence of dicts or an iterable of them.
        argument: Name of the argument that it was given as.
        shuffle: Whether each epoch has its own order.
        seed: Seed of the orders.

    Raises:
        ValueError: If it is something else, empty, or cannot be shuffled.
    """

    def __init__(self, dataset: object, argument: str, shuffle: bool = False, seed: int = 0) -> None:
        self.argument = argument
        self._dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.num_items: int | None = None
        self._table: _Table | None = None
        self._stream: Iterable[Any] = ()
        if isinstance(dataset, Mapping):
            raise ValueError(
                f"{argument} is a mapping with the keys {list(dataset)} and no path. "
                "Give one split out of it, or the arguments of load_dataset, path among them."
            )
        if isinstance(dataset, Iterator):
            raise ValueError(
                f"{argument}={short(dataset)} can be read only once, but every epoch reads it. "
                "Give a list, or datasets.IterableDataset.from_generator(...)."
            )
        if isinstance(dataset, IterableDataset):
            self._open_stream(dataset)
        elif isinstance(dataset, _Table) and not isinstance(dataset, str):
            self._open_table(dataset)
        elif isinstance(dataset, Iterable) and not isinstance(dataset, str):
            self._open_stream(dataset)
        else:
            raise ValueError(
                f"{argument}={short(dataset)} is not a dataset. Give a datasets.Dataset, a datasets.IterableDataset or "
                "a list of dicts."
            )

    def _open_table(self, table: _Table) -> None:
        self._table, self.num_items = table, len(table)
        if not self.num_items:
            raise ValueError(f"{self.argument} has no rows. Give at least one.")
        try:
            first = table[0]
        except KeyError as error:
            raise ValueError(
                f"{self.argument}={type(table).__name__} has no row 0. Give a list of dicts or a datasets.Dataset."
            ) from error
        self._checked(0, first)

    def _open_stream(self, stream: Iterable[Any]) -> None:
        self._stream = stream
        if not self.shuffle:
            return
        if not isinstance(stream, _ShufflingStream):
            raise ValueError(
                f"shuffle=True cannot reorder {self.argument}={short(stream)}, which has no length. "
                "Give a dataset with a length, a datasets.IterableDataset, or shuffle=False."
            )
        self._stream = stream.shuffle(seed=self.seed)

    def in_order(self) -> Split:
        """The same rows, in each epoch in the order of the dataset."""
        return Split(self._dataset, self.argument, seed=self.seed)

    def read(self, epoch: int, start: int) -> Iterator[Indexed]:
        """Index and row of each item of `epoch` from position `start` on.

        Raises:
            ValueError: If there is no item at all, or a row is not a dict.
        """
        if self._table is not None:
            for index in self._order(epoch)[start:]:
                yield int(index), self._checked(int(index), self._table[int(index)])
            return
        if self.shuffle and isinstance(self._stream, _ShufflingStream):
            self._stream.set_epoch(epoch)
        found = False
        for index, row in enumerate(self._stream):
            if index >= start:
                yield index, self._checked(index, row)
            found = True
        if not found:
            raise ValueError(f"{self.argument} has no rows. Give at least one.")

    def meaning(self) -> dict[str, Any]:
        """What gives a position in an epoch its meaning."""
        return {"shuffle": self.shuffle, "seed": self.seed if self.shuffle else 0, "number of rows": self.num_items}

    def _order(self, epoch: int) -> Any:
        assert self.num_items is not None
        if not self.shuffle:
            return range(self.num_items)
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_items)

    def _checked(self, index: int, row: object) -> Row:
        if isinstance(row, dict):
            return row
        if isinstance(row, Mapping):
            return dict(row)
        raise ValueError(
            f"Row {index} of {self.argument} is {short(row)}. Give dicts, for instance {{'prompt': 'a task'}}."
        )


def is_description(source: object) -> bool:
    """Whether the rows come out of `source` by a call that may take long."""
    return callable(source) or (isinstance(source, Mapping) and "path" in source)


def imported(source: object, argument: str) -> object:
    """What an import path names; anything else as it is."""
    if not isinstance(source, str):
        return source
    module, _, name = source.rpartition(".")
    problem = (
        f"{argument}={source!r} is not the import path of a function that returns a dataset. Give module.function, or "
        f"the arguments of load_dataset, for instance {{path: json, data_files: {source}, split: train}}."
    )
    if not module or not all(part.isidentifier() for part in source.split(".")):
        raise ValueError(problem)
    try:
        found: object = resolve_name(f"{module}:{name}")
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{problem} ({error})") from error
    return found


def load(source: object, argument: str) -> object:
    """The dataset behind a function or behind arguments of `load_dataset`."""
    if not is_description(source):
        return source
    if callable(source):
        try:
            return source()
        except Exception as error:
            error.add_note(f"Raised in {argument}={qualified_name(source)}.")
            raise
    assert isinstance(source, Mapping)
    from datasets import load_dataset

    loaded = load_dataset(**source)
    if isinstance(loaded, Mapping):
        if len(loaded) > 1:
            raise ValueError(f"{argument}={dict(source)} names no split. Add split, one of {list(loaded)}.")
        return next(iter(loaded.values()))
    return loaded
