"""The user's metrics over rollout records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from comlrl_lightning.callbacks import EvalInterval, RolloutMetrics, RolloutRecord
from comlrl_lightning.callbacks.rollout_metrics import rollout_records
from comlrl_lightning.types import Rollouts
from tests.callbacks.fakes import ITEMS, FakeModule, central_node, data, node, quiet_trainer


def mean_reward(rollouts: Sequence[RolloutRecord]) -> dict[str, float]:
    rewards = [record.metadata["reward"] for record in rollouts]
    return {"reward": sum(rewards) / len(rewards), "records": float(len(rollouts))}


def test_training_logs_each_step_at_once(tmp_path: Path) -> None:
    module = FakeModule()
    quiet_trainer(tmp_path, RolloutMetrics(mean_reward), EvalInterval(0)).fit(module, data(train=2, evaluation=0))
    # Item 0: two turns of two joint completions and two agents, rewards 0.1 and 0.2. Item 1: turn 1 only, reward 1.1.
    assert module.logged == [
        (4, {"reward": pytest.approx(0.15), "records": 8.0}),
        (6, {"reward": pytest.approx(1.1), "records": 4.0}),
    ]


def test_evaluation_averages_over_items(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, RolloutMetrics(mean_reward))
    (metrics,) = trainer.validate(FakeModule(), data(evaluation=2), verbose=False)
    # Item means 0.15 (two turns) and 1.1 (one turn), not the mean over their six records.
    assert metrics["eval/reward"] == pytest.approx((0.15 + 1.1) / 2)
    assert metrics["eval/records"] == 3
    (tested,) = trainer.test(FakeModule(), data(evaluation=2), verbose=False)
    assert tested["eval/records"] == 3


def test_records_hold_what_their_joint_completion_got() -> None:
    rollouts = Rollouts((ITEMS[3],), (3,), (node(0, 1, (("x", "y"), ("u", "v")), (0.5, 2.0)),))
    records = rollout_records(rollouts)
    assert [(record.agent_idx, record.completion, record.metadata["reward"]) for record in records] == [
        (0, "x", 0.5),
        (1, "u", 0.5),
        (0, "y", 2.0),
        (1, "v", 2.0),
    ]
    assert records[3].prompt == "prompt 1"
    assert records[3].metadata == {
        "turn": 1,
        "reward": 2.0,
        "item": ITEMS[3],
        "item_index": 3,
        "joint_index": 1,
        "path": (),
        "num_tokens": 1,
        "truncated": False,
    }


def test_answers_of_one_model_are_records_of_the_agents() -> None:
    entry = central_node(0, 1, (("x", "u"), ("y", "v")), (0.5, 2.0))
    records = rollout_records(Rollouts((ITEMS[3],), (3,), (entry,)))
    assert [(record.agent_idx, record.prompt, record.completion) for record in records] == [
        (0, "prompt 0", "x"),
        (1, "prompt 1", "u"),
        (0, "prompt 0", "y"),
        (1, "prompt 1", "v"),
    ]
    # Both stem from one sampled completion.
    assert [record.metadata["reward"] for record in records] == [0.5, 0.5, 2.0, 2.0]
    assert {record.metadata["num_tokens"] for record in records} == {1}


def test_signature_is_checked_at_construction() -> None:
    with pytest.raises(ValueError, match=r"metrics_callback=.*cannot be called with a list of records"):
        RolloutMetrics(lambda: {})  # type: ignore[misc, arg-type]


def test_names_of_the_library_are_taken(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"returned \['agent_1/loss'\], which are metrics of the library"):
        quiet_trainer(tmp_path, RolloutMetrics(lambda records: {"agent_1/loss": 1.0})).fit(FakeModule(), data(1, 0))
    callback = RolloutMetrics(lambda records: {"final_reward_mean": 1.0})
    with pytest.raises(ValueError, match=r"returned \['final_reward_mean'\], which are metrics of the library"):
        quiet_trainer(tmp_path, callback).validate(FakeModule(), data(), verbose=False)
