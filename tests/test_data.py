"""Splits, batches over ranks, and the position that counts trained items."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal

import datasets
import pytest
import torch

from comlrl_lightning.data.datamodule import EpochPosition, Place, SizedTaskLoader, TaskDataModule, TaskLoader
from comlrl_lightning.data.splits import Split

Kind = Literal["table", "stream"]
KINDS: tuple[Kind, ...] = ("table", "stream")


def rows(num_items: int) -> list[dict[str, Any]]:
    """Task items ``p0``, ``p1``, ..."""
    return [{"prompt": f"p{index}"} for index in range(num_items)]


def dataset(num_items: int, kind: Kind) -> Any:
    """The rows as a Hugging Face dataset with or without a length."""
    table = datasets.Dataset.from_list(rows(num_items))
    return table if kind == "table" else table.to_iterable_dataset()


def prompts(batches: Any) -> list[list[str]]:
    """`[batches][B]` prompts."""
    return [[item["prompt"] for item in batch.items] for batch in batches]


def loader(num_items: int, batch_size: int = 1, kind: Kind = "table", **settings: Any) -> TaskLoader:
    """A loader without a trainer."""
    split = Split(dataset(num_items, kind), "train_dataset")
    return (SizedTaskLoader if kind == "table" else TaskLoader)(split, batch_size, **settings)


class TestRows:
    @pytest.mark.parametrize("make", [lambda: dataset(3, "table"), lambda: dataset(3, "stream"), lambda: rows(3)])
    def test_the_order_is_kept(self, make: Callable[[], Any]) -> None:
        data = TaskDataModule(make())
        assert prompts(data.train_dataloader()) == [["p0"], ["p1"], ["p2"]]

    def test_items_are_the_rows_themselves(self) -> None:
        items = rows(2)
        (batch,) = TaskDataModule(items, batch_size=2).train_dataloader()
        assert batch.items[0] is items[0]
        assert batch.indices == [0, 1]

    def test_a_re_iterable_is_read_anew_in_each_epoch(self) -> None:
        class Counting:
            passes = 0

            def __iter__(self) -> Iterator[dict[str, Any]]:
                self.passes += 1
                yield from rows(2)

        source = Counting()
        batches = TaskDataModule(source).train_dataloader()
        assert prompts(batches) == prompts(batches) == [["p0"], ["p1"]]
        assert source.passes == 2

    def test_a_torch_stream_with_a_length_is_not_indexed(self) -> None:
        class Stream(torch.utils.data.IterableDataset[Any]):
            def __len__(self) -> int:
                return 2

            def __iter__(self) -> Iterator[dict[str, Any]]:
                yield from rows(2)

        assert prompts(TaskDataModule(Stream()).train_dataloader()) == [["p0"], ["p1"]]

    def test_shuffling_by_seed_and_epoch(self) -> None:
        def orders(seed: int, kind: Kind) -> list[list[str]]:
            batches = TaskDataModule(dataset(20, kind), batch_size=20, shuffle=True, seed=seed).train_dataloader()
            assert batches.sampler is not None
            found = []
            for epoch in range(3):
                batches.sampler.set_epoch(epoch)
                found += prompts(batches)
            return found

        for kind in KINDS:
            first = orders(0, kind)
            assert all(sorted(order) == sorted(f"p{index}" for index in range(20)) for order in first)
            assert len({tuple(order) for order in first}) == 3
            assert orders(0, kind) == first
            assert orders(1, kind) != first

    def test_shuffling_leaves_the_evaluation_alone(self) -> None:
        data = TaskDataModule(rows(8), rows(8), eval_batch_size=8, shuffle=True)
        assert prompts(data.val_dataloader()) == [[f"p{index}" for index in range(8)]]

    def test_a_dataset_shuffled_once_keeps_its_order(self) -> None:
        source = dataset(9, "stream").shuffle(seed=5)
        batches = TaskDataModule(source, batch_size=9).train_dataloader()
        assert batches.sampler is not None
        first = prompts(batches)
        batches.sampler.set_epoch(1)
        assert prompts(batches) == first != [[f"p{index}" for index in range(9)]]


class TestErrors:
    @pytest.mark.parametrize(
        ("source", "problem"),
        [
            (
                iter(rows(2)),
                r"train_dataset=<list_iterator .* can be read only once, but every epoch reads it. Give a list",
            ),
            ((row for row in rows(2)), "train_dataset=<generator .* can be read only once"),
            ([], r"train_dataset has no rows. Give at least one"),
            (3, r"train_dataset=3 is not a dataset. Give a datasets.Dataset, a datasets.IterableDataset or"),
            (
                datasets.DatasetDict(train=dataset(2, "table")),
                r"is a mapping with the keys \['train'\] and no path. Give one",
            ),
            ({"data_files": "x.json"}, r"the keys \['data_files'\] and no path. Give .* path among them"),
            (["p0"], r"Row 0 of train_dataset is 'p0'. Give dicts, for instance \{'prompt': 'a task'\}"),
            ("rows.json", r"train_dataset='rows.json' is not the import path .*: rows.json, .*No module named 'rows'"),
            ("data/rows.json", r"train_dataset='data/rows.json' is not the import path of a function"),
            ("json.nothing", r"'json.nothing' is not the import path .*no attribute 'nothing'"),
            ("json", "'json' is not the import path"),
        ],
    )
    def test_what_is_no_dataset(self, source: Any, problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            TaskDataModule(source)

    def test_the_evaluation_split_is_named(self) -> None:
        with pytest.raises(ValueError, match="eval_dataset has no rows"):
            TaskDataModule(rows(1), [])

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_row_that_is_no_dict_is_named(self, kind: Kind) -> None:
        bad: list[Any] = [{"prompt": "p0"}, "p1"]
        data = TaskDataModule(bad if kind == "table" else Reiterable(bad))
        with pytest.raises(ValueError, match="Row 1 of train_dataset is 'p1'"):
            list(data.train_dataloader())

    def test_an_empty_stream(self) -> None:
        with pytest.raises(ValueError, match=r"train_dataset has no rows. Give at least one"):
            list(TaskDataModule(Reiterable([])).train_dataloader())

    def test_a_table_without_row_numbers(self) -> None:
        with pytest.raises(
            ValueError, match=r"train_dataset=DataFrame has no row 0. Give a list of dicts or a datasets"
        ):
            TaskDataModule(datasets.Dataset.from_list(rows(2)).to_pandas())

    @pytest.mark.parametrize("name", ["batch_size", "eval_batch_size", "eval_num_samples"])
    @pytest.mark.parametrize("value", [0, -1, 1.5, True])
    def test_numbers_are_positive(self, name: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"{name}={value} is not a positive whole number. Give 1 or more"):
            TaskDataModule(rows(1), **{name: value})

    def test_eval_num_samples_stays_positive(self) -> None:
        data = TaskDataModule(rows(1), rows(1))
        with pytest.raises(ValueError, match="eval_num_samples=0 is not a positive"):
            data.eval_num_samples = 0

    @pytest.mark.parametrize("seed", [-1, 0.5, None])
    def test_the_seed_is_a_whole_number(self, seed: Any) -> None:
        with pytest.raises(ValueError, match=f"seed={seed} is not a seed. Give a whole number from 0 on"):
            TaskDataModule(rows(1), seed=seed)

    def test_an_iterable_that_cannot_shuffle(self) -> None:
        with pytest.raises(ValueError, match=r"shuffle=True cannot reorder train_dataset=.*, which has no length"):
            TaskDataModule(Reiterable(rows(3)), shuffle=True)


class Reiterable:
    """An iterable without a length that can be read again."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)


