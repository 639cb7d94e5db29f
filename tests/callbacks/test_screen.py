"""Tables of completions and progress of rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from comlrl_lightning.callbacks import CompletionsTable, EvalInterval, RolloutProgress
from comlrl_lightning.callbacks.completions_table import completion_rows, show
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.loggers import TaskWandbLogger
from comlrl_lightning.types import RolloutListener, Rollouts, prompt_text
from tests.callbacks.fakes import ITEMS, FakeModule, central_node, data, quiet_trainer


@pytest.fixture
def no_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loggers of Weights & Biases without a run."""
    monkeypatch.setattr(TaskWandbLogger, "experiment", MagicMock())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_table_as_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = CompletionsTable(num_on_screen=1)
    trainer = quiet_trainer(tmp_path, EvalInterval(2), table, logger=CSVLogger(tmp_path))
    trainer.fit(FakeModule(), data(train=4, evaluation=2))
    rows = lines(Path(str(trainer.log_dir)) / "completions.jsonl")
    # Two evaluations of item 0 (two turns) and item 1 (one turn).
    assert [(row["env_step"], row["index"], row["turn"]) for row in rows] == [
        (0, 0, 1),
        (0, 0, 2),
        (0, 1, 1),
        (6, 0, 1),
        (6, 0, 2),
        (6, 1, 1),
    ]
    assert rows[1] == {
        "env_step": 0,
        "batch": 0,
        "index": 0,
        "turn": 2,
        "prompts": ["prompt 0", "prompt 1"],
        "completions": ["a0 of task 0 t2", "a1 of task 0 t2"],
        "reward": 0.2,
    }
    printed = capsys.readouterr().out
    assert "Evaluation at env_step 6" in printed
    words = " ".join(printed.split())
    # One item with its task, both of its turns together, and not the next item.
    assert printed.count("task 0 ") >= 2
    assert "t1" in words
    assert "t2" in words
    assert "task 1" not in printed


@pytest.mark.filterwarnings("ignore:.* of another run:UserWarning")
def test_new_run_starts_a_new_file(tmp_path: Path) -> None:
    for _ in range(2):
        table = CompletionsTable(tmp_path / "c.jsonl", num_on_screen=0)
        quiet_trainer(tmp_path, EvalInterval(1), table).fit(FakeModule(), data(1, 1))
        assert len(lines(tmp_path / "c.jsonl")) == 2


def test_a_resumed_file_may_hold_any_line_break_in_its_texts(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"env_step": 0, "text": "a\u2028b\x85c\x0cd"}, ensure_ascii=False) + "\n")
    module = FakeModule()
    module.env_step = 5
    quiet_trainer(tmp_path, CompletionsTable(path, num_on_screen=0)).fit(module, data(1, 0))
    assert path.read_text().split("\n")[0].endswith('"a\u2028b\x85c\\fd"}')


@pytest.mark.usefixtures("no_wandb")
def test_wandb_table_has_env_step_as_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[dict[str, Any]] = []
    monkeypatch.setattr(WandbLogger, "log_table", lambda self, **keywords: tables.append(keywords))
    logger = TaskWandbLogger({"dir": str(tmp_path)})
    trainer = quiet_trainer(tmp_path, CompletionsTable(tmp_path / "c.jsonl"), logger=logger)
    trainer.validate(FakeModule(), data(evaluation=1), verbose=False)
    (table,) = tables
    assert table["key"] == "eval/completions"
    assert table["columns"][:4] == ["env_step", "index", "turn", "prompt_0"]
    assert table["data"][0] == [0, 0, 1, "prompt 0", "a0 of task 0 t1", "prompt 1", "a1 of task 0 t1", 0.1]


@pytest.mark.usefixtures("no_wandb")
def test_verbose_false_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WandbLogger, "log_table", lambda self, **keywords: None)
    config = {"dir": str(tmp_path), "config_sections": {"output": {"verbose": False}}}
    trainer = quiet_trainer(tmp_path, CompletionsTable(tmp_path / "c.jsonl"), logger=TaskWandbLogger(config))
    trainer.validate(FakeModule(), data(evaluation=1), verbose=False)
    assert "a0 of task 0" not in capsys.readouterr().out
    assert len(lines(tmp_path / "c-validate.jsonl")) == 2


