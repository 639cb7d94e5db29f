"""What several ranks write and report is what one process does: once, with the rows of all."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from comlrl_lightning.algorithms import MADPO, MAGRPO, MARLHF, CooperativeModule
from comlrl_lightning.callbacks import (
    BatchCheckpoint,
    CompletionsTable,
    EvalInterval,
    EvalMetrics,
    JSONExport,
    JSONPredictions,
    PreferenceRounds,
    RewardCurve,
    RolloutMetrics,
    RolloutRecord,
    SaveAgents,
)
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.evaluation import evaluate
from tests.algorithms.support import make_trainer
from tests.distributed.launch import run_ranks
from tests.distributed.support import Fit, Run, assert_in_step, fit_on_rank, tasks

FILES = ["agents", "checkpoints", "completions.jsonl", "curve.png", "eval-metrics.json", "eval-metrics.jsonl"]


def mean_length(records: Sequence[RolloutRecord]) -> dict[str, float]:
    return {
        "mean_tokens": sum(record.metadata["num_tokens"] for record in records) / len(records),
        "first_item": float(records[0].metadata["item_index"]),
    }


def text_lengths(*, agent_completions_turns: list[list[list[str]]]) -> list[int]:
    return [len(turns[0]) for turns in agent_completions_turns[0]]


def longest(rows: list[int], *, num_turns: int) -> dict[str, float]:
    return {"longest": float(max(rows)), "num_items": float(len(rows))}


def callbacks(algorithm: type[CooperativeModule]) -> list[Callback]:
    """Everything that writes, into the working folder."""
    rounds: list[Callback] = [] if algorithm is MAGRPO else [PreferenceRounds("rounds")]
    return [
        EvalInterval(4),
        CompletionsTable("completions.jsonl", num_on_screen=0),
        JSONExport("eval-metrics.json"),
        RewardCurve("curve.png"),
        RolloutMetrics(mean_length),
        EvalMetrics(text_lengths, longest),
        SaveAgents("agents"),
        BatchCheckpoint(dirpath="checkpoints"),
        *rounds,
    ]


def fit_in_own_folder(run: Run, world_size: int, folder: Path) -> Fit:
    """Fit with the working folder ``rank_r``, so that files show who wrote them."""
    own = folder / f"rank_{os.environ.get('RANK', '0')}"
    own.mkdir()
    os.chdir(own)
    settings = {"callbacks": callbacks(run.algorithm), "enable_checkpointing": True, "default_root_dir": "."}
    return fit_on_rank(run, world_size, settings)


def settings_of(algorithm: type[CooperativeModule]) -> dict[str, Any]:
    if algorithm is MAGRPO:
        return {"num_turns": 2, "num_generations": 2, "early_termination_threshold": 1.0, "agent_learning_rate": 0.01}
    return {"num_candidates": 3, "agent_learning_rate": 0.01}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("algorithm", [MAGRPO, MADPO, pytest.param(MARLHF, marks=pytest.mark.slow)])
def test_files_and_logs(algorithm: type[CooperativeModule], tmp_path: Path) -> None:
    # Six items in steps of four: evaluations of three items before items 0 and 4, on two ranks two and one of them.
    data = {"train_dataset": tasks(6), "eval_dataset": tasks(3), "batch_size": 4}
    run = Run(algorithm, settings_of(algorithm), data, {"max_epochs": 2}, dtype=torch.float64)
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (whole,) = run_ranks(fit_in_own_folder, 1, run, 1, one)
    parts = run_ranks(fit_in_own_folder, 2, run, 2, two)
    assert_in_step(parts)
    for (step, row), (other_step, other) in zip(parts[0].metrics, whole.metrics, strict=True):
        assert step == other_step
        assert row == pytest.approx(other, rel=1e-6, abs=1e-9)
    # Rank one writes nothing at all.
    expected = FILES if algorithm is MAGRPO else [*FILES, "rounds"]
    assert sorted(path.name for path in (one / "rank_0").iterdir()) == expected
    assert sorted(path.name for path in (two / "rank_0").iterdir()) == expected
    assert list((two / "rank_1").iterdir()) == []
    ours, theirs = two / "rank_0", one / "rank_0"
    completions = rows(ours / "completions.jsonl")
    assert completions == rows(theirs / "completions.jsonl")
    assert [row["index"] for row in completions if row["turn"] == 1] == [0, 1, 2] * 4
    for row, other in zip(rows(ours / "eval-metrics.jsonl"), rows(theirs / "eval-metrics.jsonl"), strict=True):
        assert row == pytest.approx(other, rel=1e-6)
        assert row["eval/num_items"] == 3
    if algorithm is not MAGRPO:
        names = sorted(path.name for path in (ours / "rounds").iterdir())
        assert names == ["round_0001.json"]
        text = (ours / "rounds" / names[0]).read_text()
        assert text == (theirs / "rounds" / names[0]).read_text()
        assert len(json.loads(text)["pairs"]) > 3


def test_lightning_has_nothing_to_say_about_logging(tmp_path: Path) -> None:
    data = {"train_dataset": tasks(5), "eval_dataset": tasks(3), "batch_size": 2}
    run = Run(MAGRPO, settings_of(MAGRPO), data)
    quiet = [one for one in callbacks(MAGRPO) if isinstance(one, EvalInterval | EvalMetrics | RolloutMetrics)]
    for part in run.on(2, callbacks=quiet):
        assert [text for text in part.warned if "sync_dist" in text or "It is recommended" in text] == []


def evaluated(world_size: int, path: Path) -> tuple[list[dict[str, float]], list[str]]:
    """Validate, test, predict and `evaluate`, outside of a fit and after one."""
    run = Run(MAGRPO, {"num_turns": 2, "num_generations": 2, "reference_kl_coef": 0.1}, {}, dtype=torch.float64)
    data, module = TaskDataModule(tasks(2), tasks(3), batch_size=2 // world_size), run.module()
    settings: dict[str, Any] = {"strategy": "ddp", "devices": world_size} if world_size > 1 else {}

    def trainer() -> Any:
        return make_trainer([JSONPredictions(path), EvalMetrics(text_lengths, longest)], **settings)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [
            dict(trainer().validate(module, data, verbose=False)[0]),
            dict(trainer().test(module, data, verbose=False)[0]),
        ]
        trainer().predict(module, data)
        trainer().fit(module, data)
        results += [evaluate(module, data), evaluate(module, data, num_eval_samples=1)]
    return results, [str(one.message) for one in caught]


def test_evaluation_is_sharded_and_gathered(tmp_path: Path) -> None:
    ((whole, _),) = run_ranks(evaluated, 1, 1, tmp_path / "one.jsonl")
    parts = run_ranks(evaluated, 2, 2, tmp_path / "two.jsonl")
    for part, warned in parts:
        assert [text for text in warned if "sync_dist" in text or "evaluated exactly once" in text] == []
        for ours, theirs in zip(part, whole, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
    assert [row["eval/num_items"] for row in whole] == [3, 3, 3, 1]
    predictions = rows(tmp_path / "two.jsonl")
    assert predictions == rows(tmp_path / "one.jsonl")
    assert [(row["index"], row["turn"]) for row in predictions] == [
        (item, turn) for item in range(3) for turn in (1, 2)
    ]
