"""Replay: weights of rounds, draws, and what the strategies keep."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from comlrl_lightning.preferences.pairs import PreferencePair, Round
from comlrl_lightning.preferences.replay import (
    AllHistory,
    CurrentRound,
    LambdaDecay,
    NearestK,
    Replay,
    draw_pairs,
    round_weights,
)
from comlrl_lightning.utilities.plain import from_plain, to_plain
from tests.preferences.support import rounds_of

KEY = (7, 2)
STRATEGIES = [CurrentRound(), NearestK(2), AllHistory(), LambdaDecay(0.5)]

# Sizes oldest first, settings, weights.
WEIGHTS: list[tuple[list[int], dict[str, Any], list[float]]] = [
    ([5, 5, 5], {"decay": 0.5}, [1 / 7, 2 / 7, 4 / 7]),
    ([5, 5, 5], {"decay": 0.8}, [0.26230, 0.32787, 0.40984]),  # .64, .8, 1 over 2.44
    ([5, 9, 2], {"decay": 0.5}, [1 / 7, 2 / 7, 4 / 7]),  # sizes do not matter
    ([5, 5, 5], {"decay": 0.0}, [0, 0, 1]),  # 0^0 = 1
    ([5, 5, 0], {"decay": 0.0}, [0, 1, 0]),
    ([5, 5, 5], {"decay": 1.0}, [1 / 3, 1 / 3, 1 / 3]),
    ([5, 0, 5, 0, 5, 0], {"decay": 0.5}, [1 / 7, 0, 2 / 7, 0, 4 / 7, 0]),  # empty rounds have no age
    ([8, 2], {"decay": 0.5}, [1 / 3, 2 / 3]),
    ([8, 2], {"decay": 0.5, "weigh_by_size": True}, [2 / 3, 1 / 3]),  # .5 * 8 : 1 * 2
    ([3, 5, 5], {"num_nearest": 2}, [0, 0.5, 0.5]),
    ([3, 5, 0, 5, 0], {"num_nearest": 2}, [0, 0.5, 0, 0.5, 0]),
    ([3, 5], {"num_nearest": 9}, [0.5, 0.5]),
    ([9, 3, 5], {"num_nearest": 2, "weigh_by_size": True}, [0, 3 / 8, 5 / 8]),
    ([1, 3, 4], {"weigh_by_size": True}, [1 / 8, 3 / 8, 4 / 8]),
    ([1, 3, 4], {}, [1 / 3, 1 / 3, 1 / 3]),
    ([0, 0], {"decay": 0.5}, [0, 0]),
    ([], {}, []),
]


@pytest.mark.parametrize(("sizes", "settings", "expected"), WEIGHTS)
def test_weights(sizes: list[int], settings: dict[str, Any], expected: list[float]) -> None:
    assert round_weights(sizes, **settings) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("weigh_by_size", "old_uses", "new_uses"),
    # 10 draws, 8 old pairs and 2 new ones: 10/3 / 8 and 20/3 / 2; by size 20/3 / 8 and 10/3 / 2.
    [(False, 0.417, 3.33), (True, 0.83, 1.67)],
)
def test_expected_uses_per_pair(weigh_by_size: bool, old_uses: float, new_uses: float) -> None:
    old, new = round_weights([8, 2], decay=0.5, weigh_by_size=weigh_by_size)
    assert (10 * old / 8, 10 * new / 2) == pytest.approx((old_uses, new_uses), abs=5e-3)


def counts(pairs: Sequence[PreferencePair]) -> Counter[int]:
    """Pairs per round."""
    return Counter(entry.item_index // 100 for entry in pairs)


def chi_square(observed: Sequence[int], expected: Sequence[float]) -> float:
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))


# Sizes, strategy, probability of each round. Those of one round in use have no spread and are tested elsewhere.
FREQUENCIES: list[tuple[list[int], Callable[[int], Replay], list[float]]] = [
    ([4, 4, 4], lambda size: NearestK(2, size), [0, 1 / 2, 1 / 2]),
    ([4, 0, 4, 4, 0], lambda size: NearestK(2, size), [0, 0, 1 / 2, 1 / 2, 0]),
    ([2, 6, 12], lambda size: NearestK(2, size, weigh_by_size=True), [0, 1 / 3, 2 / 3]),
    ([2, 6, 12], lambda size: AllHistory(size), [1 / 3, 1 / 3, 1 / 3]),
    ([2, 6, 12], lambda size: AllHistory(size, weigh_by_size=True), [0.1, 0.3, 0.6]),
    ([4, 4, 4], lambda size: LambdaDecay(0.5, size), [1 / 7, 2 / 7, 4 / 7]),
    ([4, 4, 0, 4], lambda size: LambdaDecay(0.8, size), [0.26230, 0.32787, 0, 0.40984]),
    ([8, 2], lambda size: LambdaDecay(0.5, size, weigh_by_size=True), [2 / 3, 1 / 3]),
]


@pytest.mark.parametrize(("sizes", "strategy", "weights"), FREQUENCIES)
def test_draws_follow_the_weights(sizes: list[int], strategy: Callable[[int], Replay], weights: list[float]) -> None:
    # 7,000 draws. Chi-square is above 10.8 (two rounds in use) or 13.8 (three) once in 1,000 seeds.
    drawn = counts(strategy(7000).sample(rounds_of(*sizes), KEY))
    used = [position for position, weight in enumerate(weights) if weight]
    assert sorted(drawn) == used
    statistic = chi_square([drawn[position] for position in used], [7000 * weights[position] for position in used])
    assert statistic < {2: 10.8, 3: 13.8}[len(used)]


def test_draws_are_independent() -> None:
    # The number of the 4 draws that fall on the older of two equal rounds is binomial: over 800 keys 50, 200, 300, 200
    # and 50. Chi-square of 4 degrees of freedom is above 18.5 once in 1,000 seeds. Equal shares would always give 2.
    rounds = rounds_of(4, 4)
    totals = Counter(counts(AllHistory(4).sample(rounds, (key,)))[0] for key in range(800))
    assert chi_square([totals[number] for number in range(5)], [50, 200, 300, 200, 50]) < 18.5


@pytest.mark.parametrize(("num_pairs", "least", "most"), [(3, 0, 1), (4, 1, 1), (6, 1, 2), (8, 2, 2), (11, 2, 3)])
def test_no_pair_comes_again_before_all_have_come(num_pairs: int, least: int, most: int) -> None:
    # 4 pairs: 11 draws are two whole passes and 3 more.
    drawn = draw_pairs(rounds_of(0, 4), [0.0, 1.0], num_pairs, KEY)
    uses = Counter(entry.item_index for entry in drawn)
    assert len(drawn) == num_pairs
    assert {uses[item] for item in (100, 101, 102, 103)} == {least, most}


def test_what_is_left_out_is_random() -> None:
    # 1 of 4 pairs over 400 keys: 100 expected. Chi-square of 3 degrees of freedom is above 16.3 once in 1,000 seeds.
    rounds = rounds_of(4)
    uses = Counter(draw_pairs(rounds, [1.0], 1, (key,))[0].item_index for key in range(400))
    assert chi_square([uses[item] for item in range(4)], [100] * 4) < 16.3


def test_rounds_are_mixed() -> None:
    # 16 pairs of each of two rounds, one after another, would change rounds once.
    drawn = [entry.item_index // 100 for entry in AllHistory(32).sample(rounds_of(16, 16), KEY)]
    assert sum(left != right for left, right in pairwise(drawn)) > 5


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_the_key_decides(strategy: Replay) -> None:
    rounds = rounds_of(6, 6, 6)
    assert strategy.sample(rounds, KEY) == strategy.sample(rounds, KEY)
    assert strategy.sample(rounds, KEY) != strategy.sample(rounds, (7, 3))


def test_the_current_round_is_taken_whole_and_in_order() -> None:
    rounds = rounds_of(3, 5)
    assert CurrentRound().sample(rounds, KEY) == list(rounds[1].pairs)
    assert CurrentRound().sample(rounds_of(3, 0), KEY) == []


@pytest.mark.parametrize("strategy", [NearestK(1), LambdaDecay(0.0)])
def test_one_round_is_taken_whole(strategy: Replay) -> None:
    rounds = rounds_of(3, 5)
    drawn = strategy.sample(rounds, KEY)
    assert sorted(entry.item_index for entry in drawn) == [100, 101, 102, 103, 104]


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_number_of_pairs(strategy: Replay) -> None:
    # As many as the current round has; an empty one takes the number of the newest that is not.
    assert len(strategy.sample(rounds_of(9, 3, 5), KEY)) == 5
    assert len(strategy.sample(rounds_of(9, 3, 0, 0), KEY)) == 3


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sizes", [(), (0,), (0, 0)])
def test_nothing_to_learn_from(strategy: Replay, sizes: tuple[int, ...]) -> None:
    assert strategy.sample(rounds_of(*sizes), KEY) == []


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (CurrentRound(), 1),
        (NearestK(3), 3),
        (AllHistory(), None),
        (LambdaDecay(0.5), None),
        (LambdaDecay(0.0), 1),
    ],
)
def test_rounds_that_must_be_kept(strategy: Replay, expected: int | None) -> None:
    assert strategy.num_kept == expected


@pytest.mark.parametrize("strategy", [CurrentRound(), NearestK(2), LambdaDecay(0.0)])
def test_what_is_not_kept_is_not_missed(strategy: Replay) -> None:
    rounds: list[Round] = rounds_of(4, 4, 0, 4, 4)
    assert strategy.num_kept is not None
    assert strategy.sample(rounds[-strategy.num_kept :], KEY) == strategy.sample(rounds, KEY)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NearestK(0), "k=0 is out of range. Use a whole number of at least 1."),
        (lambda: NearestK(True), "k=True is out of range."),
        (lambda: NearestK(1, 0), "sample_size=0 is out of range. Use a whole number of at least 1."),
        (lambda: AllHistory(-3), "sample_size=-3 is out of range."),
        (lambda: LambdaDecay(0.5, 2.5), "sample_size=2.5 is out of range."),  # type: ignore[arg-type]
        (lambda: LambdaDecay(1.1), "decay=1.1 is out of range. Use a number from 0 to 1."),
        (lambda: LambdaDecay(-0.1), "decay=-0.1 is out of range."),
        (lambda: LambdaDecay(float("nan")), "decay=nan is out of range."),
    ],
)
def test_settings_are_checked(make: Callable[[], Replay], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--replay=CurrentRound"], CurrentRound()),
        (["--replay=NearestK", "--replay.k=2"], NearestK(2)),
        (["--replay=AllHistory", "--replay.sample_size=9", "--replay.weigh_by_size=true"], AllHistory(9, True)),
        (["--replay=comlrl_lightning.preferences.replay.LambdaDecay", "--replay.decay=0.5"], LambdaDecay(0.5)),
    ],
)
def test_strategies_have_names_on_the_command_line(arguments: list[str], expected: Replay) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--replay", type=Replay)
    assert parser.instantiate(parser.parse_args(arguments)).replay == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_survive_as_plain_values(strategy: Replay) -> None:
    assert from_plain("replay", to_plain(strategy)) == strategy
