"""Rounds: what each epoch is for, how pairs are dealt out to steps, and what a round remembers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from comlrl_lightning.preferences import rounds
from comlrl_lightning.preferences.pairs import PreferencePair, Round, shuffled
from comlrl_lightning.preferences.replay import AllHistory, CurrentRound, LambdaDecay, NearestK, Replay
from comlrl_lightning.preferences.rounds import Phase, PhaseKind, RoundProgress, Schedule, needed, share
from tests.preferences.support import pair, rounds_of

KEY = (7, 3)
REPLAYS = [CurrentRound(), NearestK(1), NearestK(2), NearestK(3, weigh_by_size=True), AllHistory(), LambdaDecay(0.5)]


@pytest.mark.parametrize(
    ("reward_epochs", "learning_epochs", "kinds"),
    [
        (0, 1, "cl"),
        (0, 3, "clll"),
        (1, 1, "crl"),
        (2, 3, "crrlll"),
    ],
)
def test_phases(reward_epochs: int, learning_epochs: int, kinds: str) -> None:
    schedule = Schedule(reward_epochs, learning_epochs)
    assert schedule.epochs_per_round == len(kinds)
    names: dict[str, PhaseKind] = {"c": "collect", "r": "reward", "l": "learn"}
    expected = [
        Phase(number, names[kind], kinds[:place].count(kind)) for number in range(3) for place, kind in enumerate(kinds)
    ]
    assert [schedule.phase(epoch) for epoch in range(3 * len(kinds))] == expected


def shares(
    num_items: int, per_step: int, num_pairs: int, batch_size: int | None = None, collected: int | None = None
) -> list[range]:
    """The shares of an epoch of `num_items` items, after a collection of `collected`."""
    starts = range(0, num_items, per_step)
    return [
        share(
            range(start, min(start + per_step, num_items)),
            num_items if collected is None else collected,
            num_pairs,
            batch_size,
            is_last=start == starts[-1],
        )
        for start in starts
    ]


class TestShare:
    def test_equal_shares(self) -> None:
        # After k of 3 steps k * 8 / 3 pairs are due: 2.67, 5.33, 8.
        assert shares(3, 1, 8) == [range(2), range(2, 5), range(5, 8)]

    def test_as_many_as_the_step_has_items(self) -> None:
        # 5 items in steps of 2, 2, 1, and two pairs for each.
        assert shares(5, 2, 10) == [range(4), range(4, 8), range(8, 10)]

    def test_fewer_pairs_than_steps(self) -> None:
        # .5, 1, 1.5, 2
        assert shares(4, 1, 2) == [range(0), range(1), range(1, 1), range(1, 2)]

    def test_mini_batches_stay_whole(self) -> None:
        # 2.67, 5.33 and 8 are cut to 0, 4 and 8: two mini-batches of 4, none in the first step.
        assert shares(3, 1, 8, batch_size=4) == [range(0), range(4), range(4, 8)]
        # 3.33 and 6.67 are cut to 3 and 6: mini-batches of 3, 3 and 3 + 1.
        assert shares(3, 1, 10, batch_size=3) == [range(3), range(3, 6), range(6, 10)]

    def test_a_batch_larger_than_everything(self) -> None:
        assert shares(3, 1, 5, batch_size=9) == [range(0), range(0), range(5)]

    def test_an_epoch_that_ends_early_takes_all(self) -> None:
        assert shares(2, 1, 8, collected=4) == [range(2), range(2, 8)]

    def test_an_epoch_that_goes_on_has_nothing_left(self) -> None:
        assert shares(4, 1, 8, collected=2) == [range(4), range(4, 8), range(8, 8), range(8, 8)]

    @pytest.mark.parametrize("num_items", [0, 3])
    def test_nothing_collected(self, num_items: int) -> None:
        assert shares(3, 1, 0, collected=num_items) == [range(0)] * 3

    @pytest.mark.parametrize("batch_size", [None, 1, 2, 3, 7])
    @pytest.mark.parametrize("num_items", range(1, 10))
    def test_every_pair_comes_once(self, num_items: int, batch_size: int | None) -> None:
        for per_step in range(1, 4):
            for num_pairs in range(26):
                given = shares(num_items, per_step, num_pairs, batch_size)
                assert [position for one in given for position in one] == list(range(num_pairs))
                assert all(len(one) % (batch_size or 1) == 0 for one in given[:-1])
                if batch_size is None and num_items % per_step == 0:
                    assert max(map(len, given)) - min(map(len, given)) <= 1


class TestShuffled:
    def test_the_key_alone_decides(self) -> None:
        pairs = rounds_of(30)[0].pairs
        first = shuffled(pairs, (1, 3, 0, 2, 0))
        np.random.seed(0)
        torch.manual_seed(0)
        assert shuffled(list(pairs), (1, 3, 0, 2, 0)) == first
        assert sorted(first, key=lambda one: one.item_index) == list(pairs)
        others = [shuffled(pairs, key) for key in ((2, 3, 0, 2, 0), (1, 3, 1, 2, 0), (1, 3, 0, 1, 0), (1, 3, 0, 2, 1))]
        for one, other in pairwise([list(pairs), first, *others]):
            assert one != other

    def test_nothing_to_shuffle(self) -> None:
        assert shuffled([], KEY) == []


class TestNeeded:
    @pytest.mark.parametrize(
        ("sizes", "num_kept", "expected"),
        [
            ([3], 1, [0]),
            ([0], 1, [0]),
            ([3, 2], 1, [1]),
            ([3, 2], None, [0, 1]),
            ([3, 0, 2, 0, 1], None, [0, 2, 4]),
            ([3, 0, 2, 0, 1], 1, [4]),
            ([3, 0, 2, 0, 1], 2, [2, 4]),
            ([3, 0, 2, 0, 1], 9, [0, 2, 4]),
            ([3, 2, 0], 1, [1, 2]),  # the current round is there in any case, and counts for nothing if empty
            ([3, 2, 0], 2, [0, 1, 2]),
            ([3, 2, 0], None, [0, 1, 2]),
        ],
    )
    def test_by_hand(self, sizes: list[int], num_kept: int | None, expected: list[int]) -> None:
        assert [one.number for one in needed(rounds_of(*sizes), num_kept)] == expected

    @pytest.mark.parametrize("replay", REPLAYS, ids=repr)
    def test_what_is_dropped_is_not_missed(self, replay: Replay) -> None:
        history = rounds_of(4, 2, 0, 5, 3, 0, 0, 1, 6)
        kept: tuple[Round, ...] = ()
        for number, one in enumerate(history):
            kept = needed((*kept, one), replay.num_kept)
            assert replay.sample(kept, (*KEY, number)) == replay.sample(history[: number + 1], (*KEY, number))
            if replay.num_kept is not None:
                assert len(kept) <= replay.num_kept + 1


def numbered(item: int, count: int = 3) -> list[PreferencePair]:
    """Pairs of one item in an order that tokens tell."""
    return [pair(item, token) for token in range(count)]


class Ranks:
    """Ranks of one program, by hand: what they gather and add up is known beforehand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, progresses: Sequence[RoundProgress]) -> None:
        self.monkeypatch = monkeypatch
        self.progresses = progresses

    def be(self, rank: int, size: int) -> None:
        self.monkeypatch.setattr(rounds, "rank", lambda: rank)
        self.monkeypatch.setattr(rounds, "world_size", lambda: size)

    def saved(self) -> dict[str, Any]:
        """The state that all of them together write."""
        size = len(self.progresses)
        owns: list[Any] = []

        def gathered(values: list[Any]) -> list[Any]:
            owns.extend(values)
            return owns

        self.monkeypatch.setattr(rounds, "gather_objects", gathered)
        for rank, progress in enumerate(self.progresses):
            self.be(rank, size)
            state = progress.to_state()
        return loaded(state)

    def restored(self, size: int, state: dict[str, Any]) -> Ranks:
        """So many ranks that go on from a state."""
        progresses = []
        for rank in range(size):
            self.be(rank, size)
            progresses.append(RoundProgress.from_state(state))
        return Ranks(self.monkeypatch, progresses)

    def step(self, num_items: int, items: Sequence[int]) -> Ranks:
        """A step on some items; of each the k-th rank takes every so many, with rewards item and item + 1."""
        size = len(self.progresses)
        return Ranks(
            self.monkeypatch,
            [
                progress.with_step(
                    num_items,
                    [one for item in items[rank::size] for one in numbered(item)],
                    [reward for item in items[rank::size] for reward in (item, item + 1.0)],
                    2 * len(items),
                )
                for rank, progress in enumerate(self.progresses)
            ],
        )

    def end(self, replay: Replay = CurrentRound()) -> RoundProgress:  # noqa: B008  (frozen)
        """What each of them, all alike, holds after the collection."""
        everything = [one for progress in self.progresses for one in progress.collected]
        sums = torch.tensor(
            [[progress.reward_sum, progress.num_rewards] for progress in self.progresses], dtype=torch.float64
        ).sum(0)

        def gathered(values: Sequence[PreferencePair]) -> list[PreferencePair]:
            assert all(one in everything for one in values)
            return everything

        def added(values: Tensor) -> Tensor:
            assert values.dtype == torch.float64
            return sums

        self.monkeypatch.setattr(rounds, "gather_objects", gathered)
        self.monkeypatch.setattr(rounds, "all_reduce_sum", added)
        first, *others = [progress.at_end(replay, KEY) for progress in self.progresses]
        for other in others:
            assert (other.kept, other.pairs, other.collected) == (first.kept, first.pairs, ())
        return first


