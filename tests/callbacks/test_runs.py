"""Runs do not touch each other's files, resumed runs go on with their own, and files may lie anywhere."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from lightning import Callback
from lightning.pytorch.loggers import CSVLogger, Logger

from comlrl_lightning.callbacks import (
    BatchCheckpoint,
    CompletionsTable,
    EvalInterval,
    JSONExport,
    JSONPredictions,
    RewardCurve,
    SaveAgents,
)
from comlrl_lightning.callbacks.run_path import run_folder
from comlrl_lightning.files import CONTENTS, Place
from tests.callbacks.fakes import FakeModule, data, quiet_trainer

KEY = "eval/turn_1/reward_mean"
FILES = ["agents", "checkpoints", "completions.jsonl", "eval-metrics.json", "eval-metrics.jsonl", "reward-curve.png"]


def writers(keep: int | None = None) -> list[Callback]:
    """All callbacks that write in a fit, with places of their own choice."""
    table = CompletionsTable(num_on_screen=0)
    return [EvalInterval(2), JSONExport(), table, RewardCurve(), SaveAgents(), BatchCheckpoint(1, keep=keep)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_every_run_writes_into_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = [tmp_path / "lightning_logs" / f"version_{version}" for version in range(2)]
    for folder in folders:
        quiet_trainer(tmp_path, *writers(), enable_checkpointing=True).fit(FakeModule(), data(4))
        assert names(folder) == FILES
    assert names(tmp_path / "lightning_logs") == ["version_0", "version_1"]


@pytest.mark.parametrize("has_logger", [True, False])
def test_a_resumed_run_goes_on_with_its_own_files(tmp_path: Path, has_logger: bool) -> None:
    def run(root: Path, ckpt_path: Path | None = None, **settings: int) -> None:
        logger: Logger | bool = has_logger and CSVLogger(root, flush_logs_every_n_steps=1)
        trainer = quiet_trainer(root, *writers(), enable_checkpointing=True, logger=logger, **settings)
        trainer.fit(FakeModule(), data(6), ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else False)

    whole, broken = (tmp_path / name / "lightning_logs" / "version_0" for name in ("whole", "broken"))
    run(tmp_path / "whole")
    run(tmp_path / "broken", max_steps=3)
    run(tmp_path / "broken", ckpt_path=broken / "checkpoints" / "batch-000003.ckpt")
    for name in ("completions.jsonl", "eval-metrics.jsonl"):
        assert lines(broken / name) == lines(whole / name)
    assert names(broken / "checkpoints") == names(whole / "checkpoints")
    assert not list(tmp_path.glob("broken/lightning_logs/version_1/[!hm]*"))  # but the logger's hparams and metrics


@pytest.mark.filterwarnings("ignore:BatchCheckpoint.* of another run:UserWarning")
@pytest.mark.parametrize("callback", [JSONExport, RewardCurve, CompletionsTable, SaveAgents])
def test_what_would_replace_files_of_another_run_says_so_first(tmp_path: Path, callback: type[Callback]) -> None:
    ending = {JSONExport: ".json", RewardCurve: ".png", CompletionsTable: ".jsonl"}.get(callback, "")
    path = tmp_path / f"own{ending}"

    def fit(ckpt_path: Path | None = None) -> None:
        save = BatchCheckpoint(1, dirpath=tmp_path / "saved")
        trainer = quiet_trainer(tmp_path, EvalInterval(2), callback(path), save, enable_checkpointing=True)  # type: ignore[call-arg]
        trainer.fit(FakeModule(), data(2), ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else False)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*of another run")
        fit()
        fit(tmp_path / "saved" / "batch-000002.ckpt")  # the same run goes on
    (path / CONTENTS).write_text('{"files": []}') if not ending else None
    with pytest.warns(UserWarning, match=rf"{callback.__name__}: .*own.* of another run, which this one replaces"):
        fit()


def test_predictions_in_the_way_are_told_of(tmp_path: Path) -> None:
    class Predicting(FakeModule):
        def predict_step(self, batch: object, batch_idx: int) -> list[dict[str, int]]:
            return [{"index": 0, "turn": 1}]

    def predict(writer: JSONPredictions) -> None:
        quiet_trainer(tmp_path, writer).predict(Predicting(), data(1, 1))

    for version in range(2):
        predict(writer := JSONPredictions())
        assert writer.path.local == tmp_path / "lightning_logs" / f"version_{version}" / "predictions.jsonl"
    predict(JSONPredictions(tmp_path / "own.jsonl"))
    with pytest.warns(UserWarning, match=r"JSONPredictions: .*own.jsonl of another run"):
        predict(JSONPredictions(tmp_path / "own.jsonl"))


def test_a_run_beside_another_one_takes_names_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "comlrl_lightning.callbacks.run_path.claim", lambda place, writer: (place.with_stem_end("-2"), None)
    )
    callbacks = [JSONExport(tmp_path / "e.json"), RewardCurve(tmp_path / "c.png"), SaveAgents(tmp_path / "agents")]
    save = BatchCheckpoint(1, dirpath=tmp_path / "saved")
    quiet_trainer(tmp_path, EvalInterval(2), *callbacks, save, enable_checkpointing=True).fit(FakeModule(), data(2))
    assert names(tmp_path) == ["agents-2", "c-2.png", "e-2.json", "e-2.jsonl", "saved-2"]
    assert names(tmp_path / "saved-2") == ["batch-000002.ckpt"]


def test_agents_of_an_earlier_run_do_not_stay_beside_those_of_a_new_one(tmp_path: Path) -> None:
    for name in ("batch-000009", "batch-000010"):
        (tmp_path / name).mkdir()
    (tmp_path / "batch-000009" / CONTENTS).write_text('{"files": []}')
    with pytest.warns(UserWarning, match="SaveAgents: .*batch-000009.* of another run"):
        quiet_trainer(tmp_path, SaveAgents(tmp_path, every_n_batches=2)).fit(FakeModule(), data(3, 0))
    # What nobody lists may be somebody's work: it stays.
    assert names(tmp_path) == ["agent_0", "agent_1", "batch-000002", "batch-000010"]


def test_a_file_that_is_no_history_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"prompt": "a"}\n')
    table = CompletionsTable(tmp_path / "items.jsonl", num_on_screen=0)
    with pytest.raises(ValueError, match=r"items.jsonl holds lines that are no history of a run. It is left as it is"):
        quiet_trainer(tmp_path, EvalInterval(1), table).fit(FakeModule(), data(1, 1))
    assert (tmp_path / "items.jsonl").read_text() == '{"prompt": "a"}\n'


def test_files_at_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bucket = Place.of(f"memory://{tmp_path.name}")
    save = BatchCheckpoint(1, keep=2, dirpath=str(bucket / "saved"))
    callbacks = [
        JSONExport(str(bucket / "e.json")),
        CompletionsTable(str(bucket / "c.jsonl"), num_on_screen=0),
        RewardCurve(str(bucket / "curve.png")),
        save,
    ]
    trainer = quiet_trainer(tmp_path, EvalInterval(2), *callbacks, enable_checkpointing=True)
    trainer.fit(FakeModule(), data(4))
    assert [json.loads(line)["batch"] for line in (bucket / "e.jsonl").read_text().splitlines()] == [0, 2]
    assert (bucket / "curve.png").exists()
    assert [place.name for place in (bucket / "saved").glob("*")] == ["batch-000003.ckpt", "batch-000004.ckpt"]
    assert save.last_path == str(bucket / "saved" / "batch-000004.ckpt")
    assert not list(tmp_path.iterdir())

    resumed = quiet_trainer(tmp_path, EvalInterval(2), *callbacks, enable_checkpointing=True)
    resumed.fit(FakeModule(), data(4), ckpt_path=str(bucket / "saved" / "batch-000003.ckpt"), weights_only=False)
    assert len((bucket / "e.jsonl").read_text().splitlines()) == 2
    assert not list(tmp_path.iterdir())


def test_a_logger_without_folders_of_its_own_gives_the_run_one(tmp_path: Path) -> None:
    class Elsewhere(CSVLogger):
        """As loggers that write to a server: a place for all runs, a name, a version."""

        save_dir = str(tmp_path)
        name = "project"
        version = "abc"

    trainer = quiet_trainer(tmp_path, logger=Elsewhere(tmp_path))
    assert run_folder(trainer).local == tmp_path / "project" / "abc"
