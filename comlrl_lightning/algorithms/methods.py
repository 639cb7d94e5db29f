"""How each of the six policy-gradient algorithms learns, apart from the module that drives it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Literal

from typing_extensions import override

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.algorithms.checks import check_nodes, check_sampling
from comlrl_lightning.critics.critics import CriticTeam
from comlrl_lightning.critics.settings import AdapterCritic, ModelCritic, ValueHead, check_critic
from comlrl_lightning.functional import Baseline
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.learning.actor_critic import ActorCriticLearner
from comlrl_lightning.learning.policy import GroupRelativeLearner, Learner
from comlrl_lightning.learning.settings import PolicySettings, ValueSettings
from comlrl_lightning.metrics import MetricTable
from comlrl_lightning.rollouts.collect import RolloutShape
from comlrl_lightning.utilities.checks import check_choice

CriticFreeName = Literal["MAREINFORCE", "MAGRPO", "MARLOO", "MAReMax"]
ActorCriticName = Literal["IAC", "MAAC"]
BASELINES: dict[str, Baseline] = {
    "MAREINFORCE": "none",
    "MAGRPO": "group_mean",
    "MARLOO": "leave_one_out",
    "MAReMax": "group_max",
}
"""What each critic-free algorithm subtracts from a return."""


class Method(ABC, KnownKeywords):
    """How a policy learns from rewards, whichever module drives it."""

    algorithm: str
    """Name of the algorithm."""

    @abstractmethod
    def rollout_shape(self, shape: RolloutShape) -> RolloutShape:
        """The shape of this algorithm's rollouts, from one with its width and depth."""

    @abstractmethod
    def check(self, shape: RolloutShape, num_agents: int, sampling: Sampling, max_nodes: int) -> None:
        """Refuse what does not go together, before any weights load.

        Args:
            shape: Of this algorithm's rollouts.
            num_agents: N.
            sampling: How completions are drawn in training.
            max_nodes: Largest number of nodes per task item.

        Raises:
            ValueError: A group is too small for its baseline, a critic does not fit, sampling would bias the update,
                or rollouts grow too large.
        """

    def critic_groups(self, num_agents: int) -> list[str]:
        """Names of the parameter groups of critics."""
        return []

    def critic_rates(self, num_agents: int) -> list[float]:
        """Their learning rates."""
        return []

    @abstractmethod
    def learner(
        self, team: AgentTeam, policy: PolicySettings, micro_batch_tokens: int, table: MetricTable, per_agent: bool
    ) -> Learner:
        """The credit and the loss of this algorithm; critics load here.

        Args:
            team: The agents.
            policy: Settings of the policy loss.
            micro_batch_tokens: Padded tokens per forward pass.
            table: Where metrics go.
            per_agent: Whether each agent has a reward of its own.
        """


@dataclass(frozen=True)
class CriticFree(Method):
    """Policy learning without critics, by the name of the algorithm; its class documents the settings."""

    algorithm: CriticFreeName = "MAGRPO"
    """Which baseline returns are compared with."""
    joint_mode: Literal["aligned", "cross"] = "aligned"
    """``"aligned"`` scores the k-th completions of all agents together, ``"cross"`` every combination."""
    advantage_normalization: Literal["group", "batch", False, None] = None
    """Scale of the advantages: per group, over the buffer, or as they are. None: per group; False for MAREINFORCE."""

    def __post_init__(self) -> None:
        check_choice(tuple(BASELINES), algorithm=self.algorithm)
        check_choice(("group", "batch", False, None), advantage_normalization=self.advantage_normalization)
        if self.advantage_normalization is None:
            object.__setattr__(self, "advantage_normalization", False if self.baseline == "none" else "group")
        if self.baseline == "none" and self.advantage_normalization == "group":
            raise ValueError(
                f"{self.algorithm}(advantage_normalization='group') has no baseline: a group of equal returns would be"
                " divided by almost nothing. Use 'batch' or False."
            )

    @property
    def baseline(self) -> Baseline:
        """What is subtracted from a return."""
        return BASELINES[self.algorithm]

    @override
    def rollout_shape(self, shape: RolloutShape) -> RolloutShape:
        return replace(shape, joint_mode=self.joint_mode)

    @override
    def check(self, shape: RolloutShape, num_agents: int, sampling: Sampling, max_nodes: int) -> None:
        if shape.num_generations == 1 and self.advantage_normalization == "batch":
            raise ValueError(
                f"{self.algorithm}(num_generations=1, advantage_normalization='batch') has no spread inside groups to"
                " measure. Use num_generations >= 2 or advantage_normalization=False."
            )
        if shape.num_generations == 1 and self.baseline != "none":
            raise ValueError(
                f"{self.algorithm}(num_generations=1) compares a completion with itself, so that every advantage is 0."
                " Use num_generations >= 2, or MAREINFORCE."
            )
        check_sampling(self.algorithm, sampling, refuse=self.baseline == "none")
        one_is_enough = self.baseline == "none" and self.advantage_normalization != "batch"
        check_nodes(shape, num_agents, max_nodes, min_generations=1 if one_is_enough else 2)

    @override
    def learner(
        self, team: AgentTeam, policy: PolicySettings, micro_batch_tokens: int, table: MetricTable, per_agent: bool
    ) -> GroupRelativeLearner:
        assert self.advantage_normalization is not None
        return GroupRelativeLearner(
            team, policy, self.baseline, self.advantage_normalization, micro_batch_tokens, table
        )


