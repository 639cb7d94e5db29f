"""Task items on their way to the module: splits, rank-aware batches, and a position that counts what was trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pkgutil import resolve_name
from typing import Any, Protocol, runtime_checkable

import numpy as np
from lightning.pytorch import LightningDataModule
from torch.utils.data import IterableDataset
from typing_extensions import override

from comlrl_lightning.calls import short

Row = dict[str, Any]
Indexed = tuple[int, Row]


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


class EpochPosition:
    """How far training has come: the epoch and the number of its items, over all ranks, that were trained."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.items = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of another epoch; Lightning calls it at the start of each."""
        if epoch != self.epoch:
            self.epoch, self.items = epoch, 0

    def advance(self, epoch: int, stop: int, last: bool) -> None:
        """Count the items up to `stop` of `epoch` as trained; `last` ends the epoch."""
        self.epoch, self.items = (epoch + 1, 0) if last else (epoch, stop)


class TaskBatch:
    """The task items of one step on this rank. Not a dataclass: Lightning leaves it as it is on its way to a device.

    Args:
        rows: `[B]` index in the dataset (running number for an iterable) and task item; none if the rank ran out.
        epoch: Epoch, from 0.
        start: Position in the epoch of the first item of the step, over all ranks.
        stop: Position after its last item, over all ranks.
        is_last: Whether the dataset ends here.
        position: Where trained items are counted; None in evaluation.
    """

    def __init__(
        self, rows: list[Indexed], epoch: int, start: int, stop: int, is_last: bool, position: EpochPosition | None
    ) -> None:
        self.indices = [index for index, _ in rows]
        self.items = [row for _, row in rows]
        self.epoch = epoch
        self.start = start
        self.stop = stop
        self.is_last = is_last
        self._position = position

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"TaskBatch(epoch={self.epoch}, start={self.start}, stop={self.stop}, indices={self.indices})"

    def mark_trained(self, last: bool) -> None:
        """Count the step's items as trained; call it at the end of the training step.

        Args:
            last: Whether no step of this epoch follows, as ``trainer.is_last_batch`` says.
        """
        if self._position is not None:
            self._position.advance(self.epoch, self.stop, last)


