"""Evaluation metrics as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from comlrl_lightning.callbacks import (
    BatchCheckpoint,
    CompletionsTable,
    EvalInterval,
    JSONExport,
    RewardCurve,
    SaveAgents,
)
from comlrl_lightning.data.datamodule import TaskBatch
from tests.callbacks.fakes import FakeModule, data, quiet_trainer

KEY = "eval/turn_1/reward_mean"


def history(path: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["env_step"], round(row[KEY], 3)) for row in rows]


def test_file_and_history(tmp_path: Path) -> None:
    export = JSONExport(tmp_path / "out" / "metrics.json")
    quiet_trainer(tmp_path, EvalInterval(2), export).fit(FakeModule(), data(train=4))
    # The mean of 0.1, 1.1, 2.1 plus env_step; items 0 and 1 bring 4 + 2 scored joint completions.
    text = (tmp_path / "out" / "metrics.json").read_text()
    assert text == json.dumps({KEY: json.loads(text)[KEY]}, indent=2) + "\n"
    assert json.loads(text)[KEY] == pytest.approx(7.1)
    assert history(tmp_path / "out" / "metrics.jsonl") == [(0, 1.1), (6, 7.1)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["metrics.json", "metrics.jsonl"]


def test_sanity_check_writes_nothing(tmp_path: Path) -> None:
    export = JSONExport(tmp_path / "metrics.json")
    quiet_trainer(tmp_path, export, limit_train_batches=1, check_val_every_n_epoch=9).fit(FakeModule(), data())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_evaluation_after_the_fit_is_in_the_files_once(tmp_path: Path, stage: str) -> None:
    trainer = quiet_trainer(tmp_path, EvalInterval(2), JSONExport(tmp_path / "metrics.json"))
    module = FakeModule()
    trainer.fit(module, data(train=4))
    for _ in range(2):
        getattr(trainer, stage)(module, data(), verbose=False)
    # Four items bring 4 + 2 + 4 + 2 scored joint completions.
    assert history(tmp_path / "metrics.jsonl") == [(0, 1.1), (6, 7.1), (12, 13.1)]
    assert json.loads((tmp_path / "metrics.json").read_text())[KEY] == pytest.approx(13.1)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_trainer_that_never_fitted_leaves_the_files_of_a_fit_alone(tmp_path: Path, stage: str) -> None:
    def evaluate() -> None:
        trainer = quiet_trainer(tmp_path, JSONExport(tmp_path / "metrics.json"))
        getattr(trainer, stage)(FakeModule(), data(), verbose=False)

    evaluate()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    quiet_trainer(tmp_path, EvalInterval(2), JSONExport(tmp_path / "metrics.json")).fit(FakeModule(), data(train=4))
    evaluate()
    assert json.loads((tmp_path / "metrics.json").read_text())[KEY] == pytest.approx(7.1)
    assert json.loads((tmp_path / f"metrics-{stage}.json").read_text())[KEY] == pytest.approx(1.1)
    assert history(tmp_path / "metrics.jsonl") == [(0, 1.1), (6, 7.1)]


def test_rehearsal_writes_nothing(tmp_path: Path) -> None:
    callbacks = [
        EvalInterval(1),
        JSONExport(tmp_path / "m.json"),
        CompletionsTable(tmp_path / "c.jsonl", num_on_screen=0),
        RewardCurve(tmp_path / "c.png"),
        SaveAgents(tmp_path / "agents", every_n_batches=1, monitor=KEY),
        BatchCheckpoint(dirpath=tmp_path),
    ]
    trainer = quiet_trainer(tmp_path, *callbacks, fast_dev_run=True, enable_checkpointing=True)
    trainer.fit(FakeModule(), data())
    assert trainer.callback_metrics[KEY] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.* of another run:UserWarning")
def test_new_run_starts_a_new_history(tmp_path: Path) -> None:
    for _ in range(2):
        export = JSONExport(tmp_path / "metrics.json")
        quiet_trainer(tmp_path, EvalInterval(2), export).fit(FakeModule(), data(train=4))
        assert history(tmp_path / "metrics.jsonl") == [(0, 1.1), (6, 7.1)]


@pytest.mark.filterwarnings("ignore:.* of another run:UserWarning")
def test_new_run_without_evaluations_has_no_history(tmp_path: Path) -> None:
    for interval in (2, 0):
        export = JSONExport(tmp_path / "metrics.json")
        quiet_trainer(tmp_path, EvalInterval(interval), export).fit(FakeModule(), data(train=1))
    assert history(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("num_batches", [1, 2, 3, 4])
def test_resumed_run_continues_the_history(tmp_path: Path, num_batches: int) -> None:
    def run(ckpt_path: Path | None = None) -> list[tuple[int, float]]:
        export, save = JSONExport(tmp_path / "metrics.json"), BatchCheckpoint(1, keep=None, dirpath=tmp_path)
        trainer = quiet_trainer(tmp_path, EvalInterval(2), export, save, enable_checkpointing=True)
        trainer.fit(FakeModule(), data(train=6), ckpt_path=ckpt_path)
        return history(tmp_path / "metrics.jsonl")

    # Before items 0, 2, 4 there were 0, 4 + 2 and 12 scored joint completions. The first run was killed after it wrote
    # all three; the second goes on before them: what it evaluates again is not there twice.
    written = run()
    assert [step for step, _ in written] == [0, 6, 12]
    assert run(ckpt_path=tmp_path / f"batch-00000{num_batches}.ckpt") == written


@pytest.mark.parametrize("num_batches", [2, 3, 4, 5])
def test_evaluations_between_which_nothing_is_scored_all_stay(tmp_path: Path, num_batches: int) -> None:
    # As when algorithms learn from what they compared before: env_step stands still from the third batch on.
    class Learning(FakeModule):
        def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
            before = self.env_step
            super().training_step(batch, batch_idx)
            self.env_step = before if batch_idx > 1 else self.env_step

    def run(ckpt_path: Path | None = None) -> list[tuple[int, int]]:
        export, save = JSONExport(tmp_path / "metrics.json"), BatchCheckpoint(1, keep=None, dirpath=tmp_path)
        trainer = quiet_trainer(tmp_path, EvalInterval(1), export, save, enable_checkpointing=True)
        module = Learning()
        trainer.fit(module, data(train=6), ckpt_path=ckpt_path)
        for _ in range(2):
            trainer.validate(module, data(train=6), verbose=False)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        return [(row["env_step"], row["batch"]) for row in map(json.loads, lines)]

    # Items 0 and 1 bring 4 and 2 scored joint completions; the last line is that after the fit.
    written = [(0, 0), (4, 1), (6, 2), (6, 3), (6, 4), (6, 5), (6, 6)]
    assert run() == written
    assert run(tmp_path / f"batch-00000{num_batches}.ckpt") == written


def test_line_cut_off_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"env_step": 0, KEY: 1.1}) + '\n{"env_st')
    module = FakeModule()
    module.env_step = 5
    quiet_trainer(tmp_path, EvalInterval(4), JSONExport(tmp_path / "metrics.json")).fit(module, data(train=1))
    assert history(path) == [(0, 1.1), (5, 6.1)]


def test_values_of_a_turn_that_nobody_reached_do_not_stay(tmp_path: Path) -> None:
    class Shrinking(FakeModule):
        def on_validation_epoch_end(self) -> None:
            super().on_validation_epoch_end()
            if self.env_step == 0:
                self.log("eval/turn_2/reward_mean", 1.0)

    export = JSONExport(tmp_path / "metrics.json")
    quiet_trainer(tmp_path, EvalInterval(2), export).fit(Shrinking(), data(train=4))
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "eval/turn_2/reward_mean" in first
    assert "eval/turn_2/reward_mean" not in second


def test_number_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    class Broken(FakeModule):
        def on_validation_epoch_end(self) -> None:
            self.log("eval/own", float("nan"))

    quiet_trainer(tmp_path, JSONExport(tmp_path / "m.json")).validate(Broken(), data(), verbose=False)
    assert (tmp_path / "m.json").read_text() == '{\n  "eval/own": null\n}\n'


def test_a_kill_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet_trainer(tmp_path, JSONExport(tmp_path / "m.json"))
    trainer.validate(FakeModule(), data(), verbose=False)
    before = (tmp_path / "m.json").read_text()

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    module = FakeModule()
    module.env_step = 9
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.validate(module, data(), verbose=False)
    assert (tmp_path / "m.json").read_text() == before


def test_path_must_be_json() -> None:
    with pytest.raises(ValueError, match=r"JSONExport\(path='metrics.txt'\) does not name a JSON file"):
        JSONExport("metrics.txt")
