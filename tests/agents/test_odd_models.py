"""Language models that read otherwise than most: what is refused, taken over, or not taken for plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from comlrl_lightning.agents.decoding.prefixes import is_plain
from comlrl_lightning.agents.kv_cache import new_cache, sees_everything
from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import LoraSettings, Separate, SharedBase
from comlrl_lightning.agents.team import AgentTeam
from tests.agents.helpers import model_of, row_log_probs, shared_team, trained, written
from tests.tiny_lm import save_tiny, tiny_llama, tiny_tokenizer

SIZES = {"vocab_size": 259, "initializer_range": 0.25}
WIDE = {**SIZES, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY = {**WIDE, "intermediate_size": 48, "num_key_value_heads": 2}


def bart() -> PreTrainedModel:
    """It works positions out by itself, and counts padding."""
    sizes = {"vocab_size": 259, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "init_std": 0.25}
    return BartForCausalLM(BartConfig(**sizes, decoder_ffn_dim=32, is_decoder=True, is_encoder_decoder=False))


def bert() -> PreTrainedModel:
    """It sees the tokens to come."""
    return BertLMHeadModel(BertConfig(**WIDE, intermediate_size=48, is_decoder=False))


def mamba() -> PreTrainedModel:
    """It takes the mask of a whole text for that of its last token."""
    return MambaForCausalLM(MambaConfig(**SIZES, hidden_size=32, num_hidden_layers=2, state_size=8))


def recurrent_gemma() -> PreTrainedModel:
    """It keeps its states in its layers, where nobody follows when rows change places."""
    settings = {**ROTARY, "lru_width": 32, "attention_window_size": 64, "w_init_variance_scale": 1.0}
    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**settings, block_types=["recurrent", "attention"]))


def openai_gpt() -> PreTrainedModel:
    """It has no cache."""
    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(**SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=64))


TARGETS = {bert: ["query"], mamba: ["x_proj"], openai_gpt: ["c_attn"]}
ODD = [bart, bert, mamba, recurrent_gemma, openai_gpt]


def build(make: Callable[[], PreTrainedModel], dtype: torch.dtype) -> AgentTeam:
    torch.manual_seed(0)
    lora = LoraSettings(target_modules=TARGETS.get(make, ["q_proj"]))
    return build_team(SharedBase(make().to(dtype), 1, lora=lora, tokenizer=tiny_tokenizer()))


@pytest.mark.parametrize("make", ODD)
def test_refused_where_answers_depend_on_the_batch(make: Callable[[], PreTrainedModel]) -> None:
    with pytest.raises(ValueError, match=r"^\w+ reads texts otherwise beside longer ones, .* Use a causal model that"):
        build(make, torch.float32)


# Transformers' Mamba does not compute in bfloat16 on a CPU.
@pytest.mark.parametrize("make", [bart, openai_gpt])
def test_refused_in_half_precision_what_is_far_off(make: Callable[[], PreTrainedModel]) -> None:
    with pytest.raises(ValueError, match=r"^\w+ reads texts otherwise"):
        build(make, torch.bfloat16)


@pytest.mark.parametrize("make", [bert, recurrent_gemma])
def test_told_in_half_precision_what_may_be_rounding(make: Callable[[], PreTrainedModel]) -> None:
    with pytest.warns(UserWarning, match=r"differ by [12]\d% of their spread. Load it once with dtype='float32'"):
        build(make, torch.bfloat16)


@pytest.mark.parametrize("seed", range(4))
def test_experts_that_are_chosen_by_rounding_are_no_reason(seed: int) -> None:
    torch.manual_seed(seed)
    model = MixtralForCausalLM(MixtralConfig(**ROTARY, num_local_experts=8, num_experts_per_tok=2)).to(torch.bfloat16)
    build_team(SharedBase(model, 1, lora=LoraSettings(target_modules=["q_proj"]), tokenizer=tiny_tokenizer()))


def test_a_body_that_is_the_model_itself() -> None:
    # `Llama4ForCausalLM` names its body otherwise than transformers expects: only its own logits are to be had.
    settings = {
        **ROTARY,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "attention_chunk_size": 64,
    }
    torch.manual_seed(0)
    model = Llama4ForCausalLM(Llama4TextConfig(**settings, layer_types=["full_attention"] * 2)).eval()
    team = build_team(SharedBase(model, 2, lora=LoraSettings(target_modules=["q_proj"]), tokenizer=tiny_tokenizer()))
    assert not model_of(team).own_head
    rows = written(0, [0, 1])
    found = team.log_probs(rows, temperature=1.0).log_probs
    for row, values in zip(rows, found, strict=True):
        expected = row_log_probs(model_of(team).causal, row, 1.0)
        torch.testing.assert_close(values[: len(expected)], expected, rtol=0, atol=1e-4)


def test_windows_that_count_columns_are_not_plain() -> None:
    kinds = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 8}
    model = GPTNeoForCausalLM(GPTNeoConfig(**SIZES, hidden_size=32, intermediate_size=48, **kinds))
    neo = model_of(shared_team(model, lora=LoraSettings(target_modules=["q_proj"])))
    cache = new_cache(model.config)
    neo.hidden_states(torch.tensor([[1, 2, 3]]), torch.arange(3).unsqueeze(0), None, cache)
    assert not is_plain(neo, cache)
    assert not neo.reads_prompts_once
    model.config.attention_layers = ["global", "global"]
    assert is_plain(neo, cache)
    assert sees_everything(model.config)


def test_a_longer_rotation_is_a_limit() -> None:
    rotation = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    }
    model = tiny_llama(
        rope_parameters={**rotation, "original_max_position_embeddings": 40}, max_position_embeddings=128
    )
    assert model_of(shared_team(model)).max_positions == 40


@pytest.mark.parametrize("kind", ["shared", "separate"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_that_the_user_switched_on_is_taken_over(kind: str, reentrant: bool) -> None:
    def gradients(checkpointed: bool) -> dict[str, torch.Tensor]:
        model = tiny_llama().double()
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(0)
        team = shared_team(model) if kind == "shared" else build_team(Separate([model], tokenizers=[tiny_tokenizer()]))
        assert model_of(team).reads_prompts_once != checkpointed
        flags = [vars(module).get("gradient_checkpointing") for module in model_of(team).causal.modules()]
        assert (True in flags) == checkpointed
        team.train()
        rows = written(0, [0, 0, 1, 1] if kind == "shared" else [0, 0])
        rows += rows
        team.log_probs(rows, temperature=1.0).log_probs.sum().backward()  # type: ignore[no-untyped-call]
        return {name: one.grad for name, one in trained(team).items() if one.grad is not None}

    plain = gradients(checkpointed=False)
    for name, value in gradients(checkpointed=True).items():
        torch.testing.assert_close(value, plain[name], rtol=1e-6, atol=1e-6)


def folders(path: Path, agents: Sequence[int], **settings: Any) -> list[str]:
    """Adapters of PEFT that were trained elsewhere, with dropout."""
    base = save_tiny(path / "base")
    names = []
    for agent in agents:
        torch.manual_seed(agent)
        config = LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings)
        network = get_peft_model(tiny_llama(), config)
        network.peft_config["default"].base_model_name_or_path = base
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.data += 0.2 * torch.randn_like(parameter)
        network.save_pretrained(path / f"adapter_{agent}")
        names.append(str(path / f"adapter_{agent}"))
    return names


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"modules_to_save": ["norm"]}])
def test_references_have_no_dropout(tmp_path: Path, settings: dict[str, Any]) -> None:
    team = build_team(SharedBase(str(tmp_path / "base"), 2, adapters=folders(tmp_path, (0, 1), **settings)))
    team.add_reference()
    team.train()
    rows = written(0, [0, 1])
    with torch.no_grad():
        policy, reference = (team.log_probs(rows, temperature=1.0, reference=kind).log_probs for kind in (False, True))
    torch.testing.assert_close(policy, reference, rtol=0, atol=1e-6)
