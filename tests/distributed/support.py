"""Fits of the same run by one process and by several, and what can be compared of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.algorithms import CooperativeModule, PreferenceModule
from comlrl_lightning.data.datamodule import TaskBatch, TaskDataModule
from comlrl_lightning.preferences.rounds import RoundProgress
from comlrl_lightning.types import Rollouts
from tests.algorithms.support import (
    MemoryLogger,
    RecordingSGD,
    echo,
    make_trainer,
    tiny_agents,
    trained_a_little,
    uneven_reward,
)
from tests.algorithms.test_cuts import exact_agents
from tests.distributed.launch import run_ranks

WORDS = ("hi", "there", "you", "all", "of", "the", "wide", "world", "and", "more", "!", "?")
Place = tuple[int, int, tuple[int, ...]]
"""Item, turn and path of a node."""
Gradients = list[list[list[Tensor | None]]]
"""`[steps][groups][parameters]`."""


def tasks(num_items: int) -> list[dict[str, Any]]:
    """Task items of different lengths."""
    return [{"prompt": WORDS[index % len(WORDS)] * (1 + index // len(WORDS))} for index in range(num_items)]


@dataclass
class Step:
    """One training step of one rank."""

    indices: tuple[int, ...]
    tokens: dict[Place, list[tuple[int, ...]]]
    """By item, turn and path: the sampled tokens of all agents."""
    num_nodes: int


class Watch(Callback):
    """Keeps what each training step has sampled and a digest of the weights after it."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.weights: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TaskBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, CooperativeModule)
        rollouts = pl_module.rollouts
        nodes = () if rollouts is None else rollouts.nodes
        self.steps.append(Step(tuple(batch.indices), tokens_of(rollouts), len(nodes)))
        self.weights.append(digest(pl_module))


def tokens_of(rollouts: Rollouts | None) -> dict[Place, list[tuple[int, ...]]]:
    """Sampled tokens by item, turn and path."""
    if rollouts is None:
        return {}
    return {
        (rollouts.indices[node.task], node.turn, node.path): [
            one.token_ids for group in node.completions for one in group
        ]
        for node in rollouts.nodes
    }


def digest(module: CooperativeModule) -> dict[str, float]:
    """A number for each trained parameter that any change of it changes."""
    return {
        name: float((value.detach().double() * torch.linspace(1, 2, value.numel()).view_as(value)).sum())
        for name, value in module.named_parameters()
        if value.requires_grad
    }


@dataclass(frozen=True)
class Run:
    """A run that one process or several can do; `batch_size` in `data` counts the items of all ranks."""

    algorithm: type[CooperativeModule]
    settings: dict[str, Any]
    data: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    """In double precision the team is GPT-2, which computes all of it so."""

    def module(self, trained: bool = True) -> CooperativeModule:
        """A new module; if `trained`, it is so a little, so that all of its gradients are of some size."""
        settings: dict[str, Any] = {
            "reward_func": uneven_reward,
            "sampling": Sampling(max_new_tokens=4),
            "seed": 1,
            **self.settings,
        }
        if "environment" in settings:
            settings["reward_func"] = None
        elif settings.get("num_turns", 1) > 1:
            settings["external_transition"] = echo
        agents = settings.pop("agents", None)
        torch.set_default_dtype(self.dtype)  # of the heads of critics
        try:
            if agents is None:
                agents = tiny_agents(dtype=torch.float32) if self.dtype == torch.float32 else exact_agents()
            module = self.algorithm(agents, **settings)
            return trained_a_little(module) if trained else module
        finally:
            torch.set_default_dtype(torch.float32)

    def on(self, world_size: int, **trainer: Any) -> list[Fit]:
        """What each rank can tell of it.

        Args:
            world_size: Number of ranks; one is this process itself.
            trainer: More settings of the trainer; `ckpt_path` goes to its fit, `trained` to `module`.
        """
        if world_size == 1:
            return [fit_on_rank(self, 1, trainer)]
        return run_ranks(fit_on_rank, world_size, self, world_size, trainer)


@dataclass
class Fit:
    """What one rank can tell of its fit."""

    steps: list[Step]
    weights: list[dict[str, float]]
    logged: list[tuple[int | None, dict[str, float]]]
    env_step: int
    update_step: int
    gradients: Gradients
    rounds: RoundProgress | None
    warned: list[str]

    @property
    def metrics(self) -> list[tuple[int | None, dict[str, float]]]:
        """What was logged but for wall times."""
        return [
            (step, {name: value for name, value in row.items() if not name.startswith("time/")})
            for step, row in self.logged
        ]


def fit_on_rank(run: Run, world_size: int, more: dict[str, Any]) -> Fit:
    """Do a run as one of `world_size` ranks, with more settings of the trainer."""
    settings: dict[str, Any] = {"strategy": "ddp", "devices": world_size} if world_size > 1 else {}
    settings |= {**run.trainer, **more}
    ckpt_path = settings.pop("ckpt_path", None)
    module, watch, logger = run.module(settings.pop("trained", True)), Watch(), MemoryLogger()
    trainer = make_trainer([*settings.pop("callbacks", ()), watch], logger=logger, **settings)
    data = TaskDataModule(**{**run.data, "batch_size": run.data["batch_size"] // world_size})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data, ckpt_path=ckpt_path)
    optimizer = trainer.optimizers[0]
    return Fit(
        watch.steps,
        watch.weights,
        logger.rows,
        module.env_step,
        module.update_step,
        optimizer.recorded if isinstance(optimizer, RecordingSGD) else [],
        module.rounds if isinstance(module, PreferenceModule) else None,
        [str(one.message) for one in caught],
    )


def all_tokens(fits: Sequence[Fit]) -> list[dict[Place, list[tuple[int, ...]]]]:
    """Per step, the sampled tokens of all ranks."""
    return [
        {place: tokens for step in steps for place, tokens in step.tokens.items()}
        for steps in zip(*(one.steps for one in fits), strict=True)
    ]


def assert_in_step(fits: Sequence[Fit]) -> None:
    """All ranks have the same weights and have logged the same after each step."""
    first, *others = fits
    for other in others:
        assert len(other.steps) == len(first.steps)
        assert other.weights == first.weights
        assert other.logged == first.logged
        assert (other.env_step, other.update_step) == (first.env_step, first.update_step)
