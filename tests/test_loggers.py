"""`wandb_logger`: the dictionary, the x-axis, and a run without network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import wandb

from comlrl_lightning.loggers import TaskWandbLogger, wandb_logger

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
        ({"projct": "comlrl"}, r"unknown keys \['projct'\]. Allowed: project, entity, name, run_name"),
        ({"name": "a", "run_name": "b"}, "both name and run_name"),
        ({"config_sections": {"output": True}}, "is not a dictionary of dictionaries"),
        ({"api_key": "secret"}, r"unknown keys \['api_key'\]"),
    ],
)
def test_mistakes_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wandb_logger(config)


def test_verbose_is_on_by_default() -> None:
    assert TaskWandbLogger({}).verbose
    assert TaskWandbLogger(CONFIG).verbose
    assert not TaskWandbLogger({"config_sections": {"output": {"verbose": False}}}).verbose
