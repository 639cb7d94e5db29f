"""What one optimizer step is made of: rows with what their losses need, their batches, and the sums to log."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from comlrl_lightning.agents.log_probs import num_padded_tokens
from comlrl_lightning.metrics import MetricTable, agent_key
from comlrl_lightning.types import Completion
from comlrl_lightning.utilities.distributed import all_reduce_sum


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One completion with what the policy loss needs to know of it."""

    completion: Completion
    advantage: float
    scale: float
    """Weight of this completion's loss in the sum over the mini-batch."""
    old_log_probs: Tensor | None
    """`[C]` log-probabilities before the first update on this buffer; None when there is one update only."""


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One joint completion with what the critics are to say about it."""

    completions: tuple[Completion, ...]
    """`[N]` with their prompts."""
    targets: tuple[float, ...]
    """`[O]`, one per output of the critics."""
    old_values: tuple[float, ...]
    """`[O]` what the critics said when it was collected."""


@dataclass(frozen=True, slots=True)
class PreparedNode:
    """The completions of a node that have a gradient. A node without any still counts in the mini-batch's mean."""

    rows: tuple[PolicyRow, ...]
    value: ValueRow | None = None
    """What the critics learn from it, if there are any."""


@dataclass(slots=True)
class UpdateStats:
    """Sums over the rows of one optimizer step, one entry per agent."""

    num_agents: int
    loss: Tensor = field(init=False)
    sums: Tensor = field(init=False)
    """`[N, 7]` tokens, clipped tokens, entropy, sampler gap, completions, ratios, squared ratios."""
    value_loss: Tensor = field(init=False)
    num_values: int = 0
    """Joint completions that the critics judged."""
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.value_loss = torch.zeros(self.num_agents, dtype=torch.float64)
        self.loss = torch.zeros(self.num_agents, dtype=torch.float64)
        self.sums = torch.zeros(self.num_agents, 7, dtype=torch.float64)

    def add(self, agents: Tensor, losses: Tensor, columns: Sequence[Tensor]) -> None:
        """Add the `[R]` losses and `[R]` columns of the rows of `[R]` agents, from any thread."""
        rows = torch.stack([column.detach().cpu().double() for column in columns], dim=1)
        losses = losses.detach().cpu().double()
        with self._lock:
            self.loss.index_add_(0, agents, losses)
            self.sums.index_add_(0, agents, rows)

    def add_values(self, losses: Tensor) -> None:
        """Add the `[R, O]` value losses of joint completions; a single output is everybody's."""
        self.value_loss += losses.detach().cpu().double().sum(0).expand(self.num_agents)
        self.num_values += len(losses)

    def sums_of_losses(self) -> dict[str, float]:
        """Losses of this rank by agent and by critic, as summed so far."""
        policies = {f"agent_{agent}": loss for agent, loss in enumerate(self.loss.tolist())}
        critics = {f"the critic of agent_{agent}": loss for agent, loss in enumerate(self.value_loss.tolist())}
        return policies | critics

    def record(self, table: MetricTable, num_nodes: int) -> None:
        """Write the means of this optimizer step to the metrics. Call it on every rank."""
        of_all_ranks = all_reduce_sum(self.sums[:, 4:])
        for agent in range(self.num_agents):
            table.update(agent_key(agent, "loss"), self.loss[agent] / max(num_nodes, 1), float(num_nodes))
            if self.num_values:
                table.update(agent_key(agent, "value_loss"), self.value_loss[agent] / self.num_values, self.num_values)
            tokens, clipped, entropy, gap, num_here, *_ = self.sums[agent].tolist()
            if tokens:
                table.update(agent_key(agent, "clip_share"), clipped / tokens, tokens)
                table.update(agent_key(agent, "entropy"), entropy / tokens, tokens)
                table.update(agent_key(agent, "sampler_gap"), gap / tokens, tokens)
                completions, ratios, squared_ratios = of_all_ranks[agent].tolist()
                share = ratios**2 / (completions * squared_ratios)  # a ratio of sums is no mean over ranks
                table.update(agent_key(agent, "effective_sample_size"), share, num_here)


def sequence_lengths(completions: Sequence[Completion]) -> list[int]:
    """`[R]` tokens of each completion with its prompt."""
    return [len(one.prompt_ids) + len(one.token_ids) for one in completions]


def micro_batches(lengths: Sequence[int], token_budget: int, kinds: Sequence[int] | None = None) -> list[list[int]]:
    """Positions of rows of similar length, cut so that a padded batch stays within the token budget.

    There are as few batches as that allows, and the largest, which decides about memory, is as small as so many allow.

    Args:
        lengths: `[R]` tokens of each row.
        token_budget: Padded tokens per batch; a longer row gets a batch of its own.
        kinds: `[R]` rows of the same length stand together by this; None: they are all alike.
    """
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], 0 if kinds is None else kinds[row], row))
    num_batches = len(_cut(order, lengths, token_budget))
    enough = bisect_left(range(token_budget), -num_batches, key=lambda budget: -len(_cut(order, lengths, budget)))
    return _cut(order, lengths, enough)


def _cut(order: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Greedy batches of rows in this order, by ascending length."""
    batches: list[list[int]] = []
    for position in order:
        if batches and (len(batches[-1]) + 1) * lengths[position] <= token_budget:
            batches[-1].append(position)
        else:
            batches.append([position])
    return batches


def completion_batches(
    completions: Sequence[Completion], token_budget: int, *, reads_prompts_once: bool
) -> list[list[int]]:
    """Positions of completions, cut so that a padded batch stays within the token budget.

    Completions of the same prompt stand together if that makes fewer tokens to read than the order by length.

    Args:
        completions: `[R]` completions of one language model.
        token_budget: Padded tokens per batch; a longer row gets a batch of its own.
        reads_prompts_once: Of the language model.
    """
    by_length = micro_batches(sequence_lengths(completions), token_budget, [one.agent for one in completions])
    if not reads_prompts_once:
        return by_length

    def cost(rows: Sequence[int]) -> int:
        return num_padded_tokens([completions[row] for row in rows], reads_prompts_once=True)

    by_prompt: list[list[int]] = []
    for position in sorted(range(len(completions)), key=lambda row: _by_prompt(completions[row], row)):
        if by_prompt and cost([*by_prompt[-1], position]) <= token_budget:
            by_prompt[-1].append(position)
        else:
            by_prompt.append([position])
    return min(by_length, by_prompt, key=lambda batches: sum(map(cost, batches)))


def _by_prompt(one: Completion, row: int) -> tuple[int, int, tuple[int, ...], int, int]:
    return len(one.prompt_ids), one.agent, one.prompt_ids, len(one.token_ids), row


def pad_rows(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """`[R, C]` rows filled up with zeros on the right, with the dtype and device of `like`."""
    return torch.nn.utils.rnn.pad_sequence([row.to(like) for row in rows], batch_first=True)
