"""The critic-free family once more, slow and obvious: one unpadded row at a time through plain transformers and PEFT.

Nothing here comes from the library but the records of what was sampled and rewarded. Returns and weights are recursions
over paths, statistics come from `statistics`, adapters are switched by PEFT's public calls, log-probabilities are a
log-softmax over the whole vocabulary of a forward pass over one sequence, and every row has a backward pass of its own.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comlrl_lightning.types import Completion, Node, Rollouts

MAX_NEW_TOKENS = 4
"""Token limit of the completions that are compared."""
Gradients = dict[str, Tensor]
"""Gradient by parameter name; empty for an agent that takes no step."""


@dataclass(frozen=True)
class Objective:
    """What is optimized."""

    baseline: str = "mean"
    """none, mean, others, max."""
    normalization: str | bool = "group"
    discount: float = 1.0
    temperature: float = 1.0
    kl: float = 0.0
    clip: tuple[float, float] | None = None
    """How far below and above 1 a ratio may push."""
    level: str = "token"
    entropy: float = 0.0
    aggregation: str = "sum"


class Agent:
    """A model that one agent speaks through, or its adapter in a model that several share.

    Args:
        model: A plain model, or a `PeftModel`.
        adapter: Name of the agent's adapter; None: the whole model is the agent's.
    """

    def __init__(self, model: Any, adapter: str | None) -> None:
        self.model = model
        self.adapter = adapter
        self.initial = copy.deepcopy(model) if adapter is None else None

    def parameters(self) -> dict[str, nn.Parameter]:
        named = dict(self.model.named_parameters())
        if self.adapter is None:
            return named
        return {name: value for name, value in named.items() if self.adapter in name.split(".")}

    def scores(self, completion: Completion, temperature: float) -> tuple[Tensor, Tensor]:
        """`[C]` log-probabilities and `[C]` entropies."""
        if self.adapter is not None:
            self.model.set_adapter(self.adapter)
        return _scores(self.model, completion, temperature)

    @torch.no_grad()
    def reference_scores(self, completion: Completion, temperature: float) -> Tensor:
        """`[C]` log-probabilities under the model without adapters, or as it was at first."""
        if self.initial is not None:
            return _scores(self.initial, completion, temperature)[0]
        with self.model.disable_adapter():
            return _scores(self.model, completion, temperature)[0]


def _scores(model: Any, completion: Completion, temperature: float) -> tuple[Tensor, Tensor]:
    prompt, answer = list(completion.prompt_ids), list(completion.token_ids)
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
    log_probs, entropies = [], []
    for place, token in enumerate(answer):
        distribution = (logits[len(prompt) + place - 1] / temperature).log_softmax(-1)
        log_probs.append(distribution[token])
        entropies.append(-(distribution.exp() * distribution).sum())
    return torch.stack(log_probs), torch.stack(entropies)


def joint_return(rollouts: Rollouts, node: Node, joint: int, discount: float) -> float:
    """Reward of a joint completion plus the discounted mean return of the node that follows it."""
    following = [one for one in rollouts.nodes if one.task == node.task and one.path == (*node.path, joint)]
    later = [
        joint_return(rollouts, child, index, discount) for child in following for index in range(len(child.rewards))
    ]
    return node.rewards[joint] + (discount * statistics.fmean(later) if later else 0.0)


def node_weight(rollouts: Rollouts, node: Node) -> float:
    """1 at the first turn, the parent's weight divided by the parent's joint completions below."""
    if not node.path:
        return 1.0
    (parent,) = (one for one in rollouts.nodes if one.task == node.task and one.path == node.path[:-1])
    return node_weight(rollouts, parent) / len(parent.rewards)


def completion_returns(rollouts: Rollouts, node: Node, agent: int, discount: float) -> list[float]:
    """`[K]` mean return of the joint completions that hold each completion of an agent."""
    returns = [joint_return(rollouts, node, joint, discount) for joint in range(len(node.rewards))]
    return [
        statistics.fmean(value for value, chosen in zip(returns, node.joint, strict=True) if chosen[agent] == k)
        for k in range(len(node.completions[agent]))
    ]


def centered(values: Sequence[float], baseline: str) -> list[float]:
    """Values minus the mean of all, the mean of the others or the largest."""
    if baseline == "none":
        return list(values)
    if max(values) == min(values):
        return [0.0] * len(values)
    if baseline == "max":
        return [value - max(values) for value in values]
    if baseline == "mean":
        return [value - statistics.fmean(values) for value in values]
    return [
        value - statistics.fmean([*values[:position], *values[position + 1 :]]) for position, value in enumerate(values)
    ]


@dataclass(frozen=True)
class Credited:
    """A node with what the update needs of it."""

    node: Node
    weight: float
    advantages: list[list[float]]
    """`[N][K]`."""


def credit(agents: Sequence[Agent], buffer: Sequence[Rollouts], objective: Objective) -> list[Credited]:
    """Advantages and weights of all nodes, in order."""
    places = [(rollouts, node) for rollouts in buffer for node in rollouts.nodes]
    returns = [
        [completion_returns(rollouts, node, agent, objective.discount) for agent in range(len(agents))]
        for rollouts, node in places
    ]
    credited = []
    for (rollouts, node), values in zip(places, returns, strict=True):
        advantages = []
        for agent, speaker in enumerate(agents):
            same_turn = [other[agent] for (_, one), other in zip(places, returns, strict=True) if one.turn == node.turn]
            scale = _scale(values[agent], same_turn, objective)
            plain = [value / scale for value in centered(values[agent], objective.baseline)]
            advantages.append(_minus_kl(plain, speaker, node.completions[agent], objective))
        credited.append(Credited(node, node_weight(rollouts, node), advantages))
    return credited


def _scale(group: Sequence[float], same_turn: Sequence[Sequence[float]], objective: Objective) -> float:
    if objective.normalization is False:
        return 1.0
    if objective.normalization == "group":
        return statistics.pstdev(group) + 1e-4
    squares = [(value - statistics.fmean(values)) ** 2 for values in same_turn for value in values]
    return math.sqrt(statistics.fmean(squares)) + 1e-4


def _minus_kl(
    advantages: list[float], agent: Agent, completions: Sequence[Completion], objective: Objective
) -> list[float]:
    if not objective.kl:
        return advantages
    kappa = []
    for completion in completions:
        with torch.no_grad():
            policy = agent.scores(completion, objective.temperature)[0]
        kappa.append(float((policy - agent.reference_scores(completion, objective.temperature)).sum()))
    baseline = "mean" if objective.baseline == "max" else objective.baseline
    penalties = centered(kappa, baseline if len(kappa) > 1 else "none")
    return [value - objective.kl * penalty for value, penalty in zip(advantages, penalties, strict=True)]


def row_loss(
    log_probs: Tensor, entropies: Tensor, old: Tensor | None, advantage: float, objective: Objective
) -> Tensor:
    """Loss of one completion, summed over its tokens."""
    bonus = objective.entropy * entropies.sum()
    if old is None:
        return -advantage * log_probs.sum() - bonus
    difference = log_probs - old
    if objective.level == "sequence":
        ratios = [difference.mean().exp()] * len(difference)
    else:
        ratios = [one.exp() for one in difference]
    total = torch.zeros((), dtype=log_probs.dtype)
    for ratio in ratios:
        plain = ratio * advantage
        if objective.clip is None:
            total = total + plain
        else:
            low, high = objective.clip
            total = total + torch.minimum(plain, ratio.clamp(1 - low, 1 + high) * advantage)
    return -total - bonus


def mean_completion_tokens(credited: Sequence[Credited], agent: int) -> float:
    """Mean tokens of an agent's completions, weighted as their nodes are."""
    weighted = [
        (entry.weight * statistics.fmean(len(one.token_ids) for one in entry.node.completions[agent]), entry.weight)
        for entry in credited
    ]
    return sum(tokens for tokens, _ in weighted) / sum(weight for _, weight in weighted)


