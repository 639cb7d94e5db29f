"""How policies learn from rewards: credit, loss and critics, for the algorithms and for the policies of MARLHF."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.algorithms.checks import check_nodes, check_sampling
from comlrl_lightning.critics.loading import build_critics
from comlrl_lightning.critics.settings import AdapterCritic, ModelCritic, ValueHead, check_critic
from comlrl_lightning.functional import PolicyLoss, group_max, group_mean, leave_one_out
from comlrl_lightning.keywords import known_keywords
from comlrl_lightning.learning.actor_critic import ActorCriticLearner
from comlrl_lightning.learning.policy import GroupRelativeLearner, Learner, PolicyBatch, clipped_policy_loss
from comlrl_lightning.learning.settings import PolicySettings, ValueSettings
from comlrl_lightning.metrics import MetricTable
from comlrl_lightning.rollouts.collect import RolloutShape
from comlrl_lightning.utilities.checks import check_choice
from comlrl_lightning.utilities.documentation import document_fields

CriticFreeName = Literal["MAREINFORCE", "MAGRPO", "MARLOO", "MAReMax"]
ActorCriticName = Literal["IAC", "MAAC"]
BASELINES: dict[str, Callable[[Tensor], Tensor]] = {
    "MAREINFORCE": torch.zeros_like,
    "MAGRPO": group_mean,
    "MARLOO": leave_one_out,
    "MAReMax": group_max,
}


class PolicyMethod(ABC):
    """Credit, loss and critics of a team's policies."""

    loss_metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the sums that `policy_loss` adds: logged per token under ``agent_i/``."""

    @property
    @abstractmethod
    def method_name(self) -> str:
        """Name of the algorithm."""

    @abstractmethod
    def method_shape(self, shape: RolloutShape) -> RolloutShape:
        """The shape of this algorithm's rollouts, from one with its width and depth."""

    @abstractmethod
    def check_method(self, shape: RolloutShape, num_agents: int, sampling: Sampling, max_nodes: int) -> None:
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
        """Learning rates of `critic_groups`."""
        return []

    def policy_loss(self, batch: PolicyBatch) -> PolicyLoss:
        """`[R]` loss of each completion, to be added over completions and divided by nodes.

        Override it for a loss of your own; it is called on micro-batches, with gradients.

        Args:
            batch: Completions of any agents, with everything that a loss may need.
        """
        return clipped_policy_loss(batch)

    @abstractmethod
    def make_learner(
        self, team: AgentTeam, policy: PolicySettings, micro_batch_tokens: int, metrics: MetricTable, *, per_agent: bool
    ) -> Learner:
        """Credit and loss for a team; critics load here.

        Args:
            team: The agents.
            policy: Settings of the policy loss.
            micro_batch_tokens: Padded tokens per forward pass.
            metrics: Table for metrics.
            per_agent: Whether each agent has a reward of its own.
        """


