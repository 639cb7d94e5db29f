"""Rows of one optimizer step, with the inputs of their losses, and the running sums to log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from comlrl_lightning.metrics import MetricTable, agent_key
from comlrl_lightning.types import Completion
from comlrl_lightning.utilities.distributed import all_reduce_sum

RATIO_SUMS = ("num_completions", "ratio", "squared_ratio")
"""Sums that the effective sample size is made of."""


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One completion with the inputs of its policy loss."""

    completion: Completion
    advantage: float
    scale: float
    """Weight of this completion's loss in the sum over the mini-batch."""
    old_log_probs: Tensor | None
    """`[C]` log-probabilities before the first update on this buffer; None when there is one update only."""
    group_tokens: float = 0.0
    """Mean number of tokens of the completions of its group."""


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One joint completion with its value targets."""

    completions: tuple[Completion, ...]
    """`[N]` with their prompts."""
    targets: tuple[float, ...]
    """`[O]`, one per output of the critics."""
    old_values: tuple[float, ...]
    """`[O]` values at the collection."""


@dataclass(frozen=True, slots=True)
class PreparedNode:
    """The completions of a node that have a gradient. A node without any still counts in the mini-batch's mean."""

    rows: tuple[PolicyRow, ...]
    value: ValueRow | None = None
    """What the critics learn from it, if there are any."""


class UpdateStats:
    """Named sums over the completions and joint completions of one optimizer step, one entry per agent.

    Args:
        num_agents: N.
        per_token: Names of further sums, logged per token.
    """

    def __init__(self, num_agents: int, per_token: Sequence[str] = ()) -> None:
        self.num_agents = num_agents
        self.per_token = ("entropy", "sampler_gap", *per_token)
        self.loss = torch.zeros(num_agents, dtype=torch.float64)
        self.value_loss = torch.zeros(num_agents, dtype=torch.float64)
        self.num_values = torch.zeros(num_agents, dtype=torch.float64)
        """Joint completions that the critics valued, per agent."""
        self._sums: dict[str, Tensor] = {}
        self._lock = Lock()

    def add(self, agents: Tensor, losses: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Add the `[R]` losses and further `[R]` sums of completions of `[R]` agents, from any thread."""
        losses = losses.detach().cpu().double()
        rows = {name: values.detach().cpu().double() for name, values in sums.items()}
        with self._lock:
            self.loss.index_add_(0, agents, losses)
            for name, values in rows.items():
                total = self._sums.setdefault(name, torch.zeros(self.num_agents, dtype=torch.float64))
                total.index_add_(0, agents, values)

    def add_values(self, losses: Tensor, counted: Tensor) -> None:
        """Add the `[R, O]` value losses of joint completions; all agents share a single output.

        Args:
            losses: Losses.
            counted: `[R, O]` 1 = there is a value, 0 = the agent of the column does not act.
        """
        self.value_loss += losses.detach().cpu().double().sum(0).expand(self.num_agents)
        self.num_values += counted.cpu().double().sum(0).expand(self.num_agents)

    def sums_of_losses(self) -> dict[str, float]:
        """Losses of this rank by agent and by critic, as summed so far."""
        policies = {f"agent_{agent}": loss for agent, loss in enumerate(self.loss.tolist())}
        critics = {f"the critic of agent_{agent}": loss for agent, loss in enumerate(self.value_loss.tolist())}
        return policies | critics

    def record(self, metrics: MetricTable, num_nodes: int) -> None:
        """Write the means of this optimizer step to the metrics. Call it on every rank."""
        none = torch.zeros(self.num_agents, dtype=torch.float64)
        ratio_sums = torch.stack([self._sums.get(name, none) for name in RATIO_SUMS], dim=1)
        of_all_ranks = all_reduce_sum(ratio_sums)
        for agent in range(self.num_agents):
            metrics.update(agent_key(agent, "loss"), self.loss[agent] / max(num_nodes, 1), float(num_nodes))
            if num_values := float(self.num_values[agent]):
                metrics.update(agent_key(agent, "value_loss"), self.value_loss[agent] / num_values, num_values)
            if not (num_tokens := float(self._sums.get("num_tokens", none)[agent])):
                continue
            metrics.update(agent_key(agent, "clip_share"), self._sums["num_clipped"][agent] / num_tokens, num_tokens)
            for name in self.per_token:
                metrics.update(agent_key(agent, name), self._sums[name][agent] / num_tokens, num_tokens)
            completions, ratios, squared_ratios = of_all_ranks[agent].tolist()
            share = ratios**2 / (completions * squared_ratios)  # a ratio of sums is no mean over ranks
            metrics.update(agent_key(agent, "effective_sample_size"), share, float(ratio_sums[agent, 0]))


def pad_rows(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """`[R, C]` rows filled up with zeros on the right, with the dtype and device of `like`."""
    return torch.nn.utils.rnn.pad_sequence([row.to(like) for row in rows], batch_first=True)
