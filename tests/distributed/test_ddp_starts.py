"""Processes that Lightning itself starts, by fork or spawn: the fit, and what comes back of it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from comlrl_lightning.algorithms import MADPO, MAGRPO, CooperativeModule
from comlrl_lightning.callbacks import BatchCheckpoint
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.evaluation import evaluate
from tests.algorithms.support import make_trainer, uneven_reward
from tests.distributed.launch import run_alone
from tests.distributed.support import Run, digest, tasks

SETTINGS: dict[str, Any] = {"num_turns": 2, "num_generations": 2, "agent_learning_rate": 0.01}
DATA: dict[str, Any] = {"train_dataset": tasks(3), "eval_dataset": tasks(3), "batch_size": 2}


def run_of(algorithm: type[CooperativeModule]) -> Run:
    settings = SETTINGS if algorithm is MAGRPO else {"num_candidates": 3}
    return Run(algorithm, dict(settings), DATA)


def fit_as_a_script(algorithm: type[CooperativeModule], strategy: str, folder: Path) -> dict[str, Any]:
    """A script or a notebook: fit, save, evaluate, fit on, all in the process that started the ranks."""
    run = run_of(algorithm)
    if strategy == "ddp_notebook":
        run.settings["reward_func"] = lambda *texts: uneven_reward(*texts)  # a cell's function has no module
    module = run.module(trained=False)
    data = TaskDataModule(DATA["train_dataset"], DATA["eval_dataset"])
    settings: dict[str, Any] = {"strategy": strategy, "devices": 2, "enable_checkpointing": True}
    make_trainer([BatchCheckpoint(dirpath=folder / "saved")], **settings, max_epochs=2).fit(module, data)
    result = {"weights": digest(module), "steps": (module.env_step, module.update_step)}
    module.save_agents(folder / "agents")
    result["evaluation"] = evaluate(module, data)
    if strategy != "ddp_spawn":  # whose processes take long to begin
        (last,) = (folder / "saved").iterdir()
        trainer = make_trainer([BatchCheckpoint(dirpath=folder / "saved")], **settings, max_epochs=3)
        trainer.fit(module, data, ckpt_path=last)
        result["steps_at_the_end"] = (module.env_step, module.update_step)
        result["weights_at_the_end"] = digest(module)
    return result


@pytest.mark.parametrize(
    ("algorithm", "strategy"),
    [
        (MAGRPO, "ddp_fork"),
        pytest.param(MADPO, "ddp_notebook", marks=pytest.mark.slow),
        pytest.param(MAGRPO, "ddp_spawn", marks=pytest.mark.slow),
    ],
)
def test_a_script_has_the_agents_that_its_ranks_trained(
    algorithm: type[CooperativeModule], strategy: str, tmp_path: Path
) -> None:
    expected, _ = run_of(algorithm).on(2, trained=False, max_epochs=3)
    result = run_alone(fit_as_a_script, algorithm, strategy, tmp_path)
    # Two epochs of two steps, then a third one by another trainer.
    assert result["weights"] == expected.weights[3]
    assert sorted(path.name for path in (tmp_path / "agents").iterdir()) == ["agent_0", "agent_1", "contents.json"]
    assert "eval/turn_1/reward_mean" in result["evaluation"]
    if strategy != "ddp_spawn":
        assert result["weights_at_the_end"] == expected.weights[-1]
        assert result["steps_at_the_end"] == (expected.env_step, expected.update_step)
        assert 0 < result["steps"][0] < expected.env_step


def test_an_evaluated_data_module_can_be_sent_to_other_processes() -> None:
    # It holds its trainer, which holds the loaders.
    data = TaskDataModule(DATA["train_dataset"], DATA["eval_dataset"], eval_num_samples=2)
    make_trainer().validate(run_of(MAGRPO).module(), data, verbose=False)
    sent = pickle.loads(pickle.dumps(data.val_dataloader()))
    assert [index for batch in sent for index in batch.indices] == [0, 1]
    assert len(pickle.loads(pickle.dumps(data.train_dataloader()))) == 3


def fit_with_a_lambda() -> None:
    module = Run(MAGRPO, {"reward_func": lambda *texts: [0.0] * len(texts[0]), "num_generations": 2}, DATA).module()
    make_trainer(strategy="ddp_spawn", devices=2).fit(module, TaskDataModule(DATA["train_dataset"]))


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"^reward_func=.*lambda.* cannot be sent to another process: .* strategy='ddp'"
    ):
        run_alone(fit_with_a_lambda)