@dataclass(kw_only=True, eq=False, repr=False)
class CriticFreeMethod(PolicyMethod):
    """Policy gradients without critics: returns against a baseline from their group."""

    joint_mode: Literal["aligned", "cross"] = "aligned"
    """``"aligned"`` scores the k-th completions of all agents together (J=K); ``"cross"`` scores every combination
    (J=K^N) and gives each completion the mean over its partners. With the group mean as baseline that is the
    counterfactual baseline; the noise from pairwise interactions falls as 1/K, not 1/K^(N-1)."""
    advantage_normalization: Literal["group", "batch", False, None] = None
    """Divide advantages by the standard deviation of their ``"group"``'s returns, by the root mean square over the
    buffer (``"batch"``), or not at all (False). None: per group; False for an algorithm without a baseline."""

    has_baseline: ClassVar[bool] = True
    """False: returns are used as they are."""

    @abstractmethod
    def baseline(self, returns: Tensor) -> Tensor:
        """What is subtracted from the returns of a group.

        Args:
            returns: `[..., K]` returns of one agent's completions, one group per row.

        Returns:
            `[..., 1]` or `[..., K]` baselines.
        """

    def kl_baseline(self, log_ratios: Tensor) -> Tensor:
        """What is subtracted from the `[..., K]` log-ratios to the reference policy before they are a penalty."""
        return group_mean(log_ratios)

    def resolve_normalization(self) -> None:
        """Take the default of the baseline, and refuse what has no meaning under it.

        Raises:
            ValueError: If the normalization is unknown, or per group without a baseline.
        """
        check_choice(("group", "batch", False, None), advantage_normalization=self.advantage_normalization)
        if self.advantage_normalization is None:
            self.advantage_normalization = "group" if self.has_baseline else False
        if not self.has_baseline and self.advantage_normalization == "group":
            raise ValueError(
                f"{self.method_name}(advantage_normalization='group') has no baseline: a group of equal returns would"
                " be divided by almost nothing. Use 'batch' or False."
            )

    @override
    def method_shape(self, shape: RolloutShape) -> RolloutShape:
        return replace(shape, joint_mode=self.joint_mode)

    @override
    def check_method(self, shape: RolloutShape, num_agents: int, sampling: Sampling, max_nodes: int) -> None:
        if shape.trajectories and self.joint_mode == "cross":
            raise ValueError(
                f"{self.method_name}(joint_mode='cross') combines completions of the same prompts, and the episodes of"
                " an environment part after their first step. Use joint_mode='aligned'."
            )
        if shape.num_generations == 1 and self.advantage_normalization == "batch":
            raise ValueError(
                f"{self.method_name}(num_generations=1, advantage_normalization='batch') has no spread inside groups to"
                " measure. Use num_generations >= 2 or advantage_normalization=False."
            )
        if shape.num_generations == 1 and self.has_baseline:
            raise ValueError(
                f"{self.method_name}(num_generations=1) compares a completion with itself, so that every advantage is"
                " 0. Use num_generations >= 2, or MAREINFORCE."
            )
        check_sampling(self.method_name, sampling, refuse=not self.has_baseline)
        one_is_enough = not self.has_baseline and self.advantage_normalization != "batch"
        check_nodes(shape, num_agents, max_nodes, min_generations=1 if one_is_enough else 2)

    @override
    def make_learner(
        self, team: AgentTeam, policy: PolicySettings, micro_batch_tokens: int, metrics: MetricTable, *, per_agent: bool
    ) -> GroupRelativeLearner:
        assert self.advantage_normalization is not None
        return GroupRelativeLearner(
            team,
            policy,
            self.baseline,
            self.advantage_normalization,
            micro_batch_tokens,
            metrics,
            self.policy_loss,
            self.loss_metrics,
            self.kl_baseline,
        )


