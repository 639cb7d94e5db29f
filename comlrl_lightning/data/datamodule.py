"""Task items on their way to the module: splits, rank-aware batches, and a position that counts what was trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from comlrl_lightning.data.splits import Indexed, Split, imported, is_description, load
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.tasks.task import Task, load_task
from comlrl_lightning.utilities.checks import is_whole

ITEMS_PER_STEP = "batch_size times ranks"
"""Name, in the state of a loader, of how many items a whole step has over all ranks."""


@dataclass(frozen=True, slots=True)
class Place:
    """A point of training, between two steps."""

    epoch: int = 0
    items: int = 0
    """Items of the epoch, over all ranks, that were trained."""
    batches: int = 0
    """Training steps over all epochs."""
    cut_at: int = 0
    """Items of the epoch before, if it ended there although its data go on; 0 otherwise."""


class EpochPosition:
    """How far training has come. It is the truth: loop counters of Lightning follow it when a run goes on."""

    def __init__(self, epoch: int = 0, batches: int = 0) -> None:
        self.now = Place(epoch, batches=batches)  # replaced as a whole, so that an interrupt leaves no half of a step

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of another epoch; Lightning calls it at the start of each."""
        if epoch != self.now.epoch:
            self.now = Place(epoch, batches=self.now.batches)

    def advance(self, epoch: int, stop: int, last: bool, cut: bool = False) -> None:
        """Count a step up to item `stop` of `epoch` as trained; `last` ends the epoch, `cut` before its data end."""
        batches = self.now.batches + 1
        self.now = Place(epoch + 1, 0, batches, stop if cut else 0) if last else Place(epoch, stop, batches)


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
            last: Whether no step of this epoch follows, as ``trainer.is_last_batch`` says; none does when `is_last`.
        """
        if self._position is not None:
            cut = last and not self.is_last
            self._position.advance(self.epoch, self.stop, last or self.is_last, cut)


class TaskLoader:
    """Batches of a split without a known length.

    All ranks read the same order; of each step's ``world_size * batch_size`` items rank r takes every `world_size`-th,
    beginning with the r-th. All ranks get equally many batches, empty ones where a rank ran out.

    Args:
        split: The rows.
        batch_size: Items per step and rank.
        world_size: Number of ranks.
        rank: This rank.
        limit: Asked at the start of each pass for how many items it has at most; None: all.
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
        limit: Callable[[], int | None] | None = None,
        position: EpochPosition | None = None,
    ) -> None:
        self.split = split
        self.batch_size = batch_size
        self.world_size = world_size
        self.rank = rank
        self._limit = limit
        self.sampler = position

    def __iter__(self) -> Iterator[TaskBatch]:
        now = Place() if self.sampler is None else self.sampler.now
        epoch, start = now.epoch, now.items
        rows = islice(self.split.read(epoch, start), self.limit())
        ahead = next(rows, None)
        if ahead is None and start:
            raise ValueError(
                f"{self.split.argument} has ended before item {start}, where the checkpoint was saved. Use the rows"
                " that it was saved with, or resume from a checkpoint saved at the end of an epoch."
            )
        while ahead is not None:
            step = [ahead, *islice(rows, self.world_size * self.batch_size - 1)]
            ahead = next(rows, None)
            mine, stop = step[self.rank :: self.world_size], start + len(step)
            yield TaskBatch(mine, epoch, start, stop, ahead is None, self.sampler)
            start = stop

    def limit(self) -> int | None:
        """How many items a pass has at most; None: all."""
        return None if self._limit is None else self._limit()

    def state_dict(self) -> dict[str, Any]:
        """Epoch, number of its items trained and of all steps, with what gives them their meaning."""
        now = (self.sampler or EpochPosition()).now
        counts = {"epoch": now.epoch, "position": now.items, "batches": now.batches, "cut_at": now.cut_at}
        return {**counts, **self._meaning()}

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
                        f"{self.split.argument}: {name}={value}, but the checkpoint was saved inside an epoch with "
                        f"{name}={state[name]}. Set it back, or resume from a checkpoint saved at the end of an epoch."
                    )
        position.now = Place(state["epoch"], state["position"], state["batches"], state["cut_at"])

    def _meaning(self) -> dict[str, Any]:
        return {**self.split.meaning(), ITEMS_PER_STEP: self.world_size * self.batch_size}


