"""The expectation of every gradient estimator against the exact gradient, for tabular policies of two agents.

Two agents choose one of six tokens at each of two turns; at the second turn they see both tokens of the first. The
exact gradient sums over all joint actions. Estimators run through the library's own credit, advantages, weights and
divisors, one task item per update, and are averaged over many updates: unbiased ones must lie within three standard
errors of the exact gradient (divided by T=2, as losses are), biased ones of their derived factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from comlrl_lightning.functional import group_max, group_mean, leave_one_out
from comlrl_lightning.learning.actor_critic import ActorCriticLearner
from comlrl_lightning.learning.policy import GroupRelativeLearner
from comlrl_lightning.learning.settings import PolicySettings, ValueSettings
from comlrl_lightning.rollouts.collect import RolloutShape
from comlrl_lightning.types import Completion, Node, Rollouts, joint_indices

TOKENS, AGENTS, TURNS = 6, 2, 2
PAIRS = list(itertools.product(range(TOKENS), repeat=AGENTS))
RNG = np.random.default_rng(0)
FIRST = RNG.normal(size=(TOKENS, TOKENS))
"""Reward of each joint action at turn 1."""
SECOND = 2 * RNG.normal(size=(TOKENS, TOKENS, TOKENS, TOKENS)) + FIRST[:, :, None, None]
"""Reward at turn 2, by the joint actions of both turns."""
LOGITS = [RNG.normal(size=(1 + TOKENS**2, TOKENS)) for _ in range(AGENTS)]
"""`[N][S, V]` logits of each agent by state: 0 at turn 1, then one per joint action."""
UPDATES = 250
THRESHOLD = 0.4
"""About a third of the joint actions of turn 1 exceed it."""


def probabilities(agent: int, state: int) -> np.ndarray:
    weights = np.exp(LOGITS[agent][state] - LOGITS[agent][state].max())
    return cast(np.ndarray, weights / weights.sum())


POLICY = [np.stack([probabilities(agent, state) for state in range(1 + TOKENS**2)]) for agent in range(AGENTS)]


def state_of(pair: Sequence[int]) -> int:
    return 1 + pair[0] * TOKENS + pair[1]


def value_of_second(pair: tuple[int, ...]) -> float:
    """Expected reward of turn 2 after a joint action."""
    state = state_of(pair)
    return float(np.einsum("a,b,ab->", POLICY[0][state], POLICY[1][state], SECOND[pair]))


def stops(pair: tuple[int, ...], with_stops: bool) -> bool:
    return with_stops and FIRST[pair] > THRESHOLD


def exact_gradient(with_stops: bool) -> list[np.ndarray]:
    """`[N][S, V]` gradient of the expected return with respect to the logits, by summing over everything."""
    gradients = [np.zeros_like(one) for one in LOGITS]
    for pair in PAIRS:
        chance = POLICY[0][0][pair[0]] * POLICY[1][0][pair[1]]
        later = 0.0 if stops(pair, with_stops) else value_of_second(pair)
        for agent in range(AGENTS):
            gradients[agent][0] += chance * (FIRST[pair] + later) * score(agent, 0, pair[agent])
        if stops(pair, with_stops):
            continue
        state = state_of(pair)
        for following in PAIRS:
            here = chance * POLICY[0][state][following[0]] * POLICY[1][state][following[1]]
            for agent in range(AGENTS):
                gradients[agent][state] += here * SECOND[pair][following] * score(agent, state, following[agent])
    return gradients


def score(agent: int, state: int, token: int) -> np.ndarray:
    """`[V]` gradient of the log-probability of a token with respect to the logits of its state."""
    return cast(np.ndarray, np.eye(TOKENS)[token] - POLICY[agent][state])


def completion(agent: int, state: int, token: int) -> Completion:
    return Completion(agent, str(state), (state,), (token,), (0.0,), str(token), False)


def draw(rng: np.random.Generator, agent: int, state: int, count: int) -> list[int]:
    return [int(one) for one in rng.choice(TOKENS, size=count, p=POLICY[agent][state])]


def tree(rng: np.random.Generator, shape: RolloutShape) -> Rollouts:
    """The tree of one task item."""

    def node(state: int, path: tuple[int, ...], parent: Any, reward: Callable[[tuple[int, ...]], float]) -> Node:
        tokens = [draw(rng, agent, state, shape.num_generations) for agent in range(AGENTS)]
        joint = joint_indices(AGENTS, shape.num_generations, shape.joint_mode)
        rewards = tuple(float(reward((tokens[0][a], tokens[1][b]))) for a, b in joint)
        groups = tuple(tuple(completion(agent, state, one) for one in tokens[agent]) for agent in range(AGENTS))
        return Node(0, len(path) + 1, path, parent, ("", ""), groups, joint, rewards)

    root = node(0, (), None, lambda pair: FIRST[pair])
    nodes = [root]
    for index in shape.followed(root.rewards):
        pair = tuple(one.token_ids[0] for one in root.joint_completion(index))
        nodes.append(node(state_of(pair), (index,), (0, index), SECOND[pair].__getitem__))
    return Rollouts(({},), (0,), tuple(nodes))


def trajectories(rng: np.random.Generator, shape: RolloutShape) -> Rollouts:
    """K independent trajectories of one task item, breadth first."""
    firsts, seconds = [], []
    for sample in range(shape.num_generations):
        pair = tuple(draw(rng, agent, 0, 1)[0] for agent in range(AGENTS))
        firsts.append(_single(1, (sample,), None, 0, pair, FIRST[pair]))
        if shape.followed((float(FIRST[pair]),)):
            state = state_of(pair)
            following = tuple(draw(rng, agent, state, 1)[0] for agent in range(AGENTS))
            seconds.append(_single(2, (sample, 0), (sample, 0), state, following, SECOND[pair][following]))
    return Rollouts(({},), (0,), (*firsts, *seconds))


def _single(turn: int, path: tuple[int, ...], parent: Any, state: int, pair: tuple[int, ...], reward: float) -> Node:
    groups = tuple((completion(agent, state, pair[agent]),) for agent in range(AGENTS))
    return Node(0, turn, path, parent, ("", ""), groups, ((0, 0),), (float(reward),))


TEAM: Any = SimpleNamespace(num_agents=AGENTS)
POLICY_SETTINGS = PolicySettings(1.0, 0.0, None, None, "token", 0.0, "sum", 4, None)


TABLE: Any = SimpleNamespace(update=lambda *values: None)
"""Metrics take most of the time of so small an update."""


class Critics:
    """Values of the first agent's state for everybody: exact, or 0."""

    def __init__(self, values: Mapping[int, float], centralized: bool) -> None:
        self._values = values
        self.centralized = centralized
        self.num_outputs = self.num_critics = 1 if centralized else AGENTS

    def values(self, samples: Sequence[Sequence[Completion]]) -> Tensor:
        rows = [[self._values.get(sample[0].prompt_ids[0], 0.0)] * self.num_outputs for sample in samples]
        return torch.tensor(rows, dtype=torch.float64)

    def lengths(self, samples: Sequence[Any]) -> list[int]:
        return [1] * len(samples)


