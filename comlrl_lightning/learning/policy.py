"""Credit and loss as plain objects: what a team learns from a buffer, whoever drives the optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.functional import (
    Baseline,
    Normalization,
    PolicyLoss,
    batch_moments,
    batch_rms,
    group_advantages,
    kl_estimate,
    policy_loss,
    sequence_kl,
    subtract_kl,
    token_divisors,
)
from comlrl_lightning.learning.minibatches import (
    PolicyRow,
    PreparedNode,
    UpdateStats,
    pad_rows,
)
from comlrl_lightning.learning.settings import PolicySettings
from comlrl_lightning.metrics import MetricTable, agent_key, turn_key
from comlrl_lightning.rollouts.credit import CreditedNode, assign_credit, with_peers
from comlrl_lightning.types import Completion, Node, Rollouts
from comlrl_lightning.utilities.distributed import all_reduce_sum


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """Completions of any agents with the inputs of their policy loss; R rows, C tokens, padded on the right."""

    log_probs: Tensor
    """`[R, C]` log-probabilities under the policy at the sampling temperature, with gradients; 0 at padding."""
    entropy: Tensor
    """`[R, C]` entropies in nats; 0 at padding."""
    completion_mask: Tensor
    """`[R, C]` True = a sampled token that counts."""
    advantages: Tensor
    """`[R]` advantage of each completion."""
    old_log_probs: Tensor | None
    """`[R, C]` log-probabilities before the first optimizer step on this buffer; None when there is one step only, so
    that every importance ratio is 1."""
    agents: Tensor
    """`[R]` index of the agent."""
    truncated: Tensor
    """`[R]` True = the token limit ended the completion."""
    group_tokens: Tensor
    """`[R]` mean number of tokens of the completion's group: its agent's K completions of the node."""
    settings: PolicySettings
    """Settings of the loss."""


PolicyLossFunction = Callable[[PolicyBatch], PolicyLoss]
"""Maps a batch to `[R]` losses."""


def clipped_policy_loss(batch: PolicyBatch) -> PolicyLoss:
    """`functional.policy_loss` with the settings of the batch: REINFORCE, or PPO's clip where ratios are not 1."""
    settings = batch.settings
    clips = batch.old_log_probs is not None
    return policy_loss(
        batch.log_probs,
        batch.advantages,
        batch.completion_mask,
        old_log_probs=batch.old_log_probs,
        clip_epsilon=settings.clip_epsilon if clips else None,
        clip_epsilon_high=settings.clip_epsilon_high if clips else None,
        importance_level=settings.importance_level,
        dual_clip=settings.dual_clip if clips else None,
    )


def _checked_loss(loss: object, batch: PolicyBatch) -> PolicyLoss:
    """What a `policy_loss` returned.

    Raises:
        ValueError: If it is no `PolicyLoss` with one loss per completion.
    """
    shape = tuple(batch.advantages.shape)
    if not isinstance(loss, PolicyLoss) or tuple(loss.loss.shape) != shape:
        found = tuple(loss.loss.shape) if isinstance(loss, PolicyLoss) else type(loss).__name__
        raise ValueError(f"policy_loss(batch) gave {found}. Return PolicyLoss(loss, ...) with {shape} losses.")
    if batch.log_probs.requires_grad and not loss.loss.requires_grad:
        rank_zero_warn(
            "policy_loss(batch) gave losses without a gradient, which teach nothing. Compute them from batch.log_probs."
        )
    return loss


def agent_group(agent: int) -> str:
    """Name of the parameter group of an agent."""
    return f"agent_{agent}"


