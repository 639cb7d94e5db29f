"""The first program of a newcomer: a plain trainer, two agents, ten tasks, and what it must leave behind."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from comlrl_lightning import MAGRPO, Sampling, SharedBase, TaskDataModule, evaluate
from comlrl_lightning.callbacks import EvalInterval, EvalMetrics, JSONExport, RolloutMetrics
from comlrl_lightning.tasks.length_ratio import OPEN_PROMPTS
from tests.tiny_lm import tiny_llama, tiny_tokenizer

Rows = list[dict[str, float]]
SEEN: list[Mapping[str, Any]] = []


def brief_formatter(item: Mapping[str, Any]) -> str:
    return f"Write a short response to this task:\n{item['prompt']}"


def detailed_formatter(item: Mapping[str, Any]) -> str:
    return f"Write a detailed response to this task:\n{item['prompt']}"


def reward_func(
    brief_completions: Sequence[str], detailed_completions: Sequence[str], *, batch_items: Sequence[Mapping[str, Any]]
) -> list[float]:
    item = batch_items[0]
    SEEN.append(item)
    rewards = []
    for brief, detailed in zip(brief_completions, detailed_completions, strict=True):
        if not brief:
            rewards.append(0.0)
            continue
        ratio = len(detailed) / len(brief)
        distance = max(item["target_min"] - ratio, ratio - item["target_max"], 0.0)
        rewards.append(math.exp(-distance))
    return rewards


def eval_logger(*, agent_completions_turns: Any, batch_items: Sequence[Any], prompts: Sequence[Any]) -> Rows:
    assert len(prompts) == len(batch_items)
    return [
        {
            f"turn_{turn + 1}/response_chars": sum(len(agent[row][turn]) for agent in agent_completions_turns)
            / len(agent_completions_turns)
            for turn in range(len(agent_completions_turns[0][row]))
        }
        for row in range(len(batch_items))
    ]


def eval_aggregator(rows: Rows, *, num_turns: int) -> dict[str, float]:
    keys = [f"turn_{turn + 1}/response_chars" for turn in range(num_turns)]
    return {key: sum(row[key] for row in rows) / len(rows) for key in keys} if rows else {}


def metrics_callback(rollouts: Sequence[Any]) -> dict[str, float]:
    if not rollouts:
        return {}
    return {"response_chars": sum(len(sample.completion) for sample in rollouts) / len(rollouts)}


class Evaluations(EvalInterval):
    """Counts its evaluations by the env_step that they happen at."""

    def __init__(self, interval: int) -> None:
        super().__init__(interval)
        self.env_steps: list[int] = []

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        assert isinstance(pl_module, MAGRPO)
        self.env_steps.append(pl_module.env_step)


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The ten tasks in two splits; whatever a trainer writes goes to a temporary folder."""
    monkeypatch.chdir(tmp_path)
    SEEN.clear()
    tasks = Dataset.from_dict(
        {"prompt": list(OPEN_PROMPTS), "target_min": [2.0] * len(OPEN_PROMPTS), "target_max": [3.0] * len(OPEN_PROMPTS)}
    )
    return tasks.train_test_split(test_size=0.2, seed=42)


def make_module() -> MAGRPO:
    return MAGRPO(
        agents=SharedBase(tiny_llama(), num_agents=2, tokenizer=tiny_tokenizer()),
        formatters=[brief_formatter, detailed_formatter],
        reward_func=reward_func,
        num_generations=4,
        sampling=Sampling(max_new_tokens=8),
    )


def test_functions_without_a_model(split: Any) -> None:
    item = split["train"][0]
    assert item["prompt"] in brief_formatter(item)
    assert reward_func(["Hi"], ["Hello"], batch_items=[item]) == [1.0]
    assert reward_func([""], ["Hello"], batch_items=[item]) == [0.0]


def test_a_plain_trainer_does_what_it_looks_like(split: Any) -> None:
    data = TaskDataModule(train_dataset=split["train"], eval_dataset=split["test"])
    module, interval = make_module(), Evaluations(4)
    logger = CSVLogger("logs")
    callbacks = [interval, EvalMetrics(eval_logger, eval_aggregator), RolloutMetrics(metrics_callback), JSONExport()]
    trainer = Trainer(max_epochs=1, callbacks=callbacks, logger=logger, accelerator="cpu")
    trainer.fit(module, data)

    # Eight items of four joint completions each: before item 0 and before item 4, which is 16 completions later.
    assert interval.env_steps == [0, 16]
    assert module.env_step == 32
    with Path(logger.log_dir, "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["env_step"]) for row in rows if row["turn_1/reward_mean"]] == [4.0 * n for n in range(1, 9)]
    assert all(
        row["response_chars"] for row in rows if row["turn_1/reward_mean"] == "" and row["eval/response_chars"] == ""
    )
    assert {item["prompt"] for item in SEEN} == set(OPEN_PROMPTS)
    assert all(set(item) == {"prompt", "target_min", "target_max"} for item in SEEN)

    metrics = evaluate(module, data)
    assert metrics == json.loads(Path(logger.log_dir, "eval-metrics.json").read_text())
    assert {"eval/turn_1/response_chars", "eval/turn_1/reward_mean", "eval/response_chars"} <= set(metrics)
    assert metrics == evaluate(module, data)
    assert metrics != evaluate(module, data, seed=1)
    assert metrics == {key: value for key, value in trainer.validate(module, data)[0].items() if "eval/" in key}

    module.save_agents("agents")
    assert {path.name for path in Path("agents").iterdir() if path.is_dir()} == {"agent_0", "agent_1"}


def test_evaluate_without_an_evaluation_split_is_empty(split: Any) -> None:
    assert evaluate(make_module(), TaskDataModule(split["train"])) == {}


def test_evaluate_before_any_fit(split: Any) -> None:
    data = TaskDataModule(split["train"], split["test"])
    metrics = evaluate(make_module(), data, num_eval_samples=1, callbacks=[EvalMetrics(eval_logger, eval_aggregator)])
    assert "eval/turn_1/response_chars" in metrics
    assert data.eval_num_samples is None
    assert {item["prompt"] for item in SEEN} == {split["test"][0]["prompt"]}


def test_a_fit_after_an_evaluation(split: Any) -> None:
    # Lightning evaluates in inference mode: nothing that it leaves behind may stop a later fit.
    data, module = TaskDataModule(split["train"], split["test"]), make_module()
    evaluate(module, data)
    metrics = EvalMetrics(eval_logger, eval_aggregator)
    Trainer(max_epochs=1, callbacks=[EvalInterval(4), metrics], logger=False, accelerator="cpu").fit(module, data)
    assert module.update_step > 0
    # Another trainer's predictions in between do not take the metrics of the fit away.
    Trainer(logger=False, accelerator="cpu").predict(module, data)
    assert "eval/turn_1/response_chars" in evaluate(module, data)
