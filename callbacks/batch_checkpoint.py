"""Checkpoints by number of batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from comlrl_lightning.callbacks.run_path import RunPath, run_folder
from comlrl_lightning.callbacks.support import batches_trained, check_count, is_rehearsal, wait_for_checkpoints
from comlrl_lightning.files import Place
from comlrl_lightning.keywords import KnownKeywords


class BatchCheckpoint(Checkpoint, KnownKeywords):
    """Save a checkpoint every so many training batches, also while the rollout buffer fills, and at the end of a fit.

    Lightning's `ModelCheckpoint` skips a save when no optimizer step happened since the last one; this one does not.
    It takes the place of the one that Lightning adds by itself, and like that one does not go together with
    `Trainer(enable_checkpointing=False)`; a `fast_dev_run` saves nothing.

    Files are called ``batch-000012.ckpt`` after the batches trained since the run began, over all epochs.

    Args:
        every_n_batches: Training batches of this rank between two checkpoints. What is left at the end of a fit,
            however it was limited, gets one more; what an error or a signal ends does not.
        keep: How many of the latest checkpoints stay; None keeps all.
        dirpath: Folder of the checkpoints, also an address such as ``s3://bucket/run`` that fsspec reaches; None takes
            ``checkpoints`` in the folder of the run. While another run saves there, this one takes a folder with a
            number in its name.

    Raises:
        ValueError: If `every_n_batches` or `keep` is not a whole number from 1.

    Example::

        trainer = Trainer(callbacks=[BatchCheckpoint(every_n_batches=10, dirpath="runs/checkpoints")])
        trainer.fit(module, data, ckpt_path="runs/checkpoints/batch-000030.ckpt")
    """

    def __init__(self, every_n_batches: int = 1, keep: int | None = 1, dirpath: str | Path | None = None) -> None:
        super().__init__()
        for name, value in (("every_n_batches", every_n_batches), ("keep", keep)):
            if name != "keep" or value is not None:
                check_count("BatchCheckpoint", name, value)
        self._every_n_batches = every_n_batches
        self._keep = keep
        self._target = RunPath("BatchCheckpoint", dirpath, "checkpoints")
        self._saved: list[str] = []

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(every_n_batches=self._every_n_batches)

    @property
    def last_path(self) -> Path | str | None:
        """The latest checkpoint of this run; a text for an address of fsspec's."""
        if not self._saved:
            return None
        last = Place(self._saved[-1])
        return last.local if last.is_local else last.path

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._target.take(trainer, self._folder(trainer))
        folder = self._target.place
        others = [] if trainer.ckpt_path else [path for path in folder.glob("batch-*") if str(path) not in self._saved]
        if others:
            rank_zero_warn(
                f"BatchCheckpoint: {folder} holds {len(others)} checkpoints of another run, which this one may replace "
                "and does not remove. Use another dirpath, or resume with ckpt_path."
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        num_batches = batches_trained(trainer)
        if num_batches % self._every_n_batches or is_rehearsal(trainer):
            return
        self._save(trainer, self._target.place / f"batch-{num_batches:06d}.ckpt")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        num_batches = batches_trained(trainer)
        if num_batches % self._every_n_batches and not is_rehearsal(trainer):
            self._save(trainer, self._target.place / f"batch-{num_batches:06d}.ckpt")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._target.leave()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._target.leave()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"saved": list(self._saved)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = list(state_dict["saved"])

    def _folder(self, trainer: Trainer) -> Place:
        if self._target.given is not None:
            return Place(self._target.given)
        if trainer.ckpt_path is not None and self._saved:  # a resumed run goes on with its own folder
            former = Place(self._saved[-1]).parent
            if trainer.strategy.broadcast(former.exists()):
                return former
        return run_folder(trainer) / "checkpoints"

    def _save(self, trainer: Trainer, path: Place) -> None:
        """Save under another name first: whoever looks for checkpoints finds whole ones only."""
        self._saved = [*(name for name in self._saved if name != str(path)), str(path)]
        # The new file names the outdated ones, too: should they outlive this process, the next one removes them.
        outdated = [] if self._keep is None else self._saved[: -self._keep]
        part = path.parent / f".{path.name}.part" if path.is_local else path  # fsspec shows whole files only
        trainer.save_checkpoint(part.path, weights_only=False)
        wait_for_checkpoints(trainer)
        if trainer.is_global_zero:
            if path.is_local:
                if path.is_folder():  # a file is replaced in one go, so that there is one at any moment
                    path.remove()
                os.replace(part.path, path.path)
            for name in outdated:
                Place(name).remove()
        self._saved = self._saved[len(outdated) :]
        trainer.strategy.barrier("BatchCheckpoint")