def exact_values(with_stops: bool) -> dict[int, float]:
    values = {state_of(pair): value_of_second(pair) for pair in PAIRS}
    values[0] = sum(
        POLICY[0][0][pair[0]]
        * POLICY[1][0][pair[1]]
        * (FIRST[pair] + (0.0 if stops(pair, with_stops) else value_of_second(pair)))
        for pair in PAIRS
    )
    return values


def estimates(learner: Any, sample: Callable[[], Rollouts], count: int) -> np.ndarray:
    """`[count, parameters]` gradient of each of many updates on one task item."""
    found = np.zeros((count, AGENTS, 1 + TOKENS**2, TOKENS))
    for update in range(count):
        buffer = learner.credit(sample(), 1.0)
        prepared = learner.prepare(buffer, TURNS, False)
        for node in prepared:
            for row in node.rows:
                agent, state = row.completion.agent, row.completion.prompt_ids[0]
                weight = row.advantage * row.scale / len(prepared)
                found[update, agent, state] += weight * score(agent, state, row.completion.token_ids[0])
    return found.reshape(count, -1)


def distance(found: np.ndarray, exact: Sequence[np.ndarray], factor: float = 1.0) -> float:
    """How far the mean estimate lies from a multiple of the exact gradient along that gradient, in standard errors.

    The gradient itself is the direction in which a bias of scale or sign shows; a second, random one shows others.
    """
    target = np.concatenate([one.ravel() for one in exact]) / TURNS
    largest = 0.0
    for direction in (target, np.random.default_rng(3).normal(size=len(target))):
        projected = found @ direction
        error = projected.std(ddof=1) / len(projected) ** 0.5
        largest = max(largest, abs(projected.mean() - factor * target @ direction) / error)
    return float(largest)


def group_learner(baseline: Any) -> GroupRelativeLearner:
    return GroupRelativeLearner(TEAM, POLICY_SETTINGS, baseline, False, 10**6, TABLE)


TREES: dict[str, tuple[Any, str, float]] = {
    "MARLOO": (leave_one_out, "aligned", 1.0),
    "MARLOO, cross": (leave_one_out, "cross", 1.0),
    "MAREINFORCE": (torch.zeros_like, "aligned", 1.0),
    "MAREINFORCE, cross": (torch.zeros_like, "cross", 1.0),
    "MAGRPO": (group_mean, "aligned", 2 / 3),  # (K-1)/K of K=3
}
"""Baseline, joint mode, and the factor of the exact gradient that is expected."""


