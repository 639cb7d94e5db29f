"""Losses that are not finite while all gradients are: a constant makes them so, as an impossible token does."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import Tensor

from comlrl_lightning.algorithms import IAC, MAGRPO, CooperativeModule
from comlrl_lightning.functional.values import value_loss
from comlrl_lightning.learning import actor_critic as critic_learner
from tests.algorithms.preferences import same, trained
from tests.algorithms.support import beside_the_impossible, fit, make_module, trained_a_little


def broken(monkeypatch: pytest.MonkeyPatch, name: str, **settings: Any) -> CooperativeModule:
    if name == "agent_1":
        module = trained_a_little(make_module(MAGRPO, **settings))
        monkeypatch.setattr(module.team, "log_probs", beside_the_impossible(module.team.log_probs))
        return module

    def endless(*args: Any) -> Tensor:
        return value_loss(*args) + math.inf

    monkeypatch.setattr(critic_learner, "value_loss", endless)
    return make_module(IAC, num_generations=1, **settings)


@pytest.mark.parametrize("name", ["agent_1", "the critic of agent_0"])
def test_it_stops_the_training(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = broken(monkeypatch, name)
    message = rf"The loss of {name} is not finite at env_step \d\. Lower .*on_nonfinite='skip'"
    with pytest.raises(ValueError, match=message):
        fit(module)
    assert module.update_step == 0


@pytest.mark.parametrize(
    ("name", "names"), [("agent_1", "agent_1"), ("the critic of agent_0", "the critic of agent_0, .* of agent_1")]
)
def test_it_can_be_left_out_and_is_counted(monkeypatch: pytest.MonkeyPatch, name: str, names: str) -> None:
    module = broken(monkeypatch, name, on_nonfinite="skip")
    module.configure_model()
    start = trained(module)
    with pytest.warns(UserWarning, match=f"An update was left out: the losses of {names} are not finite"):
        trainer = fit(module)
    assert trainer.callback_metrics["nonfinite_updates"] == 1.0
    assert "agent_1/loss" not in trainer.callback_metrics
    assert module.update_step == 0
    assert same(trained(module), start)
