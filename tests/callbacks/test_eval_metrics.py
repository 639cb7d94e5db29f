"""The user's evaluation metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning import LightningModule

from comlrl_lightning.callbacks import EvalInterval, EvalMetrics
from comlrl_lightning.callbacks.eval_metrics import completion_texts
from comlrl_lightning.types import Rollouts
from tests.callbacks.fakes import ITEMS, FakeModule, central_node, data, quiet_trainer


def response_chars(
    *, agent_completions_turns: Sequence[Sequence[Sequence[str]]], batch_items: Sequence[Any], prompts: Sequence[str]
) -> list[dict[str, float]]:
    num_agents = len(agent_completions_turns)
    return [
        {
            f"turn_{turn + 1}/response_chars": sum(len(agent[row][turn]) for agent in agent_completions_turns)
            / num_agents
            for turn in range(len(agent_completions_turns[0][row]))
        }
        for row in range(len(batch_items))
    ]


def mean_rows(rows: Sequence[dict[str, float]], *, num_turns: int) -> dict[str, float]:
    keys = [f"turn_{turn + 1}/response_chars" for turn in range(num_turns)]
    return {key: sum(row[key] for row in rows) / len(rows) for key in keys}


def test_metrics_are_in_the_result_with_their_prefix(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, EvalMetrics(response_chars, mean_rows))
    (metrics,) = trainer.validate(FakeModule(), data(), verbose=False)
    # "a0 of task 0 t1" has 15 characters, on both agents; items 0 and 2 of three reach turn 2, "" counts 0.
    assert metrics["eval/turn_1/response_chars"] == 15
    assert metrics["eval/turn_2/response_chars"] == pytest.approx(10)
    (tested,) = trainer.test(FakeModule(), data(), verbose=False)
    assert tested["eval/turn_1/response_chars"] == 15


def test_what_the_functions_get(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def keep(**keywords: Any) -> str:
        calls.append(keywords)
        return "rows"

    def aggregate(rows: str) -> dict[str, float]:
        assert rows == "rows"
        return {}

    quiet_trainer(tmp_path, EvalMetrics(keep, aggregate), EvalInterval(0)).validate(FakeModule(), data(evaluation=2))
    assert calls == [
        {
            "agent_completions_turns": [
                [["a0 of task 0 t1", "a0 of task 0 t2"], ["a0 of task 1 t1", ""]],
                [["a1 of task 0 t1", "a1 of task 0 t2"], ["a1 of task 1 t1", ""]],
            ],
            "batch_items": ITEMS[:2],
            "prompts": ["task 0", "task 1"],
        }
    ]


def test_sanity_check_asks_nobody(tmp_path: Path) -> None:
    def never(**keywords: Any) -> None:
        raise AssertionError("asked")

    trainer = quiet_trainer(tmp_path, EvalMetrics(never, mean_rows), limit_train_batches=1, check_val_every_n_epoch=9)
    trainer.fit(FakeModule(), data())


def test_both_or_neither() -> None:
    with pytest.raises(ValueError, match=r"EvalMetrics\(eval_aggregator=None\) has half of a pair"):
        EvalMetrics(response_chars, None)  # type: ignore[arg-type]


def test_signature_is_checked_at_construction() -> None:
    with pytest.raises(
        ValueError, match=r"eval_logger=.*positional_logger cannot be called with no positional arguments"
    ):
        EvalMetrics(positional_logger, mean_rows)


def positional_logger(rows: Any, batch_items: Any) -> None: ...


def test_result_must_be_numbers(tmp_path: Path) -> None:
    def words(rows: Any) -> Any:
        return {"chars": "many"}

    trainer = quiet_trainer(tmp_path, EvalMetrics(response_chars, words))
    with pytest.raises(ValueError, match=r"eval_aggregator=.*words returned \{'chars': 'many'\}. Return a dictionary"):
        trainer.validate(FakeModule(), data(), verbose=False)


def test_exception_of_the_user_keeps_its_type_and_says_where(tmp_path: Path) -> None:
    def broken(**keywords: Any) -> None:
        raise KeyError("level")

    trainer = quiet_trainer(tmp_path, EvalMetrics(broken, mean_rows))
    with pytest.raises(KeyError) as caught:
        trainer.validate(FakeModule(), data(), verbose=False)
    assert "broken for the evaluation at env_step 0" in caught.value.__notes__[0]


def test_needs_a_module_that_keeps_rollouts(tmp_path: Path) -> None:
    class Plain(LightningModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    trainer = quiet_trainer(tmp_path, EvalMetrics(response_chars, mean_rows))
    with pytest.raises(ValueError, match="EvalMetrics needs a module that keeps its rollouts, got Plain"):
        trainer.validate(Plain(), data(), verbose=False)


@pytest.mark.parametrize("name", ["turn_1/reward_mean", "turn_2/reference_kl_mean", "final_reward_mean", "step"])
def test_names_of_the_library_are_taken(tmp_path: Path, name: str) -> None:
    metrics = EvalMetrics(lambda: None, lambda rows: {name: 1.0})
    with pytest.raises(ValueError, match=rf"returned \['{name}'\], which are metrics of the library"):
        quiet_trainer(tmp_path, metrics).validate(FakeModule(), data(), verbose=False)


def test_answers_of_one_model_are_those_of_the_agents() -> None:
    # Item 0 stops after turn 1, item 1 has two turns.
    nodes = (
        central_node(0, 1, (("a", "b"),), (1.0,)),
        central_node(1, 1, (("c", "d"),), (1.0,)),
        central_node(1, 2, (("e", "f"),), (1.0,)),
    )
    rollouts = Rollouts((ITEMS[0], ITEMS[1]), (0, 1), nodes)
    assert completion_texts(rollouts, 2, 2) == [[["a", ""], ["c", "e"]], [["b", ""], ["d", "f"]]]
