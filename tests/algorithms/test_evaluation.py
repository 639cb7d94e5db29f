"""Evaluation follows training's rules and leaves training alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.algorithms import MAGRPO, POLICY_GRADIENT_ALGORITHMS, CooperativeModule
from comlrl_lightning.callbacks import EvalInterval
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.evaluation import evaluate
from comlrl_lightning.rewards import RewardProcessors
from comlrl_lightning.types import Rollouts
from tests.algorithms.support import ITEMS, Collected, make_module, make_trainer, uneven_reward, weights


def by_item(first: list[str], second: list[str], batch_items: list[dict[str, Any]], turn: int) -> list[float]:
    """Items with a level above 1 score it at once; the others score a tenth of the turn."""
    level = batch_items[0]["level"]
    return [level if level > 1 else turn / 10] * len(first)


LEVELS = [{"prompt": "p", "level": level} for level in (0.0, 5.0, 0.0, 7.0)]


def validated(module: CooperativeModule, items: list[dict[str, Any]], batch_size: int = 2) -> dict[str, float]:
    data = TaskDataModule(items, eval_dataset=items, eval_batch_size=batch_size)
    (metrics,) = make_trainer().validate(module, data, verbose=False)
    return dict(metrics)


class TestEarlyTermination:
    def test_evaluation_stops_where_training_stops(self) -> None:
        # Rewards are halved before they are compared: items 1 and 3 have 2.5 and 3.5, above 2.
        module = make_module(
            MAGRPO,
            reward_func=by_item,
            reward_processor=RewardProcessors.scale(0.5),
            num_turns=2,
            early_termination_threshold=2.0,
        )
        metrics = validated(module, LEVELS)
        assert metrics["eval/turn_1/reward_mean"] == pytest.approx((0.05 + 2.5 + 0.05 + 3.5) / 4)
        assert metrics["eval/turn_2/reward_mean"] == pytest.approx(0.1)  # items 0 and 2 only
        assert metrics["eval/final_reward_mean"] == pytest.approx((0.1 + 2.5 + 0.1 + 3.5) / 4)
        # Item 0: .05 at turn 1 and .1 at turn 2 make .15.
        assert metrics["eval/turn_1/expected_return"] == pytest.approx((0.15 + 2.5 + 0.15 + 3.5) / 4)
        assert module.env_step == 0


class TestNothingMoves:
    @pytest.mark.parametrize("algorithm", POLICY_GRADIENT_ALGORITHMS)
    def test_training_is_the_same_with_and_without_evaluations(self, algorithm: type[CooperativeModule]) -> None:
        def run(interval: int) -> tuple[Any, dict[str, torch.Tensor]]:
            torch.manual_seed(0)
            collected = Collected()
            module = make_module(algorithm, reward_func=noisy, agent_learning_rate=0.01, num_turns=2)
            trainer = make_trainer([collected, EvalInterval(interval)])
            trainer.fit(module, TaskDataModule(ITEMS, eval_dataset=ITEMS))
            return [rollouts.nodes for rollouts in collected.rollouts], weights(module, 0)

        (nodes, end), (other_nodes, other_end) = run(0), run(1)
        assert nodes == other_nodes
        assert all(torch.equal(value, other_end[name]) for name, value in end.items())

    def test_two_evaluations_agree_and_a_seed_draws_anew(self) -> None:
        module = make_module(MAGRPO, agent_learning_rate=0.01)
        data = TaskDataModule(ITEMS, eval_dataset=ITEMS)
        trainer = make_trainer()
        trainer.fit(module, data)
        first = evaluate(module, data)
        assert first == evaluate(module, data)
        assert first == {
            key: value
            for key, value in trainer.validate(module, data, verbose=False)[0].items()
            if key.startswith("eval/")
        }
        assert first["eval/turn_1/reward_mean"] != evaluate(module, data, seed=5)["eval/turn_1/reward_mean"]

    def test_batches_do_not_matter(self) -> None:
        torch.manual_seed(0)
        module = make_module(MAGRPO)
        assert validated(module, ITEMS, 1) == pytest.approx(validated(module, ITEMS, 4))

    def test_without_a_split_there_is_nothing(self) -> None:
        assert evaluate(make_module(MAGRPO), TaskDataModule(ITEMS)) == {}


class Asks(Callback):
    """Asks for everything that was sampled, whenever it is called."""

    def __init__(self) -> None:
        self.answers: list[Rollouts] = []

    def _ask(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, CooperativeModule)
        self.answers.append(pl_module.evaluation_rollouts())

    on_validation_batch_end = on_test_batch_end = _ask  # type: ignore[assignment]
    on_validation_epoch_end = on_validation_end = on_test_epoch_end = on_test_end = _ask


@pytest.mark.parametrize("evaluated", [Trainer.validate, Trainer.test])
def test_an_evaluation_is_gathered_once_for_all_callbacks(
    evaluated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = Counter[int]()

    def gather(values: list[Rollouts]) -> list[Rollouts]:
        gathered[len(values)] += 1
        return list(values)

    monkeypatch.setattr("comlrl_lightning.algorithms.module.gather_objects", gather)
    module, data = make_module(MAGRPO), TaskDataModule(ITEMS, eval_dataset=ITEMS[:2], eval_batch_size=1)
    first, second = Asks(), Asks()
    trainer = make_trainer([first, second])
    for run in (1, 2):
        evaluated(trainer, module, data, verbose=False)
        # After the first batch, and after the second and at the ends: 1 item, then 2 items.
        assert gathered == {1: run, 2: run}
    assert [len(answer.items) for answer in first.answers] == [1, 2, 2, 2] * 2
    assert all(one is other for one, other in zip(first.answers, second.answers, strict=True))
    module.evaluation_rollouts()
    assert gathered[2] == 3  # nothing was kept


def noisy(*completions: list[str]) -> list[float]:
    """A reward that draws from the global random numbers."""
    return [value + float(torch.rand(())) for value in uneven_reward(*completions)]


def test_greedy_evaluation_has_one_answer() -> None:
    module = make_module(MAGRPO, eval_sampling=Sampling(max_new_tokens=4, temperature=0))
    data = TaskDataModule(ITEMS, eval_dataset=ITEMS)
    assert evaluate(module, data) == evaluate(module, data, seed=3)


def test_the_reference_kl_is_taken_at_the_temperature_of_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_module(MAGRPO, reference_kl_coef=0.1, eval_sampling=Sampling(max_new_tokens=4, temperature=0.5))
    module.configure_model()
    asked: list[tuple[float, bool]] = []
    score = module.team.log_probs

    def watched(completions: Any, *, temperature: float, reference: bool = False) -> Any:
        asked.append((temperature, reference))
        return score(completions, temperature=temperature, reference=reference)

    monkeypatch.setattr(module.team, "log_probs", watched)
    validated(module, ITEMS[:1])
    assert asked == [(0.5, False), (0.5, True)]


def test_predictions_are_plain_records() -> None:
    module = make_module(MAGRPO, reward_func=by_item, num_turns=2, early_termination_threshold=2.0)
    data = TaskDataModule(LEVELS, eval_dataset=LEVELS, eval_batch_size=4)
    predicted = make_trainer().predict(module, data)
    assert predicted is not None
    (records,) = predicted
    assert [(record["index"], record["turn"], record["reward"]) for record in records] == [
        (0, 1, 0.1),
        (1, 1, 5.0),
        (2, 1, 0.1),
        (3, 1, 7.0),
        (0, 2, 0.2),
        (2, 2, 0.2),
    ]
    assert records[0]["prompts"] == ["p", "p"]
    assert all(isinstance(text, str) for text in records[0]["completions"])
