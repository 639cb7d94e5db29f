"""Switching adapters against PEFT's public calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from comlrl_lightning.agents.adapters import Adapters
from comlrl_lightning.agents.settings import LoraSettings
from comlrl_lightning.agents.team import AgentTeam
from tests.agents.helpers import ARCHITECTURES, model_of, shared_team, trained, written
from tests.tiny_lm import tiny_gpt2, tiny_llama

IDS = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [3, 1, 2]])


def parts(team: AgentTeam) -> tuple[Adapters, PreTrainedModel]:
    model = model_of(team)
    assert model.adapters is not None
    return model.adapters, model.causal


def logits(causal: PreTrainedModel, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        output: Tensor = causal(input_ids=ids).logits
    return output


@pytest.mark.parametrize("make", ARCHITECTURES)
@pytest.mark.parametrize(
    "lora",
    [LoraSettings(), LoraSettings(use_dora=True), LoraSettings(modules_to_save=["norm"], use_rslora=True)],
    ids=["lora", "dora", "modules_to_save"],
)
def test_acting_equals_set_adapter(make: Callable[[], PreTrainedModel], lora: LoraSettings) -> None:
    if lora.modules_to_save and make is tiny_gpt2:
        lora = replace(lora, modules_to_save=["ln_f"])
    adapters, causal = parts(shared_team(make(), lora=lora))
    for name in ("agent_1", "agent_0"):
        adapters.network.set_adapter(name)
        public = logits(causal)
        adapters.network.set_adapter("agent_0" if name == "agent_1" else "agent_1")
        assert not torch.equal(logits(causal), public)
        with adapters.acting(name):
            assert torch.equal(logits(causal), public)
    with adapters.network.disable_adapter():
        public = logits(causal)
    with adapters.acting(None):
        assert torch.equal(logits(causal), public)


@pytest.mark.parametrize("make", ARCHITECTURES)
@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)], ids=["equal groups", "unequal groups"])
def test_grouped_rows_equal_set_adapter(make: Callable[[], PreTrainedModel], sizes: tuple[int, int]) -> None:
    adapters, causal = parts(shared_team(make(), lora=LoraSettings(rank=3, alpha=4)))
    expected = []
    for name, ids in zip(("agent_1", "agent_0"), torch.split(IDS, list(sizes)), strict=True):
        adapters.network.set_adapter(name)
        expected.append(logits(causal, ids))
    with adapters.grouped(["agent_1", "agent_0"], sizes):
        torch.testing.assert_close(logits(causal), torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("repeats", [1, 8], ids=["few rows", "many rows"])
def test_grouped_rows_in_half_precision(repeats: int) -> None:
    # The error against the same weights in single precision, beside that of PEFT, which multiplies in single precision.
    ids = IDS.repeat_interleave(repeats, 0)
    sizes = [2 * repeats, 2 * repeats]
    adapters, causal = parts(shared_team(tiny_llama(initializer_range=0.1).bfloat16()))
    adapters.network.eval()
    with adapters.grouped(("agent_1", "agent_0"), sizes):
        ours = logits(causal, ids)
    public = torch.cat(
        [_alone(adapters, causal, *pair) for pair in zip(("agent_1", "agent_0"), torch.split(ids, sizes), strict=True)]
    )
    causal.float()
    with adapters.grouped(("agent_1", "agent_0"), sizes):
        exact = logits(causal, ids)
    assert ours.dtype == torch.bfloat16
    errors = [float((found.float() - exact).norm() / exact.norm()) for found in (ours, public)]
    assert errors[0] < 1.5 * errors[1] < 0.05


def _alone(adapters: Adapters, causal: PreTrainedModel, name: str, ids: Tensor) -> Tensor:
    adapters.network.set_adapter(name)
    return logits(causal, ids)


def test_adapters_beside_a_base_in_half_precision_get_float32_gradients() -> None:
    rows = written(0, [0, 1, 1, 0] * 4)
    found = []
    team = shared_team(tiny_llama(initializer_range=0.1).bfloat16()).train()
    for prepare in (lambda: None, model_of(team).causal.float):
        prepare()
        team.zero_grad()
        torch.autograd.backward(team.log_probs(rows, temperature=1.0).log_probs.sum())
        gradients = [parameter.grad for parameter in trained(team).values()]
        assert {None if gradient is None else gradient.dtype for gradient in gradients} == {torch.float32}
        found.append(torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]).clone())
    assert torch.nn.functional.cosine_similarity(found[0], found[1], dim=0) > 0.99


def test_groups_can_leave() -> None:
    adapters, causal = parts(shared_team(num_agents=3))
    with adapters.grouped(["agent_0", "agent_1", "agent_2"], [1, 1, 2]) as grouping, torch.no_grad():
        first = causal(input_ids=IDS).logits
        grouping.keep([0, 2], 1)
        torch.testing.assert_close(causal(input_ids=IDS[[0, 2]]).logits, first[[0, 2]], rtol=1e-4, atol=1e-4)
        grouping.keep([1], 2)
        torch.testing.assert_close(causal(input_ids=IDS[2:]).logits, first[2:], rtol=1e-4, atol=1e-4)


def test_adapters_of_different_rank_and_place_share_a_batch() -> None:
    # The second adapter has another rank, scale and set of layers; where it has none, its rows see the base.
    from peft import LoraConfig

    team = shared_team(lora=LoraSettings(rank=2, target_modules=["q_proj", "up_proj"]))
    network = parts(team)[0].network
    network.add_adapter("agent_2", LoraConfig(r=5, lora_alpha=7, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "agent_2" in name:
                parameter.normal_(std=0.3)
    adapters, causal = Adapters(network, ["agent_0", "agent_2"]), network.get_base_model()
    assert adapters.groupable
    expected = []
    for name, ids in zip(("agent_0", "agent_2"), torch.split(IDS, 2), strict=True):
        network.set_adapter(name)
        expected.append(logits(causal, ids))
    with adapters.grouped(["agent_0", "agent_2"], [2, 2]):
        torch.testing.assert_close(logits(causal), torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_switches_come_back_after_an_exception() -> None:
    adapters, causal = parts(shared_team())
    before = logits(causal)
    with adapters.acting("agent_1"):
        inner = logits(causal)
        with pytest.raises(KeyError), adapters.grouped(["agent_0"], [4]):
            raise KeyError
        assert torch.equal(logits(causal), inner)
        with pytest.raises(KeyError), adapters.acting(None):
            raise KeyError
        assert torch.equal(logits(causal), inner)
    assert torch.equal(logits(causal), before)
    assert not torch.equal(inner, before)


def test_every_adapter_is_trainable_and_the_base_is_not() -> None:
    # PEFT leaves only the adapter that was added first trainable.
    team = shared_team(num_agents=3)
    names = set(trained(team))
    assert names == {name for name, _ in team.named_parameters() if "lora_" in name}
    for agent in range(3):
        assert set(team.agent_parameters(agent)) == {name for name in names if f".agent_{agent}." in name}
    with parts(team)[0].acting("agent_2"), parts(team)[0].grouped(["agent_1"], [1]):
        assert set(trained(team)) == names


def test_agent_1_is_not_agent_10() -> None:
    team = shared_team(num_agents=11, lora=LoraSettings(rank=1, target_modules=["q_proj"]))
    assert all(".agent_1." in name for name in team.agent_parameters(1))


def test_a_layer_that_hides_the_rows_rules_groups_out() -> None:
    # A mixture of experts hands its layers whichever tokens they are to see, not the rows of the batch.
    team = shared_team()
    adapters, causal = parts(team)
    causal.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: (args[0].flatten(0, 1),))
    with pytest.raises(RuntimeError), adapters.watching(4):
        logits(causal)
    assert not adapters.groupable
