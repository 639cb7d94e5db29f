"""Workers of the reward function as settings of the algorithms."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from comlrl_lightning.algorithms import CooperativeModule
from comlrl_lightning.algorithms.actor_critic import IAC
from comlrl_lightning.algorithms.critic_free import MAGRPO
from comlrl_lightning.algorithms.marlhf import MARLHF
from comlrl_lightning.data.datamodule import TaskDataModule
from comlrl_lightning.rewards import WeightedRewards
from tests.algorithms.support import fit, make_module, make_trainer, uneven_reward, weights
from tests.rollouts.scoring import limit_only
from tests.waiting import HANG_SECONDS

THREADS: dict[str, Any] = {"reward_workers": 3, "reward_timeout_seconds": HANG_SECONDS}
PROCESSES: dict[str, Any] = {"reward_workers": 2, "reward_backend": "process"}
ITEMS = [{"prompt": "hi"}, {"prompt": "there"}, {"prompt": "you all"}]


def hangs_for_there(first: list[str], second: list[str], batch_items: Sequence[Mapping[str, Any]]) -> list[float]:
    """The numbers of `uneven_reward`, too late for one of the items."""
    if batch_items[0]["prompt"] == "there":
        time.sleep(HANG_SECONDS)
    return uneven_reward(first, second)


def trained(algorithm: type[CooperativeModule], **settings: Any) -> CooperativeModule:
    module = make_module(algorithm, num_turns=2, **settings)
    fit(module, ITEMS, batch_size=3)
    return module


@pytest.mark.parametrize("algorithm", [MAGRPO, IAC])
@pytest.mark.parametrize("workers", [THREADS, pytest.param(PROCESSES, marks=pytest.mark.slow)])
def test_the_same_weights(algorithm: type[CooperativeModule], workers: dict[str, Any]) -> None:
    plain, concurrent = trained(algorithm), trained(algorithm, **workers)
    assert all(concurrent.hparams[name] == value for name, value in workers.items())
    for agent in range(2):
        for name, value in weights(plain, agent).items():
            assert torch.equal(value, weights(concurrent, agent)[name])


@pytest.fixture
def only_there_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_only(monkeypatch, lambda call: call.item["prompt"] == "there")


@pytest.mark.usefixtures("only_there_is_late")
def test_timeouts_are_logged() -> None:
    settings: dict[str, Any] = {"reward_workers": 3, "reward_timeout_seconds": 0.4, "reward_timeout_value": -7.0}
    module = make_module(MAGRPO, reward_func=hangs_for_there, **settings)
    trainer = fit(module, ITEMS, batch_size=3)
    assert trainer.callback_metrics["reward_timeouts"] == 1.0
    assert module.rollouts is not None
    assert module.rollouts.nodes[1].rewards == (-7.0, -7.0)
    # Three batches of one item each.
    data = TaskDataModule(ITEMS, eval_dataset=ITEMS)
    (metrics,) = make_trainer().validate(module, data, verbose=False)
    assert metrics["eval/reward_timeouts"] == pytest.approx(1 / 3)


@pytest.mark.usefixtures("only_there_is_late")
def test_without_a_value_a_timeout_ends_the_fit() -> None:
    module = make_module(MAGRPO, reward_func=hangs_for_there, reward_timeout_seconds=0.3)
    with pytest.raises(
        TimeoutError, match=r"reward_func=tests.faults.test_reward_workers.hangs_for_there .*there.* 1\."
    ):
        fit(module, ITEMS, batch_size=3)


def test_nothing_is_logged_without_a_limit() -> None:
    assert "reward_timeouts" not in fit(make_module(MAGRPO, reward_workers=2), ITEMS[:1]).callback_metrics


def test_another_number_of_workers_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    trainer = fit(make_module(MAGRPO, reward_workers=2), ITEMS)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["hyper_parameters"]
    assert {name: saved[name] for name in saved if name.startswith("reward_")} == {
        "reward_func": "tests.algorithms.support.uneven_reward",
        "reward_processor": None,
        "reward_workers": 2,
        "reward_backend": "thread",
        "reward_timeout_seconds": None,
        "reward_timeout_value": None,
        "reward_none": "error",
    }
    again = make_trainer(max_epochs=2)
    again.fit(make_module(MAGRPO), TaskDataModule(ITEMS, batch_size=2), ckpt_path=tmp_path / "run.ckpt")
    assert again.current_epoch == 2


def test_settings_are_checked_at_construction() -> None:
    with pytest.raises(ValueError, match="reward_workers=-1 is out of range"):
        make_module(MAGRPO, reward_workers=-1)
    with pytest.raises(ValueError, match=r"reward_func=.*<lambda> cannot be sent to a worker process"):
        make_module(MAGRPO, reward_func=lambda first, second: [0.0] * len(first), **PROCESSES)
    parts = WeightedRewards({"model": torch.nn.Bilinear(1, 1, 1)})
    with pytest.raises(ValueError, match="it holds a Bilinear, and modules of torch stay where they are"):
        make_module(MAGRPO, reward_func=parts, **PROCESSES)


def test_a_learned_reward_stays_with_its_weights() -> None:
    module = make_module(MARLHF, **PROCESSES)
    assert isinstance(module, MARLHF)
    module.configure_model()
    assert module.task_functions.workers.num_workers == 2
    assert module._learned_functions().workers.num_workers == 0
