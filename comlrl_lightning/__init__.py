"""Cooperative multi-agent reinforcement learning of language models as PyTorch Lightning modules."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from comlrl_lightning._version import __version__
from comlrl_lightning.utilities.quiet import silence_advertising, warn_of_still_bars

if TYPE_CHECKING:
    from comlrl_lightning.agents.engine import GenerationEngine as GenerationEngine
    from comlrl_lightning.agents.engine import GenerationRequest as GenerationRequest
    from comlrl_lightning.agents.engine import Sampled as Sampled
    from comlrl_lightning.agents.settings import LoraSettings as LoraSettings
    from comlrl_lightning.agents.settings import Sampling as Sampling
    from comlrl_lightning.agents.settings import Separate as Separate
    from comlrl_lightning.agents.settings import SharedBase as SharedBase
    from comlrl_lightning.algorithms.actor_critic import IAC as IAC
    from comlrl_lightning.algorithms.actor_critic import MAAC as MAAC
    from comlrl_lightning.algorithms.critic_free import MAGRPO as MAGRPO
    from comlrl_lightning.algorithms.critic_free import MAREINFORCE as MAREINFORCE
    from comlrl_lightning.algorithms.critic_free import MARLOO as MARLOO
    from comlrl_lightning.algorithms.critic_free import CriticFreeModule as CriticFreeModule
    from comlrl_lightning.algorithms.critic_free import MAReMax as MAReMax
    from comlrl_lightning.algorithms.madpo import MADPO as MADPO
    from comlrl_lightning.algorithms.marlhf import MARLHF as MARLHF
    from comlrl_lightning.algorithms.methods import ActorCritic as ActorCritic
    from comlrl_lightning.algorithms.methods import CriticFree as CriticFree
    from comlrl_lightning.algorithms.module import CooperativeModule as CooperativeModule
    from comlrl_lightning.critics.reward_settings import JointRewardModel as JointRewardModel
    from comlrl_lightning.critics.settings import AdapterCritic as AdapterCritic
    from comlrl_lightning.critics.settings import ModelCritic as ModelCritic
    from comlrl_lightning.critics.settings import ValueHead as ValueHead
    from comlrl_lightning.data.datamodule import TaskDataModule as TaskDataModule
    from comlrl_lightning.environment.joint_format import TaggedSections as TaggedSections
    from comlrl_lightning.environment.text_environment import TextEnvironment as TextEnvironment
    from comlrl_lightning.evaluation import evaluate as evaluate
    from comlrl_lightning.functional.policy import PolicyLoss as PolicyLoss
    from comlrl_lightning.learning.policy import PolicyBatch as PolicyBatch
    from comlrl_lightning.loggers import TaskWandbLogger as TaskWandbLogger
    from comlrl_lightning.loggers import wandb_logger as wandb_logger
    from comlrl_lightning.preferences.comparators import APIComparator as APIComparator
    from comlrl_lightning.preferences.comparators import CurrentPolicy as CurrentPolicy
    from comlrl_lightning.preferences.comparators import FixedModel as FixedModel
    from comlrl_lightning.preferences.comparators import FrozenCopy as FrozenCopy
    from comlrl_lightning.preferences.comparators import HistoryPolicy as HistoryPolicy
    from comlrl_lightning.preferences.replay import AllHistory as AllHistory
    from comlrl_lightning.preferences.replay import CurrentRound as CurrentRound
    from comlrl_lightning.preferences.replay import LambdaDecay as LambdaDecay
    from comlrl_lightning.preferences.replay import NearestK as NearestK
    from comlrl_lightning.rewards import RewardModel as RewardModel
    from comlrl_lightning.rewards import RewardProcessors as RewardProcessors
    from comlrl_lightning.rewards import WeightedRewards as WeightedRewards
    from comlrl_lightning.strategies.agent_parallel import AgentParallel as AgentParallel
    from comlrl_lightning.strategies.sharded_parallel import ShardedParallel as ShardedParallel
    from comlrl_lightning.tasks.task import Task as Task
    from comlrl_lightning.types import Completion as Completion
    from comlrl_lightning.types import Node as Node
    from comlrl_lightning.types import Rollouts as Rollouts

_HOMES = {
    "critics.settings": ("AdapterCritic", "ModelCritic", "ValueHead"),
    "critics.reward_settings": ("JointRewardModel",),
    "agents.settings": ("LoraSettings", "Sampling", "Separate", "SharedBase"),
    "algorithms.actor_critic": ("IAC", "MAAC"),
    "algorithms.module": ("CooperativeModule",),
    "algorithms.madpo": ("MADPO",),
    "algorithms.marlhf": ("MARLHF",),
    "algorithms.methods": ("ActorCritic", "CriticFree"),
    "algorithms.critic_free": ("CriticFreeModule", "MAGRPO", "MAREINFORCE", "MARLOO", "MAReMax"),
    "strategies.sharded_parallel": ("ShardedParallel",),
    "tasks.task": ("Task",),
    "agents.engine": ("GenerationEngine", "GenerationRequest", "Sampled"),
    "learning.policy": ("PolicyBatch",),
    "functional.policy": ("PolicyLoss",),
    "types": ("Completion", "Node", "Rollouts"),
    "environment.joint_format": ("TaggedSections",),
    "environment.text_environment": ("TextEnvironment",),
    "data.datamodule": ("TaskDataModule",),
    "evaluation": ("evaluate",),
    "loggers": ("TaskWandbLogger", "wandb_logger"),
    "preferences.comparators": ("APIComparator", "CurrentPolicy", "FixedModel", "FrozenCopy", "HistoryPolicy"),
    "preferences.replay": ("AllHistory", "CurrentRound", "LambdaDecay", "NearestK"),
    "rewards": ("RewardModel", "RewardProcessors", "WeightedRewards"),
    "strategies.agent_parallel": ("AgentParallel",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]


silence_advertising()
warn_of_still_bars()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package stays fast."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