@pytest.mark.parametrize("with_stops", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_trees(name: str, with_stops: bool) -> None:
    baseline, joint_mode, factor = TREES[name]
    threshold = THRESHOLD if with_stops else None
    shape = RolloutShape(3, TURNS, joint_mode, early_termination_threshold=threshold)
    rng = np.random.default_rng(1)
    found = estimates(group_learner(baseline), lambda: tree(rng, shape), UPDATES)
    assert distance(found, exact_gradient(with_stops), factor) < 3


def test_stops_by_the_mean_of_a_group_are_biased() -> None:
    # What a sibling earns later depends on the own action.
    shape = RolloutShape(3, TURNS, "aligned", early_termination_threshold=THRESHOLD, early_termination="group")
    rng = np.random.default_rng(1)
    found = estimates(group_learner(leave_one_out), lambda: tree(rng, shape), 800)
    assert distance(found, exact_gradient(True)) > 5


def test_the_maximum_is_no_baseline() -> None:
    rng = np.random.default_rng(1)
    found = estimates(group_learner(group_max), lambda: tree(rng, RolloutShape(3, TURNS)), 800)
    assert distance(found, exact_gradient(False)) > 5


@pytest.mark.parametrize("with_stops", [False, True])
@pytest.mark.parametrize("centralized", [False, True], ids=["IAC", "MAAC"])
@pytest.mark.parametrize(("gae_lambda", "is_exact"), [(0.0, True), (0.5, True), (1.0, True), (1.0, False)])
def test_critics(gae_lambda: float, is_exact: bool, centralized: bool, with_stops: bool) -> None:
    values = exact_values(with_stops) if is_exact else {}
    settings = ValueSettings("v", None, 0.6, None, gae_lambda, False)
    critics: Any = Critics(values, centralized)
    learner = ActorCriticLearner(TEAM, critics, POLICY_SETTINGS, settings, 10**6, TABLE)
    threshold = THRESHOLD if with_stops else None
    shape = RolloutShape(2, TURNS, early_termination_threshold=threshold, trajectories=True)
    rng = np.random.default_rng(2)
    found = estimates(learner, lambda: trajectories(rng, shape), UPDATES)
    assert distance(found, exact_gradient(with_stops)) < 3


class TestWorkedNumbers:
    """One Bernoulli action with p=1/2: 1 earns 1 and ends, 0 goes on to a reward of c, whatever is done there."""

    def gradient(self, actions: Sequence[int], reward: float) -> float:
        """Gradient to the logit of one update on trajectories with these first actions, zero critic."""
        nodes = [self.node(1, (k,), None, action, float(action)) for k, action in enumerate(actions)]
        going_on = [k for k, action in enumerate(actions) if action == 0]
        nodes += [self.node(2, (k, 0), (k, 0), 0, reward) for k in going_on]
        critics: Any = Critics({}, True)
        settings = ValueSettings("v", None, 0.6, None, 1.0, False)
        team: Any = SimpleNamespace(num_agents=1)
        learner = ActorCriticLearner(team, critics, POLICY_SETTINGS, settings, 10**6, TABLE)
        prepared = learner.prepare(learner.credit(Rollouts(({},), (0,), tuple(nodes)), 1.0), TURNS, False)
        # At turn 2 both actions earn the same: their part of the gradient is 0 in expectation, and left out.
        return sum(
            row.advantage * row.scale / len(prepared) * (row.completion.token_ids[0] - 0.5)
            for node, kept in zip(prepared, nodes, strict=True)
            for row in node.rows
            if kept.turn == 1
        )

    def node(self, turn: int, path: tuple[int, ...], parent: Any, action: int, reward: float) -> Node:
        return Node(0, turn, path, parent, ("",), ((completion(0, turn, action),),), ((0,),), (reward,))

    @pytest.mark.parametrize(("num_trajectories", "old"), [(1, 0.10), (2, 0.0333333), (4, -0.0014286)])
    def test_a_trajectory_that_ends(self, num_trajectories: int, old: float) -> None:
        # Truth: p (1-p) (1 - 1.2) = -.05, halved by T=2. Divided by the nodes that were played it was `old`.
        every = list(itertools.product((0, 1), repeat=num_trajectories))
        found = sum(self.gradient(actions, 1.2) for actions in every) / len(every)
        assert found == pytest.approx(-0.05 / 2, abs=1e-12)
        ratio = sum(
            self.gradient(actions, 1.2) * num_trajectories * TURNS / (2 * num_trajectories - sum(actions))
            for actions in every
        ) / len(every)
        assert ratio == pytest.approx(old, abs=1e-6)
