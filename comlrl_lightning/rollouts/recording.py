"""From rollouts to metric values and prediction records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from comlrl_lightning.metrics import (
    EPISODE_METRICS,
    LEARNED,
    LEFT_OUT,
    REWARD_TIMEOUTS,
    UNPARSED,
    MetricTable,
    agent_key,
    part_key,
    turn_key,
)
from comlrl_lightning.rollouts.collect import RolloutShape
from comlrl_lightning.rollouts.credit import CreditedNode, assign_credit
from comlrl_lightning.rollouts.unscored import is_known
from comlrl_lightning.types import Node, Rollouts


def record_nodes(
    table: MetricTable, credited: Sequence[CreditedNode], parts: Mapping[str, float], prefix: str = ""
) -> None:
    """Rewards and returns of every joint completion, per turn, and the means of the parts of their rewards."""
    num_scored = float(sum(len(entry.node.rewards) for entry in credited))
    for name, value in parts.items():
        table.update(part_key(name), value, num_scored)
    for entry in credited:
        table.update(prefix + turn_key(entry.node.turn, "reward_mean"), _column(entry.node.rewards))
        table.update(prefix + turn_key(entry.node.turn, "expected_return"), _column(entry.joint_returns))


def record_candidates(table: MetricTable, rollouts: Rollouts, by_task: bool) -> None:
    """Rewards, lengths and times of the candidates of a collecting epoch.

    Args:
        table: Where they go.
        rollouts: Nodes of the first turn.
        by_task: Whether the task's reward has scored them; a learned one is kept apart.
    """
    credited = assign_credit(rollouts, discount=1.0)
    record_nodes(table, credited, rollouts.reward_parts, prefix="" if by_task else LEARNED)
    record_collection(table, rollouts)


def record_collection(table: MetricTable, rollouts: Rollouts) -> None:
    """Lengths of the completions and times of the collection; `agent_0` is the model that answers for all."""
    for node in rollouts.nodes:
        for agent, group in enumerate(node.completions):
            if not group:
                continue
            table.update(agent_key(agent, "completion_tokens"), _column([len(one.token_ids) for one in group]))
            table.update(agent_key(agent, "truncated_share"), _column([one.truncated for one in group]))
    record_unparsed(table, rollouts)
    record_late(table, rollouts)
    record_left_out(table, rollouts)
    record_episodes(table, rollouts)
    table.update("time/generation", rollouts.generation_seconds)
    table.update("time/reward", rollouts.reward_seconds)


def record_unparsed(table: MetricTable, rollouts: Rollouts) -> None:
    """The share of completions in which no answer was found, where one model answers for all."""
    num_sampled = rollouts.num_scored + (rollouts.num_left_out or 0)
    if num_sampled and any(node.sections is not None for node in rollouts.nodes):
        table.update(UNPARSED, rollouts.num_unparsed / num_sampled, num_sampled)


def record_late(table: MetricTable, rollouts: Rollouts) -> None:
    """How many calls of the reward function ran out of time, where a reward stands for them."""
    if rollouts.num_late is not None:
        table.update(REWARD_TIMEOUTS, float(rollouts.num_late))


def record_left_out(table: MetricTable, rollouts: Rollouts) -> None:
    """How many joint completions were left out for want of a reward, where that is no error."""
    if rollouts.num_left_out is not None:
        table.update(LEFT_OUT, float(rollouts.num_left_out))


def record_episodes(table: MetricTable, rollouts: Rollouts) -> None:
    """Returns and lengths of episodes, where an environment plays them."""
    if rollouts.num_unfinished is None:
        return
    returns: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for node in rollouts.nodes:
        returns[node.task, node.path[0]].append(node.rewards[0])
    of_return, of_turns, of_unfinished = EPISODE_METRICS
    for rewards in returns.values():
        table.update(of_return, sum(rewards))
        table.update(of_turns, len(rewards))
    if returns:
        table.update(of_unfinished, rollouts.num_unfinished / len(returns), len(returns))


def record_final_rewards(table: MetricTable, rollouts: Rollouts) -> None:
    """The reward of the last turn that each item reached; every item has one path."""
    last = {node.task: node.rewards[0] for node in rollouts.nodes}
    for reward in last.values():
        table.update("final_reward_mean", reward)


def stops_with_reward(rollouts: Rollouts, shape: RolloutShape) -> bool:
    """Whether a joint completion with a positive reward ended before the last turn."""
    for node in rollouts.nodes:
        stopped = set(range(len(node.rewards))) - {*shape.followed(node.rewards)}
        if node.turn < shape.num_turns and any(node.rewards[index] > 0 for index in stopped):
            return True
    return False


def warn_of_rewarded_stops(shape: RolloutShape) -> None:
    """Say what early termination does to positive rewards."""
    rank_zero_warn(
        f"early_termination_threshold={shape.early_termination_threshold} stopped a joint completion with a positive"
        " reward: it gets 0 for the turns that it does not play, so that its better start is punished. Shift rewards to"
        " be at most 0, or leave the threshold out."
    )


def prediction(rollouts: Rollouts, node: Node) -> dict[str, Any]:
    """A joint completion as plain values: dataset index, turn, prompts, completions and reward.

    Agents that do not act have None for prompt and completion.
    """
    return {
        "index": rollouts.indices[node.task],
        "turn": node.turn,
        "prompts": [prompt if node.acts(agent) else None for agent, prompt in enumerate(node.prompts)],
        "completions": [answer if node.acts(agent) else None for agent, answer in enumerate(node.answers(0))],
        "reward": node.rewards[0] if is_known(node.rewards[0]) else None,
    }


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