class TaskLoader:
    """Batches of a split without a known length.

    All ranks read the same order; of each step's ``world_size * batch_size`` items rank r takes every `world_size`-th,
    beginning with the r-th. All ranks get equally many batches, empty ones where a rank ran out.

    Args:
        split: The rows.
        batch_size: Items per step and rank.
        world_size: Number of ranks.
        rank: This rank.
        limit: Asked at the start of each pass for how many items it has at most.
        position: Where to go on, and where trained items are counted; None reads epoch 0 from its start.
    """

    batch_sampler: None = None

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        world_size: int = 1,
        rank: int = 0,
        limit: Callable[[], int | None] = lambda: None,
        position: EpochPosition | None = None,
    ) -> None:
        self.split = split
        self.batch_size = batch_size
        self.world_size = world_size
        self.rank = rank
        self.limit = limit
        self.sampler = position

    def __iter__(self) -> Iterator[TaskBatch]:
        epoch, start = (0, 0) if self.sampler is None else (self.sampler.epoch, self.sampler.items)
        limit = self.limit()
        rows = islice(self.split.read(epoch, start), limit if limit is None else max(limit - start, 0))
        ahead = next(rows, None)
        while ahead is not None:
            step = [ahead, *islice(rows, self.world_size * self.batch_size - 1)]
            ahead = next(rows, None)
            mine, stop = step[self.rank :: self.world_size], start + len(step)
            yield TaskBatch(mine, epoch, start, stop, ahead is None, self.sampler)
            start = stop

    def state_dict(self) -> dict[str, Any]:
        """Epoch and number of its items trained, with what gives them their meaning."""
        position = self.sampler or EpochPosition()
        return {"epoch": position.epoch, "position": position.items, **self._meaning()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: If it was taken inside an epoch of other data, another order or other steps.
        """
        position = self.sampler or EpochPosition()
        if state["position"]:
            for name, value in self._meaning().items():
                if state[name] != value:
                    raise ValueError(
                        f"{name}={value}, but the checkpoint was saved inside an epoch with {name}={state[name]}. "
                        "Set it back to resume there, or start from a checkpoint at the end of an epoch."
                    )
        position.epoch, position.items = state["epoch"], state["position"]

    def _meaning(self) -> dict[str, Any]:
        return {**self.split.meaning(), "batch_size times ranks": self.world_size * self.batch_size}


class SizedTaskLoader(TaskLoader):
    """Batches of a split with a length."""

    def __len__(self) -> int:
        """Number of steps in a whole epoch."""
        num_items, limit, step = self.split.num_items, self.limit(), self.world_size * self.batch_size
        assert num_items is not None, "a split without a length"
        return -(-min(num_items, num_items if limit is None else limit) // step)


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
        self.shuffle = shuffle
        self.seed = seed
        self.num_items: int | None = None
        self._table: _Table | None = None
        self._stream: Iterable[Any] = ()
        if isinstance(dataset, Mapping):
            raise ValueError(f"{argument} holds the splits {list(dataset)}. Give one of them, {argument}=...[name].")
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
        self._checked(0, table[0])

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

    def read(self, epoch: int, start: int) -> Iterator[Indexed]:
        """Index and row of each item of `epoch` from position `start` on."""
        if self._table is not None:
            for index in self._order(epoch)[start:]:
                yield int(index), self._checked(int(index), self._table[int(index)])
            return
        if self.shuffle and isinstance(self._stream, _ShufflingStream):
            self._stream.set_epoch(epoch)
        for index, row in islice(enumerate(self._stream), start, None):
            yield index, self._checked(index, row)

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


class TaskDataModule(LightningDataModule):
    """Task items for training and evaluation.

    A split is a `datasets.Dataset`, a `datasets.IterableDataset` or any sequence of dicts; or, as in YAML, a mapping of
    arguments for `datasets.load_dataset`, or a function (or its import path) that returns one.

    Args:
        train_dataset: Items to train on.
        eval_dataset: Items to evaluate on, also for test and predict; None evaluates nothing.
        batch_size: Task items per training step and rank.
        eval_batch_size: Task items per evaluation step and rank.
        eval_num_samples: How many items an evaluation takes from the start of the split; None takes all. It may be
            changed between evaluations.
        shuffle: Whether every epoch has its own order, made from `seed`; False keeps the order of the dataset.
        seed: Seed of the orders.

    Raises:
        ValueError: If a number is not positive, or a split is not one.
    """

    def __init__(
        self,
        train_dataset: str | dict[str, Any] | Any,
        eval_dataset: str | dict[str, Any] | Any | None = None,
        batch_size: int = 1,
        eval_batch_size: int = 1,
        eval_num_samples: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_positive("batch_size", batch_size)
        _check_positive("eval_batch_size", eval_batch_size)
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed={seed!r} is not a seed. Give a whole number from 0 on.")
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.eval_num_samples = eval_num_samples
        self.shuffle = shuffle
        self.seed = seed
        self._sources = {"train_dataset": _imported(train_dataset, "train_dataset")}
        if eval_dataset is not None:
            self._sources["eval_dataset"] = _imported(eval_dataset, "eval_dataset")
        self._splits: dict[str, Split] = {}
        for argument, source in self._sources.items():
            if not _is_description(source):
                self._open(argument)

    @property
    def eval_num_samples(self) -> int | None:
        """How many items an evaluation takes from the start of the evaluation split; None takes all."""
        return self._eval_num_samples

    @eval_num_samples.setter
    def eval_num_samples(self, value: int | None) -> None:
        if value is not None:
            _check_positive("eval_num_samples", value)
        self._eval_num_samples = value

    @property
    def has_eval(self) -> bool:
        """Whether there is an evaluation split."""
        return "eval_dataset" in self._sources

    @override
    def prepare_data(self) -> None:
        """Load the splits, so that one process per machine downloads them."""
        self.setup("fit")

    @override
    def setup(self, stage: str) -> None:
        """Load the splits that are described by arguments or made by a function."""
        for argument in self._sources:
            self._open(argument)

    @override
    def train_dataloader(self) -> TaskLoader:
        """Batches of the training split for this rank, from the position that a checkpoint left."""
        # Lightning names the epoch only after it has read the first item of a stream: begin with the right one.
        position = EpochPosition(0 if self.trainer is None else self.trainer.fit_loop.epoch_progress.current.processed)
        return self._loader(self._open("train_dataset"), self.batch_size, position=position)

    @override
    def val_dataloader(self) -> TaskLoader | list[TaskLoader]:
        """Batches of the first `eval_num_samples` items for this rank; an empty list without an evaluation split."""
        if not self.has_eval:
            return []
        return self._loader(self._open("eval_dataset"), self.eval_batch_size, limit=lambda: self.eval_num_samples)

    @override
    def test_dataloader(self) -> TaskLoader | list[TaskLoader]:
        """The batches of `val_dataloader`."""
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> TaskLoader | list[TaskLoader]:
        """The batches of `val_dataloader`."""
        return self.val_dataloader()

    def _open(self, argument: str) -> Split:
        if argument not in self._splits:
            dataset = _load(self._sources[argument], argument)
            shuffle = self.shuffle and argument == "train_dataset"
            self._splits[argument] = Split(dataset, argument, shuffle, self.seed)
        return self._splits[argument]

    def _loader(self, split: Split, batch_size: int, **settings: Any) -> TaskLoader:
        ranks = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        if ranks is not None:
            settings |= {"world_size": ranks["num_replicas"], "rank": ranks["rank"]}
        loader = TaskLoader if split.num_items is None else SizedTaskLoader
        return loader(split, batch_size, **settings)


def _check_positive(argument: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{argument}={value!r} is not a positive whole number. Give 1 or more.")


def _is_description(source: object) -> bool:
    """Whether the rows come out of `source` by a call that may take long."""
    return callable(source) or (isinstance(source, Mapping) and "path" in source)


def _imported(source: object, argument: str) -> object:
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
        imported: object = resolve_name(f"{module}:{name}")
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{problem} ({error})") from error
    return imported


def _load(source: object, argument: str) -> object:
    """The dataset behind a function or behind arguments of `load_dataset`."""
    if not _is_description(source):
        return source
    if callable(source):
        return source()
    assert isinstance(source, Mapping)
    from datasets import load_dataset

    loaded = load_dataset(**source)
    if isinstance(loaded, Mapping):
        if len(loaded) > 1:
            raise ValueError(f"{argument}={dict(source)} names no split. Add split, one of {list(loaded)}.")
        return next(iter(loaded.values()))
    return loaded