class SizedTaskLoader(TaskLoader):
    """Batches of a split with a length."""

    def __len__(self) -> int:
        """Number of steps in a whole epoch."""
        num_items, limit, step = self.split.num_items, self.limit(), self.world_size * self.batch_size
        assert num_items is not None, "a split without a length"
        return -(-min(num_items, num_items if limit is None else limit) // step)


class TaskDataModule(LightningDataModule, KnownKeywords):
    """Task items for training and evaluation.

    A split is a `datasets.Dataset`, a `datasets.IterableDataset` or any sequence of dicts; or, as in YAML, a mapping of
    arguments for `datasets.load_dataset`, or a function (or its import path) that returns one.

    Args:
        train_dataset: Items to train on. None: those of `task`.
        eval_dataset: Items to evaluate on, also for test and predict; None: those of `task`, else nothing is evaluated.
        batch_size: Task items per training step and rank.
        eval_batch_size: Task items per evaluation step and rank.
        eval_num_samples: How many items an evaluation takes from the start of the split; None takes all. It may be
            changed between evaluations.
        shuffle: Whether every epoch has its own order, made from `seed`; False keeps the order of the dataset.
        seed: Seed of the orders.
        task: A task set, or its import path: brings the splits, as far as they are not given themselves.

    Raises:
        ValueError: If a number is not positive, or a split is not one.
    """

    def __init__(
        self,
        train_dataset: str | dict[str, Any] | Any | None = None,
        eval_dataset: str | dict[str, Any] | Any | None = None,
        batch_size: int = 1,
        eval_batch_size: int = 1,
        eval_num_samples: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        task: Task | str | None = None,
    ) -> None:
        super().__init__()
        _check_positive("batch_size", batch_size)
        _check_positive("eval_batch_size", eval_batch_size)
        if not is_whole(seed, 0):
            raise ValueError(f"seed={seed!r} is not a seed. Give a whole number from 0 on.")
        if not isinstance(shuffle, bool):
            raise ValueError(f"shuffle={shuffle!r} is neither True nor False. Use one of them.")
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.eval_num_samples = eval_num_samples
        self.shuffle = shuffle
        self.seed = seed
        if task is not None:
            found = load_task(task)
            train_dataset = found.train_items if train_dataset is None else train_dataset
            eval_dataset = found.eval_items if eval_dataset is None else eval_dataset
        if train_dataset is None:
            raise ValueError("TaskDataModule has no items to train on. Give train_dataset=, or task= with train_items.")
        self._sources = {"train_dataset": imported(train_dataset, "train_dataset")}
        if eval_dataset is not None:
            self._sources["eval_dataset"] = imported(eval_dataset, "eval_dataset")
        self._splits: dict[str, Split] = {}
        for argument, source in self._sources.items():
            if not is_description(source):
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

    def __str__(self) -> str:
        return repr(self)  # Lightning's text is about loaders of torch

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
        loop: Any = None if self.trainer is None else self.trainer.fit_loop
        counts = (loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.total.processed) if loop else ()
        return self._loader(self._training_split(), self.batch_size, position=EpochPosition(*counts))

    def _training_split(self) -> Split:
        split = self._open("train_dataset")
        num_batches = 0 if self.trainer is None else self.trainer.overfit_batches  # type: ignore[attr-defined]
        if not num_batches:
            return split
        # Lightning takes what is no sampler of torch for one that shuffles, and cannot turn ours off.
        warnings.filterwarnings("ignore", message="You requested to overfit but enabled")
        if not self.shuffle:
            return split
        rank_zero_warn(
            f"Trainer(overfit_batches={num_batches}) trains the same items in each epoch: shuffle=True is off, and they"
            " are the first of train_dataset."
        )
        return split.in_order()

    @override
    def val_dataloader(self) -> TaskLoader | list[TaskLoader]:
        """Batches of the first `eval_num_samples` items for this rank; an empty list without an evaluation split."""
        if not self.has_eval:
            warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
            return []
        return self._loader(self._open("eval_dataset"), self.eval_batch_size, limit=self._eval_limit)

    @override
    def test_dataloader(self) -> TaskLoader | list[TaskLoader]:
        """The batches of `val_dataloader`."""
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> TaskLoader | list[TaskLoader]:
        """The batches of `val_dataloader`.

        Raises:
            ValueError: If there is no evaluation split.
        """
        if not self.has_eval:
            raise ValueError("eval_dataset=None leaves nothing to predict. Give TaskDataModule an eval_dataset.")
        return self.val_dataloader()

    def _eval_limit(self) -> int | None:
        # A method, not a lambda: a data module goes to processes that are spawned with its loaders.
        return self.eval_num_samples

    def _open(self, argument: str) -> Split:
        if argument not in self._splits:
            dataset = load(self._sources[argument], argument)
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
    if not is_whole(value, 1):
        raise ValueError(f"{argument}={value!r} is not a positive whole number. Give 1 or more.")
