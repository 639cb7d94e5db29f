"""Twelve steps are five, a kill and seven more: tokens, rewards, weights and optimizer, bit for bit."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from comlrl_lightning.cli import main
from tests import killed_run
from tests.tiny_lm import save_tiny

ROOT = Path(__file__).parents[1]


def write_config(model: str, folder: Path) -> str:
    """The settings of `killed_run.run` for the command line."""
    settings: dict[str, Any] = {
        "trainer": {
            "max_epochs": 2,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            "callbacks": [
                {"class_path": "EvalInterval", "init_args": {"interval": 3}},
                {"class_path": "tests.killed_run.Record", "init_args": {"path": str(folder / "steps.jsonl")}},
                {
                    "class_path": "BatchCheckpoint",
                    "init_args": {"every_n_batches": 1, "keep": None, "dirpath": str(folder / "saved")},
                },
                {
                    "class_path": "ModelCheckpoint",
                    "init_args": {
                        "dirpath": str(folder / "best"),
                        "filename": "{step}",
                        "monitor": "eval/final_reward_mean",
                        "save_top_k": -1,
                    },
                },
            ],
        },
        "model": {
            "class_path": "MAGRPO",
            "init_args": {
                "agents": {"class_path": "SharedBase", "init_args": {"model": model, "num_agents": 2}},
                "reward_func": "tests.killed_run.reward",
                "num_generations": 2,
                "sampling": {"max_new_tokens": 6},
                "rollout_buffer_size": 2,
                "agent_learning_rate": 0.01,
                "lr_scheduler": {"class_path": "LinearLR", "init_args": {"total_iters": 3}},
            },
        },
        "data": {
            "train_dataset": "tests.killed_run.items",
            "eval_dataset": [*killed_run.ITEMS[:2]],
            "shuffle": True,
        },
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def run(route: str, model: str, folder: Path, ckpt_path: Path | None = None) -> None:
    resume = None if ckpt_path is None else str(ckpt_path)
    if route == "script":
        killed_run.run(model, str(folder), resume)
    else:
        main(["fit", "--config", write_config(model, folder), *([f"--ckpt_path={resume}"] if resume else [])])


def killed(route: str, model: str, folder: Path) -> None:
    """The same run in another process, killed before its sixth step."""
    if route == "script":
        command = ["-m", "tests.killed_run", model, str(folder), "5"]
    else:
        config = Path(write_config(model, folder))
        settings = yaml.safe_load(config.read_text())
        kill = {"class_path": "tests.killed_run.Kill", "init_args": {"before_step": 5}}
        settings["trainer"]["callbacks"].append(kill)
        config.write_text(yaml.safe_dump(settings))
        command = ["-m", "comlrl_lightning", "fit", "--config", str(config)]
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL


def assert_same_end(ours: Path, theirs: Path) -> None:
    """Weights, optimizer and schedule after twelve steps."""
    one, two = (torch.load(folder / "saved" / "batch-000012.ckpt", weights_only=True) for folder in (ours, theirs))
    optimizer, other = one["optimizer_states"][0], two["optimizer_states"][0]
    torch.testing.assert_close(one["state_dict"], two["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(optimizer["state"], other["state"], rtol=0, atol=0)
    assert optimizer["param_groups"] == other["param_groups"]
    assert one["lr_schedulers"] == two["lr_schedulers"]


def steps(folder: Path) -> list[str]:
    return (folder / "steps.jsonl").read_text().splitlines()


@pytest.mark.parametrize("route", ["script", "command line"])
def test_a_killed_run_goes_on(route: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["comlrl-lightning"])
    model = save_tiny(tmp_path / "model")
    whole, broken, evaluated = (tmp_path / name for name in ("whole", "broken", "evaluated"))
    for folder in (whole, broken, evaluated):
        folder.mkdir()
    run(route, model, whole)
    assert len(steps(whole)) == 12
    killed(route, model, broken)
    # The buffer of two nodes was used after step 4 and holds one when the process dies before its sixth step.
    assert len(steps(broken)) == 5
    run(route, model, broken, broken / "saved" / "batch-000005.ckpt")
    assert steps(broken) == steps(whole)
    assert_same_end(broken, whole)
    # Evaluations come before items 0 and 3 of each epoch. The last, after step 9, finds one node in the buffer, too.
    last = max((whole / "best").iterdir(), key=lambda path: path.stat().st_mtime)
    run(route, model, evaluated, last)
    assert steps(evaluated) == steps(whole)[9:]
    assert_same_end(evaluated, whole)
