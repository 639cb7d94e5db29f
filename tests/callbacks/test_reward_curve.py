"""The reward curve and its picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from comlrl_lightning.callbacks import EvalInterval, RewardCurve
from comlrl_lightning.callbacks.reward_curve import moving_average
from comlrl_lightning.data.datamodule import TaskBatch
from tests.callbacks.fakes import FakeModule, data, quiet_trainer


def test_points_and_picture(tmp_path: Path) -> None:
    curve = RewardCurve(tmp_path / "pictures" / "curve.png")
    quiet_trainer(tmp_path, EvalInterval(2), curve).fit(FakeModule(), data(train=3))
    # env_step after items 0, 1, 2: 4, 6, 10; rewards are level + turn / 10; turn 2 for even levels only.
    assert curve.training_points == {1: [(4, 0.1), (6, 1.1), (10, 2.1)], 2: [(4, 0.2), (10, 2.2)]}
    steps, rewards = zip(*curve.evaluation_points[1], strict=True)
    assert steps == (0, 6)
    assert rewards == pytest.approx((1.1, 7.1))
    assert (tmp_path / "pictures" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "pictures").iterdir())) == 1


def test_evaluation_after_the_fit_ends_the_curve(tmp_path: Path) -> None:
    curve, module = RewardCurve(tmp_path / "curve.png"), FakeModule()
    trainer = quiet_trainer(tmp_path, EvalInterval(2), curve)
    trainer.fit(module, data(train=3))
    (tmp_path / "curve.png").unlink()
    for _ in range(2):
        trainer.validate(module, data(), verbose=False)
    assert [step for step, _ in curve.evaluation_points[1]] == [0, 6, 10]
    assert (tmp_path / "curve.png").exists()


def test_trainer_that_never_fitted_draws_nothing(tmp_path: Path) -> None:
    quiet_trainer(tmp_path, RewardCurve(tmp_path / "curve.png")).validate(FakeModule(), data(), verbose=False)
    assert not list(tmp_path.iterdir())


def test_picture_is_drawn_when_training_breaks(tmp_path: Path) -> None:
    class Breaking(FakeModule):
        def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise RuntimeError("broke")

    with pytest.raises(RuntimeError, match="broke"):
        quiet_trainer(tmp_path, RewardCurve(tmp_path / "curve.png")).fit(Breaking(), data(3, 0))
    assert (tmp_path / "curve.png").exists()


def test_moving_average() -> None:
    # Windows (1), (1, 2), (2, 6).
    assert moving_average([1.0, 2.0, 6.0], 2) == [1.0, 1.5, 4.0]


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match=r"RewardCurve\(path='curve.jpg'\) does not name a picture. End it in .png"):
        RewardCurve("curve.jpg")
    wrong: list[Any] = [0, 2.5, "ten"]
    for window in wrong:
        with pytest.raises(ValueError, match=rf"RewardCurve\(window={window!r}\) is not a whole number from 1"):
            RewardCurve(window=window)
