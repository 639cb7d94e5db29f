"""The agents as model folders."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Any, Literal

from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from comlrl_lightning.callbacks.run_path import RunPath
from comlrl_lightning.callbacks.support import batches_trained, check_count, is_rehearsal, rollout_source
from comlrl_lightning.files import CONTENTS, Place, own_folder
from comlrl_lightning.keywords import KnownKeywords


class SaveAgents(Callback, KnownKeywords):
    """Save the agents as standard PEFT or model folders with their tokenizers, one per agent.

    At the end of training ``folder/agent_0``, ``folder/agent_1``, ... are written. With `monitor` the best agents so
    far stand in ``folder/best``, with `every_n_batches` those after n batches in ``folder/batch-000012`` and so on.
    Each of these has a list of its files, ``contents.json``. A new run warns of agents of another run in its folder;
    with its first save it removes what that one's lists name and what does not get replaced.

    Args:
        folder: Where the folders of the agents go, also an address such as ``s3://bucket/agents`` that fsspec reaches;
            None takes ``agents`` in the folder of the run.
        every_n_batches: Training batches of this rank between two saves; None saves at the end only.
        monitor: Evaluation metric that decides which agents are best, for example ``eval/final_reward_mean``.
        mode: Whether more (``max``) or less (``min``) of `monitor` is better.

    Raises:
        ValueError: If `every_n_batches` is not a whole number from 1, or `mode` is neither ``max`` nor ``min``.

    Example::

        trainer = Trainer(callbacks=[EvalInterval(4), SaveAgents("runs/agents", monitor="eval/final_reward_mean")])
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        every_n_batches: int | None = None,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
    ) -> None:
        super().__init__()
        if every_n_batches is not None:
            check_count("SaveAgents", "every_n_batches", every_n_batches)
        if mode not in ("max", "min"):
            raise ValueError(f"SaveAgents(mode={mode!r}) is neither 'max' nor 'min'. Use one of them.")
        self._target = RunPath("SaveAgents", folder, "agents")
        self._every_n_batches = every_n_batches
        self._monitor = monitor
        self._is_better = operator.gt if mode == "max" else operator.lt
        self._best: float | None = None
        self._outdated: list[Place] = []

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(folder=self._target.given, monitor=self._monitor)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._target.settle(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._target.go_on(trainer)
        self._outdated = []
        folder = self._target.place
        if trainer.ckpt_path is not None or rollout_source(pl_module, self).env_step > 0:
            for own in (folder, *_saves_below(folder)):
                own_folder(pl_module, own)
            return
        self._best = None
        if trainer.is_global_zero and not is_rehearsal(trainer):
            below = _saves_below(folder)
            self._target.warn_of_others([folder / CONTENTS, *below])
            self._outdated = [place for place in below if (place / CONTENTS).exists()]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        num_batches = batches_trained(trainer)
        is_due = self._every_n_batches is not None and num_batches % self._every_n_batches == 0
        if is_due and not is_rehearsal(trainer):
            self._save(pl_module, f"batch-{num_batches:06d}")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._monitor is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self._monitor not in trainer.callback_metrics:
            raise ValueError(
                f"SaveAgents(monitor={self._monitor!r}) is no metric of the evaluation. "
                f"Use one of {sorted(key for key in trainer.callback_metrics if key.startswith('eval/'))}."
            )
        value = trainer.strategy.broadcast(float(trainer.callback_metrics[self._monitor]))
        if self._best is None or self._is_better(value, self._best):
            self._best = value
            if not is_rehearsal(trainer):
                self._save_best(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not is_rehearsal(trainer):
            self._save(pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, **self._target.state()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best = state_dict["best"]
        self._target.restore(state_dict)

    def _save(self, pl_module: LightningModule, name: str | None = None) -> None:
        """Save into the folder or one below it; with the first save go those of an earlier run."""
        for place in self._outdated:
            place.remove()
        self._outdated = []
        folder = self._target.place if name is None else self._target.place / name
        own_folder(pl_module, folder)  # `on_train_start` has warned of what it replaces
        rollout_source(pl_module, self).save_agents(str(folder))

    def _save_best(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the new best agents whole before the old ones go."""
        if not self._target.place.is_local:  # nothing can be renamed in one go
            self._save(pl_module, "best")
            return
        best, part = self._target.place / "best", self._target.place / ".best.part"
        self._save(pl_module, part.name)
        trainer.strategy.barrier("SaveAgents")
        if trainer.is_global_zero:
            best.remove()
            os.replace(part.local, best.local)


def _saves_below(folder: Place) -> list[Place]:
    """Folders of the best agents and of those after some batches."""
    return [*folder.glob("batch-*"), *folder.glob("best")]