@dataclass(frozen=True)
class ActorCritic(Method):
    """Policy learning with critics, by the name of the algorithm; its class documents the settings."""

    algorithm: ActorCriticName = "MAAC"
    """``"IAC"`` has a critic per agent, ``"MAAC"`` one that sees all agents."""
    critic: ValueHead | AdapterCritic | ModelCritic = AdapterCritic()  # noqa: RUF009  (frozen)
    """What judges."""
    critic_type: Literal["v", "q"] = "v"
    """``"v"`` reads prompts, ``"q"`` completions, too."""
    critic_learning_rate: float | None = None
    """Of the critics. None: 1e-4, or 5e-6 where all weights of a model are trained."""
    value_loss_coef: float = 0.6
    """Weight of the value loss where it shares parameters with the policy."""
    value_clip_range: float | None = None
    """Largest change of a value that a buffer's updates are paid for. None: no limit."""
    gae_lambda: float = 1.0
    """From 1 (returns minus values) to 0 (TD errors)."""
    advantage_normalization: Literal["batch", False] = "batch"
    """Center and scale advantages over the buffer, or leave them alone."""

    def __post_init__(self) -> None:
        check_choice(("IAC", "MAAC"), algorithm=self.algorithm)
        self.values()

    def values(self) -> ValueSettings:
        """The settings of the values and of their loss."""
        return ValueSettings(**{field.name: vars(self)[field.name] for field in fields(ValueSettings)})

    @property
    def centralized(self) -> bool:
        """Whether one critic judges all agents."""
        return self.algorithm == "MAAC"

    @override
    def rollout_shape(self, shape: RolloutShape) -> RolloutShape:
        return replace(shape, trajectories=True)

    @override
    def check(self, shape: RolloutShape, num_agents: int, sampling: Sampling, max_nodes: int) -> None:
        check_critic(self.critic, num_agents, self.centralized)
        check_sampling(self.algorithm, sampling, refuse=False)
        check_nodes(shape, num_agents, max_nodes)

    @override
    def critic_groups(self, num_agents: int) -> list[str]:
        return ["critic"] if self.centralized else [f"critic_{agent}" for agent in range(num_agents)]

    @override
    def critic_rates(self, num_agents: int) -> list[float]:
        trains_all = isinstance(self.critic, ModelCritic) and self.critic.lora is None
        default = 5e-6 if trains_all else 1e-4
        rate = default if self.critic_learning_rate is None else self.critic_learning_rate
        return [rate] * len(self.critic_groups(num_agents))

    @override
    def learner(
        self, team: AgentTeam, policy: PolicySettings, micro_batch_tokens: int, table: MetricTable, per_agent: bool
    ) -> ActorCriticLearner:
        one_output = self.centralized and not per_agent
        critics = CriticTeam.build(
            self.critic,
            team,
            centralized=self.centralized,
            critic_type=self.critic_type,
            num_outputs=1 if one_output else team.num_agents,
        )
        return ActorCriticLearner(team, critics, policy, self.values(), micro_batch_tokens, table)
