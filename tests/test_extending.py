"""The pages of docs/: their programs run, and their classes are named by import path on the command line."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from comlrl_lightning.cli import main

DOCS = Path(__file__).parents[1] / "docs"


def program(page: str = "extending.md") -> str:
    """All code of a page in one file."""
    return "\n\n".join(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL))


def test_the_program_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "extending_page.py").write_text(program(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = importlib.import_module("extending_page").engine
    # Four fits: before the first generation, and in the second batch and the evaluation after an optimizer step each.
    assert engine.num_updates == 12


def test_the_program_of_environments_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "environments_page.py").write_text(program("environments.md"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("environments_page").module
    # Four items, four episodes of at least two steps each.
    assert module.env_step >= 4 * 4 * 2
    loop = program("environments.md").partition("class SolveAndVerify")[2].partition("module = ")[0]
    assert len(loop.strip().splitlines()) < 40


def test_an_environment_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definitions = program("environments.md").split("module = MAGRPO(")[0]
    (tmp_path / "my_games.py").write_text(definitions, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["comlrl-lightning"])
    main(
        [
            "fit",
            "--model=MAAC",
            "--model.agents=SharedBase",
            "--model.agents.model=story-model",
            "--model.agents.num_agents=2",
            "--model.environment=my_games.SolveAndVerify",
            "--model.num_turns=6",
            "--model.sampling.max_new_tokens=4",
            '--data.train_dataset=[{"question": "1+1", "answer": "2"}]',
            "--trainer.max_epochs=1",
            "--trainer.accelerator=cpu",
            "--trainer.enable_progress_bar=false",
        ]
    )
    (settings,) = tmp_path.glob("lightning_logs/*/hparams.yaml")
    assert "environment: my_games.SolveAndVerify" in settings.read_text(encoding="utf-8")


@pytest.mark.parametrize("algorithm", ["MAMedian", "CISPO"])
def test_a_file_outside_of_the_package(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definitions = program().split("engine = Parrot()")[0]
    (tmp_path / "my_methods.py").write_text(definitions, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)
    monkeypatch.setattr(sys, "argv", ["comlrl-lightning"])
    main(
        [
            "fit",
            "--task=my_methods",
            f"--model=my_methods.{algorithm}",
            "--model.agents=SharedBase",
            "--model.agents.model=story-model",
            "--model.agents.num_agents=2",
            "--model.agents.engine=my_methods.Parrot",
            "--model.sampling.max_new_tokens=8",
            "--trainer.max_epochs=1",
            "--trainer.accelerator=cpu",
            "--trainer.logger=false",
            "--trainer.enable_progress_bar=false",
        ]
    )
