"""Policy gradients from a rollout buffer, and the algorithms that learn so from the task's reward."""

import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_warn
from torch.nn import Parameter
from typing_extensions import override

from comlrl_lightning.algorithms.methods import PolicyMethod
from comlrl_lightning.algorithms.module import TRAIN, CooperativeModule
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.environment.functions import TaskFunctions
from comlrl_lightning.environment.prompts import Transition
from comlrl_lightning.environment.text_environment import Environments
from comlrl_lightning.learning.actor_critic import ActorCriticLearner
from comlrl_lightning.learning.settings import PolicySettings
from comlrl_lightning.metrics import agent_key, critic_keys
from comlrl_lightning.preferences.pairs import shuffled
from comlrl_lightning.rollouts.collect import RolloutShape
from comlrl_lightning.rollouts.recording import (
    record_collection,
    record_nodes,
    stops_with_reward,
    warn_of_rewarded_stops,
)
from comlrl_lightning.types import Rollouts
from comlrl_lightning.utilities.checks import check_finite, check_flag, check_share, check_whole
from comlrl_lightning.utilities.distributed import max_over_ranks, sum_over_ranks, world_size


class BufferedPolicyModule(CooperativeModule):
    """Learns policies from rollouts by way of a buffer: mini-batches of nodes, one optimizer step each."""

    num_generations: int = 4
    """K, completions per agent and node, on each rank."""
    max_nodes: int = 4096
    """Largest number of nodes that one task item may grow to; a larger tree is refused at construction."""
    reference_kl_coef: float = 0.0
    """Weight, per nat of sequence KL to the reference policy, in the advantage of the completion that has it (a
    surrogate: earlier turns are not charged for it). 0: no reference policy."""
    rollout_buffer_size: int | None = None
    """Nodes, over all ranks, that are collected before an update. None: those of one batch."""
    num_inner_epochs: int = 1
    """Passes over the buffer per update."""
    clip_epsilon: float | None = None
    """Importance ratios are clipped below ``1 - clip_epsilon``. None: no clipping."""
    clip_epsilon_high: float | None = None
    """And above ``1 + clip_epsilon_high``. None: `clip_epsilon`."""
    dual_clip: float | None = None
    """Where an advantage is negative, importance ratios are clipped above it (3 is usual): one token that became much
    likelier since it was sampled cannot dominate a step. None: no such limit."""
    importance_level: Literal["token", "sequence"] = "token"
    """One importance ratio per ``"token"`` or per ``"sequence"``."""
    loss_aggregation: Literal["sum", "constant", "sequence_mean", "token_mean"] = "constant"
    """What the loss of a completion, a sum over its tokens, is divided by: nothing (``"sum"``), the largest number of
    tokens ``sampling.max_new_tokens`` (``"constant"``, Dr. GRPO: the same gradient, smaller), its own number of tokens
    (``"sequence_mean"``, GRPO: biased by length), or the mean number of tokens per completion of the agent in the
    buffers of all ranks, weighted as the losses are (``"token_mean"``, DAPO). Under AdamW the scale alone changes no
    step, but `max_grad_norm` clips a sum over many tokens nearly always, which makes every step as long as any other.
    The entropy bonus is divided alike, and by the constant the loss of a `ValueHead`, too; that of no other critic."""
    entropy_coef: float = 0.0
    """Weight, per nat, of the entropy summed over a completion's tokens and divided as `loss_aggregation` says; it
    rewards diversity."""

    @property
    @abstractmethod
    def method(self) -> PolicyMethod:
        """Credit, loss and critics of the policies."""

    @override
    def check_settings(self) -> None:
        super().check_settings()
        self.loss_settings = PolicySettings(
            self.sampling.temperature,
            self.reference_kl_coef,
            self.clip_epsilon,
            self.clip_epsilon_high,
            self.importance_level,
            self.entropy_coef,
            self.loss_aggregation,
            self.sampling.max_new_tokens,
            self.dual_clip,
        )
        check_whole(1, num_inner_epochs=self.num_inner_epochs, max_nodes=self.max_nodes)
        if self.rollout_buffer_size is not None:
            check_whole(1, rollout_buffer_size=self.rollout_buffer_size)

    @override
    def rollout_shape(self) -> RolloutShape:
        return self.method.method_shape(replace(super().rollout_shape(), num_generations=self.num_generations))

    @override
    def check_rollouts(self) -> None:
        self.method.check_method(self.shape, self.team_size, self.sampling, self.max_nodes)

    @property
    @override
    def penalizes_kl(self) -> bool:
        return self.reference_kl_coef > 0

    @override
    def training_metric_keys(self) -> list[str]:
        keys = super().training_metric_keys()
        own = [agent_key(agent, name) for agent in range(self.team_size) for name in self.method.loss_metrics]
        return [*keys, *own, *critic_keys(self.team_size, self.method.critic_groups(self.team_size))]

    @override
    def build_learners(self) -> None:
        super().build_learners()
        self.learner = self.method.make_learner(
            self.team,
            self.loss_settings,
            self.micro_batch_tokens,
            self.training_metrics,
            per_agent=self.functions.per_agent,
        )
        if isinstance(self.learner, ActorCriticLearner):
            self.critics = self.learner.critics

    @override
    def parameter_groups(self) -> dict[str, dict[str, Parameter]]:
        return self.learner.parameter_groups()

    @override
    def initial_learning_rates(self) -> list[float]:
        return [*super().initial_learning_rates(), *self.method.critic_rates(self.team_size)]

    def learn_from(self, rollouts: Rollouts, is_last: bool) -> None:
        """Credit rollouts and keep them; update once the buffer is full or the epoch ends.

        Args:
            rollouts: Scored nodes of this rank.
            is_last: Whether the epoch ends here.
        """
        self.env_step += round(sum_over_ranks(rollouts.num_scored))
        credited = self.learner.credit(rollouts, self.return_discount)
        record_nodes(self.training_metrics, credited, rollouts.reward_parts, self.reward_prefix)
        record_collection(self.training_metrics, rollouts)
        self.buffer += credited
        if self._buffer_is_full() or is_last:
            self._update()

    @property
    def reward_prefix(self) -> str:
        """Stands before the reward metrics of training."""
        return ""

    def _buffer_is_full(self) -> bool:
        """Whether the buffers of all ranks together hold enough; the same answer on every rank."""
        size = sum_over_ranks(len(self.buffer))
        return size > 0 and size >= (self.rollout_buffer_size or 0)

    def _update(self) -> None:
        """Learn from the whole buffer and empty it."""
        started = time.perf_counter()
        per_rank = None if self.train_batch_size is None else max(1, self.train_batch_size // world_size())
        largest = max_over_ranks(len(self.buffer))
        if not largest:
            return
        num_batches = 1 if per_rank is None else -(-largest // per_rank)
        num_steps = num_batches * self.num_inner_epochs
        if num_steps > 1 and self.clip_epsilon is None:
            rank_zero_warn(
                f"{num_steps} optimizer steps use the same rollouts without clipping."
                " Give clip_epsilon, for example 0.2, or use num_inner_epochs=1 and train_batch_size=None."
            )
        prepared = self.learner.prepare(self.buffer, self.num_turns, num_steps > 1)
        size = per_rank or max(len(prepared), 1)
        for inner_epoch in range(self.num_inner_epochs):
            order = self._order(len(prepared), inner_epoch) if num_batches > 1 else list(range(len(prepared)))
            for batch in range(num_batches):
                chosen = order[batch * size : (batch + 1) * size]
                self.optimizer_step_on(self.learner, [prepared[node] for node in chosen])
        self.buffer.clear()
        self.training_metrics.update("time/update", time.perf_counter() - started)

    def _order(self, num_nodes: int, inner_epoch: int) -> list[int]:
        """Order of the nodes in one pass over the buffer, from its own random stream."""
        return shuffled(range(num_nodes), (self.seed, self.env_step, inner_epoch))

    @override
    def record_evaluation(self, rollouts: Rollouts) -> None:
        if self.penalizes_kl:
            assert self.eval_sampling is not None
            self.learner.record_kl(self.evaluation_metrics, rollouts.nodes, self.eval_sampling.temperature)

    @override
    def save_models(self, folder: Path) -> None:
        super().save_models(folder)
        if isinstance(self.learner, ActorCriticLearner):
            self.critics.save(folder)


class PolicyGradientModule(BufferedPolicyModule):
    """Learns from the task's reward, in one or many turns. A family of algorithms is a method, too: its own."""

    environment: Callable[..., Any] | str | None = None
    """A class, or a function without arguments, that makes a `TextEnvironment`, or its import path: state, prompts,
    rewards and the order in which agents act, in place of `formatters`, `reward_func` and `external_transition`. Each
    task item is played `num_generations` times, in episodes of at most `num_turns` steps. None: all agents act in every
    turn."""
    per_agent_rewards: bool = False
    """Each agent is credited with rewards of its own: ``reward_func`` returns one row of N rewards per joint
    completion, an environment a dict by agent. Early termination and reward metrics then look at the mean over the
    agents."""
    external_transition: Callable[..., Any] | None = None
    """Returns the N next prompts after a joint completion; needed when ``num_turns > 1``."""
    external_prompt_passthrough: bool = False
    """Use the transition's prompts as they are, without the formatters."""
    num_turns: int = 1
    """T, the largest number of turns per task item."""
    discount: float = 1.0
    """Factor per turn of later rewards in a return, from 0 to 1. Below 1 the score of turn t lacks the factor
    ``discount^(t-1)`` of the exact gradient, as is usual (https://arxiv.org/abs/1906.07073)."""
    early_termination_threshold: float | None = None
    """A joint completion whose processed reward exceeds it is not continued, in training and in evaluation. Stopping
    means reward 0 ever after: with positive rewards it punishes the better branch. None: never."""
    early_termination: Literal["completion", "group"] = "completion"
    """``"completion"``: each joint completion stops by its own reward. ``"group"``: the mean reward of a node stops or
    continues all its joint completions, as comlrl does; the returns of the others then depend on the own completion,
    and no baseline of a tree is unbiased. Trajectories stop one by one in any case."""

    @override
    def check_settings(self) -> None:
        super().check_settings()
        self._warned_of_stops = False
        check_share(discount=self.discount)
        check_finite(early_termination_threshold=self.early_termination_threshold)
        check_whole(1, num_turns=self.num_turns)
        check_flag(
            external_prompt_passthrough=self.external_prompt_passthrough, per_agent_rewards=self.per_agent_rewards
        )
        if self.environment is not None:
            self._check_beside_environment()

    def _check_beside_environment(self) -> None:
        """Refuse settings of functions and turns that an environment has no use for."""
        unused = {
            "collaboration": (self.collaboration, "decentralized"),
            "early_termination_threshold": (self.early_termination_threshold, None),
            "external_prompt_passthrough": (self.external_prompt_passthrough, False),
            "reward_none": (self.reward_none, "error"),
            "reward_workers": (self.reward_workers, 0),
            "reward_timeout_seconds": (self.reward_timeout_seconds, None),
        }
        for name, (value, default) in unused.items():
            if value != default:
                raise ValueError(
                    f"{name}={value!r} does not go with environment=: each agent acts by itself, and the environment"
                    " gives rewards and ends. Leave one out."
                )

    @override
    def check_reward(self) -> None:
        if self.environment is None:
            super().check_reward()
            return
        functions = {
            "reward_func": self.reward_func,
            "formatters": self.formatters,
            "external_transition": self.external_transition,
        }
        for name, function in functions.items():
            if function is not None:
                raise ValueError(
                    f"{name}= does not go with environment=, which gives prompts and rewards. Leave it out."
                )

    @override
    def make_functions(self) -> TaskFunctions | Environments:
        if self.environment is None:
            return self.make_task_functions()
        return Environments(
            self.environment, self.num_agents, per_agent=self.per_agent_rewards, processor=self.reward_processor
        )

    @override
    def make_task_functions(self) -> TaskFunctions:
        if self.num_turns > 1 and self.external_transition is None:
            raise ValueError(
                f"num_turns={self.num_turns} needs prompts for the turns after the first. Give external_transition."
            )
        functions = super().make_task_functions()
        if self.per_agent_rewards:
            functions = replace(functions, reward=functions.reward.of_agents())
        transition = self.external_transition
        return replace(
            functions,
            transition=None if transition is None else Transition(transition, self.num_agents),
            external_prompt_passthrough=self.external_prompt_passthrough,
        )

    @override
    def rollout_shape(self) -> RolloutShape:
        shape = super().rollout_shape()
        return replace(
            shape,
            num_turns=self.num_turns,
            trajectories=shape.trajectories or self.environment is not None,
            early_termination_threshold=self.early_termination_threshold,
            early_termination=self.early_termination,
        )

    @property
    @override
    def return_discount(self) -> float:
        return self.discount

    @override
    def train_on(self, batch: TaskBatch, is_last: bool) -> None:
        self.rollouts = self.collect(batch, TRAIN, self.sampling, self.shape, self.functions)
        self._warn_of_stops(self.rollouts)
        self.learn_from(self.rollouts, is_last)

    def _warn_of_stops(self, rollouts: Rollouts) -> None:
        if self.shape.early_termination_threshold is None or self._warned_of_stops:
            return
        if sum_over_ranks(stops_with_reward(rollouts, self.shape)):
            self._warned_of_stops = True
            warn_of_rewarded_stops(self.shape)
