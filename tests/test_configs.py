"""Every file in `configs/`: parsed by the real command line, and run for two steps if it needs no hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from comlrl_lightning.cli import main

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
HUB = {"magrpo_qwen.yaml"}
SHORT = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.enable_progress_bar=false"]
SMALL = ["--model.sampling.max_new_tokens=6", "--data.eval_num_samples=1"]
ROLLOUT = ["--model.num_generations=2"]
ROUND = ["--model.num_candidates=2", "--model.learning_epochs=1"]
REWARD_MODEL = ["--model.reward_model.num_epochs=1"]


def shortened(path: Path) -> list[str]:
    """Flags that cut a run down to one epoch of two steps, or to one round of such epochs."""
    if path.name.startswith("madpo"):
        return [*SHORT, *SMALL, *ROUND, "--trainer.max_epochs=2"]
    if path.name.startswith("marlhf"):
        return [*SHORT, *SMALL, *ROLLOUT, *ROUND, *REWARD_MODEL, "--trainer.max_epochs=3"]
    return [*SHORT, *SMALL, *ROLLOUT]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder: the files run from anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["comlrl-lightning"])
    return tmp_path


def test_there_is_one_file_per_algorithm_and_feature() -> None:
    features = ("two_turns", "cross", "heterogeneous", "full_finetuning", "qwen")
    expected = {f"magrpo_{feature}.yaml" for feature in features} | {"quickstart.yaml"}
    expected |= {f"{name}_length_ratio.yaml" for name in ("mareinforce", "magrpo", "marloo", "maremax", "iac", "maac")}
    expected |= {"iac_value_head.yaml", "maac_two_turns.yaml"}
    expected |= {f"{name}.yaml" for name in ("madpo_length_ratio", "madpo_rounds")}
    expected |= {f"{name}.yaml" for name in ("marlhf_length_ratio", "marlhf_maac_rounds")}
    assert {path.name for path in CONFIGS} == expected


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_file_fits_a_screen_and_parses(path: Path, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(path.read_text().splitlines()) <= 50
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", str(path), "--print_config"])
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    written = yaml.safe_load(path.read_text())
    assert printed["model"]["class_path"] == f"comlrl_lightning.{written['model']['class_path']}"
    assert printed["task"] == written["task"]


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.name not in HUB], ids=lambda path: path.stem)
def test_two_steps(path: Path, workplace: Path) -> None:
    main(["fit", "--config", str(path), *shortened(path)])
    run = workplace / "runs" / path.stem / "version_0"
    metrics = json.loads((run / "eval-metrics.json").read_text())
    assert 0 <= metrics["eval/turn_1/reward_mean"] <= 1
    for agent in range(2):
        assert list((run / "agents" / f"agent_{agent}").glob("*.safetensors"))
    assert "turn_1/reward_mean" in (run / "metrics.csv").read_text()
    assert (run / "run-config.yaml").is_file()
    if "num_candidates" in path.read_text():
        assert json.loads((run / "rounds" / "round_0001.json").read_text())["num_pairs"]
