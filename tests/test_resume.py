"""A run that was stopped during an evaluation goes on as if it had not been: tokens, rewards, weights, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import LinearLR

from comlrl_lightning import MAGRPO, LoraSettings, Sampling, SharedBase, TaskDataModule
from comlrl_lightning.callbacks import EvalInterval
from comlrl_lightning.tasks import length_ratio
from comlrl_lightning.types import RolloutSource
from tests.tiny_lm import save_tiny

ITEMS = [{"prompt": f"task {index}"} for index in range(10)]
SEQUENCE = list[tuple[list[int], list[tuple[int, ...]], list[float]]]


def reward_func(first: list[str], second: list[str]) -> list[float]:
    """Differs between most joint completions, so that every update moves the weights."""
    return [sum(map(ord, a + b)) % 7 / 7 for a, b in zip(first, second, strict=True)]


class Stream:
    """The items without a length."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(ITEMS)


class Record(Callback):
    """Items, sampled tokens and rewards of each training step; env_steps of evaluations."""

    def __init__(self) -> None:
        self.steps: SEQUENCE = []
        self.evaluations: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, RolloutSource)
        rollouts = pl_module.rollouts
        assert rollouts is not None
        tokens = [sample.token_ids for node in rollouts.nodes for group in node.completions for sample in group]
        rewards = [reward for node in rollouts.nodes for reward in node.rewards]
        self.steps.append((list(rollouts.indices), tokens, rewards))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, RolloutSource)
        self.evaluations.append(pl_module.env_step)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


def run(model: str, folder: Path, items: Any, ckpt_path: Path | None = None) -> tuple[Record, dict[str, torch.Tensor]]:
    module = MAGRPO(
        agents=SharedBase(model, num_agents=2, lora=LoraSettings(rank=2)),
        formatters=[length_ratio.brief_formatter, length_ratio.detailed_formatter],
        reward_func=reward_func,
        num_generations=2,
        sampling=Sampling(max_new_tokens=5),
        rollout_buffer_size=3,
        agent_learning_rate=1e-2,
        lr_scheduler=partial(LinearLR, total_iters=5),
    )
    record = Record()
    best = ModelCheckpoint(folder, "{epoch}-{step}", monitor="eval/final_reward_mean", save_top_k=-1)
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[EvalInterval(4), record, best],
    )
    data = TaskDataModule(items, ITEMS[:2], shuffle=items is ITEMS)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return record, {name: value.clone() for name, value in module.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("items", [ITEMS, Stream()], ids=["shuffled", "stream"])
def test_resume_from_checkpoints_saved_during_evaluations(model: str, tmp_path: Path, items: Any) -> None:
    whole, expected = run(model, tmp_path / "whole", items)
    # Ten items per epoch, two joint completions each: evaluations before items 0, 4, 8. The buffer of three nodes is
    # used after items 2, 5, 8 and with what is left after item 9, so that evaluations find one or two nodes in it.
    assert whole.evaluations == [0, 8, 16, 20, 28, 36]
    checkpoints = sorted((tmp_path / "whole").iterdir(), key=lambda path: path.stat().st_mtime)
    # Lightning saves nothing before the first optimizer step.
    for evaluation, checkpoint in zip(whole.evaluations[1:], checkpoints, strict=True):
        resumed, weights = run(model, tmp_path / "resumed", items, checkpoint)
        assert resumed.steps == whole.steps[evaluation // 2 :]
        assert resumed.evaluations == [env_step for env_step in whole.evaluations if env_step > evaluation]
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
