"""Cooperative multi-agent reinforcement learning of language models as PyTorch Lightning modules."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from comlrl_lightning._version import __version__

if TYPE_CHECKING:
    from comlrl_lightning.agents.critic_settings import AdapterCritic as AdapterCritic
    from comlrl_lightning.agents.critic_settings import ModelCritic as ModelCritic
    from comlrl_lightning.agents.critic_settings import ValueHead as ValueHead
    from comlrl_lightning.agents.settings import LoraSettings as LoraSettings
    from comlrl_lightning.agents.settings import Sampling as Sampling
    from comlrl_lightning.agents.settings import Separate as Separate
    from comlrl_lightning.agents.settings import SharedBase as SharedBase
    from comlrl_lightning.algorithms.actor_critic import IAC as IAC
    from comlrl_lightning.algorithms.actor_critic import MAAC as MAAC
    from comlrl_lightning.algorithms.cooperative import CooperativeModule as CooperativeModule
    from comlrl_lightning.algorithms.reinforce import MAGRPO as MAGRPO
    from comlrl_lightning.algorithms.reinforce import MAREINFORCE as MAREINFORCE
    from comlrl_lightning.algorithms.reinforce import MARLOO as MARLOO
    from comlrl_lightning.algorithms.reinforce import MAReMax as MAReMax
    from comlrl_lightning.data import TaskDataModule as TaskDataModule
    from comlrl_lightning.evaluation import evaluate as evaluate
    from comlrl_lightning.loggers import wandb_logger as wandb_logger
    from comlrl_lightning.rewards import RewardModel as RewardModel
    from comlrl_lightning.rewards import RewardProcessors as RewardProcessors
    from comlrl_lightning.rewards import WeightedRewards as WeightedRewards

_HOMES = {
    "agents.critic_settings": ("AdapterCritic", "ModelCritic", "ValueHead"),
    "agents.settings": ("LoraSettings", "Sampling", "Separate", "SharedBase"),
    "algorithms.actor_critic": ("IAC", "MAAC"),
    "algorithms.cooperative": ("CooperativeModule",),
    "algorithms.reinforce": ("MAGRPO", "MAREINFORCE", "MARLOO", "MAReMax"),
    "data": ("TaskDataModule",),
    "evaluation": ("evaluate",),
    "loggers": ("wandb_logger",),
    "rewards": ("RewardModel", "RewardProcessors", "WeightedRewards"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package stays fast."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
