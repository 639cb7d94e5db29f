"""What one fit or evaluation must not leave to the next one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint

from comlrl_lightning.algorithms import MAGRPO
from comlrl_lightning.callbacks import BatchCheckpoint, EvalInterval
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.evaluation import evaluate
from comlrl_lightning.rewards import WeightedRewards
from tests.algorithms.support import ITEMS, Collected, fit, make_module, make_trainer, tiny_agents, weights


class Fragile:
    """A reward, the length of the prompt, that fails at one item until it is repaired."""

    def __init__(self) -> None:
        self.broken = True

    def __call__(self, first: list[str], second: list[str], *, batch_items: list[dict[str, Any]]) -> list[float]:
        if self.broken and batch_items[0]["prompt"] == "there":
            raise RuntimeError("broken")
        return [float(len(batch_items[0]["prompt"]))] * len(first)


def test_a_failed_evaluation_leaves_nothing_to_the_next() -> None:
    reward = Fragile()
    module = make_module(MAGRPO, reward_func=WeightedRewards({"length": lengths, "fragile": reward}))
    data = TaskDataModule(ITEMS, eval_dataset=ITEMS)
    with pytest.raises(RuntimeError, match="broken"):
        evaluate(module, data)
    reward.broken = False
    metrics = evaluate(module, data)
    # The prompts have 2, 5, 7 and 1 characters; the sum of both parts is twice the mean.
    assert metrics["eval/turn_1/reward_mean"] == pytest.approx(2 * 15 / 4)
    assert metrics["eval/reward/length"] == pytest.approx(15 / 4)


def lengths(first: list[str], second: list[str], *, batch_items: list[dict[str, Any]]) -> list[float]:
    return [float(len(batch_items[0]["prompt"]))] * len(first)


class StopAtOnce(Callback):
    """Ends the fit after its first step."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        trainer.should_stop = True


def test_a_second_fit_does_not_train_on_leftovers() -> None:
    module = make_module(MAGRPO, rollout_buffer_size=100)
    fit(module, ITEMS, 1, [StopAtOnce()])
    assert len(module.buffer) == 1
    trained: list[int] = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            trained.append(len(module.buffer))

    fit(module, ITEMS[:1], 1, [Watch()])
    assert trained == [0]


def test_a_fit_after_a_refused_resume_starts_without_the_checkpoint_s_buffer(tmp_path: Path) -> None:
    trainer = make_trainer([StopAtOnce(), BatchCheckpoint(dirpath=tmp_path)], enable_checkpointing=True)
    trainer.fit(make_module(MAGRPO, rollout_buffer_size=100), TaskDataModule(ITEMS))
    (half,) = tmp_path.glob("*.ckpt")
    module = make_module(MAGRPO, rollout_buffer_size=100)
    with pytest.raises(ValueError, match="batch_size"):
        make_trainer().fit(module, TaskDataModule(ITEMS, batch_size=2), ckpt_path=half)
    held: list[int] = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            held.append(len(module.buffer))

    fit(module, ITEMS[:2], 1, [Watch()])
    assert held == [0, 1]


def test_a_trained_module_can_be_sent_though_its_trainer_cannot() -> None:
    module = make_module(MAGRPO)
    fit(module, ITEMS[:1], 1, [LambdaCallback(on_fit_end=lambda *_: None)])
    copy = pickle.loads(pickle.dumps(module))
    assert copy.fit_trainer is None
    assert module.fit_trainer is not None


@pytest.mark.parametrize("interval", [None, 2])
def test_names_of_checkpoints_count_optimizer_steps(tmp_path: Path, interval: int | None) -> None:
    # Four steps; evaluations (at env_step 0 and 4, or at 8 by Lightning's schedule) must not lend their x-axis.
    callbacks: list[Callback] = [] if interval is None else [EvalInterval(interval)]
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    after = ModelCheckpoint(
        tmp_path / "evaluated",
        filename="{step}",
        monitor="eval/turn_1/reward_mean",
        save_top_k=-1,
        save_on_train_epoch_end=False,
    )
    trainer = make_trainer([*callbacks, keep, after], enable_checkpointing=True, num_sanity_val_steps=0)
    trainer.fit(make_module(MAGRPO), TaskDataModule(ITEMS, eval_dataset=ITEMS[:1]))
    assert sorted(path.stem for path in tmp_path.glob("*.ckpt")) == [f"step={step}" for step in (1, 2, 3, 4)]
    expected = ["step=4"] if interval is None else ["step=2"]
    assert sorted(path.stem for path in (tmp_path / "evaluated").glob("*.ckpt")) == expected


