"""Nodes with their credit, kept until they are used, as plain values that a checkpoint can hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from comlrl_lightning.functional import agent_returns, node_weights, tree_returns
from comlrl_lightning.types import Node, Rollouts


@dataclass(frozen=True, slots=True)
class Critique:
    """What critics, as they were at the collection, make of a node of one joint completion.

    O outputs: one for a shared reward under a centralized critic, else one per agent.
    """

    values: tuple[float, ...]
    """`[O]` predicted returns."""
    targets: tuple[float, ...]
    """`[O]` what the critics are to predict."""
    td_errors: tuple[float, ...]
    """`[O]` reward plus discounted next value minus value."""
    advantages: tuple[float, ...]
    """`[N]` weight of each agent's policy gradient, before normalization."""


@dataclass(frozen=True, slots=True)
class CreditedNode:
    """A node, the returns of its completions and its share of the objective."""

    node: Node
    joint_returns: tuple[float, ...]
    """`[J]` discounted return of each joint completion."""
    returns: tuple[tuple[float, ...], ...]
    """`[N][K]` return of each agent's completions."""
    weight: float
    """Product over the ancestors of 1/J: the probability of a node under uniform choice of the branches."""
    critique: Critique | None = None
    """What the critics say; None without any."""
    peers: tuple[tuple[float, ...], ...] | None = None
    """`[N][K]` returns from this turn on of all episodes of the task item, which are the group of an episode's act; 0
    for those that are over. None in a tree, whose nodes are groups."""

    def to_state(self) -> dict[str, Any]:
        """Plain values for a checkpoint that loads with ``weights_only=True``."""
        return {
            "node": self.node.to_state(),
            "joint_returns": self.joint_returns,
            "returns": self.returns,
            "weight": self.weight,
            "critique": None if self.critique is None else asdict(self.critique),
            "peers": self.peers,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CreditedNode:
        """Inverse of `to_state`."""
        critique = None if state["critique"] is None else Critique(**state["critique"])
        return cls(**{**state, "node": Node.from_state(state["node"]), "critique": critique})


def assign_credit(rollouts: Rollouts, discount: float) -> list[CreditedNode]:
    """Discounted tree returns and node weights of freshly collected rollouts.

    Args:
        rollouts: Scored nodes, breadth first.
        discount: Factor per turn.

    Returns:
        One record per node, in the same order.
    """
    nodes = rollouts.nodes
    if not nodes:
        return []
    parents = [node.parent for node in nodes]
    rewards = [torch.tensor(node.rewards, dtype=torch.float64) for node in nodes]
    weights = node_weights(parents, [len(node.rewards) for node in nodes]).tolist()
    shared = tree_returns(rewards, parents, discount)
    own = _own_returns(nodes, discount) or [shared] * len(nodes[0].completions)
    credited = []
    for position, node in enumerate(nodes):
        joint, sizes = torch.tensor(node.joint), [len(group) for group in node.completions]
        rows = [
            agent_returns(returns[position], joint, max(sizes))[agent, : sizes[agent]].tolist()
            for agent, returns in enumerate(own)
        ]
        credited.append(CreditedNode(node, tuple(shared[position].tolist()), _nested(rows), weights[position]))
    return credited


def with_peers(credited: Sequence[CreditedNode], discount: float) -> list[CreditedNode]:
    """Nodes of episodes with the returns that their baseline is made of.

    The group of an act at turn t are the K episodes of its task item, each with its return from turn t on: of an
    episode that is over, 0. No other episode depends on the act, so that a baseline of the others is unbiased.

    Example: K=2, rewards (0, 1) over two turns and 1 at turn 1, where the episode ends. Turn 1: peers (1, 1). Turn 2:
    peers (1, 0).

    Args:
        credited: All nodes of the episodes, breadth first.
        discount: Factor per turn.
    """
    nodes = [entry.node for entry in credited]
    if not nodes:
        return []
    shared = [torch.tensor(entry.joint_returns, dtype=torch.float64) for entry in credited]
    own = _own_returns(nodes, discount) or [shared] * len(nodes[0].completions)
    num_episodes = Counter(node.task for node in nodes if node.parent is None)
    tables = {(node.task, node.turn): [[0.0] * num_episodes[node.task] for _ in own] for node in nodes}
    for position, node in enumerate(nodes):
        for row, returns in zip(tables[node.task, node.turn], own, strict=True):
            row[node.path[0]] = float(returns[position])
    return [replace(entry, peers=_nested(tables[entry.node.task, entry.node.turn])) for entry in credited]


def _own_returns(nodes: Sequence[Node], discount: float) -> list[list[Tensor]]:
    """`[N][nodes][J]` returns of each agent's own rewards; nothing where they share one."""
    rewards = [
        torch.tensor(node.agent_rewards, dtype=torch.float64) for node in nodes if node.agent_rewards is not None
    ]
    parents = [node.parent for node in nodes]
    num_agents = rewards[0].shape[1] if rewards else 0
    return [tree_returns([table[:, agent] for table in rewards], parents, discount) for agent in range(num_agents)]


def _nested(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in rows)