def loaded(state: dict[str, Any]) -> dict[str, Any]:
    """A state after the way to a file and back, without any code in it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return cast("dict[str, Any]", torch.load(file, weights_only=True))


class TestProgress:
    def test_a_collection(self) -> None:
        progress = RoundProgress().at_round(0)
        progress = progress.with_step(2, numbered(1), [0.5, 1.5], 2).with_step(3, numbered(0, 2), [4.0], 1)
        assert (progress.number, progress.num_items, progress.task_reward_scores) == (0, 3, 3)
        assert (progress.reward_sum, progress.num_rewards) == (6.0, 3)
        ended = progress.at_end(CurrentRound(), KEY)
        assert ended.pairs == (*numbered(0, 2), *numbered(1))
        assert ended.kept == (Round(0, ended.pairs, 2.0),)
        assert (ended.collected, ended.num_items, ended.task_reward_scores) == ((), 3, 3)

    def test_values_do_not_change(self) -> None:
        # `training_step` goes back to the one before it when a checkpoint is written inside a step.
        before = RoundProgress().at_round(0)
        after = before.with_step(1, numbered(0), [1.0], 1)
        after.at_end(CurrentRound(), KEY)
        assert before == RoundProgress().at_round(0)
        assert after.collected == tuple(numbered(0))
        with pytest.raises(FrozenInstanceError):
            after.number = 3  # type: ignore[misc]

    def test_the_next_round_begins_empty(self) -> None:
        first = RoundProgress().at_round(0).with_step(1, numbered(0), [1.0], 1).at_end(CurrentRound(), KEY)
        first = replace(first, is_fitted=True, offset=1.5, scale=2.5)
        assert first.at_round(0) is first
        second = first.at_round(1)
        assert second == RoundProgress(1, kept=first.kept, task_reward_scores=1, is_fitted=True, offset=1.5, scale=2.5)
        ended = second.with_step(1, [], [3.0, 3.0], 0).at_end(CurrentRound(), KEY)
        assert ended.pairs == ()
        assert ended.kept[-1] == Round(1, (), 3.0)

    def test_a_round_without_rewards(self) -> None:
        (kept,) = RoundProgress().at_round(0).at_end(CurrentRound(), KEY).kept
        assert kept == Round(0, (), 0.0)

    def test_the_replay_gets_what_it_asks_for(self) -> None:
        progress, replay, history = RoundProgress(), NearestK(2, sample_size=40), []
        for number, size in enumerate((3, 4, 2)):
            progress = progress.at_round(number).with_step(1, numbered(number, size), [1.0], 1)
            progress = progress.at_end(replay, KEY)
            history.append(progress.kept[-1])
            assert list(progress.pairs) == replay.sample(history, (*KEY, number))
        assert [one.number for one in progress.kept] == [1, 2]
        assert {one.item_index for one in progress.pairs} == {1, 2}

    def test_ranks_bring_their_pairs_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Steps on items 3 1 2 and 0 4. Mean reward: that of items, 2, and a half.
        def collected(size: int) -> RoundProgress:
            ranks = Ranks(monkeypatch, [RoundProgress().at_round(0)] * size)
            return ranks.step(3, [3, 1, 2]).step(5, [0, 4]).end(AllHistory(sample_size=9))

        alone = collected(1)
        assert alone.kept == (Round(0, tuple(one for item in range(5) for one in numbered(item)), 2.5),)
        assert len(alone.pairs) == 9
        for size in (2, 3, 7):
            assert collected(size).kept == alone.kept
            assert collected(size).pairs == alone.pairs


class TestState:
    def test_round_trip(self) -> None:
        history = rounds_of(2, 3)
        progress = RoundProgress(
            2, 4, tuple(numbered(5)), 2.5, 6, tuple(history), tuple(numbered(1)), 77, True, -0.25, 1.75
        )
        assert RoundProgress.from_state(loaded(progress.to_state())) == progress
        assert RoundProgress.from_state(loaded(RoundProgress().to_state())) == RoundProgress()

    @pytest.mark.parametrize("after", [1, 2, 3, 5])
    @pytest.mark.parametrize("before", [1, 2, 3])
    def test_other_ranks_go_on(self, before: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
        # Saved inside a collection: it ends as if nothing had happened, the order of pairs and draws included.
        begun = replace(RoundProgress().at_round(1), kept=(rounds_of(4)[0],), task_reward_scores=8)
        replay = AllHistory(sample_size=20)
        unbroken = Ranks(monkeypatch, [begun]).step(6, [5, 2, 0, 4, 1, 3]).step(8, [7, 6]).end(replay)
        ranks = Ranks(monkeypatch, [begun] * before).step(6, [5, 2, 0, 4, 1, 3])
        ended = ranks.restored(after, ranks.saved()).step(8, [7, 6]).end(replay)
        assert ended.kept == unbroken.kept
        assert ended.pairs == unbroken.pairs
        assert (ended.num_items, ended.task_reward_scores) == (8, 24)

    def test_the_same_ranks_get_back_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ranks = Ranks(monkeypatch, [RoundProgress().at_round(0)] * 2).step(4, [3, 1, 2, 0])
        again = ranks.restored(2, ranks.saved())
        assert list(again.progresses) == list(ranks.progresses)
        assert [one.item_index for one in again.progresses[1].collected] == [1, 1, 1, 0, 0, 0]
