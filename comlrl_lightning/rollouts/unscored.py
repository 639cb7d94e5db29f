"""Joint completions without a reward, which are left out of their groups as if they had not been sampled.

While a rollout is collected, NaN stands for a reward that was None; a reward function cannot give NaN itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from comlrl_lightning.types import Node, Rollouts


def is_known(reward: float) -> bool:
    """Whether a reward is a number."""
    return not math.isnan(reward)


def without_unscored(rollouts: Rollouts) -> Rollouts:
    """The same rollouts without the joint completions that have no reward.

    A joint completion goes if its reward is unknown, or if all joint completions of the turn after it go: then its
    return is unknown. A completion goes with the last joint completion that holds it, a node with its last one. In a
    group of another size J, K and the weights 1/J are those of what stays.

    Example: aligned, K=3, rewards (1, NaN, 4): two joint completions with mean 2.5 stay. Cross, K=2 of two agents, NaN
    for the pairs (0, 0) and (0, 1): agent 0 keeps its second completion alone, agent 1 both. A tree of two turns in
    which the group after joint completion 0 is all NaN loses that joint completion, too; one NaN in that group makes it
    smaller. A trajectory with a NaN at any turn goes as a whole.

    Args:
        rollouts: Nodes, breadth first, with NaN for unknown rewards.

    Returns:
        The rollouts with known rewards only, and how many joint completions were left out.
    """
    nodes, lost = rollouts.nodes, set[tuple[int, int]]()
    kept: list[list[int]] = [[] for _ in nodes]
    for position in reversed(range(len(nodes))):
        node = nodes[position]
        known = [index for index, reward in enumerate(node.rewards) if is_known(reward)]
        kept[position] = [index for index in known if (position, index) not in lost]
        if node.parent is not None and not kept[position]:
            lost.add(node.parent)
    moved = {old: new for new, old in enumerate(old for old, indices in enumerate(kept) if indices)}
    left = []
    for position in moved:
        node = _reduced(nodes[position], kept[position])
        if node.parent is not None:
            above, index = node.parent
            node = replace(node, parent=(moved[above], kept[above].index(index)))
        left.append(node)
    num_left_out = rollouts.num_scored - sum(map(len, kept))
    return replace(rollouts, nodes=tuple(left), num_left_out=num_left_out)


def _reduced(node: Node, kept: Sequence[int]) -> Node:
    """A node of some of its joint completions, and of the completions that they hold."""
    if len(kept) == len(node.rewards):
        return node
    joint = [node.joint[index] for index in kept]
    used = [sorted(set(of_agent)) for of_agent in zip(*joint, strict=True)]
    sections, own = node.sections, node.agent_rewards
    return replace(
        node,
        completions=tuple(
            tuple(group[k] for k in chosen) for group, chosen in zip(node.completions, used, strict=True)
        ),
        joint=tuple(tuple(chosen.index(k) for chosen, k in zip(used, row, strict=True)) for row in joint),
        rewards=tuple(node.rewards[index] for index in kept),
        agent_rewards=None if own is None else tuple(own[index] for index in kept),
        sections=None if sections is None else tuple(sections[k] for k in used[0]),
    )
