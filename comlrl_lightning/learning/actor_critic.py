"""Credit from critics, and what the critics learn from it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from comlrl_lightning.agents.batches import micro_batches
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.critics.critics import CriticTeam
from comlrl_lightning.functional import subtract_kl
from comlrl_lightning.functional.values import (
    advantage_moments,
    center_and_scale,
    explained_variance,
    explained_variance_moments,
    gae,
    leave_one_out_weights,
    rewards_between_acts,
    value_loss,
)
from comlrl_lightning.learning.minibatches import PreparedNode, UpdateStats, ValueRow
from comlrl_lightning.learning.policy import Learner, PolicyLossFunction, agent_group, clipped_policy_loss
from comlrl_lightning.learning.settings import PolicySettings, ValueSettings
from comlrl_lightning.metrics import MetricTable, agent_key
from comlrl_lightning.rollouts.credit import CreditedNode, Critique
from comlrl_lightning.types import Completion, Node, Rollouts
from comlrl_lightning.utilities.distributed import all_reduce_sum


class ActorCriticLearner(Learner):
    """Policy gradients against the values of critics, which learn along.

    O is the number of values per joint completion: one from a central critic of a shared reward, else one per agent.

    Args:
        team: The agents.
        critics: One critic per agent, or one for all.
        policy: Settings of the policy loss.
        value: Settings of the values and their loss.
        micro_batch_tokens: Padded tokens per forward pass.
        table: Where metrics go.
        policy_loss: Loss of completions.
        loss_metrics: Names of the sums that the loss adds.
    """

    def __init__(
        self,
        team: AgentTeam,
        critics: CriticTeam,
        policy: PolicySettings,
        value: ValueSettings,
        micro_batch_tokens: int,
        table: MetricTable,
        policy_loss: PolicyLossFunction = clipped_policy_loss,
        loss_metrics: Sequence[str] = (),
    ) -> None:
        super().__init__(team, policy, micro_batch_tokens, table, policy_loss, loss_metrics)
        self.critics = critics
        self.value = value

    @override
    def parameter_groups(self) -> dict[str, dict[str, Parameter]]:
        return {**super().parameter_groups(), **self.critics.parameter_groups()}

    @override
    def active_groups(self, nodes: Sequence[PreparedNode]) -> set[str]:
        if not nodes:
            return set()
        shared = range(self.team.num_agents) if self.critics.shares_parameters() else ()
        return {*super().active_groups(nodes), *self.critics.parameter_groups(), *map(agent_group, shared)}

    @override
    def credit(self, rollouts: Rollouts, discount: float) -> list[CreditedNode]:
        """Values, targets and raw advantages by the critics that are there at the collection."""
        credited = super().credit(rollouts, discount)
        if not credited:
            return []
        values = self.values([entry.node.joint_completion(0) for entry in credited])
        rewards = torch.stack([_rewards(entry.node, values.shape[1]) for entry in credited])
        advantages, targets, errors = (torch.zeros_like(values) for _ in range(3))
        valued = self._valued(rollouts.nodes)
        for trajectory in map(torch.tensor, trajectories(rollouts.nodes)):
            for output, acts in enumerate(valued[trajectory].T):
                played, own = trajectory[acts], rewards[trajectory, output]
                between, factors = rewards_between_acts(own, acts, discount)
                seen = between, values[played, output], factors
                credit = gae(*seen, self.value.gae_lambda)
                advantages[played, output], targets[played, output] = credit.advantages, credit.targets
                errors[played, output] = gae(*seen, 0.0).advantages
        if self.value.critic_type == "q":
            for group in siblings(rollouts.nodes):
                advantages[group] = leave_one_out_weights(targets[group].T, values[group].T).T
        weights = advantages.expand(-1, self.team.num_agents)
        rows = zip(credited, *(table.tolist() for table in (values, targets, errors, weights)), strict=True)
        return [replace(entry, critique=Critique(*map(tuple, numbers))) for entry, *numbers in rows]

    def _valued(self, nodes: Sequence[Node]) -> Tensor:
        """`[nodes, O]` True = the critic of the column values the node: a critic of one agent where that agent acts."""
        central = self.critics.centralized
        outputs = range(self.critics.num_outputs)
        return torch.tensor([[central or node.acts(output) for output in outputs] for node in nodes])

    @torch.no_grad()
    def values(self, samples: Sequence[tuple[Completion, ...]]) -> Tensor:
        """`[R, O]` what the critics say now, in float64.

        Args:
            samples: `[R][N]` joint completions with their prompts.
        """
        values = torch.empty(len(samples), self.critics.num_outputs, dtype=torch.float64)
        for batch in micro_batches(self.critics.lengths(samples), self.micro_batch_tokens):
            values[batch] = self.critics.values([samples[position] for position in batch]).cpu().double()
        return values

    @override
    def advantages(
        self, buffer: Sequence[CreditedNode], num_turns: int, kappa: Sequence[Sequence[Tensor]] | None
    ) -> list[list[Tensor]]:
        raw = torch.tensor([_critique(entry).advantages for entry in buffer], dtype=torch.float64)
        raw = raw.reshape(len(buffer), self.team.num_agents)
        agents = range(self.team.num_agents)
        acts = torch.tensor([[entry.node.acts(agent) for agent in agents] for entry in buffer], dtype=torch.bool)
        acts = acts.reshape(len(buffer), self.team.num_agents)
        if self.value.advantage_normalization:
            turns = torch.tensor([entry.node.turn for entry in buffer])
            raw = self._normalized(raw, [(turns == turn)[:, None] & acts for turn in range(1, num_turns + 1)])
        rows = [
            [row[agent : agent + 1] if acting[agent] else row[:0] for agent in agents]
            for row, acting in zip(raw, acts, strict=True)
        ]
        if kappa is None:
            return rows
        coefficient = self.settings.reference_kl_coef
        return [
            [subtract_kl(one, own, coefficient, "none") for one, own in zip(row, of_node, strict=True)]
            for row, of_node in zip(rows, kappa, strict=True)
        ]

    def _normalized(self, advantages: Tensor, turns: Sequence[Tensor]) -> Tensor:
        """`[nodes, N]` advantages, centered and scaled per agent and turn over the buffers of all ranks.

        Args:
            advantages: `[nodes, N]`.
            turns: `[T][nodes, N]` which nodes are of each turn, and which agents act there.
        """
        columns = range(advantages.shape[1])
        moments = torch.stack(
            [
                torch.stack([advantage_moments(advantages[chosen[:, agent], agent]) for agent in columns])
                for chosen in turns
            ]
        )
        normalized = torch.zeros_like(advantages)
        for chosen, of_turn in zip(turns, all_reduce_sum(moments), strict=True):
            for agent in columns:
                acting = chosen[:, agent]
                normalized[acting, agent] = center_and_scale(advantages[acting, agent], of_turn[agent])
        return normalized

    @override
    def prepare(self, buffer: Sequence[CreditedNode], num_turns: int, stale: bool) -> list[PreparedNode]:
        self._record_values(buffer)
        rows = [
            ValueRow(entry.node.joint_completion(0), _critique(entry).targets, _critique(entry).values)
            for entry in buffer
        ]
        prepared = super().prepare(buffer, num_turns, stale)
        return [replace(node, value=row) for node, row in zip(prepared, rows, strict=True)]

    def _record_values(self, buffer: Sequence[CreditedNode]) -> None:
        """How well the critics foresaw the returns of the buffers of all ranks, per agent."""
        for agent in range(self.team.num_agents):
            own = [entry for entry in buffer if entry.node.acts(agent)]
            values = torch.tensor([_of_agent(_critique(entry).values, agent) for entry in own], dtype=torch.float64)
            returns = torch.tensor([entry.returns[agent][0] for entry in own], dtype=torch.float64)
            share = explained_variance(all_reduce_sum(explained_variance_moments(values, returns)))
            if math.isfinite(share):
                self.table.update(agent_key(agent, "explained_variance"), share)
            errors = [abs(_of_agent(_critique(entry).td_errors, agent)) for entry in own]
            self.table.update(agent_key(agent, "td_error"), torch.tensor(errors, dtype=torch.float64))

    @override
    def losses(self, nodes: Sequence[PreparedNode], stats: UpdateStats) -> Iterator[Tensor]:
        yield from super().losses(nodes, stats)
        rows = [node.value for node in nodes if node.value is not None]
        for positions in micro_batches(
            self.critics.lengths([row.completions for row in rows]), self.micro_batch_tokens
        ):
            yield self.value_loss([rows[position] for position in positions], stats)

    def _counted(self, rows: Sequence[ValueRow]) -> Tensor:
        """`[R, O]` 1 = the critic of the column values the joint completion."""
        central, outputs = self.critics.centralized, range(self.critics.num_outputs)
        acting = [{one.agent for one in row.completions} for row in rows]
        return torch.tensor([[float(central or output in agents) for output in outputs] for agents in acting])

    def value_loss(self, rows: Sequence[ValueRow], stats: UpdateStats) -> Tensor:
        """`[]` summed value losses of joint completions; divide by the nodes of the mini-batch, not here.

        Critics of their own add up. The outputs of one critic are averaged, so that it learns as fast from several
        rewards as from one.

        Args:
            rows: Joint completions.
            stats: Gets the sums to log.
        """
        values = self.critics.values([row.completions for row in rows])
        targets = values.new_tensor([row.targets for row in rows])
        old_values = values.new_tensor([row.old_values for row in rows])
        losses = value_loss(values, targets, old_values, self.value.value_clip_range)
        stats.add_values(losses, self._counted(rows).to(losses))
        weight = 1.0
        if self.critics.shares_parameters():
            # The constant scales all that reaches an agent's adapter: the coefficient keeps its meaning.
            constant = self.settings.max_new_tokens if self.settings.loss_aggregation == "constant" else 1
            weight = self.value.value_loss_coef / constant
        return weight * losses.sum() / (losses.shape[1] if self.critics.num_critics == 1 else 1)


def trajectories(nodes: Sequence[Node]) -> list[list[int]]:
    """Positions of the nodes of each trajectory, turn by turn."""
    chains: list[list[int]] = []
    chain_of: dict[int, list[int]] = {}
    for position, node in enumerate(nodes):
        if node.parent is None:
            chains.append([])
        chain_of[position] = chains[-1] if node.parent is None else chain_of[node.parent[0]]
        chain_of[position].append(position)
    return chains


def siblings(nodes: Sequence[Node]) -> list[list[int]]:
    """Positions of the nodes that answer the same prompts: those of one task without a turn in between."""
    groups: defaultdict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for position, node in enumerate(nodes):
        groups[node.task, node.path[:-1]].append(position)
    return list(groups.values())


def _rewards(node: Node, num_outputs: int) -> Tensor:
    """`[O]` rewards of a node of one joint completion."""
    own = node.agent_rewards
    rewards = (node.rewards[0],) * num_outputs if own is None else own[0]
    return torch.tensor(rewards, dtype=torch.float64)


def _critique(entry: CreditedNode) -> Critique:
    assert entry.critique is not None, "the critics saw every node when it was collected"
    return entry.critique


def _of_agent(outputs: Sequence[float], agent: int) -> float:
    return outputs[agent if len(outputs) > 1 else 0]
