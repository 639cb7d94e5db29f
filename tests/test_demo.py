"""The demonstration: what it writes, and that its agents learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from comlrl_lightning.demo import demo, main
from tests.tiny_lm import save_tiny


def test_files_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = save_tiny(tmp_path / "model"), tmp_path / "out"
    main(["--model", model, "--out", str(out), "--epochs", "2"])
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["after"] == metrics["eval/final_reward_mean"]
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["before"] == pytest.approx(first["eval/final_reward_mean"])
    # An evaluation of two items before each of two epochs and one after them.
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
    assert len((out / "completions.jsonl").read_text().splitlines()) == 6
    assert (out / "reward-curve.png").stat().st_size > 1000
    assert (out / "logs" / "metrics.csv").exists()
    for agent in range(2):
        assert (out / "agents" / f"agent_{agent}" / "adapter_model.safetensors").exists()
    words = capsys.readouterr().out
    assert "after training" in words
    listed = words.splitlines()[-1].partition(": ")[2].split(", ")
    assert sorted(name.rstrip("/") for name in listed) == sorted(path.name for path in out.iterdir())


def test_few_points_have_quarters_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny(tmp_path / "model")
    main(["--model", model, "--out", str(tmp_path / "out"), "--epochs", "1"])
    assert "in the first quarter" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--model", model, "--epochs", "0"])
    assert "--epochs 0 trains nothing. Use at least 1." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_agents_of_the_story_model_learn(tmp_path: Path, seed: int) -> None:
    rewards = demo(None, seed, tmp_path)
    assert rewards["last_quarter"] >= rewards["first_quarter"] + 0.25
    assert rewards["after"] > rewards["before"]
