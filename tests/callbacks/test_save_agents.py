"""The agents as folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from comlrl_lightning.callbacks import EvalInterval, SaveAgents
from tests.callbacks.fakes import FakeModule, data, quiet_trainer

KEY = "eval/turn_1/reward_mean"


def test_saves_at_the_end(tmp_path: Path) -> None:
    module = FakeModule()
    quiet_trainer(tmp_path, SaveAgents(tmp_path / "agents")).fit(module, data(2, 0))
    for agent in range(2):
        assert (tmp_path / "agents" / f"agent_{agent}" / "weight.txt").read_text() == str(module.layer.weight.item())


def test_saves_every_n_batches(tmp_path: Path) -> None:
    module = FakeModule()
    quiet_trainer(tmp_path, SaveAgents(tmp_path, every_n_batches=2)).fit(module, data(5, 0))
    assert module.saved == ["batch-000002", "batch-000004", tmp_path.name]


@pytest.mark.parametrize(("mode", "num_saves"), [("max", 3), ("min", 1)])
def test_best_agents_so_far(tmp_path: Path, mode: str, num_saves: int) -> None:
    # The fake's evaluation reward rises with env_step: three evaluations, each the best, or the first is the lowest.
    module = FakeModule()
    save = SaveAgents(tmp_path, monitor=KEY, mode=mode)  # type: ignore[arg-type]
    quiet_trainer(tmp_path, EvalInterval(2), save).fit(module, data(6))
    assert module.saved == [".best.part"] * num_saves + [tmp_path.name]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent_0", "agent_1", "best"]


def test_every_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for version in range(2):
        quiet_trainer(tmp_path, SaveAgents()).fit(FakeModule(), data(1, 0))
        folder = tmp_path / "lightning_logs" / f"version_{version}" / "agents"
        assert sorted(path.name for path in folder.iterdir()) == ["agent_0", "agent_1"]


@pytest.mark.filterwarnings("ignore:.* of another run:UserWarning")
def test_new_run_forgets_the_best(tmp_path: Path) -> None:
    save = SaveAgents(tmp_path, monitor=KEY, mode="min")
    for _ in range(2):
        module = FakeModule()
        quiet_trainer(tmp_path, EvalInterval(2), save).fit(module, data(2))
        assert module.saved[0] == ".best.part"


def test_resumed_run_remembers_the_best() -> None:
    save = SaveAgents("agents", monitor=KEY)
    save.load_state_dict({"best": 3.0})
    assert save.state_dict() == {"best": 3.0}


def test_unknown_monitor_is_an_error(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, EvalInterval(2), SaveAgents(tmp_path, monitor="eval/rewrd"))
    with pytest.raises(ValueError, match=r"monitor='eval/rewrd'\) is no metric.*eval/turn_1/reward_mean"):
        trainer.fit(FakeModule(), data(2))


def test_arguments_are_checked() -> None:
    for value in (0, "a"):
        with pytest.raises(ValueError, match=rf"SaveAgents\(every_n_batches={value!r}\) is not a whole number from 1"):
            SaveAgents("agents", every_n_batches=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mode='best'\) is neither 'max' nor 'min'"):
        SaveAgents("agents", mode="best")  # type: ignore[arg-type]