@dataclass(kw_only=True, eq=False, repr=False)
class ActorCriticMethod(PolicyMethod):
    """Policy gradients against the values of critics, which learn along."""

    critic: ValueHead | AdapterCritic | ModelCritic = AdapterCritic()  # noqa: RUF009  (frozen)
    """Source of the values: `AdapterCritic` (one more adapter on the agents' frozen base), `ModelCritic` (another
    model) or `ValueHead` (a head on the agent's own hidden states). Values start at 0."""
    critic_type: Literal["v", "q"] = "v"
    """``"v"`` reads the prompts of a turn, ``"q"`` the completions, too. Under ``"q"`` a completion's advantage is its
    target minus the mean value of the other trajectories' completions of the same prompts."""
    critic_learning_rate: float | None = None
    """Learning rate of the critics. None: 1e-4, or 5e-6 where all weights of a model are trained."""
    value_loss_coef: float = 0.6
    """Weight of the value loss where it shares parameters with the policy, which is under `ValueHead` only: there it
    trains the agent's own adapter along."""
    value_clip_range: float | None = None
    """Clip range of the value loss (PPO), in units of reward. None: no clipping."""
    gae_lambda: float = 1.0
    """From 1 (advantages are returns minus values) to 0 (TD errors: the critic is trusted)."""
    advantage_normalization: Literal["batch", False] = "batch"
    """``"batch"`` centers and scales advantages per agent and turn over the buffers of all ranks, where these hold at
    least four of them; fewer stay as they are, since two would be +1 and -1 whatever the gap. False: none of them."""

    centralized: ClassVar[bool]
    """Whether one critic values the joint history; otherwise each agent has a critic for its own."""

    def value_settings(self) -> ValueSettings:
        """The settings of the values and of their loss.

        Raises:
            ValueError: If one is out of range.
        """
        return ValueSettings(
            self.critic_type,
            self.critic_learning_rate,
            self.value_loss_coef,
            self.value_clip_range,
            self.gae_lambda,
            self.advantage_normalization,
        )

    @override
    def method_shape(self, shape: RolloutShape) -> RolloutShape:
        return replace(shape, trajectories=True)

    @override
    def check_method(self, shape: RolloutShape, num_agents: int, sampling: Sampling, max_nodes: int) -> None:
        check_critic(self.critic, num_agents, self.centralized)
        check_sampling(self.method_name, sampling, refuse=False)
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
    def make_learner(
        self, team: AgentTeam, policy: PolicySettings, micro_batch_tokens: int, metrics: MetricTable, *, per_agent: bool
    ) -> ActorCriticLearner:
        critics = build_critics(
            self.critic,
            team,
            centralized=self.centralized,
            critic_type=self.critic_type,
            num_outputs=1 if self.centralized and not per_agent else team.num_agents,
        )
        return ActorCriticLearner(
            team,
            critics,
            policy,
            self.value_settings(),
            micro_batch_tokens,
            metrics,
            self.policy_loss,
            self.loss_metrics,
        )


@known_keywords
@document_fields
@dataclass(kw_only=True, eq=True)
class CriticFree(CriticFreeMethod):
    """Policy learning without critics, by the name of the algorithm."""

    algorithm: CriticFreeName = field(default="MAGRPO", kw_only=False)
    """Algorithm whose baseline returns are compared with."""

    def __post_init__(self) -> None:
        check_choice(tuple(BASELINES), algorithm=self.algorithm)
        self.resolve_normalization()

    @property
    @override
    def method_name(self) -> str:
        return self.algorithm

    @property
    def has_baseline(self) -> bool:  # type: ignore[override]
        """Whether something is subtracted from returns."""
        return self.algorithm != "MAREINFORCE"

    @override
    def baseline(self, returns: Tensor) -> Tensor:
        return BASELINES[self.algorithm](returns)

    @override
    def kl_baseline(self, log_ratios: Tensor) -> Tensor:
        return group_mean(log_ratios) if self.algorithm == "MAReMax" else self.baseline(log_ratios)


@known_keywords
@document_fields
@dataclass(kw_only=True, eq=True)
class ActorCritic(ActorCriticMethod):
    """Policy learning with critics, by the name of the algorithm."""

    algorithm: ActorCriticName = field(default="MAAC", kw_only=False)
    """``"IAC"`` has a critic per agent, ``"MAAC"`` one that sees all agents."""

    def __post_init__(self) -> None:
        check_choice(("IAC", "MAAC"), algorithm=self.algorithm)
        self.value_settings()

    @property
    @override
    def method_name(self) -> str:
        return self.algorithm

    @property
    def centralized(self) -> bool:  # type: ignore[override]
        """Whether one critic values the joint history."""
        return self.algorithm == "MAAC"


def policy_method(policy: Any) -> CriticFree | ActorCritic:
    """The settings of policy learning, from themselves or from the name of an algorithm.

    Raises:
        ValueError: If there is no such algorithm.
    """
    if isinstance(policy, CriticFree | ActorCritic):
        return policy
    for name in BASELINES:
        if policy == name:
            return CriticFree(algorithm=name)  # type: ignore[arg-type]
    if policy in ("IAC", "MAAC"):
        return ActorCritic(algorithm=policy)
    names = ", ".join(map(repr, (*BASELINES, "IAC", "MAAC")))
    raise ValueError(f"policy={policy!r} is unknown. Use one of {names}, CriticFree(...) or ActorCritic(...).")
