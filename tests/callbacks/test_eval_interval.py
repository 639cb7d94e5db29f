"""When `EvalInterval` evaluates, and that training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from comlrl_lightning.callbacks import EvalInterval, SaveAgents
from tests.callbacks.fakes import FakeModule, Trace, data, quiet_trainer


def events(root: Path, interval: int, **settings: int) -> list[str]:
    trace, limits = Trace(), {"max_epochs": settings.pop("max_epochs", 1)}
    quiet_trainer(root, EvalInterval(interval), trace, **limits).fit(FakeModule(), data(**settings))
    return trace.events


def test_schedule_counts_items_in_each_epoch(tmp_path: Path) -> None:
    # Items 0 and 3 are multiples of 3; index 0 comes again in the second epoch.
    epoch = ["V", "T0", "T1", "T2", "V", "T3", "T4"]
    assert events(tmp_path, 3, train=5, max_epochs=2) == epoch + epoch


def test_schedule_with_several_items_per_batch(tmp_path: Path) -> None:
    # Batches [0, 3), [3, 6), [6, 8) hold the multiples 0, 4 and none of 4.
    assert events(tmp_path, 4, train=8, batch_size=3) == ["V", "T0", "T1", "T2", "V", "T3", "T4", "T5", "T6", "T7"]


def test_zero_never_evaluates(tmp_path: Path) -> None:
    assert events(tmp_path, 0, train=2) == ["T0", "T1"]


def test_without_evaluation_split_nothing_happens(tmp_path: Path) -> None:
    assert events(tmp_path, 1, train=2, evaluation=0) == ["T0", "T1"]


@pytest.mark.parametrize("interval", [-1, 2.5, True])
def test_refuses_other_intervals(interval: int) -> None:
    with pytest.raises(ValueError, match=r"EvalInterval\(interval=.*is not a whole number from 0"):
        EvalInterval(interval)


def final_weight(root: Path, interval: int) -> float:
    seed_everything(3)
    module = FakeModule()
    quiet_trainer(root, EvalInterval(interval)).fit(module, data())
    return module.layer.weight.item()


def test_evaluation_changes_no_random_number_of_training(tmp_path: Path) -> None:
    # The module draws a random number per training step and three per validation step.
    assert final_weight(tmp_path, 1) == final_weight(tmp_path, 0)


def test_number_of_evaluated_items_is_read_anew(tmp_path: Path) -> None:
    module, source = FakeModule(), data(train=2, evaluation=3, eval_num_samples=1)
    seen = []

    class Grow(Trace):
        def on_validation_end(self, *args: object) -> None:
            seen.append(len(module.evaluation_rollouts().items))
            source.eval_num_samples = 3

    quiet_trainer(tmp_path, EvalInterval(1), Grow()).fit(module, source)
    assert seen == [1, 3]


def run(root: Path, trace: Trace, **settings: object) -> FakeModule:
    module = FakeModule()
    best = ModelCheckpoint(root, "{step}-{eval/turn_1/reward_mean}", monitor="eval/turn_1/reward_mean", save_top_k=-1)
    best.CHECKPOINT_EQUALS_CHAR = "_"
    trainer = quiet_trainer(root, trace, EvalInterval(2), best, max_epochs=2, enable_checkpointing=True)
    trainer.fit(module, data(train=5), **settings)  # type: ignore[arg-type]
    return module


def test_resume_from_checkpoints_saved_during_evaluations(tmp_path: Path) -> None:
    seed_everything(1)
    whole = Trace()
    reference = run(tmp_path / "whole", whole)
    checkpoints = sorted((tmp_path / "whole").rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    # Evaluations before items 0, 2, 4 of two epochs; ModelCheckpoint saves nothing before the first step.
    assert whole.events == ["V", "T0", "T1", "V", "T2", "T3", "V", "T4"] * 2
    starts = [position for position, event in enumerate(whole.events) if event == "V"][1:]
    for start, checkpoint in zip(starts, checkpoints, strict=True):
        seed_everything(99)
        trace = Trace()
        resumed = run(tmp_path / "resumed", trace, ckpt_path=checkpoint)
        # The evaluation that saved the checkpoint is done; the rest comes as in the unbroken run.
        assert trace.events == whole.events[start + 1 :]
        torch.testing.assert_close(resumed.layer.weight, reference.layer.weight, rtol=0, atol=0)


def test_second_fit_evaluates_again(tmp_path: Path) -> None:
    interval = EvalInterval(4)
    for _ in range(2):
        trace = Trace()
        quiet_trainer(tmp_path, interval, trace).fit(FakeModule(), data(train=1))
        assert trace.events == ["V", "T0"]


def test_default_checkpoint_holds_the_end_of_training(tmp_path: Path) -> None:
    module = FakeModule()
    quiet_trainer(tmp_path, EvalInterval(2), enable_checkpointing=True).fit(module, data(train=3))
    (path,) = tmp_path.rglob("*.ckpt")
    # Items 0, 1, 2 bring 4, 2 and 4 scored joint completions.
    assert torch.load(path, weights_only=False)["fake"]["env_step"] == module.env_step == 10


def test_checkpoint_that_was_told_otherwise_waits_for_evaluations(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_on_train_epoch_end=False)
    quiet_trainer(tmp_path, EvalInterval(9), checkpoint, enable_checkpointing=True).fit(FakeModule(), data(train=3))
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("stops_first", [True, False])
def test_early_stopping_looks_at_each_evaluation_wherever_it_stands(tmp_path: Path, stops_first: bool) -> None:
    stop = EarlyStopping("eval/turn_1/reward_mean", patience=1, mode="min")
    trace, interval = Trace(), EvalInterval(2)
    callbacks = [stop, interval, trace] if stops_first else [interval, trace, stop]
    quiet_trainer(tmp_path, *callbacks, max_epochs=4).fit(FakeModule(), data(train=5))
    # The reward rises with env_step: the second evaluation is the first that is not lower.
    assert stop.wait_count == 1
    assert trace.events.count("V") == 2


def test_batches_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got batches like 1.*Give it a TaskDataModule"):
        quiet_trainer(tmp_path, EvalInterval(1)).fit(FakeModule(), [1, 2])


def end_events(root: Path, interval: int, *callbacks: Callback, **settings: int) -> list[str]:
    trace, limits = Trace(), {"max_epochs": settings.pop("max_epochs", 1), "max_steps": settings.pop("max_steps", -1)}
    trainer = quiet_trainer(root, trace, EvalInterval(interval, at_end=True), *callbacks, **limits)
    trainer.fit(FakeModule(), data(**settings))
    return trace.events


def test_an_evaluation_at_the_end_of_a_fit(tmp_path: Path) -> None:
    epoch = ["V", "T0", "T1", "T2", "V", "T3", "T4"]
    assert end_events(tmp_path, 3, train=5, max_epochs=2) == [*epoch, *epoch, "V"]
    assert end_events(tmp_path, 0, train=2) == ["T0", "T1", "V"]
    assert end_events(tmp_path, 0, train=2, evaluation=0) == ["T0", "T1"]


def test_the_end_of_a_fit_is_where_it_stops(tmp_path: Path) -> None:
    class StopAt3(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
            trainer.should_stop = trainer.global_step == 3

    assert end_events(tmp_path, 0, train=5, max_steps=2) == ["T0", "T1", "V"]
    assert end_events(tmp_path, 4, StopAt3(), train=5) == ["V", "T0", "T1", "T2", "V"]


def test_no_evaluation_after_an_exception(tmp_path: Path) -> None:
    class Break(Trace):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            raise RuntimeError("broken")

    trace = Break()
    with pytest.raises(RuntimeError, match="broken"):
        quiet_trainer(tmp_path, trace, EvalInterval(0, at_end=True)).fit(FakeModule(), data())
    assert trace.events == ["T0"]


def test_monitors_see_the_final_agents(tmp_path: Path) -> None:
    module, save = FakeModule(), SaveAgents(tmp_path / "agents", monitor="eval/turn_1/reward_mean")
    best = ModelCheckpoint(tmp_path / "best", monitor="eval/turn_1/reward_mean", mode="max")
    stop = EarlyStopping("eval/turn_1/reward_mean", mode="max", patience=9)
    callbacks = (EvalInterval(2, at_end=True), save, best, stop)
    quiet_trainer(tmp_path, *callbacks, max_epochs=2, enable_checkpointing=True).fit(module, data(train=3))
    # The reward rises with env_step, so that the last evaluation is the best: 1 (the mean level) + 0.1 + env_step.
    assert module.env_step == 20
    assert best.best_model_score == stop.best_score == pytest.approx(21.1)
    assert torch.load(best.best_model_path, weights_only=False)["fake"]["env_step"] == 20
    assert (tmp_path / "agents" / "best" / "agent_0" / "weight.txt").read_text() == str(module.layer.weight.item())


def end_run(root: Path, trace: Trace, max_epochs: int, **settings: object) -> FakeModule:
    module, best = FakeModule(), ModelCheckpoint(root, monitor="eval/turn_1/reward_mean", mode="max")
    callbacks = (trace, EvalInterval(2, at_end=True), best)
    trainer = quiet_trainer(root, *callbacks, max_epochs=max_epochs, enable_checkpointing=True)
    trainer.fit(module, data(train=3), **settings)  # type: ignore[arg-type]
    return module


def test_resume_from_the_evaluation_at_the_end(tmp_path: Path) -> None:
    seed_everything(1)
    whole, first, second = Trace(), Trace(), Trace()
    reference = end_run(tmp_path / "whole", whole, 2)
    seed_everything(1)
    end_run(tmp_path / "first", first, 1)
    (path,) = (tmp_path / "first").rglob("*.ckpt")
    seed_everything(99)
    resumed = end_run(tmp_path / "second", second, 2, ckpt_path=path)
    epoch = ["V", "T0", "T1", "V", "T2"]
    assert whole.events == [*epoch, *epoch, "V"]
    # What the first run ended with is what the second epoch begins with.
    assert [*first.events, *second.events] == whole.events
    torch.testing.assert_close(resumed.layer.weight, reference.layer.weight, rtol=0, atol=0)


def test_refuses_another_end() -> None:
    with pytest.raises(ValueError, match=r"EvalInterval\(at_end='last'\) is neither True nor False"):
        EvalInterval(4, at_end="last")  # type: ignore[arg-type]
