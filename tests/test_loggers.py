"""`wandb_logger`: the dictionary, the x-axis, and a run without network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import wandb
from lightning import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from comlrl_lightning import MAGRPO, Sampling, SharedBase, TaskDataModule
from comlrl_lightning.loggers import TaskWandbLogger, wandb_logger
from tests.callbacks.fakes import quiet_trainer
from tests.tiny_lm import tiny_llama, tiny_tokenizer

CONFIG = {
    "project": "comlrl",
    "name": "length-ratio-magrpo",
    "tags": ["length-ratio", "magrpo"],
    "config_sections": {"dataset": {"name": "length-ratio", "split_seed": 42}, "output": {"verbose": True}},
}


def test_none_turns_logging_off() -> None:
    assert wandb_logger(None) is False


def test_offline_run_from_the_dictionary(tmp_path: Path) -> None:
    wandb.finish()
    logger = wandb_logger({**CONFIG, "dir": str(tmp_path)}, offline=True)
    assert isinstance(logger, TaskWandbLogger)
    run = logger.experiment
    logged: list[dict[str, Any]] = []
    log = run.log

    def keep(row: dict[str, Any]) -> None:
        logged.append(row)
        log(row)

    run.log = keep
    try:
        logger.log_metrics({"turn_1/reward_mean": 0.5, "env_step": 16}, step=16)
        logger.log_metrics({"eval/turn_1/reward_mean": 0.25, "env_step": 16}, step=16)
        assert (run.project, run.name, run.tags) == ("comlrl", "length-ratio-magrpo", ("length-ratio", "magrpo"))
        assert run.config["dataset"] == {"name": "length-ratio", "split_seed": 42}
    finally:
        run.finish()
    assert [row["env_step"] for row in logged] == [16, 16]
    assert logged[0]["turn_1/reward_mean"] == 0.5
    assert list(tmp_path.rglob("*.wandb"))


def test_run_name_is_a_name() -> None:
    assert TaskWandbLogger({"run_name": "first"})._name == "first"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"projct": "comlrl"}, r"unknown keys \['projct'\]. Allowed: name, run_name, .*project, entity"),
        ({"name": "a", "run_name": "b"}, "both name and run_name"),
        ({"config_sections": {"output": True}}, "is not a dictionary of dictionaries"),
        ({"api_key": "secret"}, r"unknown keys \['api_key'\]"),
        ({"log_model": True, "mode": "offline"}, r"log_model'\]=True sends checkpoints, .* Leave it out"),
    ],
)
def test_mistakes_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wandb_logger(config)


SETTINGS = {
    "group": "seeds",
    "job_type": "train",
    "notes": "a try",
    "id": "abc123",
    "resume": "must",
    "mode": "offline",
    "save_code": True,
}


def test_settings_of_init_reach_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(wandb, "run", None)
    monkeypatch.setattr(wandb, "init", lambda **arguments: seen.update(arguments) or MagicMock())
    config = {**CONFIG, **SETTINGS, "dir": str(tmp_path), "config": {"seed": 1}, "checkpoint_name": "agents"}
    _ = TaskWandbLogger(config).experiment
    assert {key: seen[key] for key in SETTINGS} == SETTINGS
    assert seen["config"] == {"seed": 1, **CONFIG["config_sections"]}  # type: ignore[dict-item]
    assert "checkpoint_name" not in seen


def test_a_run_offline_leaves_others_online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "run", None)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(wandb, "init", lambda **arguments: seen.update(arguments) or MagicMock())
    _ = TaskWandbLogger({}, offline=True).experiment
    assert seen["mode"] == "offline"
    assert "WANDB_MODE" not in os.environ


def test_a_resumed_fit_goes_on_with_the_same_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[str] = []

    def init(**arguments: Any) -> MagicMock:
        begun.append(arguments["id"])
        return MagicMock(id=begun[-1])

    monkeypatch.setattr(wandb, "run", None)
    monkeypatch.setattr(wandb, "init", init)

    def fit(config: dict[str, Any], ckpt_path: Path | None = None) -> Trainer:
        module = MAGRPO(SharedBase(tiny_llama(), 2, tokenizer=tiny_tokenizer()), reward, num_generations=2,
                        sampling=Sampling(max_new_tokens=3))  # fmt: skip
        trainer = quiet_trainer(tmp_path, logger=TaskWandbLogger({**config, "dir": str(tmp_path)}))
        trainer.fit(module, TaskDataModule([{"prompt": "a"}] * 2), ckpt_path=ckpt_path)
        return trainer

    saved = tmp_path / "saved.ckpt"
    fit({}).save_checkpoint(saved)
    for config in ({}, {"id": "other"}, {"resume": "never"}):
        fit(config, saved)
    assert begun[1:3] == [begun[0], "other"]
    assert begun[3] is None  # W&B makes a new one up


def test_a_configuration_file_names_the_logger() -> None:
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(Trainer, "trainer")
    config = {"class_path": "comlrl_lightning.TaskWandbLogger", "init_args": {"wandb_config": SETTINGS}}
    parsed = parser.instantiate_classes(parser.parse_object({"trainer": {"logger": config, "accelerator": "cpu"}}))
    assert isinstance(parsed.trainer.logger, TaskWandbLogger)


def reward(first: list[str], second: list[str]) -> list[float]:
    return [float(len(one) - len(other)) for one, other in zip(first, second, strict=True)]


def test_verbose_is_on_by_default() -> None:
    assert TaskWandbLogger({}).verbose
    assert TaskWandbLogger(CONFIG).verbose
    assert not TaskWandbLogger({"config_sections": {"output": {"verbose": False}}}).verbose