class TestRanks:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("world_size", [1, 2, 3])
    @pytest.mark.parametrize("batch_size", [1, 2])
    @pytest.mark.parametrize("num_items", [1, 4, 5, 6, 7])
    def test_each_item_once_and_equally_many_batches(
        self, num_items: int, batch_size: int, world_size: int, kind: Kind
    ) -> None:
        loaders = [loader(num_items, batch_size, kind, world_size=world_size, rank=rank) for rank in range(world_size)]
        ranks = [list(batches) for batches in loaders]
        num_steps = -(-num_items // (world_size * batch_size))
        assert [len(batches) for batches in ranks] == [num_steps] * world_size
        assert sorted(index for batches in ranks for batch in batches for index in batch.indices) == list(
            range(num_items)
        )
        for step, batches in enumerate(zip(*ranks, strict=True)):
            assert {(batch.epoch, batch.start, batch.stop, batch.is_last) for batch in batches} == {
                (
                    0,
                    step * world_size * batch_size,
                    min((step + 1) * world_size * batch_size, num_items),
                    step == num_steps - 1,
                )
            }
            assert sum(len(batch) for batch in batches) == batches[0].stop - batches[0].start
        if kind == "table":
            assert [len(batches) for batches in loaders if isinstance(batches, SizedTaskLoader)] == [
                num_steps
            ] * world_size

    def test_by_hand(self) -> None:
        # 7 items, 2 ranks, 2 items each: steps of 0..3 and 4..6, every other item per rank, rank 1 gets one in the end
        ranks = [[batch.indices for batch in loader(7, 2, world_size=2, rank=rank)] for rank in range(2)]
        assert ranks == [[[0, 2], [4, 6]], [[1, 3], [5]]]

    def test_a_rank_without_items_gets_an_empty_batch(self) -> None:
        batches = list(loader(3, world_size=2, rank=1))
        assert [batch.indices for batch in batches] == [[1], []]
        assert (len(batches[1]), batches[1].items, batches[1].start, batches[1].stop) == (0, [], 2, 3)

    def test_a_stream_has_no_length(self) -> None:
        with pytest.raises(TypeError):
            len(loader(3, kind="stream"))  # type: ignore[arg-type]

    def test_the_trainer_says_which_rank_it_is(self) -> None:
        data = TaskDataModule(rows(4), rows(3))
        epochs = SimpleNamespace(current=SimpleNamespace(processed=2))
        batches = SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(processed=8)))
        progress = SimpleNamespace(epoch_progress=epochs, epoch_loop=batches)
        ranks = {"num_replicas": 2, "rank": 1}
        data.trainer = SimpleNamespace(distributed_sampler_kwargs=ranks, fit_loop=progress, overfit_batches=0)  # type: ignore[assignment]
        assert data.train_dataloader().state_dict()["batches"] == 8
        assert [(batch.epoch, batch.indices) for batch in data.train_dataloader()] == [(2, [1]), (2, [3])]
        assert [batch.indices for batch in data.val_dataloader()] == [[1], []]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_printed(kind: Kind) -> None:
    assert str(TaskDataModule(dataset(3, kind))).startswith("<comlrl_lightning.data.datamodule.TaskDataModule")


