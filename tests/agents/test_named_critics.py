"""Several critics on the base of the agents, and critics of which only the head is trained."""

from __future__ import annotations

import pytest
import torch

from comlrl_lightning.agents.settings import LoraSettings
from comlrl_lightning.critics.settings import AdapterCritic, ModelCritic
from tests.agents.critics import critics_of, head_of, talk
from tests.agents.helpers import shared_team, trained, written
from tests.tiny_lm import tiny_llama, tiny_tokenizer


def test_two_central_critics_on_the_base_of_the_agents() -> None:
    team, rows = shared_team(), written(0, [0, 1])
    critics = critics_of(AdapterCritic(LoraSettings(rank=4)), team, centralized=True)
    reward_model = critics_of(
        AdapterCritic(LoraSettings(rank=3)), team, centralized=True, critic_type="q", name="reward_model"
    )
    assert [*critics.parameter_groups(), *reward_model.parameter_groups()] == ["critic", "reward_model"]
    groups = [critics.parameter_groups()["critic"], reward_model.parameter_groups()["reward_model"]]
    groups += [team.agent_parameters(agent) for agent in range(2)]
    before = team.log_probs(rows, temperature=1.0).log_probs.detach(), critics.values(talk(team)).detach()
    reward_model.values(talk(team)).square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in groups[1].values())
    for group in (groups[0], *groups[2:]):
        assert all(parameter.grad is None for parameter in group.values())
    torch.optim.SGD(groups[1].values(), 1.0).step()
    assert torch.equal(team.log_probs(rows, temperature=1.0).log_probs, before[0])
    assert torch.equal(critics.values(talk(team)), before[1])
    # Every trained parameter is in exactly one group.
    grouped = [id(parameter) for group in groups for parameter in group.values()]
    everything = {id(p) for module in (team, critics, reward_model) for p in module.parameters() if p.requires_grad}
    assert sorted(grouped) == sorted(everything)


@pytest.mark.parametrize("lora", [LoraSettings(rank=2), LoraSettings(rank=2, modules_to_save=["norm"])])
def test_a_frozen_adapter_stays_frozen(lora: LoraSettings) -> None:
    team = shared_team(reference="initial")
    agents = [{*team.agent_parameters(agent)} for agent in range(2)]
    critics = critics_of(AdapterCritic(lora), team, centralized=True, name="reward_model", freeze_backbone=True)
    # Others come later and count anew what is trained.
    critics_of(AdapterCritic(), team, centralized=True)
    team.add_reference()
    assert [{*team.agent_parameters(agent)} for agent in range(2)] == agents
    assert [*critics.parameter_groups()["reward_model"]] == ["head.output.weight", "head.output.bias"]
    assert not any("reward_model" in name for name in trained(team))
    critics.values(talk(team)).square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for parameter in team.parameters())
    assert head_of(critics).output.weight.grad is not None


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)])
def test_a_frozen_model_under_a_head(lora: LoraSettings | None) -> None:
    settings = ModelCritic(tiny_llama().bfloat16(), tokenizer=tiny_tokenizer(), lora=lora, hidden_size=3)
    critics = critics_of(settings, shared_team(), centralized=True, freeze_backbone=True)
    assert [name.split(".")[0] for name in critics.parameter_groups()["critic"]] == ["head"] * 4
    assert not any(parameter.requires_grad for parameter in critics.own_models.parameters())
    team = shared_team()
    critics.values(talk(team)).square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in head_of(critics).parameters())
