"""Weights that do not fit, in whole or in part, end with an error that names them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import LoraSettings, Separate, SharedBase
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.critics.critics import HEAD_FILE
from comlrl_lightning.critics.loading import build_critics
from comlrl_lightning.critics.settings import AdapterCritic, CriticSettings, ModelCritic
from tests.agents.helpers import model_of, stir
from tests.agents.test_loading import own_logits
from tests.tiny_lm import save_tiny, tiny_gpt2, tiny_llama, tiny_qwen2, tiny_tokenizer

LORA = LoraSettings(rank=2, target_modules=["q_proj", "v_proj"])
FILE = "adapter_model.safetensors"
Weights = dict[str, Tensor]


def moved(weights: Weights) -> Weights:
    return {name.replace("base_model.model.", "base_model.model.language_model."): w for name, w in weights.items()}


def without_a_layer(weights: Weights) -> Weights:
    return {name: value for name, value in weights.items() if ".layers.1." not in name}


def renamed(weights: Weights) -> Weights:
    return {name.replace("lora_B", "lora_up"): value for name, value in weights.items()}


def with_more(weights: Weights) -> Weights:
    return {**weights, "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.zeros(2, 32)}


def of_other_width(weights: Weights) -> Weights:
    return {name: value[:, :-1] for name, value in weights.items()}


def with_nan(weights: Weights) -> Weights:
    return {name: value.fill_(torch.nan) if "lora_B" in name else value for name, value in weights.items()}


BROKEN = [
    (moved, r"8 missing: \S*q_proj.lora_A\S*.*; 8 without a place: \S*language_model"),
    (without_a_layer, r"4 missing: \S*layers\.1\.self_attn\.q_proj\.lora_A"),
    (renamed, r"4 missing: \S*lora_B\S*.*4 without a place: \S*lora_up"),
    (lambda _: {}, "8 missing"),
    (with_more, r"1 without a place: \S*layers\.7"),
    (of_other_width, "size mismatch for .*lora_A"),
    (with_nan, "values that are not finite, in .*lora_B"),
]


def change(folder: Path, name: str, edit: Callable[[Weights], Weights]) -> None:
    """Write other weights into a file of an adapter, a model or a head."""
    weights = edit(load_file(folder / name))
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / name, metadata={"format": "pt"})


@pytest.fixture
def base(tmp_path: Path) -> str:
    return save_tiny(tmp_path / "base")


@pytest.fixture
def agents(base: str, tmp_path: Path) -> Path:
    """Folders of two agents."""
    team = build_team(SharedBase(base, 2, lora=LORA))
    stir(team)
    team.save(tmp_path / "agents")
    return tmp_path / "agents"


def write_config(folder: Path, **entries: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize(("edit", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("agent", [0, 1])
def test_an_adapter_that_does_not_fit(
    base: str, agents: Path, edit: Callable[[Weights], Weights], message: str, agent: int
) -> None:
    change(agents / f"agent_{agent}", FILE, edit)
    named = rf"(?s)The adapter of agent_{agent} in '.*agent_{agent}' .*{message}"
    with pytest.raises(ValueError, match=named):
        build_team(SharedBase(base, 2, adapters=str(agents)))
    if not agent:
        with pytest.raises(ValueError, match=named):
            build_team(Separate([str(agents / "agent_0")]))


def test_missing_copies_of_layers(base: str, tmp_path: Path) -> None:
    settings = LoraSettings(rank=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    build_team(SharedBase(base, 1, lora=settings)).save(tmp_path / "agents")
    folder = tmp_path / "agents" / "agent_0"
    change(folder, FILE, lambda weights: {name: value for name, value in weights.items() if "lm_head" not in name})
    with pytest.raises(ValueError, match=r"The adapter of agent_0 in .*does not fit its base: .*lm_head"):
        build_team(SharedBase(base, 1, adapters=[str(folder)]))


@pytest.mark.parametrize(("content", "message"), [(b"", "cannot be read"), (None, "has no weights")])
def test_a_file_that_is_none(base: str, agents: Path, content: bytes | None, message: str) -> None:
    (agents / "agent_1" / FILE).unlink()
    if content is not None:
        (agents / "agent_1" / FILE).write_bytes(content)
    with pytest.raises(ValueError, match=f"The adapter of agent_1 in '.*agent_1' {message}"):
        build_team(SharedBase(base, 2, adapters=str(agents)))


def critics_of(base: str, settings: CriticSettings, folder: Path) -> Path:
    team = build_team(SharedBase(base, 1, lora=LORA))
    critics = build_critics(settings, team, centralized=True)
    critics.save(folder)
    return folder / "critic"


def test_critics_that_do_not_fit(base: str, tmp_path: Path) -> None:
    folder = critics_of(base, AdapterCritic(lora=LORA), tmp_path / "saved")
    change(folder, HEAD_FILE, with_nan_everywhere)
    team = build_team(SharedBase(base, 1, lora=LORA))
    with pytest.raises(ValueError, match=r"The head in '.*' holds values that are not finite, in output"):
        build_critics(AdapterCritic(adapters=[str(folder)]), team, centralized=True)
    change(folder, FILE, moved)
    team = build_team(SharedBase(base, 1, lora=LORA))
    with pytest.raises(ValueError, match=r"The adapter of critic in '.*critic' does not fit in whole"):
        build_critics(AdapterCritic(adapters=[str(folder)]), team, centralized=True)
    with pytest.raises(ValueError, match=r"The adapter of critic in '.*critic' does not fit in whole"):
        build_critics(ModelCritic(model=str(folder)), team, centralized=True)
    (folder / HEAD_FILE).write_bytes(b"")
    critic = critics_of(base, AdapterCritic(lora=LORA), tmp_path / "again")
    (critic / HEAD_FILE).write_bytes(b"")
    team = build_team(SharedBase(base, 1, lora=LORA))
    with pytest.raises(ValueError, match=r"The head in '.*' cannot be read"):
        build_critics(AdapterCritic(adapters=[str(critic)]), team, centralized=True)


def with_nan_everywhere(weights: Weights) -> Weights:
    return {name: value.fill_(torch.nan) for name, value in weights.items()}


def test_models_that_were_saved_in_part(base: str) -> None:
    name, file = "model.layers.0.mlp.up_proj.weight", "model.safetensors"
    taken = load_file(Path(base, file))[name]
    change(Path(base), file, lambda weights: {key: value for key, value in weights.items() if key != name})
    for settings in (SharedBase(base, 1), Separate([base])):
        with pytest.raises(ValueError, match=rf"The model of .* does not fit in whole. Weights 1 missing: {name}"):
            build_team(settings)
    bias = "model.layers.0.self_attn.q_proj.bias"
    change(Path(base), file, lambda weights: {**weights, name: taken, bias: torch.ones(32)})
    with pytest.raises(ValueError, match=f"Weights 1 without a place: {bias}"):
        build_team(Separate([base]))
    change(
        Path(base), file, lambda weights: {("v_head.weight" if key == bias else key): w for key, w in weights.items()}
    )
    with pytest.warns(UserWarning, match=r"has weights of parts that LlamaForCausalLM lacks: v_head.weight"):
        build_team(Separate([base]))


def test_critics_need_no_head(base: str) -> None:
    change(Path(base), "model.safetensors", lambda all_: {key: w for key, w in all_.items() if key != "lm_head.weight"})
    team = build_team(SharedBase(tiny_llama(), 1, lora=LORA, tokenizer=tiny_tokenizer()))
    build_critics(ModelCritic(model=base), team, centralized=True)
    with pytest.raises(ValueError, match=r"The model of agent_0, .* missing: lm_head.weight"):
        build_team(Separate([base]))


def test_an_adapter_of_another_base(base: str, agents: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", tiny_llama(rope_theta=5e5))
    with pytest.raises(ValueError, match=r"agent_0' belongs to the base '.*base', but here .* on '.*other'"):
        build_team(SharedBase(other, 2, adapters=str(agents)))
    team = build_team(SharedBase(other, 1, lora=LORA))
    with pytest.raises(ValueError, match=r"The adapter of critic in .* belongs to the base"):
        build_critics(AdapterCritic(adapters=[str(agents / "agent_0")]), team, centralized=True)
    for kind in (tiny_qwen2(), tiny_gpt2()):
        with pytest.raises(ValueError, match=r"The adapter of agent_0 in .* belongs to the base"):
            build_team(SharedBase(save_tiny(tmp_path / kind.config.model_type, kind), 2, adapters=str(agents)))


def test_names_on_the_hub_differ(base: str, agents: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    model.name_or_path = "someone/base"
    write_config(agents / "agent_1", base_model_name_or_path="someone/other")
    with pytest.raises(ValueError, match=r"agent_1' belongs to the base 'someone/other', .* on 'someone/base'"):
        build_team(SharedBase(model, 2, adapters=str(agents), tokenizer=tiny_tokenizer()))


def test_a_base_may_move(base: str, agents: Path, tmp_path: Path) -> None:
    write_config(agents / "agent_0", base_model_name_or_path="/gone/base")
    write_config(agents / "agent_1", base_model_name_or_path=save_tiny(tmp_path / "copy"))
    team = build_team(SharedBase(base, 2, adapters=str(agents)))
    team.save(tmp_path / "again")
    configs = [tmp_path / "again" / f"agent_{agent}" / "adapter_config.json" for agent in range(2)]
    assert [json.loads(path.read_text())["base_model_name_or_path"] for path in configs] == [base] * 2


def test_saved_adapters_find_their_base_from_anywhere(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained("./base")
    given: dict[str, SharedBase | Separate] = {
        "named": SharedBase("base", 1, lora=LORA),
        "loaded": SharedBase(loaded, 1, lora=LORA, tokenizer=tiny_tokenizer()),
        "separate": Separate(["./base"], lora=LORA),
    }
    for name, settings in given.items():
        build_team(settings).save(name)
    monkeypatch.chdir("/")
    for name in given:
        config = json.loads((tmp_path / name / "agent_0" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == base


def test_a_relative_base_that_is_not_here(agents: Path) -> None:
    for name in ("./base", "base"):
        write_config(agents / "agent_0", base_model_name_or_path=name)
        with pytest.raises(
            ValueError, match=rf"agent_0' of agent_0 stands on base_model_name_or_path='{name}', which .*"
        ):
            build_team(Separate([str(agents / "agent_0")]))


def saved_by_peft(base: str, folder: Path, **settings: Any) -> str:
    network = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings),
    )
    network.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("saved", "written", "found"),
    [
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "pissa_niter_2"}, {}, "init_lora_weights='pissa_niter_2'"),
        ({"init_lora_weights": "olora"}, {}, "init_lora_weights='olora'"),
        ({}, {"init_lora_weights": "corda"}, "init_lora_weights='corda'"),
        ({}, {"init_lora_weights": "lora_ga"}, "init_lora_weights='lora_ga'"),
        ({"layer_replication": [(0, 2), (1, 2)]}, {}, "layer_replication"),
        ({}, {"bias": "all"}, "bias='all'"),
    ],
)
def test_kinds_that_change_the_base(
    base: str, tmp_path: Path, saved: dict[str, Any], written: dict[str, Any], found: str
) -> None:
    folder = saved_by_peft(base, tmp_path / "adapter", **saved)
    write_config(Path(folder), **written)
    with pytest.raises(ValueError, match=rf"The adapter of agent_0 in .* changes its base \({found}\)"):
        build_team(SharedBase(base, 2, adapters=[folder, folder]))
    team = build_team(SharedBase(base, 1, lora=LORA))
    with pytest.raises(ValueError, match=rf"The adapter of critic in .* changes its base \({found}\)"):
        build_critics(AdapterCritic(adapters=[folder]), team, centralized=True)


@pytest.mark.parametrize("start", ["gaussian", "orthogonal", "eva", False])
def test_kinds_that_leave_the_base_alone(base: str, tmp_path: Path, start: str | bool) -> None:
    folder = saved_by_peft(base, tmp_path / "adapter", init_lora_weights=start)
    build_team(SharedBase(base, 2, adapters=[folder, folder]))


def test_pissa_on_a_base_of_its_own(base: str, tmp_path: Path) -> None:
    folder = saved_by_peft(base, tmp_path / "adapter", init_lora_weights="pissa")
    team = build_team(Separate([folder], tokenizers=[tiny_tokenizer()]))
    alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    with model_of(team).acting_as([0], [1]):
        torch.testing.assert_close(own_logits(model_of(team).causal), own_logits(alone))


def enlarged(base: str, seed: int, tokens: int = 261) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(tokens, mean_resizing=False)
    return model


@pytest.mark.parametrize(
    ("targets", "copies"),
    [
        (["q_proj"], None),
        (["q_proj", "lm_head"], None),
        (["q_proj", "embed_tokens"], None),
        (["q_proj"], ["embed_tokens"]),  # whose rows are trained, then
    ],
)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_rows_of_new_tokens_are_saved(tmp_path: Path, targets: list[str], copies: list[str] | None, tied: bool) -> None:
    base = save_tiny(tmp_path / "base", tiny_qwen2() if tied else tiny_llama())
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    lora = LoraSettings(rank=2, target_modules=targets, modules_to_save=copies)
    team = build_team(SharedBase(enlarged(base, 1), 2, lora=lora, tokenizer=tokenizer))
    names = [name for name, one in team.named_parameters() if one.requires_grad and one.shape == (261, 32)]
    assert len(names) == (2 if copies else 0)
    stir(team)
    team.save(tmp_path / "agents")
    ids = torch.tensor([[5, 259, 6, 260]])
    folders = [str(tmp_path / "agents" / f"agent_{agent}") for agent in range(2)]
    again = build_team(SharedBase(enlarged(base, 3), 2, adapters=folders, tokenizer=tokenizer))
    own = build_team(Separate(folders))
    for agent, folder in enumerate(folders):
        alone = PeftModel.from_pretrained(enlarged(base, 2), folder)
        expected = logits_of(team, agent, ids)
        with torch.no_grad():
            torch.testing.assert_close(alone(input_ids=ids).logits, expected)
        torch.testing.assert_close(logits_of(again, agent, ids), expected)
        torch.testing.assert_close(logits_of(own, agent, ids), expected)


def logits_of(team: AgentTeam, agent: int, ids: Tensor) -> Tensor:
    with torch.no_grad(), team.speaker(agent).acting_as([agent], [1]):
        logits: Tensor = team.speaker(agent).causal(input_ids=ids).logits
    return logits


def test_rows_of_new_tokens_that_do_not_fit(base: str, tmp_path: Path) -> None:
    for seed in (1, 2):
        team = build_team(SharedBase(enlarged(base, seed), 1, lora=LORA, tokenizer=tiny_tokenizer()))
        team.save(tmp_path / str(seed))
    folders = [str(tmp_path / str(seed) / "agent_0") for seed in (1, 2)]
    with pytest.raises(ValueError, match=r"agent_1 in .* brings the weights \S*weight of its base along"):
        build_team(SharedBase(enlarged(base, 1), 2, adapters=folders, tokenizer=tiny_tokenizer()))
    with pytest.raises(ValueError, match=r"agent_0 in .* with shape \(261, 32\), but here it is \(259, 32\)"):
        build_team(SharedBase(base, 2, adapters=folders))
    team = build_team(SharedBase(enlarged(base, 1), 1, lora=LORA, tokenizer=tiny_tokenizer()))
    with pytest.raises(ValueError, match=r"critic in .* not those of the base that it would share"):
        build_critics(AdapterCritic(adapters=folders[1:]), team, centralized=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_modules": ["q_proj", "vproj"]},
            r"\(target_modules=.* names 'vproj', .* Did you mean 'v_proj'\?",
        ),
        (
            {"target_modules": [r".*q_proj", "v_proj"]},
            "names '.*q_proj', but .* give a text, and no list",
        ),
        ({"target_modules": "q_proj"}, "target_modules='q_proj'.* fits no layer. A text is a regular expression"),
        ({"modules_to_save": ["lmhead"]}, r"\(modules_to_save=.* names 'lmhead', .* Did you mean 'lm_head'\?"),
        ({"exclude_modules": ["q_proj", "up_prj"]}, r"\(exclude_modules=.* 'up_prj', .* Did you mean 'up_proj'\?"),
        ({"exclude_modules": "q_proj"}, "exclude_modules='q_proj'.* fits no layer"),
        ({"modules_to_save": ["zzz"]}, "Use some of .*, lm_head, "),
    ],
)
def test_misspelled_names_of_layers(settings: dict[str, Any], message: str) -> None:
    lora = LoraSettings(**settings)
    with pytest.raises(ValueError, match=r"SharedBase\(lora=LoraSettings" + f".*{message}"):
        build_team(SharedBase(tiny_llama(), 2, lora=lora, tokenizer=tiny_tokenizer()))


def test_misspelled_names_for_critics(base: str) -> None:
    lora = LoraSettings(target_modules=["q_proj", "vproj"])
    team = build_team(SharedBase(base, 2, lora=LORA))
    for settings, name in ((AdapterCritic(lora=lora), "AdapterCritic"), (ModelCritic(base, lora=lora), "ModelCritic")):
        with pytest.raises(ValueError, match=rf"{name}\(lora=LoraSettings.* names 'vproj'"):
            build_critics(settings, team, centralized=True)


def test_separate_models_may_share_names_of_several_kinds() -> None:
    def settings(*names: str) -> Separate:
        lora = LoraSettings(target_modules=list(names))
        return Separate([tiny_llama(), tiny_gpt2()], lora=lora, tokenizers=[tiny_tokenizer()] * 2)

    build_team(settings("q_proj", "c_attn"))
    with pytest.raises(ValueError, match=r"Separate\(lora=LoraSettings.* names 'cattn', .* Did you mean 'c_attn'"):
        build_team(settings("q_proj", "c_attn", "cattn"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("lora", [LORA, None], ids=["adapters", "all weights"])
def test_a_base_with_broken_weights(value: float, lora: LoraSettings | None) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = value
    settings = Separate([model], lora=lora, tokenizers=[tiny_tokenizer()])
    with pytest.raises(ValueError, match=r"itself holds NaN or infinity in model.layers.0.self_attn.q_proj.weight"):
        build_team(settings)


def test_attention_that_fails_in_64_bits() -> None:
    with pytest.raises(ValueError, match=r'In 64 bits, attention .* Use dtype="float32"'):
        build_team(SharedBase(tiny_llama(attn_implementation="eager").double(), 1, tokenizer=tiny_tokenizer()))
