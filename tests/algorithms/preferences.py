"""Modules that learn from preferences in short fits, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.algorithms import MADPO, MARLHF, CooperativeModule, PreferenceModule
from comlrl_lightning.critics.reward_settings import JointRewardModel
from tests.algorithms.support import ITEMS, MemoryLogger, fit, tiny_agents, uneven_reward

DEFAULTS: dict[str, Any] = {
    "reward_func": uneven_reward,
    "num_candidates": 4,
    "sampling": Sampling(max_new_tokens=4),
    "agent_learning_rate": 0.01,
    "seed": 1,
}


def direct(**settings: Any) -> MADPO:
    return MADPO(settings.pop("agents", None) or tiny_agents(), **{**DEFAULTS, **settings})


def indirect(**settings: Any) -> MARLHF:
    more = {"num_generations": 2, "reward_model": JointRewardModel(learning_rate=0.01)}
    return MARLHF(settings.pop("agents", None) or tiny_agents(), **{**DEFAULTS, **more, **settings})


MAKERS: tuple[Callable[..., PreferenceModule], ...] = (direct, indirect)


def trained(module: CooperativeModule, part: str = "") -> dict[str, Tensor]:
    """A copy of the trained weights under a name."""
    named = module.named_parameters()
    return {name: value.detach().clone() for name, value in named if value.requires_grad and name.startswith(part)}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    assert ours
    assert list(ours) == list(theirs)
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


def begun(module: PreferenceModule) -> dict[str, Tensor]:
    """The weights before any training."""
    module.configure_model()
    return trained(module)


class Rows(MemoryLogger):
    """Training logs without wall times, and evaluations."""

    @property
    def training(self) -> list[dict[str, float]]:
        rows = [row for _, row in self.rows if not any(key.startswith("eval/") for key in row)]
        return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]

    @property
    def evaluations(self) -> list[dict[str, float]]:
        return [row for _, row in self.rows if any(key.startswith("eval/") for key in row)]


class AtEnds(Callback):
    """What a module looks like at the end of every epoch."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        self.look = look
        self.seen: list[Any] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append(self.look(pl_module))


def run(module: PreferenceModule, num_rounds: int = 1, callbacks: Sequence[Callback] = (), **settings: Any) -> Rows:
    """Fit, one item per step, and return what was logged."""
    rows = Rows()
    items = settings.pop("items", ITEMS)
    fit(module, items, 1, callbacks, max_epochs=num_rounds * module.epochs_per_round, logger=rows, **settings)
    return rows
