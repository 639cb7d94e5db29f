"""The pairs of each round as a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning import LightningModule

from comlrl_lightning.callbacks import PreferenceRounds
from comlrl_lightning.data.datamodule import TaskBatch
from comlrl_lightning.preferences.pairs import PreferencePair, Round
from tests.callbacks.fakes import FakeModule, completion, data, quiet_trainer


def pair(item: int) -> PreferencePair:
    winner = (completion(0, "été"), completion(1, "good"))
    loser = (completion(0, "bad"), completion(1, "worse"))
    return PreferencePair(item, winner, loser, 1.5, -0.5, "comparator", "policy")


class Learner(FakeModule):
    """Collects in the first batch of every second epoch; round r has r pairs, whose items are 0, 1, ...

    Args:
        mean: Mean reward of the candidates.
    """

    def __init__(self, mean: float = 0.25) -> None:
        super().__init__()
        self.last_round: Round | None = None
        self.mean = mean

    def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        number, learns = divmod(self.current_epoch, 2)
        if not learns and batch_idx == 1:
            self.last_round = Round(number, tuple(map(pair, range(number))), self.mean)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fit(root: Path, callback: PreferenceRounds, module: LightningModule | None = None, max_epochs: int = 4) -> None:
    quiet_trainer(root, callback, max_epochs=max_epochs).fit(module or Learner(), data(2, 0))


def test_one_file_per_round(tmp_path: Path) -> None:
    fit(tmp_path, PreferenceRounds(tmp_path / "own"))
    assert names(tmp_path / "own") == ["round_0001.json", "round_0002.json"]
    first = json.loads((tmp_path / "own" / "round_0001.json").read_text())
    assert first == {"iteration": 1, "num_pairs": 0, "candidate_reward_mean": 0.25, "pairs": []}
    text = (tmp_path / "own" / "round_0002.json").read_text(encoding="utf-8")
    assert "été" in text
    second = json.loads(text)
    assert (second["iteration"], second["num_pairs"], len(second["pairs"])) == (2, 1, 1)
    assert second["pairs"][0] == {
        "item_index": 0,
        "prompts": ["prompt 0", "prompt 1"],
        "prompt_ids": [[1, 2], [1, 2]],
        "winner_completions": ["été", "good"],
        "winner_token_ids": [[5], [5]],
        "winner_reward": 1.5,
        "winner_source": "comparator",
        "loser_completions": ["bad", "worse"],
        "loser_token_ids": [[5], [5]],
        "loser_reward": -0.5,
        "loser_source": "policy",
    }


def test_each_file_is_written_once_after_the_collecting_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr("comlrl_lightning.files.Place.write_text", lambda place, text: written.append(place.name))
    fit(tmp_path, PreferenceRounds(), max_epochs=1)
    assert written == ["round_0001.json"]
    fit(tmp_path, PreferenceRounds())
    assert written == ["round_0001.json", "round_0001.json", "round_0002.json"]


def test_every_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for version in range(2):
        fit(tmp_path, PreferenceRounds())
        folder = tmp_path / "lightning_logs" / f"version_{version}" / "rounds"
        assert names(folder) == ["round_0001.json", "round_0002.json"]


def test_a_new_run_removes_the_rounds_of_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "rounds"
    folder.mkdir()
    for name in ("round_0001.json", "round_0007.json", "round_7.json", "notes.json"):
        (folder / name).write_text("old")
    with pytest.warns(UserWarning, match=r"PreferenceRounds: .*round_0001.json, .*round_0007.json of another run"):
        fit(tmp_path, PreferenceRounds(folder))
    assert names(folder) == ["notes.json", "round_0001.json", "round_0002.json", "round_7.json"]
    assert (folder / "round_0001.json").read_text() != "old"


@pytest.mark.filterwarnings("ignore:.* of another run:UserWarning")
def test_a_second_run_with_the_same_callback_writes_its_own(tmp_path: Path) -> None:
    callback = PreferenceRounds(tmp_path / "rounds")
    for mean in (0.25, 0.75):
        fit(tmp_path, callback, Learner(mean), max_epochs=1)
        (path,) = (tmp_path / "rounds").iterdir()
        assert json.loads(path.read_text())["candidate_reward_mean"] == mean


def test_a_module_that_learns_on_keeps_its_rounds(tmp_path: Path) -> None:
    # Three rounds; then round 1 anew. Round 3 is written again as it was, nobody writes round 2 again.
    module, callback = Learner(), PreferenceRounds(tmp_path / "rounds")
    fit(tmp_path, callback, module, max_epochs=6)
    module.mean = 0.75
    fit(tmp_path, callback, module, max_epochs=2)
    means = [json.loads(path.read_text())["candidate_reward_mean"] for path in sorted(tmp_path.glob("rounds/*"))]
    assert means == [0.75, 0.25, 0.25]


def test_a_resumed_run_keeps_the_rounds_before_its_checkpoint(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, PreferenceRounds(tmp_path / "rounds"), max_epochs=2)
    trainer.fit(Learner(), data(2, 0))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    resumed = quiet_trainer(tmp_path, PreferenceRounds(tmp_path / "rounds"), max_epochs=4)
    resumed.fit(Learner(), data(2, 0), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    assert names(tmp_path / "rounds") == ["round_0001.json", "round_0002.json"]


def test_a_mean_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    fit(tmp_path, PreferenceRounds(tmp_path / "rounds"), Learner(float("nan")), max_epochs=1)
    assert json.loads((tmp_path / "rounds" / "round_0001.json").read_text())["candidate_reward_mean"] is None


def test_a_kill_while_writing_leaves_no_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tmp_path, PreferenceRounds(tmp_path / "rounds"))
    assert not (tmp_path / "rounds" / "round_0001.json").exists()


def test_a_rehearsal_writes_and_removes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "rounds"
    folder.mkdir()
    (folder / "round_0001.json").write_text("old")

    class Quick(Learner):
        def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
            super().training_step(batch, 1)

    trainer = quiet_trainer(tmp_path, PreferenceRounds(folder), fast_dev_run=True)
    trainer.fit(Quick(), data(2, 0))
    assert (folder / "round_0001.json").read_text() == "old"


def test_other_modules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^PreferenceRounds needs a module that learns .*, got FakeModule\. Use it"):
        fit(tmp_path, PreferenceRounds(), FakeModule())