def test_shuffle_is_true_or_false() -> None:
    with pytest.raises(ValueError, match=r"shuffle='no' is neither True nor False"):
        TaskDataModule(rows(1), shuffle="no")  # type: ignore[arg-type]


class TestEvaluation:
    def test_without_a_split(self) -> None:
        data = TaskDataModule(rows(1))
        assert data.val_dataloader() == data.test_dataloader() == []
        assert not data.has_eval
        with pytest.raises(ValueError, match=r"eval_dataset=None leaves nothing to predict. Give"):
            data.predict_dataloader()

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_first_rows_read_anew(self, kind: Kind) -> None:
        data = TaskDataModule(rows(1), dataset(5, kind), eval_batch_size=2, eval_num_samples=3)
        batches = data.val_dataloader()
        assert isinstance(batches, TaskLoader)
        assert prompts(batches) == [["p0", "p1"], ["p2"]]
        data.eval_num_samples = 1
        assert prompts(batches) == [["p0"]]
        data.eval_num_samples = None
        assert prompts(batches) == [["p0", "p1"], ["p2", "p3"], ["p4"]]
        assert prompts(data.test_dataloader()) == prompts(data.predict_dataloader()) == prompts(batches)
        assert data.has_eval

    def test_lengths_follow(self) -> None:
        data = TaskDataModule(rows(1), rows(5), eval_batch_size=2, eval_num_samples=3)
        batches = data.val_dataloader()
        assert isinstance(batches, SizedTaskLoader)
        assert len(batches) == 2
        data.eval_num_samples = 100
        assert len(batches) == 3

    def test_trained_items_are_not_counted(self) -> None:
        batches = TaskDataModule(rows(1), rows(2)).val_dataloader()
        assert isinstance(batches, TaskLoader)
        next(iter(batches)).mark_trained(last=False)
        assert prompts(batches) == [["p0"], ["p1"]]


