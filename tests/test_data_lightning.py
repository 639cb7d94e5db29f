"""The data module inside Lightning: epochs, last batches, exact resume, precision, the command line."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch.multiprocessing.spawn import ProcessRaisedException

from comlrl_lightning.data.datamodule import TaskBatch, TaskDataModule
from tests.test_data import KINDS, Kind, dataset, prompts, rows


class Killed(Exception):
    """The run ends here."""


class Recording(LightningModule):
    """Remembers what each training step got, and marks it as trained."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[tuple[Any, ...]] = []
        self.evaluated: list[list[int]] = []
        self.batches: list[TaskBatch] = []
        self.weight = torch.nn.Parameter(torch.zeros(1))  # DDP wants one

    def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
        last = self.trainer.is_last_batch
        texts = [item["prompt"] for item in batch.items]
        self.seen.append((batch.epoch, batch.start, batch.stop, batch.indices, texts, last))
        self.batches.append(batch)
        batch.mark_trained(last)

    def validation_step(self, batch: TaskBatch, batch_idx: int) -> None:
        self.evaluated.append(batch.indices)

    def configure_optimizers(self) -> None:
        return None


class SaveAndStop(Callback):
    """Saves a checkpoint at the n-th call of a hook and kills the run."""

    def __init__(self, hook: str, count: int, path: Path) -> None:
        self.hook, self.count, self.path = hook, count, path

    def _reach(self, hook: str, trainer: Trainer) -> None:
        if hook == self.hook:
            self.count -= 1
            if self.count < 0:
                trainer.save_checkpoint(self.path)
                raise Killed

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._reach("on_train_batch_start", trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._reach("on_train_batch_end", trainer)

    def on_train_epoch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._reach("on_train_epoch_end", trainer)


def fit(data: TaskDataModule, *callbacks: Callback, ckpt_path: Path | None = None, **settings: Any) -> Recording:
    """Train on the CPU, in silence."""
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    module = Recording()
    limits = {"max_epochs": 2, "num_sanity_val_steps": 0, **settings}
    trainer = Trainer(**quiet, accelerator="cpu", callbacks=list(callbacks), **limits)
    trainer.fit(module, data, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return module


@pytest.mark.filterwarnings("ignore")
class TestLightning:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("num_items", [4, 5])
    def test_every_epoch_and_its_last_batch(self, num_items: int, kind: Kind) -> None:
        seen = fit(TaskDataModule(dataset(num_items, kind), batch_size=2), max_epochs=2).seen
        steps = [(0, 2, [0, 1], False), (2, 4, [2, 3], num_items == 4), (4, 5, [4], True)][: -(-num_items // 2)]
        assert [(epoch, start, stop, indices, last) for epoch, start, stop, indices, _, last in seen] == [
            (epoch, *step) for epoch in range(2) for step in steps
        ]

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"])
    @pytest.mark.parametrize("num_items", [3, 4])
    def test_resume_equals_an_unbroken_run(self, kind: Kind, hook: str, num_items: int, tmp_path: Path) -> None:
        def data() -> TaskDataModule:
            return TaskDataModule(dataset(num_items, kind), batch_size=2, shuffle=True, seed=3)

        whole = fit(data()).seen
        assert len(whole) == 4
        for count in range(2 if hook == "on_train_epoch_end" else 4):
            path = tmp_path / f"{count}.ckpt"
            begun = Begun()
            with pytest.raises(Killed):
                fit(data(), begun, SaveAndStop(hook, count, path))
            assert begun.module is not None
            assert begun.module.seen + fit(data(), ckpt_path=path).seen == whole

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_limit_ends_the_epoch_early(self, kind: Kind) -> None:
        seen = fit(TaskDataModule(dataset(5, kind)), limit_train_batches=2).seen
        assert [(epoch, indices, last) for epoch, _, _, indices, _, last in seen] == [
            (0, [0], False),
            (0, [1], True),
            (1, [0], False),
            (1, [1], True),
        ]

    def test_a_stream_shorter_than_the_limit_says_itself_where_it_ends(self) -> None:
        # Lightning believes limit_train_batches and finds out too late that the stream is over
        module = fit(TaskDataModule(dataset(3, "stream")), limit_train_batches=10, max_epochs=1)
        assert [batch.is_last for batch in module.batches] == [False, False, True]

    @pytest.mark.parametrize("kind", KINDS)
    def test_another_fit_with_the_same_trainer_goes_on_with_the_next_epoch(self, kind: Kind) -> None:
        data = TaskDataModule(dataset(6, kind), batch_size=6, shuffle=True)
        whole = fit(data, max_epochs=2).seen
        first = fit(data, max_epochs=1)
        trainer = first.trainer
        trainer.fit_loop.max_epochs = 2
        trainer.fit(first, data)
        assert first.seen == whole

    @pytest.mark.parametrize("kind", KINDS)
    def test_evaluation_within_a_fit(self, kind: Kind) -> None:
        data = TaskDataModule(rows(2), dataset(5, kind), eval_batch_size=2, eval_num_samples=3)
        assert fit(data, max_epochs=1).evaluated == [[0, 1], [2]]

    def test_a_fit_without_an_evaluation_split(self) -> None:
        assert fit(TaskDataModule(rows(2)), max_epochs=1).evaluated == []

    @pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
    def test_batches_arrive_as_they_left(self, precision: str) -> None:
        items = [{"prompt": "p0", "target": torch.tensor([1.0]), "more": {"list": [torch.tensor(2.0)]}}]
        (batch,) = fit(TaskDataModule(items), max_epochs=1, precision=precision).batches
        assert batch.items[0] is items[0]
        assert batch.items[0]["target"].dtype == torch.float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_share_the_items_and_resume(kind: Kind, tmp_path: Path) -> None:
    def run(ckpt_path: Path | None = None, *callbacks: Callback) -> None:
        data = TaskDataModule(dataset(5, kind), dataset(3, kind))
        fit(data, Reporting(tmp_path), *callbacks, ckpt_path=ckpt_path, devices=2, strategy="ddp_fork")

    def seen() -> list[Any]:
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    run()
    # steps of two items, [0, 1], [2, 3] and [4]; three to evaluate, [0, 1] and [2], after each epoch
    assert seen() == [[[[0], [2], [4]] * 2, [[0], [2]] * 2], [[[1], [3], []] * 2, [[1], []] * 2]]
    path = tmp_path / "inside.ckpt"
    with pytest.raises(ProcessRaisedException, match="Killed"):
        run(None, SaveAndStop("on_train_batch_start", 4, path))
    run(path)
    assert [steps for steps, _ in seen()] == [[[2], [4]], [[3], []]]


class Reporting(Callback):
    """Writes what each rank got."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Recording)
        steps = [indices for _, _, _, indices, _, _ in pl_module.seen]
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps([steps, pl_module.evaluated]))


class Begun(Callback):
    """Keeps the module of a run that is killed."""

    module: Recording | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Recording)
        self.module = pl_module


def make_rows() -> list[dict[str, Any]]:
    """A function that YAML names."""
    return rows(2)


def make_nothing() -> None:
    """A function that fails."""
    raise KeyError("nothing")


def from_yaml(**settings: Any) -> TaskDataModule:
    """A data module as the command line makes it."""
    cli = LightningCLI(
        Recording,
        TaskDataModule,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        args={"data": settings},
        trainer_defaults={"logger": False, "enable_checkpointing": False, "accelerator": "cpu"},
    )
    assert isinstance(cli.datamodule, TaskDataModule)
    return cli.datamodule


@pytest.mark.filterwarnings("ignore")
class TestYaml:
    @pytest.mark.parametrize("extension", ["json", "jsonl", "csv", "parquet"])
    def test_files(self, extension: str, tmp_path: Path) -> None:
        path, table = tmp_path / f"rows.{extension}", datasets.Dataset.from_list(rows(2))
        write = {"json": table.to_json, "jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}
        write[extension](str(path))
        name = "json" if extension == "jsonl" else extension
        described = {"path": name, "data_files": str(path), "split": "train", "cache_dir": str(tmp_path / "cache")}
        data = from_yaml(train_dataset=described, eval_dataset={**described, "streaming": True}, batch_size=2)
        data.prepare_data()
        data.setup("fit")
        assert prompts(data.train_dataloader()) == [["p0", "p1"]]
        assert prompts(data.val_dataloader()) == [["p0"], ["p1"]]

    def test_a_folder_with_one_split_needs_no_name(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        datasets.Dataset.from_list(rows(2)).to_json(str(tmp_path / "data" / "train.jsonl"))
        described = {"path": str(tmp_path / "data"), "cache_dir": str(tmp_path / "cache")}
        assert prompts(from_yaml(train_dataset=described).train_dataloader()) == [["p0"], ["p1"]]

    def test_several_splits_need_one(self, tmp_path: Path) -> None:
        for split in ("train", "test"):
            datasets.Dataset.from_list(rows(2)).to_json(str(tmp_path / f"{split}.jsonl"))
        files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}
        data = from_yaml(train_dataset={"path": "json", "data_files": files, "cache_dir": str(tmp_path / "cache")})
        with pytest.raises(ValueError, match=r"train_dataset=.* names no split. Add split, one of \['train', 'test'\]"):
            data.setup("fit")

    def test_the_import_path_of_a_function(self) -> None:
        data = from_yaml(
            train_dataset="tests.test_data_lightning.make_rows",
            eval_dataset="tests.test_data_lightning.make_rows",
            seed=2,
        )
        assert prompts(data.train_dataloader()) == prompts(data.val_dataloader()) == [["p0"], ["p1"]]
        assert (data.seed, data.has_eval) == (2, True)

    def test_rows_in_the_file(self) -> None:
        assert prompts(from_yaml(train_dataset=rows(2)).train_dataloader()) == [["p0"], ["p1"]]

    def test_an_error_of_the_function_names_it(self) -> None:
        data = from_yaml(train_dataset="tests.test_data_lightning.make_nothing")
        with pytest.raises(KeyError) as error:
            data.setup("fit")
        assert error.value.__notes__ == ["Raised in train_dataset=tests.test_data_lightning.make_nothing."]

    def test_a_missing_module_inside_the_users_module_is_not_ours(self, tmp_path: Path, monkeypatch: Any) -> None:
        (tmp_path / "broken_tasks.py").write_text("import a_library_that_is_missing\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ModuleNotFoundError, match="a_library_that_is_missing"):
            TaskDataModule("broken_tasks.rows")


class TestOverfitting:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_the_same_items_in_each_epoch(self, kind: Kind, shuffle: bool) -> None:
        data = TaskDataModule(dataset(6, kind), shuffle=shuffle)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = fit(data, overfit_batches=2, max_epochs=3)
        assert [indices for _, _, _, indices, _, _ in module.seen] == [[0], [1]] * 3
        heard = [str(one.message) for one in caught if "shuffl" in str(one.message)]
        # Lightning would say that it turned off a shuffling that it cannot turn off, or that was never on.
        assert len(heard) == int(shuffle)
        assert all(
            "overfit_batches=2) trains the same items in each epoch: shuffle=True is off" in one for one in heard
        )

    @pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
    def test_another_trainer_shuffles_again(self) -> None:
        data = TaskDataModule(rows(20), shuffle=True)
        with pytest.warns(UserWarning, match="shuffle=True is off"):
            fit(data, overfit_batches=2, max_epochs=1)
        module = fit(data, max_epochs=1)
        indices = [index for _, _, _, batch, _, _ in module.seen for index in batch]
        assert indices != sorted(indices) == list(range(20))
