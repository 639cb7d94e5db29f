"""A module that rolls out without language models, for tests of callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn

from comlrl_lightning.data.datamodule import TaskBatch, TaskDataModule
from comlrl_lightning.types import Completion, Node, Rollouts

ITEMS = [{"prompt": f"task {index}", "level": index} for index in range(8)]


def completion(agent: int, text: str) -> Completion:
    return Completion(agent, f"prompt {agent}", (1, 2), (5,), (-0.5,), text, truncated=False)


def node(task: int, turn: int, texts: tuple[tuple[str, ...], ...], rewards: tuple[float, ...]) -> Node:
    """A node of aligned joint completions: `texts[agent][k]`."""
    completions = tuple(tuple(completion(agent, text) for text in group) for agent, group in enumerate(texts))
    joint = tuple((k,) * len(texts) for k in range(len(rewards)))
    prompts = tuple(f"prompt {agent}" for agent in range(len(texts)))
    path, parent = ((), None) if turn == 1 else ((0,), (task, 0))
    return Node(task, turn, path, parent, prompts, completions, joint, rewards)


def central_node(task: int, turn: int, sections: tuple[tuple[str, ...], ...], rewards: tuple[float, ...]) -> Node:
    """A node of one model that answers for all agents: `sections[k][agent]`."""
    completions = (tuple(completion(0, " | ".join(answers)) for answers in sections),)
    aligned = node(task, turn, tuple(zip(*sections, strict=True)), rewards)
    joint = tuple((k,) for k in range(len(rewards)))
    return replace(aligned, completions=completions, joint=joint, sections=sections)


def rollouts_of(batch: TaskBatch, num_generations: int = 1) -> Rollouts:
    """Two agents; items with an even level get a second turn. The reward is the level plus a tenth of the turn."""
    nodes = []
    for turn in (1, 2):
        for task, item in enumerate(batch.items):
            if turn == 1 or item["level"] % 2 == 0:
                texts = tuple((f"a{agent} of {item['prompt']} t{turn}",) * num_generations for agent in range(2))
                nodes.append(node(task, turn, texts, (item["level"] + turn / 10,) * num_generations))
    return Rollouts(tuple(batch.items), tuple(batch.indices), tuple(nodes))


class FakeModule(LightningModule):
    """Satisfies `RolloutSource`; its weights follow the global random numbers and the items that it trains."""

    def __init__(self, num_turns: int = 2) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.env_step = 0
        self.num_agents = 2
        self.num_turns = num_turns
        self.rollouts: Rollouts | None = None
        self.evaluated: list[Rollouts] = []
        self.trained: list[int] = []
        self.saved: list[str] = []
        self.logged: list[tuple[int, dict[str, float]]] = []

    def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
        self.rollouts = rollouts_of(batch, num_generations=2)
        self.env_step += self.rollouts.num_scored
        self.trained += batch.indices
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        optimizer.zero_grad()
        self.manual_backward((self.layer.weight * torch.rand(()) * (1 + sum(batch.indices))).sum())
        optimizer.step()
        batch.mark_trained(self.trainer.is_last_batch)

    def on_validation_epoch_start(self) -> None:
        self.evaluated = []

    def validation_step(self, batch: TaskBatch, batch_idx: int) -> None:
        torch.rand(3)
        self.evaluated.append(rollouts_of(batch))

    def on_validation_epoch_end(self) -> None:
        rewards = [node.rewards[0] for node in self.evaluation_rollouts().nodes if node.turn == 1]
        metrics = {"eval/turn_1/reward_mean": sum(rewards) / len(rewards) + self.env_step}
        self.log_dict({**metrics, "step": float(self.env_step)}, batch_size=1)

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def evaluation_rollouts(self) -> Rollouts:
        nodes: list[Node] = []
        items: list[Any] = []
        indices: list[int] = []
        for part in self.evaluated:
            for entry in part.nodes:
                copy = entry.to_state() | {"task": entry.task + len(items)}
                nodes.append(Node.from_state(copy))
            items += part.items
            indices += part.indices
        nodes.sort(key=lambda entry: entry.turn)
        return Rollouts(tuple(items), tuple(indices), tuple(nodes))

    def log_now(self, metrics: Mapping[str, float]) -> None:
        self.logged.append((self.env_step, dict(metrics)))

    def save_agents(self, folder: str | Path) -> None:
        for agent in range(self.num_agents):
            path = Path(folder) / f"agent_{agent}"
            path.mkdir(parents=True, exist_ok=True)
            (path / "weight.txt").write_text(str(self.layer.weight.item()))
        self.saved.append(Path(folder).name)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["fake"] = {"env_step": self.env_step, "random": torch.get_rng_state()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.env_step = checkpoint["fake"]["env_step"]
        self._random = checkpoint["fake"]["random"]

    def on_train_start(self) -> None:
        if self.trainer.ckpt_path is not None:
            torch.set_rng_state(self._random)


class Trace(Callback):
    """Writes down trained items and evaluations in order: ``T0``, ``V@4`` for an evaluation at env_step 4."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TaskBatch, batch_idx: int
    ) -> None:
        self.events += [f"T{index}" for index in batch.indices]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, FakeModule)
        self.events.append("V")


def data(train: int = 8, evaluation: int = 3, **settings: Any) -> TaskDataModule:
    """The first items for training, the first again for evaluation; none if 0."""
    split = ITEMS[:evaluation] or None
    return TaskDataModule(train_dataset=ITEMS[:train], eval_dataset=split, **settings)


def quiet_trainer(root: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    """A trainer that writes nothing but what the callbacks write."""
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False} | settings
    return Trainer(
        default_root_dir=root,
        callbacks=list(callbacks),
        accelerator="cpu",
        enable_progress_bar=settings.pop("enable_progress_bar", False),
        enable_model_summary=False,
        **settings,
    )
