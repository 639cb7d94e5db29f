"""Credit of collected rollouts: returns of joint completions and of agents, weights of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from comlrl_lightning.rollouts.credit import CreditedNode, assign_credit
from comlrl_lightning.types import Rollouts
from tests.rollouts.fakes import FakeTeam, Recorder, make_collector

ITEM = {"prompt": "p"}


def credit(num_agents: int, rewards: dict[str, float], discount: float = 1.0, **shape: Any) -> list[CreditedNode]:
    collector = make_collector(FakeTeam(num_agents), Recorder(rewards), **shape)
    return assign_credit(collector.collect([ITEM], [0]), discount)


def test_one_turn_returns_its_rewards() -> None:
    (entry,) = credit(2, {"a1 b1": 1.0, "a2 b2": -2.0})
    assert entry.joint_returns == (1.0, -2.0)
    assert entry.returns == ((1.0, -2.0), (1.0, -2.0))
    assert entry.weight == 1.0


def test_rewards_keep_their_precision() -> None:
    (entry,) = credit(1, {"a1": 1 + 2**-40, "a2": 1.0})
    assert entry.returns == ((1 + 2**-40, 1.0),)


def test_a_child_adds_its_discounted_mean() -> None:
    # Below the first joint completion the mean is (3 + 5) / 2 = 4, below the second (0 + 1) / 2 = .5.
    rewards = {"a1": 1.0, "a2": 2.0, "a11": 3.0, "a12": 5.0, "a22": 1.0}
    root, first, second = credit(1, rewards, discount=0.5, num_turns=2)
    assert root.joint_returns == (1 + 0.5 * 4, 2 + 0.5 * 0.5)
    assert first.joint_returns == (3.0, 5.0)
    assert second.joint_returns == (0.0, 1.0)


def test_cross_gives_each_completion_the_mean_over_its_partners() -> None:
    # r = [[0, 2], [1, 5]]: agent 0 gets (1, 3), agent 1 (.5, 3.5).
    rewards = {"a1 b1": 0.0, "a1 b2": 2.0, "a2 b1": 1.0, "a2 b2": 5.0}
    (entry,) = credit(2, rewards, joint_mode="cross")
    assert entry.joint_returns == (0.0, 2.0, 1.0, 5.0)
    assert entry.returns == ((1.0, 3.0), (0.5, 3.5))


def test_weights_are_the_product_of_one_over_the_ancestors_joint_completions() -> None:
    weights = [entry.weight for entry in credit(1, {}, num_turns=3)]
    assert weights == [1.0] + [1 / 2] * 2 + [1 / 4] * 4


def test_a_branch_that_ended_leaves_the_others_weights() -> None:
    # Below the first joint completion one of two stops; what is followed weighs 1/4 as without it.
    entries = credit(1, {"a11": 4.0}, num_turns=3, early_termination_threshold=1.0)
    assert [(entry.node.path, entry.weight) for entry in entries] == [
        ((), 1.0),
        ((0,), 1 / 2),
        ((1,), 1 / 2),
        ((0, 1), 1 / 4),
        ((1, 0), 1 / 4),
        ((1, 1), 1 / 4),
    ]


def test_cross_weights_count_joint_completions() -> None:
    weights = [entry.weight for entry in credit(2, {}, joint_mode="cross", num_turns=2)]
    assert weights == [1.0] + [1 / 4] * 4


def test_early_termination_punishes_the_better_branch() -> None:
    # Parent rewards .5 and .5. Branch A scores 1.0 and stops: .5 + 1.0 = 1.5. B scores .6 twice: .5 + .6 + .6 = 1.7.
    rewards = {"a1": 0.5, "a2": 0.5, "a11": 1.0, "a12": 1.0, "a21": 0.6, "a22": 0.6}
    rewards |= dict.fromkeys(("a211", "a212", "a221", "a222"), 0.6)
    entries = credit(1, rewards, num_turns=3, early_termination_threshold=0.9)
    assert entries[0].joint_returns == pytest.approx((1.5, 1.7))


def test_items_are_credited_by_themselves() -> None:
    reward = Recorder({"a1": 1.0, "a11": 10.0, "a12": 10.0})
    collector = make_collector(FakeTeam(1), reward, num_turns=2)
    entries = assign_credit(collector.collect([ITEM, ITEM], [0, 1]), 1.0)
    # The fake team answers both items alike: both roots get 1 + 10 and 0 + 0, from their own children.
    assert [entry.joint_returns for entry in entries[:2]] == [(11.0, 0.0)] * 2
    assert [entry.weight for entry in entries] == [1.0] * 2 + [0.5] * 4


def test_nothing_collected() -> None:
    assert assign_credit(Rollouts((), (), ()), 1.0) == []