@pytest.mark.parametrize("interval", [0, 2])
@pytest.mark.parametrize("interval_first", [True, False])
def test_monitors_of_training_look_at_the_end_of_each_epoch(
    tmp_path: Path, interval: int, interval_first: bool
) -> None:
    # The first evaluation, before the first batch, has no metric of training.
    keep = ModelCheckpoint(tmp_path, filename="{step}", monitor="turn_1/reward_mean", save_top_k=-1)
    stop = EarlyStopping("turn_1/reward_mean", mode="max", min_delta=100.0, patience=2)
    callbacks: list[Callback] = [EvalInterval(interval), keep, stop]
    trainer = make_trainer(callbacks if interval_first else callbacks[::-1], enable_checkpointing=True, max_epochs=9)
    trainer.fit(make_module(MAGRPO), TaskDataModule(ITEMS, eval_dataset=ITEMS[:1]))
    # Four steps in each of three epochs: the first sets the mark, two do not surpass it.
    assert sorted(int(path.stem.removeprefix("step=")) for path in tmp_path.glob("*.ckpt")) == [4, 8, 12]


@pytest.mark.parametrize("failing", [2, 4])
def test_a_checkpoint_of_a_failed_update_does_not_count_the_batch_twice(
    tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(resume: str | None = None, fail: int | None = None) -> tuple[Any, Any]:
        module = make_module(MAGRPO, agent_learning_rate=0.01, rollout_buffer_size=2)
        collected = Collected()
        update, count = module._update, [0]

        def counted() -> None:
            count[0] += 1
            if count[0] * 2 == fail:
                raise RuntimeError("no memory")
            update()

        monkeypatch.setattr(module, "_update", counted)
        trainer = make_trainer([collected, OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
        if fail is None:
            trainer.fit(module, TaskDataModule(ITEMS), ckpt_path=resume)
        else:
            with pytest.raises(RuntimeError, match="no memory"):
                trainer.fit(module, TaskDataModule(ITEMS), ckpt_path=resume)
        return module, collected

    whole, _ = run()
    run(fail=failing)
    again, collected = run(resume=str(tmp_path / "on_exception.ckpt"))
    assert again.env_step == whole.env_step == 8
    assert [rollouts.indices for rollouts in collected.rollouts] == [(index,) for index in range(failing - 1, 4)]
    for agent in (0, 1):
        now = weights(again, agent)
        assert all(torch.equal(value, now[name]) for name, value in weights(whole, agent).items())


class TestHalfPrecision:
    @pytest.mark.parametrize(
        ("dtype", "precision"), [(torch.bfloat16, "32-true"), (torch.float16, "32-true"), (torch.float32, "bf16-true")]
    )
    def test_full_fine_tuning_of_half_precision_weights_is_refused(self, dtype: torch.dtype, precision: str) -> None:
        module = make_module(MAGRPO, tiny_agents("full", dtype=dtype))
        with pytest.raises(ValueError, match=r'float16, in which .*dtype="float32" .*precision="bf16-mixed"'):
            fit(module, precision=precision)

    def test_mixed_precision_is_the_way(self) -> None:
        module = make_module(MAGRPO, tiny_agents("full", dtype=torch.float32))
        module.configure_model()
        start = weights(module, 0)
        fit(module, precision="bf16-mixed")
        assert any(not torch.equal(value, start[name]) for name, value in weights(module, 0).items())


def test_agents_can_be_saved_before_any_fit(tmp_path: Path) -> None:
    make_module(MAGRPO).save_agents(tmp_path)
    assert Path(tmp_path, "agent_1", "adapter_config.json").is_file()
