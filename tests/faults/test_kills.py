"""Kill -9 at any moment of a run that saves every step: it goes on from what is there, and ends as if unbroken."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from comlrl_lightning.callbacks import batch_checkpoint
from tests.faults.registry import Fault, faults
from tests.faults.runs import FileOpener, every_step, exit_code, is_loadable, latest_loadable, start, train, weights_in

STEPS = 12
AREA = "kill -9"
SAME = "the run goes on from the latest checkpoint and ends with the same weights, bit for bit"
Patch = Callable[[Callable[[], None]], None]
"""Puts a call of its argument, which kills in time, into something that writes a checkpoint."""


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("dead processes raise nothing")


def before_writing(tick: Callable[[], None]) -> None:
    """Just before the checkpoint is put into bytes."""
    save = torch.save

    def patched(*args: Any, **keywords: Any) -> None:
        tick()
        save(*args, **keywords)

    torch.save = patched


def half_written(tick: Callable[[], None]) -> None:
    """When half of the bytes are in the file."""
    write = FileOpener.write

    def patched(self: Any, content: bytes) -> int:
        written: int = write(self, content[: len(content) // 2])
        self.flush()
        tick()
        return written + int(write(self, content[len(content) // 2 :]))

    FileOpener.write = patched


def half_copied(tick: Callable[[], None]) -> None:
    """When half of a file is at its place, where temporary files lie on another disk and cannot just be renamed."""

    def patched(source: str, target: str) -> None:
        content = Path(source).read_bytes()
        with open(target, "wb") as file:
            file.write(content[: len(content) // 2])
            file.flush()
            tick()
            file.write(content[len(content) // 2 :])
        os.unlink(source)

    shutil.move = patched  # type: ignore[assignment]


def before_replacing(tick: Callable[[], None]) -> None:
    """When the new file is whole, and not yet at its place."""
    _around(os, "replace", tick, first=True)


def before_removing(tick: Callable[[], None]) -> None:
    """When the new file is at its place, and the former is still there."""
    _around(batch_checkpoint, "_remove", tick, first=True)


def after_removing(tick: Callable[[], None]) -> None:
    """When the former file is gone."""
    _around(batch_checkpoint, "_remove", tick, first=False)


def _around(owner: Any, name: str, tick: Callable[[], None], *, first: bool) -> None:
    inner = vars(owner)[name]

    def patched(*args: Any) -> None:
        if first:
            tick()
        inner(*args)
        if not first:
            tick()

    setattr(owner, name, patched)


PATCHES: tuple[Patch, ...] = (
    before_writing,
    half_written,
    half_copied,
    before_replacing,
    before_removing,
    after_removing,
)


@dataclass
class Unbroken:
    """The run that nobody kills."""

    seconds: float
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """Run it twice: the first time pays for the imports."""
    folder = tmp_path_factory.mktemp("unbroken")
    train([every_step(folder / "first")])
    started = time.monotonic()
    train([every_step(folder / "second")])
    return Unbroken(time.monotonic() - started, weights_in(folder / "second" / f"batch-{STEPS:06d}.ckpt"))


def killed_inside(patch: Patch, number: int, folder: Path, temporary: Path) -> None:
    """A run that ends at the `number`-th time, from 1, that it comes by such a place."""
    tempfile.tempdir = str(temporary)
    left = number

    def tick() -> None:
        nonlocal left
        left -= 1
        if not left:
            die()

    patch(tick)
    train([every_step(folder)])


def kill_and_go_on(folder: Path, unbroken: Unbroken, kill: int) -> None:
    """Kill a run by the plan of this number, check what is left, and let it go on."""
    generator = random.Random(kill)
    saved, log = folder / "saved", folder / "log"
    folder.mkdir()
    if kill % 2:
        patch = PATCHES[kill // 2 % len(PATCHES)]
        process = start(killed_inside, patch, generator.randint(1, STEPS - 1), saved, folder, log=log)
    else:
        process = start(train, [every_step(saved)], log=log)
        time.sleep(generator.uniform(0.0, unbroken.seconds))
        process.kill()
    assert exit_code(process) in (-signal.SIGKILL, 0)
    assert kill % 2 == 0 or process.exitcode != 0
    # Whatever carries a checkpoint's name is whole; what is not has another name.
    assert all(map(is_loadable, saved.glob("batch-*.ckpt")))
    last = latest_loadable(saved)
    assert exit_code(start(train, [every_step(saved)], None, last, log=log)) == 0, log.read_text()
    # What the dead process could not remove, the next one does, if it has a step left to save.
    end = saved / f"batch-{STEPS:06d}.ckpt"
    assert last == end or [*saved.glob("[!.]*")] == [end]
    torch.testing.assert_close(weights_in(end), unbroken.weights, rtol=0, atol=0)


DEFAULT = Fault(AREA, "4 kills, 2 of them inside the writing of a checkpoint", SAME)
MANY = Fault(AREA, "100 kills at seeded moments, half of them inside the writing of a checkpoint", SAME)


@faults(DEFAULT, MANY, slow=frozenset({MANY}))
def test_any_moment(fault: Fault, unbroken: Unbroken, tmp_path: Path) -> None:
    for kill in (0, 3, 5, 8) if fault is DEFAULT else range(100):
        kill_and_go_on(tmp_path / str(kill), unbroken, kill)
        shutil.rmtree(tmp_path / str(kill))


KEPT = "the former checkpoint is still there, and the run goes on from it to the same weights"


def models(folder: Path) -> ModelCheckpoint:
    """Lightning's own checkpoints, of which the last and a link to it stay; it saves after optimizer steps only."""
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1, save_last="link")


def killed_in_models(patch: Patch, folder: Path, temporary: Path) -> None:
    """The fourth of six checkpoints."""
    tempfile.tempdir = str(temporary)
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        if count == 4:
            die()

    patch(tick)
    train([models(folder)])


@faults(
    Fault(AREA, "in the middle of writing a file of Lightning's ModelCheckpoint", KEPT),
    Fault(AREA, "the same, with temporary files on another disk: a part of the file is at its place", KEPT),
)
def test_checkpoints_of_lightning(fault: Fault, unbroken: Unbroken, tmp_path: Path) -> None:
    patch, saved = half_copied if "another disk" in fault.tried else half_written, tmp_path / "saved"
    assert exit_code(start(killed_in_models, patch, saved, tmp_path, log=tmp_path / "log")) == -signal.SIGKILL
    # Two items per update: the fourth checkpoint comes with step 4, the one before it is that of step 3.
    assert is_loadable(saved / "step=3.ckpt")
    assert not is_loadable(saved / "step=4.ckpt")
    last = latest_loadable(saved)
    assert last is not None
    end = every_step(tmp_path / "end")
    assert exit_code(start(train, [end], None, last, log=tmp_path / "log")) == 0, (tmp_path / "log").read_text()
    ended = weights_in(tmp_path / "end" / f"batch-{STEPS:06d}.ckpt")
    torch.testing.assert_close(ended, unbroken.weights, rtol=0, atol=0)


@faults(Fault(AREA, "before a checkpoint takes the place of one with the same name", "the former one is still there"))
def test_replacing(fault: Fault, tmp_path: Path) -> None:
    train([every_step(tmp_path, keep=None)])
    first = tmp_path / "batch-000001.ckpt"
    former = first.read_bytes()
    process = start(killed_inside, before_replacing, 1, tmp_path, tmp_path, log=tmp_path / "log")
    assert exit_code(process) == -signal.SIGKILL
    assert first.read_bytes() == former
