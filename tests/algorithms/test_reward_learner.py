"""Fitting a joint reward model on paper: scores are numbers of a table. And which pairs are held out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from comlrl_lightning.critics.critics import CriticTeam
from comlrl_lightning.critics.reward_settings import JointRewardModel
from comlrl_lightning.learning import reward_model as reward_learner
from comlrl_lightning.learning.reward_model import Moments, RewardLearner
from comlrl_lightning.metrics import MetricTable
from comlrl_lightning.preferences.pairs import PreferencePair
from comlrl_lightning.types import Completion

KEYS = ("reward_model/loss", "reward_model/accuracy", "reward_model/held_out_accuracy")


class PaperModel:
    """Scores the answers by a table of their texts, which is what is trained."""

    def __init__(self, scores: Mapping[str, float]) -> None:
        self.places = {text: place for place, text in enumerate(scores)}
        self.table = nn.Parameter(torch.tensor([*scores.values()], dtype=torch.float64))

    def values(self, samples: Sequence[Sequence[Completion]]) -> Tensor:
        return self.table[[self.places["".join(one.text for one in sample)] for sample in samples]].unsqueeze(1)

    def lengths(self, samples: Sequence[Sequence[Completion]]) -> list[int]:
        return [1] * len(samples)

    def parameter_groups(self) -> dict[str, dict[str, nn.Parameter]]:
        return {"reward_model": {"table": self.table}}


def on_paper(scores: Mapping[str, float], **settings: Any) -> RewardLearner:
    model = cast("CriticTeam", PaperModel(scores))
    return RewardLearner(model, JointRewardModel(**settings), 4096, MetricTable(KEYS))


def answer(text: str) -> tuple[Completion, ...]:
    return (Completion(0, "p", (), (), (), text, False),)


def preferred(winner: str, loser: str, item: int = 0) -> PreferencePair:
    return PreferencePair(item, answer(winner), answer(loser), 1.0, 0.0)


def table_of(learner: RewardLearner) -> nn.Parameter:
    return learner.parameter_groups()["reward_model"]["table"]


class TestOnPaper:
    def test_the_loss_and_its_gradient(self) -> None:
        # -log sigmoid(1.2 - .4) = .371101, and sigmoid(.8) - 1 = -.310026.
        learner = on_paper({"a": 1.2, "b": 0.4})
        stats = learner.new_stats()
        (loss,) = learner.losses([preferred("a", "b")], stats)
        assert loss.item() == pytest.approx(0.371101, abs=1e-6)
        loss.backward()  # type: ignore[no-untyped-call]
        gradient = table_of(learner).grad
        assert gradient is not None
        assert gradient.tolist() == pytest.approx([-0.310026, 0.310026], abs=1e-6)

    def test_centering(self) -> None:
        # .01 * (1.2 + .4)^2 = .0256, and its slope .02 * 1.6 = .032 on both sides.
        learner = on_paper({"a": 1.2, "b": 0.4}, centering_coef=0.01)
        (loss,) = learner.losses([preferred("a", "b")], learner.new_stats())
        assert loss.item() == pytest.approx(0.371101 + 0.0256, abs=1e-6)
        loss.backward()  # type: ignore[no-untyped-call]
        gradient = table_of(learner).grad
        assert gradient is not None
        assert gradient.tolist() == pytest.approx([-0.278026, 0.342026], abs=1e-6)

    def test_losses_are_summed_and_metrics_averaged(self) -> None:
        # Pairs (0, 0): log 2, half right. (1, 0): log(1 + e^-1), right. (0, 1): log(1 + e), wrong.
        learner = on_paper({"a": 0.0, "b": 0.0, "c": 1.0})
        pairs = [preferred("a", "b"), preferred("c", "a"), preferred("b", "c")]
        expected = math.log(2) + math.log1p(math.exp(-1)) + math.log1p(math.exp(1))
        stats = learner.new_stats()
        assert sum(loss.item() for loss in learner.losses(pairs, stats)) == pytest.approx(expected)
        stats.record(learner.table, 3)
        logged = learner.table.pop()
        assert logged == {
            "reward_model/loss": pytest.approx(expected / 3),
            "reward_model/accuracy": pytest.approx(0.5),
        }

    def test_steps_count_by_their_pairs(self) -> None:
        learner = on_paper({"a": 0.0, "b": 1.0})
        for pairs in ([preferred("b", "a")] * 3, [preferred("a", "b")], []):
            stats = learner.new_stats()
            list(learner.losses(pairs, stats))
            stats.record(learner.table, len(pairs))
        assert learner.table.pop()["reward_model/accuracy"] == pytest.approx(0.75)

    def test_nothing_to_learn_from(self) -> None:
        learner = on_paper({"a": 0.0})
        assert list(learner.losses([], learner.new_stats())) == []
        assert learner.active_groups([]) == set()
        assert learner.active_groups([preferred("a", "a")]) == {"reward_model"}
        assert math.isnan(learner.accuracy([]))
        learner.record_held_out([])
        assert learner.table.pop() == {}
        assert learner.scores([]).shape == (0,)
        assert learner.moments([]) == Moments(0.0, 1.0)

    def test_accuracy(self) -> None:
        learner = on_paper({"a": 0.0, "b": 0.0, "c": 1.0})
        pairs = [preferred("c", "a"), preferred("c", "b"), preferred("b", "c"), preferred("a", "b")]
        assert learner.accuracy(pairs) == pytest.approx(2.5 / 4)
        learner.record_held_out(pairs)
        assert learner.table.pop() == {"reward_model/held_out_accuracy": pytest.approx(0.625)}

    def test_each_rank_scores_a_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # What rank 1 gathers is what both have scored: pairs 0 and 2, then pair 1.
        learner = on_paper({"a": 5.0, "b": 1.0, "c": 3.0})
        pairs = [preferred("a", "b"), preferred("b", "c"), preferred("a", "c")]
        alone, rows = learner.moments(pairs), []

        def gather(mine: list[Any]) -> list[Any]:
            rows.append(mine)
            return [row for part in reversed(rows) for row in part]

        monkeypatch.setattr(reward_learner, "world_size", lambda: 2)
        monkeypatch.setattr(reward_learner, "gather_objects", gather)
        for rank in range(2):
            monkeypatch.setattr(reward_learner, "rank", lambda rank=rank: rank)
            together = learner.moments(pairs)
        assert rows == [[(0, [5.0, 1.0]), (2, [5.0, 3.0])], [(1, [1.0, 3.0])]]
        assert together == alone

    def test_moments_are_those_of_both_sides_of_all_pairs(self) -> None:
        # 5, 1, 5, 3: mean 3.5, squared distances 2.25 + 6.25 + 2.25 + .25 = 11, over 4.
        learner = on_paper({"a": 5.0, "b": 1.0, "c": 3.0})
        pairs = [preferred("a", "b"), preferred("a", "c")]
        assert learner.moments(pairs) == pytest.approx((3.5, math.sqrt(2.75)))
        assert on_paper({"a": 5.0, "b": 1.0, "c": 3.0}, standardize=False).moments(pairs) == Moments(0.0, 1.0)

    def test_equal_scores_are_centered_alone(self) -> None:
        pairs = [preferred("a", "b")]
        assert on_paper({"a": 5.0, "b": 5.0}).moments(pairs) == Moments(5.0, 1.0)
        assert on_paper({"a": 5.0, "b": 5.0 + 1e-7}).moments(pairs).scale == 1.0
        assert on_paper({"a": 5.0, "b": 5.0 + 1e-3}).moments(pairs).scale == pytest.approx(5e-4)

    def test_reset(self) -> None:
        learner = on_paper({"a": 1.0, "b": 2.0})
        table = table_of(learner)
        optimizer = torch.optim.Adam([table], 0.5)
        (loss,) = learner.losses([preferred("a", "b")], learner.new_stats())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert table.tolist() != [1.0, 2.0]
        assert table in optimizer.state
        learner.reset(optimizer)
        assert table.tolist() == [1.0, 2.0]
        assert table not in optimizer.state
        with torch.no_grad():
            table.add_(1.0)
        learner.reset()
        assert table.tolist() == [1.0, 2.0]

    def test_going_on_from_the_last_round(self) -> None:
        learner = on_paper({"a": 1.0}, fresh_each_round=False)
        with torch.no_grad():
            table_of(learner).add_(1.0)
        learner.reset()
        assert table_of(learner).tolist() == [2.0]


class TestSplit:
    def items(self, pairs: Sequence[PreferencePair]) -> list[int]:
        return [pair.item_index for pair in pairs]

    def test_all_pairs_of_an_item_are_on_one_side(self) -> None:
        pairs = [preferred("a", "b", item) for _ in range(3) for item in range(200)]
        fitted, held_out = on_paper({"a": 0.0}, held_out_share=0.25).split(pairs, seed=3)
        assert not {*self.items(fitted)} & {*self.items(held_out)}
        assert len(fitted) + len(held_out) == 600
        # Binomial, 200 items at 1/4: 50 and a standard deviation of 6.1.
        assert 30 < len({*self.items(held_out)}) < 70
        order = self.items(pairs)
        assert [item for item in order if item in {*self.items(held_out)}] == self.items(held_out)

    def test_a_side_is_the_items_own(self) -> None:
        learner = on_paper({"a": 0.0}, held_out_share=0.5)
        pairs = [preferred("a", "b", item) for item in range(40)]
        _, held_out = learner.split(pairs, seed=1)
        _, of_half = learner.split(pairs[:20], seed=1)
        assert self.items(of_half) == [item for item in self.items(held_out) if item < 20]
        assert self.items(learner.split(pairs, seed=2)[1]) != self.items(held_out)

    @pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
    def test_both_sides_have_an_item_if_there_are_two(self, share: float) -> None:
        pairs = [preferred("a", "b", item) for item in (4, 9, 4)]
        fitted, held_out = on_paper({"a": 0.0}, held_out_share=share).split(pairs, seed=0)
        assert sorted([{*self.items(fitted)}, {*self.items(held_out)}], key=min) == [{4}, {9}]

    @pytest.mark.parametrize("share", [0.0, 1 - 1e-9])
    def test_a_single_item_is_fitted(self, share: float) -> None:
        pairs = [preferred("a", "b", 7)] * 2
        assert on_paper({"a": 0.0}, held_out_share=share).split(pairs, seed=0) == (pairs, [])
        assert on_paper({"a": 0.0}, held_out_share=share).split([], seed=0) == ([], [])

    def test_nothing_is_held_out_if_nothing_should_be(self) -> None:
        pairs = [preferred("a", "b", item) for item in range(5)]
        assert on_paper({"a": 0.0}, held_out_share=0).split(pairs, seed=0) == (pairs, [])
