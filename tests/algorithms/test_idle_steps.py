"""Optimizer steps without anything to learn: they count, move nothing, and many of them are a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

from comlrl_lightning.algorithms import MAGRPO, MARLHF, CooperativeModule, PreferenceModule
from comlrl_lightning.learning.gradients import IdleSteps
from tests.algorithms.preferences import MAKERS, begun, same, trained
from tests.algorithms.support import fit, make_module, tiny_agents, uneven_reward

MANY = "optimizer steps had nothing to learn"


def constant(*completions: list[str]) -> list[float]:
    return [0.35] * len(completions[0])


def once(*completions: list[str], batch_items: list[dict[str, Any]]) -> list[float]:
    """A reward that varies for items that say so."""
    return uneven_reward(*completions) if batch_items[0].get("varies") else constant(*completions)


def halving(optimizer: Optimizer) -> LRScheduler:
    return StepLR(optimizer, step_size=1, gamma=0.5)


def endless(module: CooperativeModule, **settings: Any) -> Any:
    """A fit that only `max_steps` is to end; after 20 epochs it is given up."""
    return fit(module, [{"prompt": "hi"}], 1, max_epochs=20, **settings)


class TestTheyCount:
    def test_max_steps_and_the_schedule(self) -> None:
        module = make_module(MAGRPO, reward_func=constant, lr_scheduler=halving, agent_learning_rate=1.0)
        trainer = endless(module, max_steps=3)
        assert (trainer.global_step, trainer.fit_loop.epoch_progress.current.completed) == (3, 3)
        assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [1 / 8, 1 / 8]
        assert module.update_step == 0

    def test_every_mini_batch_of_every_pass(self) -> None:
        # Four nodes in mini-batches of three, twice: 2 x 2.
        module = make_module(MAGRPO, reward_func=constant, train_batch_size=3, num_inner_epochs=2, clip_epsilon=0.2)
        assert fit(module, [{"prompt": "hi"}] * 4, 4).global_step == 4

    def test_checkpoints_by_steps(self, tmp_path: Path) -> None:
        saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        module = make_module(MAGRPO, tiny_agents(dtype=torch.float32), reward_func=constant)
        endless(module, max_steps=4, callbacks=[saver], enable_checkpointing=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step=2.ckpt", "step=4.ckpt"]

    def test_updates_that_are_left_out(self) -> None:
        # A reward of 3e38 times a log-probability is infinite in single precision.
        module = make_module(
            MAGRPO,
            tiny_agents(dtype=torch.float32),
            reward_func=lambda first, second: [3e38, 0.0],
            advantage_normalization=False,
            on_nonfinite="skip",
        )
        module.configure_model()
        start = trained(module)
        with pytest.warns(UserWarning, match="An update was left out"):
            trainer = endless(module, max_steps=3)
        assert (trainer.global_step, module.update_step) == (3, 0)
        assert same(trained(module), start)

    @pytest.mark.filterwarnings("ignore:Round . has no pair to learn from", "ignore:Trainer.* ends inside a round")
    @pytest.mark.parametrize("make", MAKERS)
    def test_rounds_without_pairs(self, make: Callable[..., PreferenceModule]) -> None:
        # Each training step of an epoch that learns or fits; those that collect take none.
        module = make(reward_func=constant)
        start = begun(module)
        with pytest.warns(UserWarning, match="Round 1 has no pair"):
            trainer = endless(module, max_steps=3)
        assert (trainer.global_step, module.update_step) == (3, 0)
        epochs = 3 + (2 if isinstance(module, MARLHF) else 3)  # two steps per round, or one
        assert trainer.fit_loop.epoch_progress.current.ready == epochs
        assert same(trained(module), start)


def test_momentum_moves_no_weight() -> None:
    # AdamW has momentum and weight decay after the first item; the second has equal rewards.
    items: list[dict[str, Any]] = [{"prompt": "hi", "varies": True}, {"prompt": "there"}]
    short, long = (make_module(MAGRPO, reward_func=once, agent_learning_rate=0.1) for _ in range(2))
    assert fit(short, items[:1], 1).global_step == 1
    assert fit(long, items, 1).global_step == 2
    assert (short.update_step, long.update_step) == (1, 1)
    assert same(trained(long), trained(short))


class TestTheyAreTold:
    def test_after_ten_and_not_before(self) -> None:
        with pytest.warns(UserWarning, match=f"The last 10 {MANY}.*turn_1/reward_mean.*sampling.temperature") as caught:
            endless(make_module(MAGRPO, reward_func=constant), max_steps=12)
        assert sum(MANY in str(warning.message) for warning in caught) == 1
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=f".*{MANY}")
            endless(make_module(MAGRPO, reward_func=constant), max_steps=9)

    def test_every_other_fit_begins_anew(self) -> None:
        module = make_module(MAGRPO, reward_func=constant)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=f".*{MANY}")
            endless(module, max_steps=9)
            endless(module, max_steps=9)

    def test_tenfold_and_only_in_a_row(self) -> None:
        steps = IdleSteps()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(109):
                steps.count(is_idle=number != 5)
        # Five, one that learns, and 103: told at ten and at a hundred in a row.
        assert [str(warning.message).split()[2] for warning in caught] == ["10", "100"]