class Learner(ABC):
    """Credit and loss of a team; an algorithm says what an advantage is.

    Args:
        team: The agents.
        settings: Settings of the policy loss.
        micro_batch_tokens: Padded tokens per forward pass.
        table: Where metrics go.
        policy_loss: Loss of completions.
        loss_metrics: Names of the sums that the loss adds.
    """

    def __init__(
        self,
        team: AgentTeam,
        settings: PolicySettings,
        micro_batch_tokens: int,
        table: MetricTable,
        policy_loss: PolicyLossFunction = clipped_policy_loss,
        loss_metrics: Sequence[str] = (),
    ) -> None:
        self.team = team
        self.settings = settings
        self.micro_batch_tokens = micro_batch_tokens
        self.table = table
        self.policy_loss = policy_loss
        self.loss_metrics = loss_metrics

    def parameter_groups(self) -> dict[str, dict[str, Parameter]]:
        """Trained parameters by group; each group has its own learning rate and gradient norm."""
        return {agent_group(agent): self.team.agent_parameters(agent) for agent in range(self.team.num_agents)}

    def new_stats(self) -> UpdateStats:
        """Empty sums of one optimizer step."""
        return UpdateStats(self.team.num_agents, self.loss_metrics)

    def credit(self, rollouts: Rollouts, discount: float) -> list[CreditedNode]:
        """What the policies and critics that collected a rollout can say of it, once and for all.

        Args:
            rollouts: Scored nodes, breadth first.
            discount: Factor per turn.
        """
        return assign_credit(rollouts, discount)

    @abstractmethod
    def advantages(
        self, buffer: Sequence[CreditedNode], num_turns: int, kappa: Sequence[Sequence[Tensor]] | None
    ) -> list[list[Tensor]]:
        """`[nodes][N][K]` advantages in float64. Call it on every rank.

        Args:
            buffer: Nodes of this rank.
            num_turns: T, the same on every rank.
            kappa: `[nodes][N][K]` log-ratio to the reference policy; None without a penalty.
        """

    def active_groups(self, nodes: Sequence[PreparedNode]) -> set[str]:
        """Names of the parameter groups that get a gradient from these nodes."""
        return {agent_group(row.completion.agent) for node in nodes for row in node.rows}

    def losses(self, nodes: Sequence[PreparedNode], stats: UpdateStats) -> Iterator[Tensor]:
        """Summed losses of one mini-batch, one micro-batch after the other: call backward before taking the next.

        Args:
            nodes: The mini-batch; divide the gradients by its number of nodes.
            stats: Gets the sums to log.
        """
        rows = [row for node in nodes for row in node.rows]
        for batches in self.team.micro_batches([row.completion for row in rows], self.micro_batch_tokens):
            tasks = [
                (
                    self.team.speaker(rows[batch[0]].completion.agent),
                    partial(self.loss, [rows[one] for one in batch], stats),
                )
                for batch in batches
            ]
            yield torch.stack(self.team.each(tasks)).sum()

    def prepare(self, buffer: Sequence[CreditedNode], num_turns: int, stale: bool) -> list[PreparedNode]:
        """Advantages, scales and old log-probs of a whole buffer. Call it on every rank.

        Args:
            buffer: Nodes of this rank.
            num_turns: T, the same on every rank.
            stale: Whether more than one optimizer step will use the buffer.

        Returns:
            One entry per node, in order.
        """
        completions = [one for entry in buffer for group in entry.node.completions for one in group]
        with_kl = self.settings.reference_kl_coef > 0
        current = self.score(completions) if stale or with_kl else []
        nodes = [entry.node for entry in buffer]
        kappa = self._record_kl(self.table, nodes, *self.kl(completions, current)) if with_kl else None
        advantages = self.advantages(buffer, num_turns, kappa)
        mean_weight = self._mean_weight(buffer, num_turns)
        divisors = self._divisors(buffer)
        old = iter(current if stale else [None] * len(completions))
        prepared = []
        for entry, values, of_node in zip(buffer, advantages, divisors, strict=True):
            rows: list[PolicyRow] = []
            for agent, group in enumerate(entry.node.completions):
                if not group:  # an agent that does not act
                    continue
                scale = entry.weight / mean_weight / len(group)
                silent = self._is_silent(values[agent])
                self.table.update(agent_key(agent, "zero_advantage_share"), float(not values[agent].any()))
                group_tokens = sum(len(one.token_ids) for one in group) / len(group)
                candidates = [
                    PolicyRow(one, float(advantage), scale / divisor, next(old), group_tokens)
                    for one, advantage, divisor in zip(group, values[agent], of_node[agent], strict=True)
                ]
                rows += [] if silent else candidates
            prepared.append(PreparedNode(tuple(rows)))
        return prepared

    def loss(self, rows: Sequence[PolicyRow], stats: UpdateStats) -> Tensor:
        """`[]` sum of the scaled losses of some completions; divide by the nodes of the mini-batch, not here.

        Args:
            rows: Completions of any agents.
            stats: Gets the sums to log.
        """
        batch = self._batch(rows)
        policy = _checked_loss(self.policy_loss(batch), batch)
        mask, log_probs = batch.completion_mask, batch.log_probs.detach()
        entropy = (batch.entropy * mask).sum(1)
        # Without a coefficient the entropy is only logged, and its gradient left out.
        bonus = self.settings.entropy_coef * entropy if self.settings.entropy_coef else 0.0
        losses = (policy.loss - bonus) * log_probs.new_tensor([row.scale for row in rows])
        sampler = pad_rows([torch.tensor(row.completion.log_probs) for row in rows], log_probs)
        behavior = log_probs if batch.old_log_probs is None else batch.old_log_probs
        gap = ((behavior - sampler).abs() * mask).sum(1)
        # Clamped, for a share of squares: a completion that drifted far must not overflow it.
        ratio = ((log_probs - behavior) * mask).sum(1).cpu().double().clamp(-20.0, 20.0).exp()
        sums = {
            "num_tokens": policy.num_tokens,
            "num_clipped": policy.num_clipped,
            "entropy": entropy,
            "sampler_gap": gap,
            "num_completions": torch.ones_like(gap),
            "ratio": ratio,
            "squared_ratio": ratio.square(),
        }
        stats.add(batch.agents, losses, {**sums, **policy.sums})
        return losses.sum()

    def _batch(self, rows: Sequence[PolicyRow]) -> PolicyBatch:
        """The inputs of the policy loss of some completions, log-probabilities with gradients."""
        scores = self.team.log_probs([row.completion for row in rows], temperature=self.settings.temperature)
        old = None
        if rows[0].old_log_probs is not None:
            old = pad_rows([row.old_log_probs for row in rows if row.old_log_probs is not None], scores.log_probs)
        return PolicyBatch(
            log_probs=scores.log_probs,
            entropy=scores.entropy,
            completion_mask=scores.completion_mask,
            advantages=scores.log_probs.new_tensor([row.advantage for row in rows]),
            old_log_probs=old,
            agents=torch.tensor([row.completion.agent for row in rows]),
            truncated=torch.tensor([row.completion.truncated for row in rows], device=scores.log_probs.device),
            group_tokens=scores.log_probs.new_tensor([row.group_tokens for row in rows]),
            settings=self.settings,
        )

    @torch.no_grad()
    def score(
        self, completions: Sequence[Completion], reference: bool = False, temperature: float | None = None
    ) -> list[Tensor]:
        """`[C]` log-probabilities of each completion, by the code path of the update.

        Args:
            completions: Completions of any agents.
            reference: Score under the reference policy.
            temperature: Divides the logits; None: that of training.
        """
        temperature = self.settings.temperature if temperature is None else temperature
        scored: list[Tensor] = [torch.empty(0)] * len(completions)
        for batches in self.team.micro_batches(completions, self.micro_batch_tokens):
            batch = [position for positions in batches for position in positions]
            chosen = [completions[position] for position in batch]
            scores = self.team.log_probs(chosen, temperature=temperature, reference=reference)
            for row, position in enumerate(batch):
                scored[position] = scores.log_probs[row, : len(completions[position].token_ids)]
        return scored

    def kl(
        self, completions: Sequence[Completion], current: Sequence[Tensor], temperature: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """`[R]` kappa and `[R]` estimate of the sequence KL to the reference policy, in nats.

        Args:
            completions: `[R]` completions of any agents.
            current: `[R][C]` log-probabilities under the policy.
            temperature: At which they are; None: that of training.
        """
        reference = self.score(completions, reference=True, temperature=temperature)
        if not completions:
            return torch.empty(0), torch.empty(0)
        log_probs, reference_log_probs = pad_rows(current, current[0]), pad_rows(reference, current[0])
        lengths = torch.tensor([len(one.token_ids) for one in completions], device=log_probs.device)
        mask = torch.arange(log_probs.shape[1], device=log_probs.device) < lengths[:, None]
        return sequence_kl(log_probs, reference_log_probs, mask), kl_estimate(log_probs, reference_log_probs, mask)

    def record_kl(self, table: MetricTable, nodes: Sequence[Node], temperature: float) -> list[list[Tensor]]:
        """Log the reference KL of some nodes, scored anew.

        Args:
            table: Gets the metrics.
            nodes: The nodes.
            temperature: At which they were sampled; greedy ones are scored at 1.

        Returns:
            `[nodes][N][K]` kappa in float64.
        """
        completions = [one for node in nodes for group in node.completions for one in group]
        temperature = temperature or 1.0
        current = self.score(completions, temperature=temperature)
        return self._record_kl(table, nodes, *self.kl(completions, current, temperature))

    def _record_kl(
        self, table: MetricTable, nodes: Sequence[Node], kappa: Tensor, estimate: Tensor
    ) -> list[list[Tensor]]:
        kappa, estimate = kappa.cpu(), estimate.cpu()
        per_node: list[list[Tensor]] = []
        first = 0
        for node in nodes:
            sizes = [len(group) for group in node.completions]
            last = first + sum(sizes)
            penalty = self.settings.reference_kl_coef * kappa[first:last]
            table.update(turn_key(node.turn, "reference_kl_mean"), estimate[first:last].mean(), last - first)
            table.update(turn_key(node.turn, "reference_kl_penalty_mean"), penalty.mean(), last - first)
            per_node.append(list(torch.split_with_sizes(kappa[first:last].double(), sizes)))
            first = last
        return per_node

    def _mean_weight(self, buffer: Sequence[CreditedNode], num_turns: int) -> float:
        """Roots times turns per node of the buffers of all ranks: the mean weight where no branch ends early.

        A mini-batch takes the mean over its nodes of ``weight / mean_weight * loss``: over a whole buffer the sum of
        ``weight * loss``, divided by roots times turns (`node_weights` has the reason). Each of several mini-batches is
        an estimate of that sum, but early stops change their number, and with it the size of the update as a whole.
        """
        num_roots = sum(entry.node.parent is None for entry in buffer)
        roots, count = all_reduce_sum(torch.tensor([num_roots, len(buffer)], dtype=torch.float64)).tolist()
        return roots * num_turns / count if count else 1.0

    def _divisors(self, buffer: Sequence[CreditedNode]) -> list[list[list[float]]]:
        """`[nodes][N][K]` what the sum over the tokens of each completion is divided by. Call it on every rank."""
        lengths = [
            [torch.tensor([float(len(one.token_ids)) for one in group], dtype=torch.float64) for group in groups]
            for groups in (entry.node.completions for entry in buffer)
        ]
        totals = torch.zeros(self.team.num_agents, 2, dtype=torch.float64)
        for entry, of_node in zip(buffer, lengths, strict=True):
            acts = torch.tensor([float(len(group) > 0) for group in of_node], dtype=torch.float64)
            means = torch.stack([group.sum() / max(len(group), 1) for group in of_node])
            totals += entry.weight * torch.stack([means, acts], dim=1)
        aggregation = self.settings.loss_aggregation
        totals = all_reduce_sum(totals) if aggregation == "token_mean" else totals
        tokens = [total / weight if weight else 0.0 for total, weight in totals.tolist()]
        largest = self.settings.max_new_tokens
        return [
            [
                token_divisors(group, aggregation, max_tokens=largest, mean_tokens=mean).tolist()
                for group, mean in zip(of_node, tokens, strict=True)
            ]
            for of_node in lengths
        ]

    def _is_silent(self, advantages: Tensor) -> bool:
        """Whether a group has no gradient at all, so that its forward pass can be left out."""
        return self.settings.entropy_coef == 0 and not advantages.any()


class GroupRelativeLearner(Learner):
    """Critic-free policy gradients: returns of a group against a baseline from the same group.

    Args:
        team: The agents.
        settings: Settings of the policy loss.
        baseline: What is subtracted from the returns of a group.
        normalization: What the advantages are divided by.
        kl_baseline: What is subtracted from the log-ratios to the reference policy; None: `baseline`.
        micro_batch_tokens: Padded tokens per forward pass.
        table: Where metrics go.
        policy_loss: Loss of completions.
        loss_metrics: Names of the sums that the loss adds.
    """

    def __init__(
        self,
        team: AgentTeam,
        settings: PolicySettings,
        baseline: Baseline,
        normalization: Normalization,
        micro_batch_tokens: int,
        table: MetricTable,
        policy_loss: PolicyLossFunction = clipped_policy_loss,
        loss_metrics: Sequence[str] = (),
        kl_baseline: Baseline | None = None,
    ) -> None:
        super().__init__(team, settings, micro_batch_tokens, table, policy_loss, loss_metrics)
        self.kl_baseline: Baseline = baseline if kl_baseline is None else kl_baseline
        self.baseline: Baseline = baseline
        self.normalization: Normalization = normalization

    @override
    def credit(self, rollouts: Rollouts, discount: float) -> list[CreditedNode]:
        credited = super().credit(rollouts, discount)
        return with_peers(credited, discount) if rollouts.are_episodes else credited

    @override
    def advantages(
        self, buffer: Sequence[CreditedNode], num_turns: int, kappa: Sequence[Sequence[Tensor]] | None
    ) -> list[list[Tensor]]:
        returns = [_tables(entry) for entry in buffer]
        moments = torch.zeros(num_turns, self.team.num_agents, 2, dtype=torch.float64)
        for entry, values in zip(buffer, returns, strict=True):
            of_node = torch.stack([batch_moments(group) for table in values for group in table])
            moments[entry.node.turn - 1] += of_node if entry.peers is None else _share_of_act(entry, of_node)
        if self.normalization == "batch":
            moments = all_reduce_sum(moments)
        advantages = []
        for position, (entry, values) in enumerate(zip(buffer, returns, strict=True)):
            rms = torch.stack([batch_rms(agent) for agent in moments[entry.node.turn - 1]])[:, None]
            of_tables = zip(values, torch.split_with_sizes(rms, [len(table) for table in values]), strict=True)
            rows = [
                row
                for table, scale in of_tables
                for row in group_advantages(table, self.baseline, self.normalization, rms=scale)
            ]
            if entry.peers is not None:
                own = entry.node.path[0]
                rows = [row[own : own + 1] if entry.node.acts(agent) else row[:0] for agent, row in enumerate(rows)]
            if kappa is not None:
                pairs, coefficient = zip(rows, kappa[position], strict=True), self.settings.reference_kl_coef
                rows = [subtract_kl(row, own, coefficient, self.kl_baseline) for row, own in pairs]
            advantages.append(rows)
        return advantages


def _share_of_act(entry: CreditedNode, moments: Tensor) -> Tensor:
    """`[N, 2]` moments of a group of episodes, for one act of each: 1/K, and nothing of agents that do not act."""
    acts = torch.tensor([entry.node.acts(agent) for agent in range(len(moments))], dtype=moments.dtype)
    return moments * acts[:, None] / moments[:, 1:].clamp(min=1.0)


def _tables(entry: CreditedNode) -> list[Tensor]:
    """Returns of a group: one `[N, K]` table, or a `[1, K]` table per agent where K differs."""
    if entry.peers is not None:
        return [torch.tensor(entry.peers, dtype=torch.float64)]
    if len({len(group) for group in entry.returns}) == 1:
        return [torch.tensor(entry.returns, dtype=torch.float64)]
    return [torch.tensor([group], dtype=torch.float64) for group in entry.returns]