class TestPosition:
    def test_only_trained_items_count(self) -> None:
        batches = loader(5, 2, position=EpochPosition())
        iterator = iter(batches)
        first = next(iterator)
        next(iterator)
        assert (batches.state_dict()["epoch"], batches.state_dict()["position"]) == (0, 0)
        first.mark_trained(last=False)
        assert (batches.state_dict()["epoch"], batches.state_dict()["position"]) == (0, 2)
        assert [batch.indices for batch in batches] == [[2, 3], [4]]

    def test_the_last_batch_ends_the_epoch(self) -> None:
        # also when it comes early, as with limit_train_batches
        position = EpochPosition(3, batches=9)
        next(iter(loader(5, 2, position=position))).mark_trained(last=True)
        assert position.now == Place(4, 0, batches=10, cut_at=2)

    def test_rows_that_are_gone_are_an_error(self) -> None:
        position = EpochPosition()
        position.now = Place(0, 3)
        with pytest.raises(ValueError, match="train_dataset has ended before item 3, where the checkpoint was saved"):
            next(iter(loader(3, kind="stream", position=position)))

    def test_the_end_of_the_dataset_ends_the_epoch_too(self) -> None:
        batches = loader(2, kind="stream", position=EpochPosition())
        for batch in batches:
            batch.mark_trained(last=False)
        assert (batches.state_dict()["epoch"], batches.state_dict()["position"]) == (1, 0)

    def test_lightning_names_another_epoch(self) -> None:
        position = EpochPosition(1)
        position.advance(1, 4, last=False)
        position.set_epoch(1)
        assert position.now == Place(1, 4, batches=1)
        position.set_epoch(2)
        assert position.now == Place(2, 0, batches=1)

    def test_the_state_is_plain(self) -> None:
        batches = loader(5, 2, position=EpochPosition())
        next(iter(batches)).mark_trained(last=False)
        assert json.loads(json.dumps(batches.state_dict())) == batches.state_dict()

    def test_other_settings_inside_an_epoch_are_an_error(self) -> None:
        def state(items: int, **settings: Any) -> TaskLoader:
            split = Split(rows(items), "train_dataset", settings.pop("shuffle", True), settings.pop("seed", 1))
            return SizedTaskLoader(split, settings.pop("batch_size", 2), position=EpochPosition(), **settings)

        saved = state(6)
        next(iter(saved)).mark_trained(last=False)
        inside = saved.state_dict()
        state(6).load_state_dict(inside)
        state(6, batch_size=1, world_size=2).load_state_dict(inside)
        for other, problem in (
            (state(7), "train_dataset: number of rows=7, but the checkpoint .* number of rows=6. Set it back"),
            (state(6, seed=2), "seed=2, but .* seed=1"),
            (state(6, shuffle=False), "shuffle=False, but .* shuffle=True"),
            (state(6, batch_size=3), "batch_size times ranks=3, but .* batch_size times ranks=2"),
        ):
            with pytest.raises(ValueError, match=problem):
                other.load_state_dict(inside)
            other.load_state_dict(state(6).state_dict())