def test_evaluations_outside_of_the_fit(tmp_path: Path) -> None:
    module, path = FakeModule(), tmp_path / "c.jsonl"
    trainer = quiet_trainer(tmp_path, EvalInterval(1), CompletionsTable(path, num_on_screen=0))
    trainer.fit(module, data(1, 1))
    for _ in range(2):
        trainer.validate(module, data(1, 1), verbose=False)
        other = quiet_trainer(tmp_path, CompletionsTable(path, num_on_screen=0))
        other.validate(FakeModule(), data(1, 1), verbose=False)
    # Item 0 has two turns; it was trained once, with two joint completions per turn.
    assert [row["env_step"] for row in lines(path)] == [0, 0, 4, 4]
    assert [row["env_step"] for row in lines(tmp_path / "c-validate.jsonl")] == [0, 0]


def test_a_row_has_the_answers_of_the_agents_whoever_wrote_them() -> None:
    (row,) = completion_rows(Rollouts((ITEMS[3],), (3,), (central_node(0, 1, (("x", "y"),), (0.5,)),)))
    assert row["prompts"] == ["prompt 0", "prompt 1"]
    assert row["completions"] == ["x", "y"]


def test_text_of_chat_messages() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt_text(messages) == "system: Be brief.\nuser: Hi"


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match=r"CompletionsTable\(path='c.csv'\) does not name JSON lines"):
        CompletionsTable("c.csv")
    with pytest.raises(ValueError, match=r"CompletionsTable\(num_on_screen=-1\) is negative"):
        CompletionsTable(num_on_screen=-1)


class Telling(FakeModule):
    """Tells its listeners about a rollout, and reads the tasks of the progress bar."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptions: list[str] = []

    def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        listeners = [callback for callback in callbacks if isinstance(callback, RolloutListener)]
        assert len(listeners) == 1
        for rows_running in (8, 3, 0):
            listeners[0].on_rollout_progress(2, rows_running)
            self.read(self.descriptions)
        super().training_step(batch, batch_idx)

    def read(self, descriptions: list[str]) -> None:
        bar = self.trainer.progress_bar_callback
        if isinstance(bar, RichProgressBar) and bar.progress is not None:
            descriptions += [f"{task.description} {task.completed}/{task.total}" for task in bar.progress.tasks[1:]]

    def on_train_batch_end(self, *args: Any) -> None:
        self.read(self.descriptions)


def test_rollout_progress_is_a_task_under_the_rich_bar(tmp_path: Path) -> None:
    module = Telling()
    bar, progress = RichProgressBar(), RolloutProgress()
    quiet_trainer(tmp_path, bar, progress, EvalInterval(0), enable_progress_bar=True).fit(module, data(1, 0))
    # The task is gone when the batch ends.
    assert module.descriptions == [
        "sampling turn 2/2, 8 left 0/8",
        "sampling turn 2/2, 3 left 5/8",
        "sampling turn 2/2, 0 left 8/8",
    ]


@pytest.mark.parametrize("bar", [TQDMProgressBar(), RichProgressBar(refresh_rate=0), None])
def test_rollout_progress_needs_a_live_rich_bar(tmp_path: Path, bar: TQDMProgressBar | None) -> None:
    module, bars = Telling(), [] if bar is None else [bar]
    trainer = quiet_trainer(tmp_path, RolloutProgress(), *bars, enable_progress_bar=bar is not None)
    trainer.fit(module, data(1, 0))
    assert module.descriptions == []


def test_both_turns_of_an_item_stand_together_under_its_task(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"index": index, "turn": turn, "completions": [f"c{index}{turn}"], "reward": 0.5}
        for index, turn in ((4, 1), (4, 2), (7, 1))
    ]
    show(rows, {4: "Invent a fruit.", 7: "Invent a nut."}, title="Evaluation")
    body = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("│", "├"))]
    # Two turns, a line between items, the next item.
    assert ["c41" in body[0], "c42" in body[1], body[2][0], "c71" in body[3]] == [True, True, "├", True]
    assert "Invent a fruit." in body[0]
    assert "Invent" not in body[1]
