"""A run of twelve steps that can be killed: what it samples is written down step by step."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import LinearLR

from comlrl_lightning import MAGRPO, Sampling, SharedBase, TaskDataModule
from comlrl_lightning.callbacks import BatchCheckpoint, EvalInterval
from comlrl_lightning.callbacks.support import batches_trained
from comlrl_lightning.types import RolloutSource

ITEMS = [{"prompt": f"task {index}"} for index in range(6)]


def items() -> list[dict[str, str]]:
    """Six task items: two epochs make twelve steps."""
    return ITEMS


def reward(*completions: list[str]) -> list[float]:
    """Rewards that depend on every character."""
    return [sum("".join(joint).encode()) % 97 / 97 for joint in zip(*completions, strict=True)]


class Record(Callback):
    """Writes the items, sampled tokens and rewards of each training step as a line of JSON."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, RolloutSource)
        assert pl_module.rollouts is not None
        nodes = pl_module.rollouts.nodes
        tokens = [one.token_ids for node in nodes for group in node.completions for one in group]
        line = [pl_module.rollouts.indices, tokens, [node.rewards for node in nodes]]
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Kill(Callback):
    """Kills the process, without a chance to tidy up, before a training step; counted from 0 over all epochs."""

    def __init__(self, before_step: int) -> None:
        self.before_step = before_step

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if batches_trained(trainer) == self.before_step:
            os.kill(os.getpid(), signal.SIGKILL)


def run(model: str, folder: str, ckpt_path: str | None = None, kill: int | None = None) -> None:
    """Train from a script: shuffled items, a buffer of two nodes, a schedule, evaluations in between."""
    module = MAGRPO(
        agents=SharedBase(model, num_agents=2),
        reward_func=reward,
        num_generations=2,
        sampling=Sampling(max_new_tokens=6),
        rollout_buffer_size=2,
        agent_learning_rate=1e-2,
        lr_scheduler=partial(LinearLR, total_iters=3),
    )
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            EvalInterval(3),
            Record(f"{folder}/steps.jsonl"),
            BatchCheckpoint(every_n_batches=1, keep=None, dirpath=f"{folder}/saved"),
            ModelCheckpoint(f"{folder}/best", "{step}", monitor="eval/final_reward_mean", save_top_k=-1),
            *([] if kill is None else [Kill(kill)]),
        ],
    )
    trainer.fit(module, TaskDataModule(ITEMS, ITEMS[:2], shuffle=True), ckpt_path=ckpt_path)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], kill=int(sys.argv[3]))
