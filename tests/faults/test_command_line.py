"""Command lines with mistakes: they end with exit code 2 and one sentence that says what to do."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from comlrl_lightning.cli import main
from tests.faults.registry import Refused, faults

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "quickstart.yaml")
TASK = "comlrl_lightning.tasks.length_ratio"


class Exit2(SystemExit):
    """The process would end with code 2 and the text of this exception on its error stream."""


def command(*arguments: str) -> object:
    """A command line, as a function of a folder."""

    def attempt(folder: Path) -> None:
        with redirect_stderr(StringIO()) as said, pytest.raises(SystemExit) as caught:
            main(["fit", "--config", CONFIG, f"--trainer.default_root_dir={folder}", *arguments])
        assert caught.value.code == 2
        raise Exit2(said.getvalue())

    return attempt


def case(tried: str, outcome: str, *arguments: str) -> Refused:
    """A mistake in the arguments."""
    attempt = command(*arguments)
    assert callable(attempt)
    return Refused("command line", tried, outcome, attempt, Exit2)


CASES = (
    case("a misspelled algorithm", "model: MAGRP is neither a known name nor an import path. Did you mean MAGRPO?",
         "--model", "MAGRP"),
    case("a misspelled setting", "model: num_generation is not a setting. Did you mean num_generations?",
         "--model.num_generation", "3"),
    case("a text for a number", "model.agents.num_agents: the value is not of type int. Correct it.",
         "--model.agents.num_agents", "two"),
    case("a reward that its module does not have",
         f"model.reward_func: module '{TASK}' has no attribute 'rewrd' and so the import path leads nowhere.",
         "--model.reward_func", f"{TASK}.rewrd"),
    case("data from a module that is not there", "train_dataset='nosuch.items' is not the import path of a function",
         "--data.train_dataset", "nosuch.items"),
    case("a flag of the trainer that does not know about agents",
         "Leave it out and use max_grad_norm, which clips each agent by itself.", "--trainer.gradient_clip_val", "1"),
    case("a value that the algorithm refuses", "MAGRPO(num_generations=1) compares a completion with itself",
         "--model.num_generations", "1"),
    case("a misspelled callback", "is neither a known name nor an import path. Did you mean EvalInterval?",
         "--trainer.callbacks+=EvalIntervall"),
    case("a file that is not there", "nosuch.yaml", "--config", "nosuch.yaml"),
)  # fmt: skip


@faults(*CASES)
def test_mistakes(fault: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["comlrl-lightning"])
    fault.check(tmp_path)
