"""Loading and saving of teams."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    FalconConfig,
    FalconForCausalLM,
    PreTrainedModel,
)

from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import LoraSettings, Separate, SharedBase
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.assets import story_model_path
from tests.agents.helpers import model_of, requests, shared_team, stir, trained, written
from tests.agents.test_generation import GREEDY
from tests.tiny_lm import save_tiny, tiny_gemma, tiny_gpt2, tiny_llama, tiny_tokenizer

ROWS = written(0, [0, 1])


def scores(team: AgentTeam) -> Tensor:
    with torch.no_grad():
        return team.log_probs(ROWS, temperature=1.0).log_probs


def own_logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    return logits


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save_tiny(tmp_path / "base")


def test_shared_base_from_a_folder_and_back(folder: str, tmp_path: Path) -> None:
    team = build_team(SharedBase(folder, 2, lora=LoraSettings(rank=4, target_modules=["q_proj", "lm_head"])))
    stir(team)
    team.save(tmp_path / "saved")
    names = [str(tmp_path / "saved" / f"agent_{agent}") for agent in range(2)]
    again = build_team(SharedBase(folder, 2, adapters=names))
    torch.testing.assert_close(scores(again), scores(team))
    assert set(trained(again)) == set(trained(team))
    assert again.generate(requests(["hi"]), GREEDY) == team.generate(requests(["hi"]), GREEDY)
    # By PEFT alone, adapter and tokenizer.
    for agent, name in enumerate(names):
        alone = AutoPeftModelForCausalLM.from_pretrained(name)
        adapters = model_of(team).adapters
        assert adapters is not None
        with adapters.acting(f"agent_{agent}"):
            torch.testing.assert_close(own_logits(alone), own_logits(model_of(team).causal))
        assert AutoTokenizer.from_pretrained(name)("hé").input_ids == tiny_tokenizer()("hé").input_ids
        # The head's adapter is small; the head itself is not written.
        assert Path(name, "adapter_model.safetensors").stat().st_size < 20_000


def test_loaded_adapters_set_the_reference(folder: str, tmp_path: Path) -> None:
    team = build_team(SharedBase(folder, 2))
    assert model_of(team).reference == "base"
    team.save(tmp_path)
    adapters = [str(tmp_path / "agent_0"), str(tmp_path / "agent_1")]
    assert model_of(build_team(SharedBase(folder, 2, adapters=adapters))).reference == "initial"
    chosen = build_team(SharedBase(folder, 2, adapters=adapters, reference="base"))
    assert model_of(chosen).reference == "base"


def test_adapter_folders_as_separate_models(folder: str, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", tiny_gpt2(), tiny_tokenizer(reverse=True))
    team = build_team(Separate([folder, other], lora=LoraSettings(rank=4)))
    stir(team)
    team.save(tmp_path / "saved")
    names = [str(tmp_path / "saved" / f"agent_{agent}") for agent in range(2)]
    again = build_team(Separate(names))
    torch.testing.assert_close(scores(again), scores(team))
    assert set(trained(again)) == set(trained(team))
    assert model_of(again, 1).reference == "initial"
    assert again.encode(1, "hi") == team.encode(1, "hi") != team.encode(0, "hi")


def test_full_models_save_and_load(folder: str, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", tiny_gpt2(), tiny_tokenizer())
    team = build_team(Separate([folder, other]))
    stir(team, 0.02)
    team.save(tmp_path / "saved")
    names = [str(tmp_path / "saved" / f"agent_{agent}") for agent in range(2)]
    torch.testing.assert_close(scores(build_team(Separate(names))), scores(team))
    for agent, name in enumerate(names):
        alone = AutoModelForCausalLM.from_pretrained(name)
        torch.testing.assert_close(own_logits(alone), own_logits(model_of(team, agent).causal))
        assert AutoTokenizer.from_pretrained(name)("hé").input_ids == tiny_tokenizer()("hé").input_ids


def test_an_adapter_folder_without_a_base_is_an_error(folder: str, tmp_path: Path) -> None:
    build_team(SharedBase(folder, 1)).save(tmp_path)
    path = tmp_path / "agent_0" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match=r"agent_0.* of agent_0 does not say which model it belongs to"):
        build_team(Separate([str(tmp_path / "agent_0")]))


def test_an_adapter_folder_is_no_shared_base(folder: str, tmp_path: Path) -> None:
    build_team(SharedBase(folder, 1)).save(tmp_path)
    with pytest.raises(ValueError, match=r"SharedBase\(model='.*agent_0'\) is an adapter folder"):
        build_team(SharedBase(str(tmp_path / "agent_0"), 2))


def test_prompt_learning_adapters_are_refused(folder: str, tmp_path: Path) -> None:
    from peft import PromptTuningConfig

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(tmp_path / "prompt")
    with pytest.raises(ValueError, match="learns prompts, which is not supported"):
        build_team(Separate([str(tmp_path / "prompt")]))


@pytest.mark.parametrize("base", ["bfloat16", "float32"])
def test_adapters_are_float32_and_the_base_has_its_dtype(folder: str, base: str) -> None:
    team = build_team(SharedBase(folder, 2, dtype=base))
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in team.parameters()}
    assert dtypes == {True: torch.float32, False: torch.float32 if base == "float32" else torch.bfloat16}


def test_the_default_dtype_does_not_reach_adapters(folder: str) -> None:
    # Lightning's bf16-true sets it while the module is configured.
    torch.set_default_dtype(torch.bfloat16)
    try:
        team = build_team(SharedBase(folder, 2, reference="initial"))
        team.add_reference()
        team.generate(requests(["hi"]), GREEDY)
        loss = team.log_probs(ROWS, temperature=1.0).log_probs.sum()
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.dtype == torch.float32
    assert {p.dtype for name, p in team.named_parameters() if "lora_" in name} == {torch.float32}


def test_a_cast_to_half_precision_passes_over_adapters() -> None:
    team = shared_team(reference="initial")
    team.add_reference()
    before = {name: parameter.clone() for name, parameter in team.named_parameters() if "lora_" in name}
    nn.ModuleList([team]).to(torch.bfloat16)
    now = dict(team.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in before.items())
    assert {p.dtype for name, p in now.items() if "lora_" not in name} == {torch.bfloat16}
    # And an update that bfloat16 would swallow arrives.
    parameter = next(iter(trained(team).values()))
    with torch.no_grad():
        parameter.fill_(1.0).add_(1e-4)
    assert bool((parameter > 1).all())


def test_half_precision_bases_generate_and_score() -> None:
    saved = LoraSettings(target_modules=["v_proj"], modules_to_save=["norm", "lm_head", "embed_tokens"])
    for lora in (LoraSettings(), LoraSettings(use_dora=True), saved):
        team = shared_team(tiny_llama().to(torch.bfloat16), lora=lora)
        answers = [answer for group in team.generate(requests(["hi", "you"]), GREEDY) for answer in group]
        result = team.log_probs(answers, temperature=1.0)
        torch.autograd.backward(result.log_probs.sum())
        assert result.log_probs.dtype == torch.float32
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained(team).values())


def test_full_fine_tuning_defaults_to_float32(tmp_path: Path) -> None:
    name = save_tiny(tmp_path, tiny_llama().to(torch.bfloat16))
    assert model_of(build_team(Separate([name]))).causal.dtype == torch.float32
    assert model_of(build_team(SharedBase(name, 1))).causal.dtype == torch.bfloat16
    assert model_of(build_team(Separate([name], dtype="auto"))).causal.dtype == torch.bfloat16


def test_every_dropout_is_off() -> None:
    # GPT-2 has dropout modules, Llama and Qwen keep a number in their attention.
    settings: dict[str, Any] = {"tokenizers": [tiny_tokenizer()] * 3}
    models = [tiny_gpt2(), tiny_llama(attention_dropout=0.5), tiny_gemma(attention_dropout=0.5)]
    team = build_team(Separate(models, **settings)).train()
    rows = written(1, [0, 1, 2])
    first, second = (team.log_probs(rows, temperature=1.0).log_probs for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(team.eval().log_probs(rows, temperature=1.0).log_probs, first)


def test_dropout_of_loaded_adapters_is_off(folder: str, tmp_path: Path) -> None:
    network = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(lora_dropout=0.5))
    nn.init.ones_(next(p for name, p in network.named_parameters() if "lora_B" in name))
    network.save_pretrained(tmp_path / "adapter")
    team = build_team(SharedBase(folder, 2, adapters=[str(tmp_path / "adapter")] * 2)).train()
    assert torch.equal(scores(team), scores(team))


def test_adapters_already_in_a_loaded_model_are_refused() -> None:
    model = tiny_llama()
    build_team(SharedBase(model, 2, tokenizer=tiny_tokenizer()))
    with pytest.raises(ValueError, match="loaded LlamaForCausalLM that carries adapters already"):
        build_team(SharedBase(model, 2, tokenizer=tiny_tokenizer()))


def test_the_story_model_has_a_name() -> None:
    shared = build_team(SharedBase("story-model", 1))
    own = build_team(Separate(["story-model"], tokenizers=["story-model"]))
    assert model_of(shared).tokenizer("a").input_ids == model_of(own).tokenizer("a").input_ids
    assert model_of(shared).causal.config.name_or_path == str(story_model_path())


@pytest.mark.parametrize("settings", [SharedBase("./nosuch", 1), Separate([Path("nosuch")])])
def test_a_missing_folder_is_an_error(settings: SharedBase | Separate) -> None:
    with pytest.raises(ValueError, match=r"'(\./)?nosuch' is neither a folder nor a hub name"):
        build_team(settings)


def test_other_objects_are_refused() -> None:
    for model in (nn.Linear(2, 2), get_peft_model(tiny_llama(), LoraConfig())):
        with pytest.raises(ValueError, match="SharedBase got a model of type"):
            build_team(SharedBase(model, 2, tokenizer=tiny_tokenizer()))


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer of agent_0 has 259 tokens, its model only 100"):
        build_team(
            SharedBase(
                tiny_llama(vocab_size=100, bos_token_id=1, eos_token_id=2, pad_token_id=3),
                2,
                tokenizer=tiny_tokenizer(),
            )
        )


def test_an_agent_without_trainable_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    team = shared_team()
    for parameter in team.agent_parameters(1).values():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="agent_1 has no trainable parameters"):
        AgentTeam([model_of(team)])


def test_rollout_mode_restores_every_mode() -> None:
    team = shared_team().train()
    model_of(team).causal.lm_head.eval()
    before = [module.training for module in team.modules()]
    with team.rollout_mode():
        assert not any(module.training for module in team.modules())
        assert not torch.is_grad_enabled()
    with pytest.raises(KeyError), team.rollout_mode():
        raise KeyError
    assert [module.training for module in team.modules()] == before
    assert torch.is_grad_enabled()
    team.generate(requests(["hi"]), GREEDY)
    assert [module.training for module in team.modules()] == before


def test_loading_keeps_the_modes_of_a_loaded_model() -> None:
    model = tiny_llama().train()
    build_team(Separate([model], tokenizers=[tiny_tokenizer()]))
    assert model.model.training


def test_own_head_only_where_logits_are_no_more_than_a_product() -> None:
    # Gemma 2 caps its logits; without the cap its head is like any other.
    own = {
        name: model_of(shared_team(model)).own_head
        for name, model in {
            "llama": tiny_llama(),
            "gpt2": tiny_gpt2(),
            "capped": tiny_gemma(),
            "uncapped": tiny_gemma(soft_cap=None),
        }.items()
    }
    assert own == {"llama": True, "gpt2": True, "capped": False, "uncapped": True}


def test_peft_reads_the_folder_as_an_adapter_of_its_base(folder: str, tmp_path: Path) -> None:
    build_team(SharedBase(folder, 1)).save(tmp_path)
    network = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "agent_0")
    assert network.peft_config["default"].base_model_name_or_path == folder


def test_autocast_generates_and_scores() -> None:
    # Lightning's bf16-mixed runs the whole training step under autocast.
    for lora in (LoraSettings(), LoraSettings(use_dora=True)):
        team = shared_team(lora=lora, gradient_checkpointing=True).train()
        with torch.autocast("cpu", torch.bfloat16):
            answers = [answer for group in team.generate(requests(["hi", "you"]), GREEDY) for answer in group]
            result = team.log_probs(answers, temperature=1.0)
            assert result.log_probs.dtype == torch.float32
            torch.autograd.backward(result.log_probs.sum())
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained(team).values())


def test_inference_mode_leaves_nothing_behind() -> None:
    # Lightning evaluates in inference mode, whose tensors must not reach a later backward pass.
    team = shared_team(reference="initial")
    team.add_reference()
    with torch.inference_mode():
        team.generate(requests(["hi"]), GREEDY)
        team.log_probs(ROWS, temperature=1.0, reference=True)
    torch.autograd.backward(team.log_probs(ROWS, temperature=1.0).log_probs.sum())
    assert all(p.grad is not None for p in trained(team).values())


def test_a_copied_team_is_a_team_of_its_own() -> None:
    team = shared_team()
    before = scores(team)
    copy = deepcopy(team)
    torch.testing.assert_close(scores(copy), before)
    stir(copy, 0.5)
    assert not torch.allclose(scores(copy), before)
    assert torch.equal(scores(team), before)


def test_dropout_in_the_configuration_is_off() -> None:
    # Falcon reads the probability from its configuration in every forward pass.
    sizes = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = FalconForCausalLM(FalconConfig(**sizes, hidden_dropout=0.5, attention_dropout=0.5))
    team = build_team(SharedBase(model, 1, tokenizer=tiny_tokenizer()))
    team.train()
    assert model.config.hidden_dropout == model.config.attention_dropout == 0
    assert torch.equal(scores_of(team, [0]), scores_of(team, [0]))


def scores_of(team: AgentTeam, agents: list[int]) -> Tensor:
    with torch.no_grad():
        return team.log_probs(written(0, agents), temperature=1.0).log_probs


def test_saved_agents_come_without_a_blank_model_card(tmp_path: Path) -> None:
    team = shared_team()
    team.save(tmp_path / "new")
    assert sorted(path.name for path in Path(tmp_path, "new").iterdir()) == ["agent_0", "agent_1"]
    Path(tmp_path, "README.md").write_text("mine")
    team.save(tmp_path)
    assert Path(tmp_path, "README.md").read_text() == "mine"
