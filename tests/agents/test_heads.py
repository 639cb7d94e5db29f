"""Critics: what they read, what they return, where their gradients go."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import LoraSettings, Separate, SharedBase
from comlrl_lightning.critics.critics import CriticType
from comlrl_lightning.critics.loading import build_critics
from comlrl_lightning.critics.settings import AdapterCritic, CriticSettings, ModelCritic, ValueHead
from comlrl_lightning.types import Prompt
from tests.agents.critics import (
    OWN,
    critics_of,
    expected_own_values,
    head_of,
    own_ids,
    samples,
    state_at,
    talk,
)
from tests.agents.helpers import ARCHITECTURES, counting, model_of, shared_team, trained, written
from tests.tiny_lm import tiny_gpt2, tiny_llama, tiny_tokenizer


@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize(("settings", "adapter"), list(zip(OWN, ("agent", "critic"), strict=True)))
def test_values_of_own_tokens(settings: CriticSettings, adapter: str, critic_type: CriticType) -> None:
    team = shared_team()
    critics = critics_of(settings, team, critic_type=critic_type)
    with torch.no_grad():
        values = critics.values(talk(team))
        expected = expected_own_values(critics, team, critic_type, adapter)
    assert values.shape == (3, 2)
    assert len(set(values.flatten().tolist())) == len({own_ids(one, critic_type) for s in talk(team) for one in s})
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
def test_values_of_every_architecture(architecture: Any) -> None:
    team = shared_team(architecture())
    critics = critics_of(AdapterCritic(LoraSettings(rank=4)), team, critic_type="q")
    with torch.no_grad():
        expected = expected_own_values(critics, team, "q", "critic")
        torch.testing.assert_close(critics.values(talk(team)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lora", [LoraSettings(rank=4, use_dora=True), LoraSettings(rank=4, modules_to_save=["norm"])])
def test_critics_whose_adapters_cannot_share_a_batch(lora: LoraSettings) -> None:
    team = shared_team(tiny_llama().double())
    assert model_of(team).mixes_agents
    critics = critics_of(AdapterCritic(lora), team)
    assert not model_of(team).mixes_agents
    with torch.no_grad():
        expected = expected_own_values(critics, team, "v", "critic")
        torch.testing.assert_close(critics.values(talk(team)), expected, rtol=1e-4, atol=1e-4)


def test_plain_critics_of_agents_that_copy_layers() -> None:
    team = shared_team(lora=LoraSettings(rank=4, modules_to_save=["norm"]))
    critics = critics_of(AdapterCritic(LoraSettings(rank=4)), team)
    with torch.no_grad():
        expected = expected_own_values(critics, team, "v", "critic")
        torch.testing.assert_close(critics.values(talk(team)), expected, rtol=1e-4, atol=1e-4)


def test_value_heads_on_fully_trained_models() -> None:
    team = build_team(Separate([tiny_llama(), tiny_gpt2()], tokenizers=[tiny_tokenizer(), tiny_tokenizer()]))
    critics = critics_of(ValueHead(hidden_size=5), team, critic_type="q")
    values = critics.values(talk(team))
    for agent, completion in enumerate(talk(team)[0]):
        head = head_of(critics, agent)
        state = state_at(team.speaker(agent).causal, own_ids(completion, "q"))
        assert head.hidden is not None
        by_hand = head.output(torch.nn.functional.gelu(head.hidden(state)))[0, 0]
        torch.testing.assert_close(values[0, agent], by_hand, rtol=1e-4, atol=1e-4)
    assert set(critics.parameter_groups()["critic_0"]) == {
        "head.hidden.weight",
        "head.hidden.bias",
        "head.output.weight",
        "head.output.bias",
    }


@pytest.mark.parametrize("settings", [*OWN, AdapterCritic(hidden_size=8)])
def test_the_first_values_are_zero(settings: CriticSettings) -> None:
    team = shared_team()
    assert not build_critics(settings, team, centralized=False).values(talk(team)).any()


def test_no_sample_has_no_value() -> None:
    team = shared_team()
    assert critics_of(ValueHead(), team).values([]).shape == (0, 2)
    assert critics_of(AdapterCritic(), team, centralized=True, num_outputs=3).values([]).shape == (0, 3)


JOINT_PROMPTS = "[Prompt of agent 0]\nhello\n\n[Prompt of agent 1]\na longer prompt"
JOINT_ANSWERS = "\n\n[Completion of agent 0]\nyes\n\n[Completion of agent 1]\nno"


@pytest.mark.parametrize(("critic_type", "text"), [("v", JOINT_PROMPTS), ("q", JOINT_PROMPTS + JOINT_ANSWERS)])
def test_a_central_adapter_reads_all_agents(critic_type: CriticType, text: str) -> None:
    team = shared_team()
    critics = critics_of(AdapterCritic(), team, centralized=True, critic_type=critic_type, num_outputs=2)
    assert (critics.num_critics, critics.num_outputs) == (1, 2)
    model = model_of(team)
    assert model.adapters is not None
    with torch.no_grad(), model.adapters.acting("critic"):
        expected = head_of(critics)(state_at(model.causal, model.tokenizer(text).input_ids))[0]
    torch.testing.assert_close(critics.values(talk(team))[0].detach(), expected, rtol=1e-4, atol=1e-4)
    # The mark of the beginning and one token per byte.
    assert critics.lengths(talk(team))[0] == 1 + len(text)


@pytest.mark.parametrize("centralized", [True, False])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)])
def test_a_critic_of_another_family_reads_through_its_own_tokenizer(
    centralized: bool, lora: LoraSettings | None
) -> None:
    team = shared_team()
    own = tiny_tokenizer(reverse=True, add_bos=False)
    models = [tiny_gpt2(n_positions=512), tiny_gpt2(seed=1)]
    settings = (
        ModelCritic(models[0], tokenizer=own, lora=lora)
        if centralized
        else ModelCritic(models=models, tokenizers=[own, own], lora=lora)
    )
    critics = critics_of(settings, team, centralized=centralized, critic_type="q")
    (sample, *_) = talk(team)
    texts = [JOINT_PROMPTS + JOINT_ANSWERS] if centralized else ["helloyes", "a longer promptno"]
    values = critics.values([sample])[0].detach()
    for critic, text in enumerate(texts):
        ids = own(text).input_ids
        assert ids != team.speaker(0).tokenizer(text, add_special_tokens=False).input_ids
        body = critics.bodies[critic].model
        with torch.no_grad(), body.acting_through(["critic" if centralized else f"critic_{critic}"], [1]):
            expected = head_of(critics, critic)(state_at(body.causal, ids))[0, 0]
        torch.testing.assert_close(values[critic], expected, rtol=1e-4, atol=1e-4)


def test_agents_with_other_tokenizers_never_reach_a_model_through_them() -> None:
    # The agents number their bytes differently, so every token of the wrong tokenizer would show.
    tokenizers = [tiny_tokenizer(), tiny_tokenizer(reverse=True)]
    team = build_team(Separate([tiny_llama(), tiny_gpt2()], tokenizers=tokenizers, lora=LoraSettings(rank=2)))
    critics = critics_of(AdapterCritic(), team, centralized=True, critic_type="q")
    (sample, *_) = talk(team)
    ids = critics.bodies[0].reader.ids(sample)
    assert tokenizers[0].decode(ids) == "<bos>" + JOINT_PROMPTS + JOINT_ANSWERS
    separate = critics_of(AdapterCritic(), build_team(_two_separate()), critic_type="q")
    assert [body.reader.ids((one,)) for body, one in zip(separate.bodies, sample, strict=True)] == [
        own_ids(one, "q") for one in sample
    ]


def _two_separate() -> Separate:
    return Separate(
        [tiny_llama(), tiny_gpt2()],
        tokenizers=[tiny_tokenizer(), tiny_tokenizer(reverse=True)],
        lora=LoraSettings(rank=2),
    )


def test_chat_messages() -> None:
    team = shared_team()
    messages: Prompt = [{"role": "user", "content": "hi"}]
    (sample,) = samples(team, [(messages, "yes"), ("plain", "no")])
    # One agent's messages: through the critic's own template where it has one, as plain text where it has none.
    for chat, text in ((True, "<bos>[user]hi\n[assistant]yes"), (False, "<bos>user: hiyes")):
        own = tiny_tokenizer(chat=chat)
        critics = critics_of(ModelCritic(tiny_gpt2(), tokenizer=own, lora=LoraSettings(rank=2)), team, critic_type="q")
        assert own.decode(critics.bodies[0].reader.ids(sample[:1])) == text
    # All agents: plain text.
    central = critics_of(ModelCritic(tiny_gpt2(), tokenizer=tiny_tokenizer(chat=True)), team, centralized=True)
    text = own.decode(central.bodies[0].reader.ids(sample))
    assert text == "<bos>[Prompt of agent 0]\nuser: hi\n\n[Prompt of agent 1]\nplain"


def test_long_texts_are_cut_from_the_left_with_one_warning() -> None:
    team = shared_team()
    critics = critics_of(AdapterCritic(max_tokens=6), team, centralized=True)
    with pytest.warns(UserWarning, match=r"critic was to read 63 tokens, more than the 6 that it may.*from the left"):
        critics.values(talk(team))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert critics.lengths(talk(team)) == [6, 6, 6]
    ids = critics.bodies[0].reader.ids(talk(team)[0])
    assert team.speaker(0).tokenizer.decode(ids) == "<bos>rompt"
    # Without a limit of the user the model's own one holds: 128 positions of the tiny GPT-2.
    other = critics_of(ModelCritic(tiny_gpt2(), tokenizer=tiny_tokenizer(add_bos=False)), team, centralized=True)
    with pytest.warns(UserWarning, match="more than the 128"):
        (length,) = other.lengths(samples(team, [("a" * 200, ""), ("b", "")]))
    assert length == 128


@pytest.mark.parametrize("critic_type", ["v", "q"])
def test_the_gradient_of_a_shared_head(critic_type: CriticType) -> None:
    """Loss (V_0 - 2)^2 of agent 0: on the head 2 (V_0 - 2) times the state, and through the state on the adapter."""
    team = shared_team()
    critics = critics_of(ValueHead(), team, critic_type=critic_type)
    assert critics.shares_parameters()
    (sample, *_) = talk(team)
    (critics.values([sample])[0, 0] - 2).square().backward()  # type: ignore[no-untyped-call]
    head, model = head_of(critics), model_of(team)
    assert model.adapters is not None
    with model.adapters.acting("agent_0"):
        state = state_at(model.causal, own_ids(sample[0], critic_type))
        slope = 2 * (head(state)[0, 0].item() - 2)
        adapter = team.agent_parameters(0)
        expected = torch.autograd.grad((state @ head.output.weight.detach().T).squeeze(), [*adapter.values()])
    assert head.output.weight.grad is not None
    torch.testing.assert_close(head.output.weight.grad, slope * state.detach(), rtol=1e-4, atol=1e-3)
    for parameter, gradient in zip(adapter.values(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, slope * gradient, rtol=1e-3, atol=1e-3)
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in team.agent_parameters(1).values())


@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize("centralized", [True, False])
def test_the_gradient_of_a_separate_critic_reaches_no_agent(critic_type: CriticType, centralized: bool) -> None:
    team = shared_team()
    critics = critics_of(AdapterCritic(LoraSettings(rank=4)), team, centralized=centralized, critic_type=critic_type)
    assert not critics.shares_parameters()
    (sample, *_) = talk(team)
    (critics.values([sample])[0, 0] - 2).square().backward()  # type: ignore[no-untyped-call]
    first, *others = critics.parameter_groups().values()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in first.values())
    for group in (*others, team.agent_parameters(0), team.agent_parameters(1)):
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in group.values())
    # Every trained parameter is in exactly one group.
    groups = [*critics.parameter_groups().values(), team.agent_parameters(0), team.agent_parameters(1)]
    grouped = [id(parameter) for group in groups for parameter in group.values()]
    everything = {id(p) for module in (team, critics) for p in module.parameters() if p.requires_grad}
    assert sorted(grouped) == sorted(everything)


def test_recomputed_activations_give_the_same_gradient() -> None:
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        team = shared_team(gradient_checkpointing=recompute).train()
        critics = critics_of(AdapterCritic(LoraSettings(rank=4)), team)
        critics.values(talk(team)).square().sum().backward()  # type: ignore[no-untyped-call]
        groups = critics.parameter_groups()
        gradients.append([parameter.grad for group in groups.values() for parameter in group.values()])
    torch.testing.assert_close(*gradients)


def test_recomputed_activations_of_a_model_of_its_own() -> None:
    team, gradients = shared_team(), []
    for recompute in (False, True):
        settings = ModelCritic(tiny_llama(), tokenizer=tiny_tokenizer(), gradient_checkpointing=recompute)
        critics = critics_of(settings, team, centralized=True).train()
        layer = critics.bodies[0].model.causal.model.layers[0]
        calls: list[None] = []
        layer.self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(None))
        critics.values(talk(team)).square().sum().backward()  # type: ignore[no-untyped-call]
        assert len(calls) == 1 + recompute
        gradients.append([parameter.grad for parameter in critics.parameter_groups()["critic"].values()])
    torch.testing.assert_close(*gradients)


def test_agents_do_not_notice_the_critics() -> None:
    team, rows = shared_team(), written(0, [0, 1, 0])
    before, names = team.log_probs(rows, temperature=1.0).log_probs.detach(), [*team.agent_parameters(0)]
    # On more layers than the agents' adapters: all linear ones and the embedding.
    critics = critics_of(AdapterCritic(LoraSettings(rank=3)), team)
    torch.testing.assert_close(team.log_probs(rows, temperature=1.0).log_probs.detach(), before, rtol=0, atol=0)
    assert [*team.agent_parameters(0)] == names
    assert model_of(team).mixes_agents
    assert critics.num_critics == 2


def test_critics_on_layers_without_adapters_of_agents() -> None:
    team = shared_team(lora=LoraSettings(rank=2, target_modules=["q_proj"]))
    rows = written(0, [0, 1])
    before = team.log_probs(rows, temperature=1.0).log_probs.detach()
    critics = critics_of(AdapterCritic(LoraSettings(rank=3)), team)
    torch.testing.assert_close(team.log_probs(rows, temperature=1.0).log_probs.detach(), before, rtol=0, atol=0)
    with torch.no_grad():
        expected = expected_own_values(critics, team, "v", "critic")
        torch.testing.assert_close(critics.values(talk(team)), expected, rtol=1e-4, atol=1e-4)


def test_the_reference_is_that_of_the_agents_alone() -> None:
    team = shared_team(reference="initial")
    critics_of(AdapterCritic(), team)
    team.add_reference()
    adapters = model_of(team).adapters
    assert adapters is not None
    assert {name for name in adapters.network.peft_config if name.endswith("_reference")} == {
        "agent_0_reference",
        "agent_1_reference",
    }
    assert {name.split(".")[-2] for name in trained(team)} == {"agent_0", "agent_1", "critic_0", "critic_1"}


def test_a_cast_to_half_precision_passes_over_critics() -> None:
    team = shared_team()
    critics = critics_of(AdapterCritic(), team)
    before = critics.values(talk(team)).detach()
    team.to(torch.bfloat16)
    critics.to(torch.bfloat16)
    dtypes = {p.dtype for group in critics.parameter_groups().values() for p in group.values()}
    assert dtypes == {torch.float32}
    values = critics.values(talk(team)).detach()
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, before, rtol=0.2, atol=0.5)


def test_autocast_leaves_heads_alone() -> None:
    team = shared_team()
    critics = critics_of(ValueHead(hidden_size=3), team)
    with torch.autocast("cpu", torch.bfloat16):
        assert critics.values(talk(team)).dtype == torch.float32


def test_the_same_text_is_read_once() -> None:
    team = shared_team()
    one, *_ = talk(team)
    critics = critics_of(AdapterCritic(), team)
    with counting(model_of(team).causal.base_model) as calls:
        values = critics.values([one] * 5)
    # Two critics, one row each; the longer prompt has 15 bytes after the mark of the beginning.
    assert calls == [(2, 16)]
    assert values.shape == (5, 2)
    assert critics.lengths([one]) == [2 * 16]


def test_one_model_under_the_adapters_of_all_critics() -> None:
    team = shared_team()
    settings = ModelCritic(tiny_gpt2(), tokenizer=tiny_tokenizer(), lora=LoraSettings(rank=2))
    critics = critics_of(settings, team)
    assert len(critics.own_models) == 1
    with counting(critics.bodies[0].model.causal.base_model) as calls:
        critics.values(talk(team))
    assert len(calls) == 1


def test_all_weights_of_a_critic_but_an_unused_head_are_trained() -> None:
    team = shared_team()
    model = tiny_llama(seed=3)
    critics = critics_of(ModelCritic(model, tokenizer=tiny_tokenizer()), team, centralized=True)
    critics.values(talk(team)).square().sum().backward()  # type: ignore[no-untyped-call]
    (group,) = critics.parameter_groups().values()
    assert all(parameter.grad is not None for parameter in group.values())
    assert not model.lm_head.weight.requires_grad
    assert len(group) == len(list(model.parameters())) - 1 + 2


def test_adapters_leave_the_agents_copies_of_layers_alone() -> None:
    lora = LoraSettings(rank=2, modules_to_save=["lm_head"])
    team = build_team(SharedBase(tiny_llama(), 2, lora=lora, tokenizer=tiny_tokenizer()))
    names = [set(team.agent_parameters(agent)) for agent in range(2)]
    critics = build_critics(AdapterCritic(), team, centralized=False)
    assert [set(team.agent_parameters(agent)) for agent in range(2)] == names
    trained = [id(one) for group in critics.parameter_groups().values() for one in group.values()]
    trained += [id(one) for agent in range(2) for one in team.agent_parameters(agent).values()]
    assert len(trained) == len(set(trained))


def test_nobody_finds_an_empty_form_beside_a_saved_critic(tmp_path: Path) -> None:
    critics = build_critics(AdapterCritic(), shared_team(), centralized=True)
    critics.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["critic"]
    assert (tmp_path / "critic" / "adapter_model.safetensors").is_file()


def test_adapter_critics_need_frozen_models() -> None:
    team = build_team(Separate([tiny_llama()], tokenizers=[tiny_tokenizer()]))
    with pytest.raises(ValueError, match=r"AdapterCritic\(\) needs a frozen model under it, but agent_0 trains all"):
        build_critics(AdapterCritic(), team, centralized=False)


def test_a_tokenizer_that_is_too_large() -> None:
    settings = ModelCritic(tiny_gpt2(vocab_size=258), tokenizer=tiny_tokenizer())
    with pytest.raises(ValueError, match="The tokenizer of the critic has 259 tokens, its model only 258"):
        build_critics(settings, shared_team(), centralized=True)


def test_stirred_agents_change_value_heads_and_nothing_else() -> None:
    changed = []
    for settings in OWN:
        team = build_team(SharedBase(tiny_llama(), 2, tokenizer=tiny_tokenizer()))
        critics = critics_of(settings, team)
        before = critics.values(talk(team)).detach()
        with torch.no_grad():
            for parameter in team.agent_parameters(0).values():
                parameter.add_(0.1)
        changed.append((critics.values(talk(team)).detach() != before).any(0).tolist())
    assert changed == [[True, False], [False, False]]
