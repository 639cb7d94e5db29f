"""Weights of another time: copies, and agents that speak with them for a while."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import Sampling, Separate
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.preferences.snapshots import borrowed_weights, weights_of
from comlrl_lightning.types import Completion
from tests.agents.helpers import flat, requests, shared_team, stir, trained
from tests.tiny_lm import tiny_gpt2, tiny_llama, tiny_tokenizer

SAMPLING = Sampling(max_new_tokens=6)


def separate_team(dtype: torch.dtype = torch.float32) -> AgentTeam:
    """Two agents with all their weights trained, one of them with its head tied to its embeddings."""
    models = [tiny_llama().to(dtype), tiny_gpt2().to(dtype)]
    return build_team(Separate(models, tokenizers=[tiny_tokenizer(), tiny_tokenizer()]))


def answers(team: AgentTeam) -> list[Completion]:
    return flat(team.generate(requests(["ab", "c"]), SAMPLING))


@pytest.mark.parametrize("build", [shared_team, separate_team])
def test_the_copy_is_of_all_trained_weights_and_does_not_follow_them(build: Callable[[], AgentTeam]) -> None:
    team = build()
    weights = weights_of(team)
    assert weights.keys() == trained(team).keys()
    before = {name: parameter.detach().clone() for name, parameter in trained(team).items()}
    stir(team)
    for name, weight in weights.items():
        assert torch.equal(weight, before[name])
        assert not weight.requires_grad
        assert not torch.equal(weight, trained(team)[name])


@pytest.mark.parametrize("build", [shared_team, separate_team])
def test_agents_speak_with_borrowed_weights_and_get_their_own_back(build: Callable[[], AgentTeam]) -> None:
    team = build()
    former, weights = answers(team), weights_of(team)
    stir(team, 0.3)
    present = answers(team)
    assert former != present
    pointers = {name: parameter.data_ptr() for name, parameter in trained(team).items()}
    with borrowed_weights(team, weights):
        assert answers(team) == former
    assert answers(team) == present
    # The very same storage: nothing was copied back, optimizers and gradient buckets go on with it.
    assert {name: parameter.data_ptr() for name, parameter in trained(team).items()} == pointers


def test_own_weights_come_back_after_exceptions_and_the_copy_stays_a_copy() -> None:
    team = shared_team()
    weights = weights_of(team)
    kept = {name: weight.clone() for name, weight in weights.items()}
    stir(team)
    present = weights_of(team)
    with pytest.raises(RuntimeError, match="stop"), borrowed_weights(team, weights):
        raise RuntimeError("stop")
    assert all(torch.equal(parameter, present[name]) for name, parameter in trained(team).items())
    assert all(torch.equal(weight, kept[name]) for name, weight in weights.items())


def test_gradients_and_parameters_stay_the_same_objects() -> None:
    team = shared_team()
    parameters = list(trained(team).values())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with borrowed_weights(team, weights_of(team)):
        assert [id(parameter) for parameter in trained(team).values()] == [id(parameter) for parameter in parameters]
    for parameter in parameters:
        assert parameter.requires_grad
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.ones_like(parameter))


def test_weights_of_another_dtype_are_cast() -> None:
    team = separate_team(torch.bfloat16)
    weights: dict[str, Tensor] = {name: weight.double() for name, weight in weights_of(team).items()}
    former = answers(team)
    stir(team, 0.3)
    with borrowed_weights(team, weights):
        assert all(parameter.dtype == torch.bfloat16 for parameter in trained(team).values())
        assert answers(team) == former


def test_weights_of_other_agents_are_refused_and_nothing_changes() -> None:
    team = shared_team(num_agents=2)
    present = weights_of(team)
    name = sorted(present)[-1]
    fewer = {key: weight for key, weight in present.items() if key != name}
    with pytest.raises(ValueError, match=f"differ in 1 names, the first is '{name}'"), borrowed_weights(team, fewer):
        pass
    longer = {**present, name: torch.zeros(1, 2)}
    with pytest.raises(ValueError, match=rf"holds '{name}' with shape \(1, 2\)"), borrowed_weights(team, longer):
        pass
    assert all(torch.equal(parameter, present[key]) for key, parameter in trained(team).items())
