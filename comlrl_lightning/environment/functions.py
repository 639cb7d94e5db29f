"""The user's functions of a task behind checked calls, from an algorithm's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from comlrl_lightning.environment.joint_format import JointFormat
from comlrl_lightning.environment.prompts import Formatters, Transition
from comlrl_lightning.environment.reward import RewardFunction
from comlrl_lightning.environment.reward_workers import RewardWorkers


@dataclass(frozen=True, slots=True)
class TaskFunctions:
    """Prompts, reward and transition of a task, each a checked function of the user."""

    formatters: Formatters
    reward: RewardFunction
    transition: Transition | None = None
    external_prompt_passthrough: bool = False
    joint_format: JointFormat | None = None
    """How one model is asked to answer for all agents; None: each agent answers."""
    workers: RewardWorkers = field(default_factory=RewardWorkers)
    """Where the reward runs."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts of the reward."""
        return self.reward.part_names

    @property
    def per_agent(self) -> bool:
        """Whether each agent is credited with rewards of its own."""
        return self.reward.per_agent

    @classmethod
    def of_functions(
        cls,
        num_agents: int,
        reward_func: Callable[..., Any],
        formatters: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        reward_processor: Callable[[float], float] | None = None,
        transition: Callable[..., Any] | None = None,
        *,
        external_prompt_passthrough: bool = False,
        joint_format: JointFormat | None = None,
        none_as_nan: bool = False,
        workers: RewardWorkers | None = None,
    ) -> TaskFunctions:
        """Put functions behind checked calls.

        Args:
            num_agents: N.
            reward_func: The reward of joint completions.
            formatters: None, one for all agents, or one per agent.
            reward_processor: Maps each reward.
            transition: The prompts of the turns after the first.
            external_prompt_passthrough: Use the transition's prompts without the formatters.
            joint_format: How one model answers for all agents.
            none_as_nan: NaN stands for rewards that are None; else None is an error.
            workers: Where the reward runs; None: in place.

        Raises:
            ValueError: If a function does not fit.
        """
        workers = workers or RewardWorkers()
        reward = RewardFunction(reward_func, num_agents, reward_processor, none_as_nan=none_as_nan)
        workers.check(reward)
        return cls(
            Formatters(formatters, num_agents),
            reward,
            None if transition is None else Transition(transition, num_agents),
            external_prompt_passthrough,
            joint_format,
            workers,
        )
