"""What the rounds of preferences count, log and evaluate in each of their phases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comlrl_lightning.algorithms import MADPO, PreferenceModule
from comlrl_lightning.callbacks import EvalInterval, RolloutMetrics
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.evaluation import evaluate
from comlrl_lightning.metrics import DIRECT_METRICS, NORM_METRICS
from comlrl_lightning.preferences.comparators import CurrentPolicy, FrozenCopy, HistoryPolicy
from comlrl_lightning.rewards import WeightedRewards
from tests.algorithms.preferences import MAKERS, AtEnds, Rows, direct, indirect, run, same, trained
from tests.algorithms.support import ITEMS, fit, make_trainer, tiny_agents, uneven_reward


def lengths(*completions: list[str]) -> list[float]:
    return [float(sum(map(len, joint))) for joint in zip(*completions, strict=True)]


def ones(*completions: list[str]) -> list[float]:
    return [1.0] * len(completions[0])


def hundreds(*completions: list[str]) -> list[float]:
    return [100.0 + value for value in uneven_reward(*completions)]


def noisy(*completions: list[str]) -> list[float]:
    """A reward that draws from the global random numbers."""
    return [value + float(torch.rand(())) for value in uneven_reward(*completions)]


class TestCounters:
    def test_every_candidate_counts(self) -> None:
        # 4 items of 8 candidates, twice; pairs are learned without a score.
        module = direct(num_candidates=8)
        rows = run(module, 2).training
        steps = [8.0, 16.0, 24.0, 32.0]
        assert [row["env_step"] for row in rows] == [*steps, *[32.0] * 4, *(32 + step for step in steps), *[64.0] * 4]
        assert all(row["task_reward_scores"] == row["env_step"] for row in rows)

    @pytest.mark.parametrize(("logging_steps", "rows_of_pairs"), [(1, 4), (2, 2), (3, 1), (100, 0)])
    def test_steps_on_pairs_are_logged_by_their_updates(self, logging_steps: int, rows_of_pairs: int) -> None:
        # Four steps of one update each, in which env_step stands still; what is left is logged at the end of the fit.
        rows = run(direct(num_candidates=8, logging_steps=logging_steps)).training
        learned = [row for row in rows if "preference/loss" in row]
        left_over = 4 % logging_steps > 0
        assert len(learned) == rows_of_pairs + left_over
        assert rows[-1]["update_step"] == 4

    def test_a_comparators_answers_count_too(self) -> None:
        # 4 candidates and 4 answers; then 2 and 3.
        module = direct(num_candidates=4, comparator=CurrentPolicy())
        run(module)
        assert module.env_step == module.rounds.task_reward_scores == 4 * 8
        module = direct(num_candidates=2, comparator=FrozenCopy(), comparator_num_candidates=3)
        run(module)
        assert module.env_step == module.rounds.task_reward_scores == 4 * 5

    @pytest.mark.parametrize(
        ("scoring", "task", "learned"),
        [
            # Each round: 4 items of 4 candidates, 4 items of 2 completions that the reward model scores.
            ("task", [16, 16, 16, 32, 32, 32], [16, 16, 24, 40, 40, 48]),
            ("reward_model", [16, 16, 16, 16, 16, 16], [16, 16, 24, 40, 40, 48]),
        ],
    )
    def test_learned_scores_count_beside(self, scoring: str, task: list[int], learned: list[int]) -> None:
        ends = AtEnds(lambda module: (module.rounds.task_reward_scores, module.env_step))
        rows = run(indirect(preference_scoring=scoring), 2, [ends]).training
        assert ends.seen == list(zip(task, learned, strict=True))
        assert all({"env_step", "task_reward_scores", "update_step"} <= row.keys() for row in rows)
        for name in ("env_step", "task_reward_scores", "update_step"):
            values = [row[name] for row in rows]
            assert values == sorted(values)

    def test_a_comparator_is_scored_by_the_reward_model_too(self) -> None:
        module = indirect(num_candidates=2, comparator=CurrentPolicy(), preference_scoring="reward_model")
        run(module, 2)
        # Round 1: 4 items of 2 + 2 by the task. Both rounds learn on 4 items of 2; round 2 compares 16 more.
        assert (module.rounds.task_reward_scores, module.env_step) == (16, 16 + 8 + 16 + 8)

    def test_they_go_on_in_another_fit(self, tmp_path: Path) -> None:
        module = direct()
        run(module)
        fit(module, ITEMS[:1], 1, max_epochs=2).save_checkpoint(tmp_path / "run.ckpt")
        assert module.env_step == module.rounds.task_reward_scores == 16 + 4
        loaded = MADPO.load_from_checkpoint(tmp_path / "run.ckpt", agents=tiny_agents())
        assert loaded.counters() == module.counters()
        fit(loaded, ITEMS[:1], 1, max_epochs=2)
        assert loaded.env_step == loaded.rounds.task_reward_scores == 16 + 4 + 4


HELD_OUT = "reward_model/held_out_accuracy"
COLLECTED = {
    "turn_1/reward_mean",
    "turn_1/expected_return",
    "preference/pairs_per_item",
    "preference/reward_gap",
    *(f"agent_{agent}/{name}" for agent in (0, 1) for name in ("completion_tokens", "truncated_share")),
}
COUNTERS = {"env_step", "task_reward_scores", "update_step"}


class TestLogs:
    def test_what_each_phase_of_madpo_logs(self) -> None:
        rows = run(direct(comparator=CurrentPolicy())).training
        learned = {
            "preference/loss",
            "preference/accuracy",
            "nonfinite_updates",
            *(f"agent_{agent}/{name}" for agent in (0, 1) for name in (*DIRECT_METRICS, *NORM_METRICS)),
        }
        collected = COLLECTED | {"preference/comparator_reward_mean"}
        assert [row.keys() - COUNTERS for row in rows[:4]] == [collected] * 4
        assert {frozenset(row.keys() - COUNTERS) for row in rows[4:]} == {frozenset(learned)}

    @pytest.mark.parametrize("policy", ["MAGRPO", "MAAC"])
    def test_what_each_phase_of_marlhf_logs(self, policy: Any) -> None:
        rows = run(indirect(policy=policy)).training
        assert [row.keys() - COUNTERS for row in rows[:4]] == [COLLECTED] * 4
        fitted = {*(f"reward_model/{name}" for name in ("loss", "accuracy", *NORM_METRICS)), "nonfinite_updates"}
        learned = [row.keys() - COUNTERS for row in rows if "learned/turn_1/reward_mean" in row]
        middle = [row.keys() - COUNTERS for row in rows[4 : -len(learned)]]
        assert {frozenset(row) for row in middle} == {frozenset(fitted), frozenset({*fitted, HELD_OUT})}
        assert HELD_OUT in middle[-1]
        assert len(learned) == 4
        for row in learned:
            assert {"learned/turn_1/expected_return", "agent_0/loss", "agent_1/sampler_gap"} <= row
            assert not any(key.startswith(("turn_", "preference/", "reward_model/", "reward/")) for key in row)
            assert ("critic/grad_norm" in row) == (policy == "MAAC")

    def test_scores_of_candidates_are_kept_apart_from_rewards(self) -> None:
        # From the second round on the reward model ranks: the task's reward is unknown.
        rows = run(indirect(preference_scoring="reward_model"), 2).training
        collected = [row.keys() for row in rows if "preference/pairs_per_item" in row]
        assert [("turn_1/reward_mean" in row, "learned/turn_1/reward_mean" in row) for row in collected] == [
            *[(True, False)] * 4,
            *[(False, True)] * 4,
        ]

    @pytest.mark.parametrize("make", MAKERS)
    def test_parts_of_a_reward_are_the_teams(self, make: Callable[..., PreferenceModule]) -> None:
        reward = WeightedRewards({"lengths": lengths, "one": ones}, {"lengths": 1.0, "one": 2.0})
        module = make(reward_func=reward, comparator=CurrentPolicy())
        data = TaskDataModule(ITEMS, ITEMS[:2])
        rows = Rows()
        make_trainer([EvalInterval(4)], max_epochs=module.epochs_per_round, logger=rows).fit(module, data)
        collected = [row for row in rows.training if "reward/lengths" in row]
        assert len(collected) == 4
        for row in collected:
            # The sum of the parts is the reward of the candidates alone.
            assert row["reward/one"] == 1.0
            assert row["reward/lengths"] + 2.0 == pytest.approx(row["turn_1/reward_mean"])
        assert all(row["eval/reward/one"] == 1.0 for row in rows.evaluations)
        assert len(rows.evaluations) == module.epochs_per_round

    def test_callbacks_see_each_rollout_once(self) -> None:
        calls: list[int] = []

        def count(records: list[Any]) -> dict[str, float]:
            calls.append(len(records))
            return {"records": float(len(records))}

        run(direct(), callbacks=[RolloutMetrics(count)])
        # Four items of 4 candidates by 2 agents; the steps that learn have no rollouts.
        assert calls == [8] * 4
        calls.clear()
        run(indirect(), callbacks=[RolloutMetrics(count)])
        assert calls == [8] * 4 + [4] * 4


class TestEvaluation:
    def test_it_is_always_by_the_task(self) -> None:
        # The task's rewards are from 100 on, standardized scores far below.
        module, rows = indirect(reward_func=hundreds, preference_scoring="reward_model"), Rows()
        data = TaskDataModule(ITEMS, ITEMS[:2])
        make_trainer([EvalInterval(4)], max_epochs=6, logger=rows).fit(module, data)
        assert len(rows.evaluations) == 6
        assert all(row["eval/turn_1/reward_mean"] >= 100 for row in rows.evaluations)
        learned = [row["learned/turn_1/reward_mean"] for row in rows.training if "learned/turn_1/reward_mean" in row]
        assert len(learned) == 4 + 4 + 4
        assert all(abs(value) < 50 for value in learned)
        assert evaluate(module, data)["eval/final_reward_mean"] >= 100
        (predicted,) = make_trainer().predict(module, TaskDataModule(ITEMS, ITEMS[:1])) or [[]]
        assert predicted[0]["reward"] >= 100

    @pytest.mark.parametrize("make", MAKERS)
    def test_it_happens_in_every_epoch_and_changes_nothing(self, make: Callable[..., PreferenceModule]) -> None:
        def outcome(interval: int) -> tuple[Rows, PreferenceModule]:
            torch.manual_seed(0)
            module, rows = make(reward_func=noisy, comparator=HistoryPolicy(1)), Rows()
            trainer = make_trainer([EvalInterval(interval)], max_epochs=2 * module.epochs_per_round, logger=rows)
            trainer.fit(module, TaskDataModule(ITEMS, ITEMS[:1]))
            return rows, module

        (alone, module), (rows, other) = outcome(0), outcome(2)
        assert not alone.evaluations
        # Before items 0 and 2 of every epoch.
        assert len(rows.evaluations) == 2 * 2 * module.epochs_per_round
        assert alone.training == rows.training
        assert module.rounds == other.rounds
        assert same(trained(module), trained(other))
