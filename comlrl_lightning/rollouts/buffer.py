"""Nodes with their credit, kept until they are used, as plain values that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from comlrl_lightning.functional import agent_returns, node_weights, tree_returns
from comlrl_lightning.rollouts.types import Node, Rollouts


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

    def to_state(self) -> dict[str, Any]:
        """Plain values for a checkpoint that loads with ``weights_only=True``."""
        return {
            "node": self.node.to_state(),
            "joint_returns": self.joint_returns,
            "returns": self.returns,
            "weight": self.weight,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CreditedNode:
        """Inverse of `to_state`."""
        return cls(**{**state, "node": Node.from_state(state["node"])})


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
    credited = []
    for node, returns, weight in zip(nodes, tree_returns(rewards, parents, discount), weights, strict=True):
        per_agent = agent_returns(returns, torch.tensor(node.joint), len(node.completions[0]))
        credited.append(CreditedNode(node, tuple(returns.tolist()), _nested(per_agent.tolist()), weight))
    return credited


def _nested(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in rows)
