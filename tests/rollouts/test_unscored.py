"""Rewards of None with ``reward_none="skip"``: joint completions that leave their groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from comlrl_lightning.algorithms import IAC, MADPO, MAGRPO
from comlrl_lightning.environment.reward_workers import RewardWorkers
from comlrl_lightning.functional import group_advantages
from comlrl_lightning.preferences.pairs import candidate_pairs
from comlrl_lightning.rewards import WeightedRewards
from comlrl_lightning.rollouts.credit import assign_credit
from comlrl_lightning.types import Rollouts, merge_rollouts
from comlrl_lightning.utilities.plain import from_plain
from tests.algorithms.preferences import direct
from tests.algorithms.support import ITEMS as TASKS
from tests.algorithms.support import MemoryLogger, make_module, make_trainer
from tests.rollouts.fakes import CentralTeam, FakeTeam, make_collector

from comlrl_lightning import RewardProcessors, TaskDataModule  # isort: skip


class Table:
    """Rewards by joint completion, else 1."""

    def __init__(self, rewards: Mapping[str, Any]) -> None:
        self.rewards = rewards

    def __call__(self, *completions: list[str]) -> list[Any]:
        return [self.rewards.get(" ".join(joint), 1.0) for joint in zip(*completions, strict=True)]


def collect(rewards: Mapping[str, Any], num_agents: int = 2, team: FakeTeam | None = None, **settings: Any) -> Rollouts:
    keep = settings.pop("keep_unscored", False)
    collector = make_collector(team or FakeTeam(num_agents), Table(rewards), none_as_nan=True, **settings)
    return collector.collect([{"prompt": "p"}], [5], keep_unscored=keep)


def test_aligned_groups_lose_the_joint_completion() -> None:
    # 1, None, 4: what stays has the mean 2.5, hence the advantages -1.5 and 1.5, and K = 2.
    rollouts = collect({"a1 b1": 1, "a2 b2": None, "a3 b3": 4}, num_generations=3)
    (entry,) = assign_credit(rollouts, 1.0)
    assert [[one.text for one in group] for group in entry.node.completions] == [["a1", "a3"], ["b1", "b3"]]
    assert entry.node.joint == ((0, 0), (1, 1))
    assert entry.returns == ((1.0, 4.0), (1.0, 4.0))
    values = group_advantages(torch.tensor(entry.returns), "group_mean", False)
    assert values.tolist() == [[-1.5, 1.5], [-1.5, 1.5]]
    assert (rollouts.num_scored, rollouts.num_left_out) == (2, 1)


def test_cross_keeps_completions_while_a_combination_has_a_reward() -> None:
    # Agent 0's first completion has no combination left; agent 1's returns are those with the second one.
    rollouts = collect({"a1 b1": None, "a1 b2": None, "a2 b1": 3, "a2 b2": 5}, joint_mode="cross")
    (entry,) = assign_credit(rollouts, 1.0)
    assert [[one.text for one in group] for group in entry.node.completions] == [["a2"], ["b1", "b2"]]
    assert entry.node.joint == ((0, 0), (0, 1))
    assert entry.returns == ((4.0,), (3.0, 5.0))
    # One combination is missing: a1's return is that of a1 b2, b1's that of a2 b1.
    (entry,) = assign_credit(collect({"a1 b1": None, "a1 b2": 2, "a2 b1": 3, "a2 b2": 5}, joint_mode="cross"), 1.0)
    assert entry.returns == ((2.0, 4.0), (3.0, 3.5))


class TestTrees:
    def test_a_smaller_group_has_the_mean_of_the_others(self) -> None:
        # Below the first joint completion 7 stays alone: R = 1 + 7; below the second (2 + 4) / 2: R = 1 + 3.
        rewards = {"a11 b11": None, "a12 b12": 7, "a21 b21": 2, "a22 b22": 4}
        top, first, second = assign_credit(collect(rewards, num_turns=2), 1.0)
        assert top.joint_returns == (8.0, 4.0)
        assert (first.joint_returns, second.joint_returns) == ((7.0,), (2.0, 4.0))
        assert [entry.weight for entry in (top, first, second)] == [1.0, 0.5, 0.5]

    def test_what_is_left_out_is_not_followed(self) -> None:
        rollouts = collect({"a1 b1": None}, num_turns=2)
        top, below = rollouts.nodes
        assert (top.rewards, below.path, below.parent) == ((1.0,), (1,), (0, 0))
        assert [entry.weight for entry in assign_credit(rollouts, 1.0)] == [1.0, 1.0]

    def test_an_unknown_future_is_an_unknown_return(self) -> None:
        rollouts = collect({"a11 b11": None, "a12 b12": None}, num_turns=2)
        top, below = rollouts.nodes
        assert ([one.text for one in top.completions[0]], below.path, below.parent) == (["a2"], (1,), (0, 0))
        assert (rollouts.num_scored, rollouts.num_left_out) == (3, 3)

    def test_nothing_may_be_left(self) -> None:
        rollouts = collect({f"a{k} b{k}": None for k in (11, 12, 21, 22)}, num_turns=2)
        assert (rollouts.nodes, rollouts.num_left_out) == ((), 6)

    @pytest.mark.parametrize("rule", ["completion", "group"])
    def test_early_termination_asks_the_others(self, rule: str) -> None:
        shape: dict[str, Any] = {"num_turns": 2, "early_termination_threshold": 3.0, "early_termination": rule}
        assert len(collect({"a1 b1": None, "a2 b2": 5}, **shape).nodes) == 1


def test_trajectories_go_as_a_whole() -> None:
    rollouts = collect({"a11 b11": None}, num_turns=2, trajectories=True, num_generations=2)
    assert [node.path for node in rollouts.nodes] == [(1,), (1, 0)]
    assert [node.parent for node in rollouts.nodes] == [None, (0, 0)]


def test_one_reward_per_agent_needs_all_of_them() -> None:
    rollouts = collect({"a1 b1": [1, None], "a2 b2": [2, 4]}, per_agent=True)
    assert rollouts.nodes[0].agent_rewards == ((2.0, 4.0),)
    assert collect({"a1 b1": None, "a2 b2": [2, 4]}, per_agent=True).nodes[0].rewards == (3.0,)


def test_one_model_that_answers_for_all() -> None:
    (node,) = collect({"a1 b1": None}, team=CentralTeam(2)).nodes
    assert (node.sections, node.joint, len(node.completions[0])) == ((("a2", "b2"),), ((0,),), 1)


def test_processors_and_workers() -> None:
    settings: dict[str, Any] = {"processor": RewardProcessors.scale(10.0), "workers": RewardWorkers(2)}
    assert collect({"a1 b1": None, "a2 b2": 2}, **settings).nodes[0].rewards == (20.0,)


def test_parts_of_a_sum_count_what_is_left() -> None:
    parts = WeightedRewards({"x": Table({"a1 b1": None, "a2 b2": 2}), "y": Table({"a1 b1": 8})}, [1.0, 10.0])
    collector = make_collector(FakeTeam(2), parts, none_as_nan=True)
    rollouts = collector.collect([{"prompt": "p"}], [5])
    assert rollouts.nodes[0].rewards == (12.0,)
    assert rollouts.reward_parts == {"x": 2.0, "y": 1.0}
    with pytest.raises(ValueError, match="gave None"):
        make_collector(FakeTeam(2), parts).collect([{"prompt": "p"}], [5])


def test_none_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ValueError, match=r"gave None for task item 5 .* not a number") as caught:
        make_collector(FakeTeam(1), Table({"a1": None})).collect([{"prompt": "p"}], [5])
    assert any('reward_none="skip"' in note for note in caught.value.__notes__)


def test_nan_stays_an_error() -> None:
    with pytest.raises(ValueError, match="gave nan"):
        collect({"a1 b1": math.nan})


def test_predictions_keep_none() -> None:
    rewards = collect({"a1 b1": None}, keep_unscored=True).nodes[0].rewards
    assert math.isnan(rewards[0])
    assert rewards[1] == 1.0


def test_preferences_pair_what_is_left() -> None:
    (node,) = collect({"a1 b1": 5, "a2 b2": None, "a3 b3": 1}, num_generations=3).nodes
    (pair,) = candidate_pairs(node, 5, "disjoint", None, (0,))
    assert [one.text for one in (*pair.winner, *pair.loser)] == ["a1", "b1", "a3", "b3"]


def test_merging_adds_up() -> None:
    part = collect({"a1 b1": None})
    assert merge_rollouts([part, part]).num_left_out == 2


def half(*completions: list[str]) -> list[float | None]:
    """Every second joint completion has no reward."""
    return [None if k % 2 else float(len(text)) for k, text in enumerate(completions[0])]


def making(algorithm: Any, **settings: Any) -> Any:
    return direct(**settings) if algorithm is MADPO else make_module(algorithm, **settings)


def nothing(*completions: list[str]) -> list[None]:
    return [None] * len(completions[0])


@pytest.mark.parametrize(
    ("algorithm", "settings", "per_item"),
    [
        (MAGRPO, {"num_generations": 4}, 2),
        (MAGRPO, {"num_generations": 3, "joint_mode": "cross", "reference_kl_coef": 0.1}, 5),
        (IAC, {"num_generations": 2}, 1),
        (MADPO, {"num_candidates": 4}, 2),
    ],
)
def test_a_fit_counts_and_logs_what_is_left(algorithm: Any, settings: dict[str, Any], per_item: int) -> None:
    logger = MemoryLogger()
    module = making(algorithm, reward_func=half, reward_none="skip", **settings)
    trainer = make_trainer(max_epochs=2, logger=logger)
    trainer.fit(module, TaskDataModule(TASKS[:2], TASKS[:1]))
    epochs = 1 if algorithm is MADPO else 2
    assert module.env_step == 2 * epochs * per_item
    assert all(value.isfinite().all() for value in module.parameters())
    (metrics,) = make_trainer().validate(module, TaskDataModule(TASKS[:2], TASKS[:1]), verbose=False)
    assert metrics["eval/left_out"] == 0


@pytest.mark.filterwarnings("ignore:Round 1 has no pair to learn from:UserWarning")
@pytest.mark.parametrize("algorithm", [MAGRPO, IAC, MADPO])
def test_a_fit_without_any_reward_goes_through(algorithm: Any) -> None:
    module = making(algorithm, reward_func=nothing, reward_none="skip")
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, TaskDataModule(TASKS[:2], TASKS[:1]))
    assert module.env_step == 0
    (predictions,) = trainer.predict(module, TaskDataModule(TASKS[:1], TASKS[:1])) or [[]]
    assert [one["reward"] for one in predictions] == [None]


def test_the_setting() -> None:
    with pytest.raises(ValueError, match=r"reward_none='leave' is unknown. Use one of 'error', 'skip'"):
        make_module(MAGRPO, reward_none="leave")
    assert from_plain("reward_none", make_module(MAGRPO).hparams["reward_none"]) == "error"
