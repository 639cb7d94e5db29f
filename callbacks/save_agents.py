"""The agents as model folders."""

from __future__ import annotations

import operator
import shutil
from pathlib import Path
from typing import Any, Literal

from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from comlrl_lightning.callbacks.support import batches_trained, check_count, is_rehearsal, rollout_source, run_folder
from comlrl_lightning.keywords import KnownKeywords


class SaveAgents(Callback, KnownKeywords):
    """Save the agents as standard PEFT or model folders with their tokenizers, one per agent.

    At the end of training ``folder/agent_0``, ``folder/agent_1``, ... are written. With `monitor` the best agents so
    far stand in ``folder/best``, with `every_n_batches` those after n batches in ``folder/batch-000012`` and so on.

    Args:
        folder: Where the folders of the agents go; None takes ``agents`` in the folder of the run.
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
        self._given_folder = None if folder is None else str(folder)
        self._folder = Path(folder or "agents")
        self._every_n_batches = every_n_batches
        self._monitor = monitor
        self._is_better = operator.gt if mode == "max" else operator.lt
        self._best: float | None = None

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(folder=self._given_folder, monitor=self._monitor)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._given_folder is None:
            self._folder = Path(trainer.strategy.broadcast(run_folder(trainer))) / "agents"

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is None and rollout_source(pl_module, self).env_step == 0:
            self._best = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        num_batches = batches_trained(trainer)
        is_due = self._every_n_batches is not None and num_batches % self._every_n_batches == 0
        if is_due and not is_rehearsal(trainer):
            rollout_source(pl_module, self).save_agents(self._folder / f"batch-{num_batches:06d}")

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
            rollout_source(pl_module, self).save_agents(self._folder)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best = state_dict["best"]

    def _save_best(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the new best agents whole before the old ones go."""
        best, part = self._folder / "best", self._folder / ".best.part"
        rollout_source(pl_module, self).save_agents(part)
        trainer.strategy.barrier("SaveAgents")
        if trainer.is_global_zero:
            shutil.rmtree(best, ignore_errors=True)
            part.rename(best)