def learn(
    agents: Sequence[Agent],
    buffer: Sequence[Rollouts],
    objective: Objective,
    batches: Sequence[Sequence[int]],
    learning_rate: float,
) -> list[list[Gradients]]:
    """Train by plain gradient descent on a buffer.

    Args:
        agents: `[N]`; they are changed.
        buffer: What was collected, one record per training step.
        objective: What is optimized.
        batches: Positions in the buffer of the nodes of each optimizer step.
        learning_rate: Of every agent.

    Returns:
        `[steps][N]` gradients.
    """
    credited = credit(agents, buffer, objective)
    num_turns = max(entry.node.turn for entry in credited)  # as the objective's, as some branch is always followed
    num_roots = sum(entry.node.turn == 1 for entry in credited)
    mean_weight = num_roots * num_turns / len(credited)
    mean_tokens = [mean_completion_tokens(credited, agent) for agent in range(len(agents))]
    old: dict[tuple[int, int, int], Tensor] = {}
    if len(batches) > 1:
        for position, entry in enumerate(credited):
            for agent, group in enumerate(entry.node.completions):
                for k, completion in enumerate(group):
                    with torch.no_grad():
                        old[position, agent, k] = agents[agent].scores(completion, objective.temperature)[0]
    steps = []
    for batch in batches:
        totals: list[Gradients] = [{} for _ in agents]
        for position in batch:
            entry = credited[position]
            share = entry.weight / mean_weight / len(batch)
            for agent, group in enumerate(entry.node.completions):
                if not objective.entropy and not any(entry.advantages[agent]):
                    continue
                for k, completion in enumerate(group):
                    scores = agents[agent].scores(completion, objective.temperature)
                    loss = row_loss(*scores, old.get((position, agent, k)), entry.advantages[agent][k], objective)
                    loss = (
                        loss
                        / {
                            "sum": 1,
                            "constant": MAX_NEW_TOKENS,
                            "sequence_mean": len(completion.token_ids),
                            "token_mean": mean_tokens[agent],
                        }[objective.aggregation]
                    )
                    _add_gradients(totals[agent], agents[agent], loss * share / len(group))
        for speaker, total in zip(agents, totals, strict=True):
            for name, gradient in total.items():
                speaker.parameters()[name].data -= learning_rate * gradient
        steps.append(totals)
    return steps


def _add_gradients(total: Gradients, agent: Agent, loss: Tensor) -> None:
    named = agent.parameters()
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
        value = torch.zeros_like(parameter) if gradient is None else gradient
        total[name] = total[name] + value if name in total else value
