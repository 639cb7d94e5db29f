"""Settings as fields: modules of torch among them, defaults without annotations, own settings in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from comlrl_lightning import CriticFreeModule, PolicyBatch, PolicyLoss, Sampling, SharedBase, Task
from comlrl_lightning.algorithms import MAGRPO
from tests.algorithms.support import ITEMS, fit, make_module, tiny_agents, uneven_reward

UNLOADED = SharedBase("not/loaded", num_agents=2)


class Negative(nn.Module):
    """A reward processor."""

    def forward(self, reward: float) -> float:
        return -reward


class Formatter(nn.Module):
    """A formatter."""

    def forward(self, item: dict[str, Any]) -> str:
        return "mine"


class Reward(nn.Module):
    """A reward."""

    def forward(self, first: list[str], second: list[str]) -> Tensor:
        return torch.ones(len(first))


TASK = Task(reward_func=uneven_reward, num_agents=2, formatters=lambda item: "the task's")


class TestTorchModules:
    def test_checkpoints_ask_for_them(self, tmp_path: Path) -> None:
        module = make_module(MAGRPO, reward_processor=Negative())
        assert module.hparams["reward_processor"] == f"<{__name__}.Negative object>"
        assert "reward_processor" not in module._modules
        fit(module, ITEMS[:1], 1).save_checkpoint(tmp_path / "run.ckpt")
        with pytest.raises(ValueError, match="reward_processor was <"):
            MAGRPO.load_from_checkpoint(tmp_path / "run.ckpt", agents=tiny_agents())

    def test_they_win_over_a_task(self) -> None:
        given = Formatter()
        assert MAGRPO(UNLOADED, formatters=given, task=TASK).formatters is given

    def test_one_is_a_reward(self) -> None:
        module = MAGRPO(UNLOADED, Reward())
        assert module.task_functions.reward([["a"], ["b"]], item={}, prompts=None, turn=1) == [1.0]


class Plain(MAGRPO):
    """Other defaults, without annotations."""

    num_generations = 8
    agent_learning_rate = 1e-2
    loss_metrics: ClassVar[tuple[str, ...]] = ("mine",)


class Below(Plain):
    """One more level."""

    num_generations = 3


def brief(item: dict[str, Any]) -> str:
    return "brief"


class Own(MAGRPO):
    """A setting that is a function."""

    chosen: Any = None
    """Chosen function."""


def test_defaults_need_no_annotation() -> None:
    module, below = Plain(UNLOADED, uneven_reward), Below(UNLOADED, uneven_reward)
    assert (module.num_generations, module.agent_learning_rate) == (8, 1e-2)
    assert (below.num_generations, below.agent_learning_rate) == (3, 1e-2)
    assert module.hparams["num_generations"] == module.shape.num_generations == 8
    assert Plain(UNLOADED, uneven_reward, num_generations=2).num_generations == 2


def test_functions_among_own_settings_come_back(tmp_path: Path) -> None:
    module = make_module(Own, chosen=brief)
    fit(module, ITEMS[:1], 1).save_checkpoint(tmp_path / "run.ckpt")
    loaded = Own.load_from_checkpoint(tmp_path / "run.ckpt", agents=tiny_agents())
    assert loaded.chosen is brief


def test_a_misspelled_keyword_of_loading_is_named(tmp_path: Path) -> None:
    fit(make_module(MAGRPO), ITEMS[:1], 1).save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(TypeError, match=r"MAGRPO\(samplign=...\) has no such setting. Did you mean sampling\?"):
        MAGRPO.load_from_checkpoint(tmp_path / "run.ckpt", agents=tiny_agents(), samplign=Sampling())
    loaded = MAGRPO.load_from_checkpoint(tmp_path / "run.ckpt", map_location="cpu", agents=tiny_agents(), seed=5)
    assert loaded.seed == 5


class WrongShape(CriticFreeModule):
    """A baseline without its last dimension."""

    def baseline(self, returns: Tensor) -> Tensor:
        return returns.mean(-1)


class Nothing(CriticFreeModule):
    """A baseline that is none."""

    def baseline(self, returns: Tensor) -> Tensor:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("algorithm", "found"),
    [(WrongShape, r"\(2,\) for returns of shape \(2, 2\)"), (Nothing, r"None for returns of shape \(2, 2\)")],
)
def test_a_baseline_of_another_shape_is_named(algorithm: type[CriticFreeModule], found: str) -> None:
    with pytest.raises(ValueError, match=rf"baseline\(returns\) gave {found}. Return a tensor of shape \(2, 1\)"):
        fit(make_module(algorithm), ITEMS[:1], 1)


class Summed(MAGRPO):
    """One loss for all completions."""

    def policy_loss(self, batch: PolicyBatch) -> PolicyLoss:
        loss = super().policy_loss(batch)
        return loss._replace(loss=loss.loss.sum())


class Bare(MAGRPO):
    """A tensor alone."""

    def policy_loss(self, batch: PolicyBatch) -> PolicyLoss:
        return super().policy_loss(batch).loss  # type: ignore[return-value]


class Detached(MAGRPO):
    """No gradient."""

    def policy_loss(self, batch: PolicyBatch) -> PolicyLoss:
        loss = super().policy_loss(batch)
        return loss._replace(loss=loss.loss.detach())


@pytest.mark.parametrize(("algorithm", "found"), [(Summed, r"\(\)"), (Bare, "Tensor")])
def test_a_loss_of_another_shape_is_named(algorithm: type[MAGRPO], found: str) -> None:
    with pytest.raises(ValueError, match=rf"policy_loss\(batch\) gave {found}. Return PolicyLoss"):
        fit(make_module(algorithm), ITEMS[:1], 1)


def test_a_loss_without_a_gradient_warns() -> None:
    with pytest.warns(UserWarning, match="losses without a gradient, which teach nothing"):
        fit(make_module(Detached), ITEMS[:1], 1)


def test_a_task_checks_its_parts() -> None:
    with pytest.raises(ValueError, match="num_agents='2' is out of range"):
        Task(reward_func=uneven_reward, num_agents="2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Task\(reward_func=3\) is not callable"):
        Task(reward_func=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Task\(reward_fun=...\) has no such setting. Did you mean reward_func\?"):
        Task(reward_fun=uneven_reward)  # type: ignore[call-arg]
