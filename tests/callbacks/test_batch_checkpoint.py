"""Checkpoints by number of batches."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from comlrl_lightning.callbacks import BatchCheckpoint, RewardCurve
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.files import Place
from tests.callbacks.fakes import FakeModule, data, quiet_trainer


class NeverStepping(FakeModule):
    """No optimizer step ever happens, as while a buffer fills."""

    def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
        batch.mark_trained(self.trainer.is_last_batch)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_saves_without_optimizer_steps_and_keeps_the_latest(tmp_path: Path) -> None:
    checkpoint = BatchCheckpoint(every_n_batches=2, keep=2, dirpath=tmp_path / "saved")
    trainer = quiet_trainer(tmp_path, checkpoint, max_epochs=2, enable_checkpointing=True)
    trainer.fit(NeverStepping(), data(train=5, evaluation=0))
    # Ten batches in two epochs: saved after 2, 4, 6, 8, 10.
    assert names(tmp_path / "saved") == ["batch-000008.ckpt", "batch-000010.ckpt"]
    assert checkpoint.last_path == tmp_path / "saved" / "batch-000010.ckpt"


def test_every_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for version in range(2):
        quiet_trainer(tmp_path, BatchCheckpoint(), enable_checkpointing=True).fit(FakeModule(), data(3, 0))
        assert names(tmp_path / "lightning_logs" / f"version_{version}" / "checkpoints") == ["batch-000003.ckpt"]


@pytest.mark.parametrize(
    ("every", "limits", "expected"),
    [
        (10, {}, ["batch-000005.ckpt"]),
        (2, {}, ["batch-000002.ckpt", "batch-000004.ckpt", "batch-000005.ckpt"]),
        (2, {"max_steps": 3}, ["batch-000002.ckpt", "batch-000003.ckpt"]),
        (5, {}, ["batch-000005.ckpt"]),
        (2, {"fast_dev_run": 3}, []),
    ],
)
def test_the_end_of_a_fit_is_saved(tmp_path: Path, every: int, limits: dict[str, Any], expected: list[str]) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    checkpoint = BatchCheckpoint(every, keep=None, dirpath=folder)
    quiet_trainer(tmp_path, checkpoint, enable_checkpointing=True, **limits).fit(FakeModule(), data(5, 0))
    assert names(folder) == expected


def test_resume_equals_the_unbroken_run_and_prunes_what_came_before(tmp_path: Path) -> None:
    def run(folder: str, limit: int | None = None, ckpt_path: Path | None = None) -> tuple[FakeModule, RewardCurve]:
        seed_everything(4 if ckpt_path is None else 77)
        module, curve = FakeModule(), RewardCurve(tmp_path / folder / "curve.png")
        checkpoint = BatchCheckpoint(1, keep=1, dirpath=tmp_path / folder)
        steps = -1 if limit is None else limit
        trainer = quiet_trainer(tmp_path, checkpoint, curve, max_epochs=2, enable_checkpointing=True, max_steps=steps)
        trainer.fit(module, data(train=3, evaluation=0, shuffle=True), ckpt_path=ckpt_path)
        return module, curve

    whole, whole_curve = run("whole")
    for steps in range(1, 6):
        first, _ = run(f"part{steps}", limit=steps)
        second, curve = run(f"part{steps}", ckpt_path=tmp_path / f"part{steps}" / f"batch-{steps:06d}.ckpt")
        assert first.trained + second.trained == whole.trained
        torch.testing.assert_close(second.layer.weight, whole.layer.weight, rtol=0, atol=0)
        assert names(tmp_path / f"part{steps}") == ["batch-000006.ckpt", "curve.png"]
        # The other callbacks' state is in the file too: the curve goes on without a gap.
        assert curve.training_points == whole_curve.training_points


def test_half_written_checkpoint_has_another_name(tmp_path: Path) -> None:
    class Killed(FakeModule):
        def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
            if self.env_step > 4:
                raise RuntimeError("killed")

    trainer = quiet_trainer(tmp_path, BatchCheckpoint(1, dirpath=tmp_path / "saved"), enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="killed"):
        trainer.fit(Killed(), data(3, 0))
    assert names(tmp_path / "saved") == ["batch-000001.ckpt"]


def test_folder_of_another_run_is_warned_of(tmp_path: Path) -> None:
    def run(ckpt_path: Path | None = None) -> None:
        trainer = quiet_trainer(tmp_path, BatchCheckpoint(dirpath=tmp_path), max_epochs=2, enable_checkpointing=True)
        trainer.fit(FakeModule(), data(2, 0), ckpt_path=ckpt_path)

    run()
    with pytest.warns(UserWarning, match=r"holds 1 checkpoints of another run.*Use another dirpath"):
        run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(ckpt_path=tmp_path / "batch-000004.ckpt")
    assert not [warning for warning in caught if "another run" in str(warning.message)]


class Lock:
    """What keeps other processes away as long as something refers to it."""


@pytest.mark.parametrize("error", [None, "power cut"])
def test_its_folder_is_locked_until_the_fit_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str | None
) -> None:
    locks: list[ref[Lock]] = []

    def claim(place: Place, writer: str) -> tuple[Place, Lock]:
        lock = Lock()
        locks.append(ref(lock))
        return place, lock

    class Ending(FakeModule):
        def on_train_epoch_end(self) -> None:
            assert locks[0]() is not None
            if error is not None:
                raise RuntimeError(error)

    monkeypatch.setattr("comlrl_lightning.callbacks.run_path.claim", claim)
    checkpoint = BatchCheckpoint(dirpath=tmp_path)
    with nullcontext() if error is None else pytest.raises(RuntimeError, match=error):
        quiet_trainer(tmp_path, checkpoint, enable_checkpointing=True).fit(Ending(), data(2, 0))
    assert locks[0]() is None


@pytest.mark.parametrize("value", [0, "4", 1.5, True])
@pytest.mark.parametrize("name", ["every_n_batches", "keep"])
def test_counts_are_whole_numbers_from_one(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"BatchCheckpoint\({name}={value!r}\) is not a whole number from 1"):
        BatchCheckpoint(**{name: value})  # type: ignore[arg-type]


class Present(Checkpoint):
    """The files in a folder after each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[list[str]] = []

    def on_train_batch_end(self, *args: object) -> None:
        self.names.append(sorted(path.name for path in self.folder.iterdir()))


def test_checkpoints_of_a_thread_are_whole(tmp_path: Path) -> None:
    io = AsyncCheckpointIO()
    checkpoint = BatchCheckpoint(keep=2, dirpath=tmp_path)
    present = Present(tmp_path)
    trainer = quiet_trainer(tmp_path, checkpoint, present, plugins=[io], enable_checkpointing=True)
    trainer.fit(FakeModule(), data(train=3))
    # After each batch its checkpoint is there, and no more than two of them.
    numbers = [[1], [1, 2], [2, 3]]
    assert present.names == [[f"batch-{one:06d}.ckpt" for one in step] for step in numbers]
    resumed = FakeModule()
    path = tmp_path / "batch-000002.ckpt"
    quiet_trainer(tmp_path).fit(resumed, data(train=3), ckpt_path=path)
    assert resumed.trained == [2]
