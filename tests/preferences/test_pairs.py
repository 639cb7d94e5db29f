"""Pairs of joint completions: among candidates, against a comparator, their records and settings."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from comlrl_lightning.preferences.pairs import (
    PairSelection,
    PairSettings,
    PreferencePair,
    Round,
    RoundSource,
    candidate_pairs,
    compared_pairs,
)
from comlrl_lightning.types import Completion, Node
from tests.preferences.support import completion, indices, node, pair

NAN, INF = math.nan, math.inf
KEY = (7, 1)

# Rewards, selection, limit and the (winner, loser) numbers that must come, in order.
CANDIDATES: list[tuple[list[float], PairSelection, int | None, list[tuple[int, int]]]] = [
    ([0, 1, 2, 3], "disjoint", None, [(3, 0), (2, 1)]),
    ([0, 1, 2, 3], "disjoint", 1, [(3, 0)]),
    ([2, 0, 3, 1, 9], "disjoint", None, [(4, 1), (2, 3)]),  # 9, 3, [2], 1, 0: the one in the middle has no partner
    ([0, 0, 0, 1], "disjoint", None, [(3, 2)]),  # 3 | 0 1 2: the second pair (0, 1) is a tie
    ([1, 1, 0, 0], "disjoint", None, [(0, 3), (1, 2)]),  # equal ones in the order of their index
    ([5, 5, 5], "disjoint", None, []),
    ([1], "disjoint", None, []),
    ([0, NAN, 2, 3], "disjoint", None, [(3, 0)]),  # 3, 2, 0: 1 takes nobody's partner
    ([0, 1, INF, 2, -INF, 3], "disjoint", None, [(5, 0), (3, 1)]),
    # gaps: (0,1) 1, (2,0) 2, (2,1) 3, (2,3) 1, (3,0) 1, (3,1) 2
    ([1, 0, 3, 2], "reward_gap", None, [(2, 1), (2, 0), (3, 1), (0, 1), (2, 3), (3, 0)]),
    ([1, 0, 3, 2], "reward_gap", 3, [(2, 1), (2, 0), (3, 1)]),
    ([1, 0, 3, 2], "all", None, [(0, 1), (2, 0), (2, 1), (2, 3), (3, 0), (3, 1)]),
    ([0, 0, 0, 1], "all", None, [(3, 0), (3, 1), (3, 2)]),
    ([0, 0, 0, 1], "reward_gap", 2, [(3, 0), (3, 1)]),  # equal gaps in the order of the loser
    ([1, NAN, 0, INF], "all", None, [(0, 2)]),
    ([1, NAN, 0, INF], "reward_gap", None, [(0, 2)]),
    ([1e308, -1e308, 0], "reward_gap", None, [(0, 2), (2, 1)]),  # 2e308 is no float64: the gap of (0, 1) is infinite
    ([2, 2], "all", None, []),
]


@pytest.mark.parametrize(("rewards", "selection", "limit", "expected"), CANDIDATES)
def test_candidates(
    rewards: list[float], selection: PairSelection, limit: int | None, expected: list[tuple[int, int]]
) -> None:
    pairs = candidate_pairs(node(rewards), 5, selection, limit, KEY)
    assert indices(pairs) == expected
    for entry, (winner, loser) in zip(pairs, expected, strict=True):
        assert (entry.winner_reward, entry.loser_reward) == (rewards[winner], rewards[loser])
        assert entry.gap == rewards[winner] - rewards[loser]
        assert (entry.item_index, entry.winner_source, entry.loser_source) == (5, "policy", "policy")


def test_a_pair_holds_the_sampled_completions_of_all_agents() -> None:
    candidates = node([0, 1])
    (entry,) = candidate_pairs(candidates, 5, "disjoint", None, KEY)
    assert entry.winner == (candidates.completions[0][1], candidates.completions[1][1])
    assert entry.loser == (candidates.completions[0][0], candidates.completions[1][0])


@pytest.mark.parametrize("selection", ["reward_gap", "all", "random"])
def test_equal_answers_give_no_pair_and_take_no_place(selection: PairSelection) -> None:
    # 0 and 2 read alike, though a noisy reward tells them apart: of (1,0), (2,0), (2,1) the middle one goes.
    candidates = node([0, 1, 5], texts=["same", "other", "same"])
    assert sorted(indices(candidate_pairs(candidates, 0, selection, 2, KEY))) == [(1, 0), (2, 1)]


def test_equal_answers_of_a_disjoint_pair() -> None:
    # (3, 0) read alike, (2, 1) do not.
    candidates = node([0, 1, 2, 3], texts=["same", "a", "b", "same"])
    assert indices(candidate_pairs(candidates, 0, "disjoint", None, KEY)) == [(2, 1)]


def test_one_agent_that_answers_otherwise_is_enough() -> None:
    candidates = node([0, 1], texts=["same", "same"])
    groups = (candidates.completions[0], (completion(1, "same", 0), completion(1, "other", 1)))
    assert indices(candidate_pairs(candidates, 0, "disjoint", None, KEY)) == []
    assert indices(candidate_pairs(replace(candidates, completions=groups), 0, "disjoint", None, KEY)) == [(1, 0)]


def test_a_model_that_answers_for_all_is_one_completion() -> None:
    # 0 and 2 differ in what stands around the sections alone: (2, 0) goes, (2, 1) and (1, 0) stay.
    group = tuple(completion(0, text, j) for j, text in enumerate(["<a>x<b>y", "<a>x<b>z", "well, <a>x<b>y"]))
    sections = (("x", "y"), ("x", "z"), ("x", "y"))
    candidates = Node(0, 1, (), None, ("p", "q"), (group,), ((0,), (1,), (2,)), (0.0, 1.0, 2.0), sections=sections)
    pairs = candidate_pairs(candidates, 0, "all", None, KEY)
    assert indices(pairs) == [(1, 0), (2, 1)]
    assert pairs[0].winner == (group[1],)


def test_random_takes_some_of_all_and_depends_on_key_and_item() -> None:
    rewards = [float(reward) for reward in range(8)]  # 28 pairs
    every = indices(candidate_pairs(node(rewards), 0, "all", None, KEY))

    def drawn(item_index: int, key: tuple[int, ...], limit: int | None = None) -> list[tuple[int, int]]:
        return indices(candidate_pairs(node(rewards), item_index, "random", limit, key))

    assert drawn(0, KEY) != every
    assert sorted(drawn(0, KEY)) == every
    assert drawn(0, KEY, 4) == drawn(0, KEY)[:4]
    assert drawn(0, KEY) == drawn(0, KEY)
    assert drawn(0, (7, 2)) != drawn(0, KEY)
    assert drawn(1, KEY) != drawn(0, KEY)


def test_random_is_uniform_and_leaves_the_global_generators_alone() -> None:
    # 3 pairs, 300 items, the first of each: 100 expected. Chi-square of 2 degrees of freedom is above 13.8 once in
    # 1,000 seeds.
    torch.manual_seed(0)
    before = torch.get_rng_state()
    firsts = Counter(indices(candidate_pairs(node([0, 1, 2]), item, "random", 1, KEY))[0] for item in range(300))
    assert sum((firsts[index] - 100) ** 2 / 100 for index in [(1, 0), (2, 0), (2, 1)]) < 13.8
    assert sum(firsts.values()) == 300
    assert torch.equal(torch.get_rng_state(), before)


# Rewards of the policy and of the comparator, selection, limit, and the pairs as index and winning side.
COMPARED: list[tuple[list[float], list[float], PairSelection, int | None, list[tuple[int, str]]]] = [
    # gaps: 0 -> 2 (policy), 1 -> tie, 2 -> 3 (comparator), 3 -> 1 (policy)
    ([3, 1, 0, 2], [1, 1, 3, 1], "all", None, [(0, "policy"), (2, "comparator"), (3, "policy")]),
    ([3, 1, 0, 2], [1, 1, 3, 1], "reward_gap", None, [(2, "comparator"), (0, "policy"), (3, "policy")]),
    ([3, 1, 0, 2], [1, 1, 3, 1], "reward_gap", 1, [(2, "comparator")]),
    # comparator's rewards 3; then 1 and 1, of which 0 has the larger gap
    ([3, 1, 0, 2], [1, 1, 3, 1], "comparator_reward", None, [(2, "comparator"), (0, "policy"), (3, "policy")]),
    ([2, 1, 0, 3], [1, 1, 3, 1], "comparator_reward", None, [(2, "comparator"), (3, "policy"), (0, "policy")]),
    # the comparator's reward comes before the gap
    ([9, 4.5, 0], [1, 4, 2], "comparator_reward", None, [(1, "policy"), (2, "comparator"), (0, "policy")]),
    ([9, 4.5, 0], [1, 4, 2], "comparator_reward", 2, [(1, "policy"), (2, "comparator")]),
    ([2, 2, 2], [1, 3, 1], "reward_gap", None, [(0, "policy"), (1, "comparator"), (2, "policy")]),  # equal: by index
    ([1, NAN, 2, INF, 4], [0, 1, NAN, 0, INF], "all", None, [(0, "policy")]),
    ([1, NAN, 2, INF, 4], [0, 1, NAN, 0, INF], "comparator_reward", None, [(0, "policy")]),
    ([1, 5, 6], [0, 7], "all", None, [(0, "policy"), (1, "comparator")]),  # no partner for the third
    ([1], [0, 7], "all", None, [(0, "policy")]),
    ([1, 2], [1, 2], "comparator_reward", None, []),
]


@pytest.mark.parametrize(("own", "other", "selection", "limit", "expected"), COMPARED)
def test_comparisons(
    own: list[float],
    other: list[float],
    selection: PairSelection,
    limit: int | None,
    expected: list[tuple[int, str]],
) -> None:
    policy, comparator = node(own), node(other, name="c")
    pairs = compared_pairs(policy, comparator, 5, selection, limit, KEY)
    assert indices(pairs) == [(index, index) for index, _ in expected]
    assert [entry.winner_source for entry in pairs] == [side for _, side in expected]
    for entry, (index, side) in zip(pairs, expected, strict=True):
        sides = [(policy, own), (comparator, other)]
        (better, high), (worse, low) = sides if side == "policy" else sides[::-1]
        assert (entry.winner, entry.winner_reward) == (better.joint_completion(index), high[index])
        assert (entry.loser, entry.loser_reward) == (worse.joint_completion(index), low[index])
        assert {entry.winner_source, entry.loser_source} == {"policy", "comparator"}
        assert entry.item_index == 5


def test_the_comparator_may_answer_the_same() -> None:
    policy, comparator = node([1, 1], texts=["same", "a"]), node([0, 0], texts=["same", "b"])
    assert indices(compared_pairs(policy, comparator, 0, "comparator_reward", None, KEY)) == [(1, 1)]


def test_random_comparisons_depend_on_key_and_item() -> None:
    policy, comparator = node([1.0] * 12), node([0.0] * 12, name="c")

    def drawn(item_index: int, key: tuple[int, ...], limit: int | None = None) -> list[tuple[int, int]]:
        return indices(compared_pairs(policy, comparator, item_index, "random", limit, key))

    every = [(index, index) for index in range(12)]
    assert drawn(0, KEY) != every
    assert sorted(drawn(0, KEY)) == every
    assert drawn(0, KEY, 4) == drawn(0, KEY)[:4]
    assert len({tuple(drawn(*choice)) for choice in [(0, KEY), (1, KEY), (0, (7, 2))]}) == 3


@pytest.mark.parametrize(
    ("selection", "with_comparator", "expected"),
    [
        (None, False, "disjoint"),
        (None, True, "comparator_reward"),
        ("disjoint", False, "disjoint"),
        ("comparator_reward", True, "comparator_reward"),
        ("reward_gap", False, "reward_gap"),
        ("reward_gap", True, "reward_gap"),
        ("random", True, "random"),
        ("all", False, "all"),
    ],
)
def test_selection_that_holds(selection: PairSelection | None, with_comparator: bool, expected: str) -> None:
    assert PairSettings(selection).resolved(with_comparator) == expected


@pytest.mark.parametrize(
    ("selection", "with_comparator", "message"),
    [
        ("disjoint", True, "pair_selection='disjoint' pairs the candidates with each other, but there is a comparator"),
        ("comparator_reward", False, "pair_selection='comparator_reward' needs a comparator, and comparator=None"),
    ],
)
def test_selection_that_makes_no_sense(selection: PairSelection, with_comparator: bool, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        PairSettings(selection).resolved(with_comparator)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"selection": "best"}, "pair_selection='best' is unknown. Use one of ['disjoint', 'reward_gap', 'random', "),
        ({"num_pairs_per_item": 0}, "num_pairs_per_item=0 is out of range. Use a whole number from 1, or None."),
        ({"num_pairs_per_item": 1.5}, "num_pairs_per_item=1.5 is out of range"),
        ({"num_pairs_per_item": True}, "num_pairs_per_item=True is out of range"),
        (
            {"selection": "all", "num_pairs_per_item": 4},
            "num_pairs_per_item=4 contradicts pair_selection='all', which takes every pair. Use ",
        ),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        PairSettings(**settings)


def test_a_round_comes_back_from_a_checkpoint_of_plain_values() -> None:
    comparator = PreferencePair(4, pair(4).winner, pair(4).loser, 2.0, -1.0, "comparator", "policy")
    chat = Completion(0, [{"role": "user", "content": "hi"}], (1,), (2, 3), (), "answer", truncated=True)
    record = Round(3, (pair(1), comparator, PreferencePair(9, (chat,), (chat,), 1.0, 0.0)), 0.25)
    buffer = io.BytesIO()
    torch.save(record.to_state(), buffer)
    buffer.seek(0)
    assert Round.from_state(torch.load(buffer, weights_only=True)) == record


def test_who_has_rounds() -> None:
    class Source:
        last_round: Round | None = None

    assert isinstance(Source(), RoundSource)
    assert not isinstance(object(), RoundSource)
