"""Returns of a tree of turns, what each node of it weighs, and what each agent's completion earned.

A tree is given by `parents`, one entry per node in breadth-first order: None at turn 1, else the position of the parent
node and the index of the joint completion there that the node follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Parents = Sequence[tuple[int, int] | None]
"""Position of each node's parent and the joint completion followed there; parents stand before their children."""


def tree_returns(rewards: Sequence[Tensor], parents: Parents, discount: float) -> list[Tensor]:
    """Return of each joint completion: ``R = r + discount * mean(R of the child)``, and ``R = r`` without a child.

    A joint completion that was not followed counts as reward 0 ever after.

    Args:
        rewards: One `[J]` tensor per node, breadth first; J may differ between nodes.
        parents: `[nodes]` where each node hangs.
        discount: Factor per turn.

    Returns:
        One `[J]` tensor per node, in the order of `rewards`.
    """
    returns = [reward.clone() for reward in rewards]
    for node in reversed(range(len(returns))):
        parent = parents[node]
        if parent is not None:
            position, joint_index = parent
            returns[position][joint_index] += discount * returns[node].mean()
    return returns


def node_weights(parents: Parents, num_joint: Sequence[int]) -> Tensor:
    """`[nodes]` probability of coming to each node by a fair choice among the joint completions of every ancestor.

    The weight is the product of 1/J over the ancestors, so the losses of all turns count as in the expected return: the
    loss of trees is ``sum(weight * loss) / (roots * T)``. Without early stops ``roots * T`` is the sum of the weights.
    A branch that ended early leaves the others' weights and the divisor as they are: a divisor that depends on actions,
    as the sum of the weights then does, makes the gradient biased, up to its sign. Add sums and roots over ranks before
    dividing.

    Example: one action with probability 1/2 each, K=1, no baseline; 1 earns 1 and ends, 0 goes on to a reward of 1.2.
    The gradient of the expected return is ``p (1-p) (1 - 1.2) = -.05``, halved by T=2: ``-.025``. Divided by the sum of
    the weights it would be ``1/2 (.5 * 1) + 1/2 (-.5 * 1.2) / 2 = +.10``.

    Args:
        parents: `[nodes]` where each node hangs.
        num_joint: `[nodes]` joint completions J of each node.

    Returns:
        `[nodes]` weights in float64, 1 at turn 1.
    """
    weights: list[float] = []
    for parent in parents:
        weights.append(1.0 if parent is None else weights[parent[0]] / num_joint[parent[0]])
    return torch.tensor(weights, dtype=torch.float64)


def agent_returns(joint_returns: Tensor, joint: Tensor, num_generations: int) -> Tensor:
    """`[N, K]` mean return of the joint completions that hold each agent's completion.

    Where every completion of an agent meets every combination of the others' (the Cartesian product), this minus the
    group mean is the counterfactual advantage that marginalizes out the own action, with the sampled completions in
    place of the policy (COMA, https://arxiv.org/abs/1705.08926). The noise of pairwise interactions falls
    as 1/K, not as 1/K^(N-1).

    Args:
        joint_returns: `[J]` returns of a node's joint completions.
        joint: `[J, N]` index of each agent's completion in each joint completion.
        num_generations: Completions K per agent; each must be part of a joint completion.

    Returns:
        `[N, K]` returns.
    """
    choices = joint.T
    zeros = joint_returns.new_zeros(choices.shape[0], num_generations)
    # One addition per joint completion in a fixed order: equal returns leave equal sums.
    sums = zeros.scatter_add(1, choices, joint_returns.expand(choices.shape))
    return sums / zeros.scatter_add(1, choices, torch.ones_like(joint_returns).expand(choices.shape))
