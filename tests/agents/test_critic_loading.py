"""Saving critics and loading them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import LoraSettings, Separate, SharedBase
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.critics.critics import CriticTeam
from comlrl_lightning.critics.loading import build_critics
from comlrl_lightning.critics.settings import AdapterCritic, ModelCritic, ValueHead
from tests.agents.critics import critics_of, talk
from tests.agents.helpers import stir
from tests.tiny_lm import save_tiny, tiny_gpt2, tiny_llama, tiny_tokenizer


@pytest.fixture
def base(tmp_path: Path) -> str:
    return save_tiny(tmp_path / "base")


def new_team(base: str) -> AgentTeam:
    torch.manual_seed(0)
    team = build_team(SharedBase(base, 2, lora=LoraSettings(rank=2)))
    stir(team)
    return team


def saved(team: AgentTeam, critics: CriticTeam, folder: Path) -> None:
    team.save(folder)
    critics.save(folder)


def folders(folder: Path, *names: str) -> list[str]:
    return [str(folder / name) for name in names]


@pytest.mark.parametrize("hidden_size", [None, 4])
def test_value_heads(base: str, tmp_path: Path, hidden_size: int | None) -> None:
    team, out = new_team(base), tmp_path / "out"
    critics = critics_of(ValueHead(hidden_size), team)
    saved(team, critics, out)
    assert sorted(entry.name for entry in out.iterdir() if entry.is_dir()) == ["agent_0", "agent_1"]
    names = folders(out, "agent_0", "agent_1")
    again = build_team(SharedBase(base, 2, adapters=names))
    loaded = build_critics(ValueHead(hidden_size, heads=names), again, centralized=False)
    torch.testing.assert_close(loaded.values(talk(team)), critics.values(talk(team)))


def test_value_heads_of_fully_trained_agents(base: str, tmp_path: Path) -> None:
    team, out = build_team(Separate([base, base])), tmp_path / "out"
    critics = critics_of(ValueHead(), team)
    saved(team, critics, out)
    names = folders(out, "agent_0", "agent_1")
    loaded = build_critics(ValueHead(heads=names), build_team(Separate([*names])), centralized=False)
    torch.testing.assert_close(loaded.values(talk(team)), critics.values(talk(team)))


@pytest.mark.parametrize("centralized", [True, False])
def test_adapters(base: str, tmp_path: Path, centralized: bool) -> None:
    team, out = new_team(base), tmp_path / "out"
    critics = critics_of(AdapterCritic(LoraSettings(rank=4)), team, centralized=centralized)
    saved(team, critics, out)
    own = ["critic"] if centralized else ["critic_0", "critic_1"]
    assert sorted(entry.name for entry in out.iterdir() if entry.is_dir()) == ["agent_0", "agent_1", *own]
    names = folders(out, *own)
    loaded = build_critics(AdapterCritic(adapters=names), new_team(base), centralized=centralized)
    torch.testing.assert_close(loaded.values(talk(team)), critics.values(talk(team)))
    sizes = [[len(group) for group in one.parameter_groups().values()] for one in (critics, loaded)]
    assert sizes[0] == sizes[1]
    # By PEFT alone, and nobody else's weights with it.
    AutoPeftModelForCausalLM.from_pretrained(names[0])
    assert Path(names[0], "adapter_model.safetensors").stat().st_size < 60_000


@pytest.mark.parametrize("freeze_backbone", [True, False])
def test_critics_of_another_name(base: str, tmp_path: Path, freeze_backbone: bool) -> None:
    team, out = new_team(base), tmp_path / "out"
    critics_of(AdapterCritic(LoraSettings(rank=4)), team, centralized=True).save(out)
    own = critics_of(AdapterCritic(LoraSettings(rank=2)), team, centralized=True, name="reward_model")
    saved(team, own, out)
    names = sorted(entry.name for entry in out.iterdir() if entry.is_dir())
    assert names == ["agent_0", "agent_1", "critic", "reward_model"]
    loaded = build_critics(
        AdapterCritic(adapters=folders(out, "reward_model")),
        new_team(base),
        centralized=True,
        name="reward_model",
        freeze_backbone=freeze_backbone,
    )
    torch.testing.assert_close(loaded.values(talk(team)), own.values(talk(team)))
    # A frozen adapter is what was loaded, and is written again.
    assert len(loaded.parameter_groups()["reward_model"]) == (2 if freeze_backbone else 30)
    loaded.save(tmp_path / "again")
    again = build_critics(
        ModelCritic(str(tmp_path / "again" / "reward_model")), team, centralized=True, name="reward_model"
    )
    torch.testing.assert_close(again.values(talk(team)), own.values(talk(team)))


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)])
def test_central_models(base: str, tmp_path: Path, lora: LoraSettings | None) -> None:
    other = save_tiny(tmp_path / "other", tiny_gpt2(n_positions=512), tiny_tokenizer(reverse=True))
    team, out = new_team(base), tmp_path / "out"
    critics = critics_of(ModelCritic(other, lora=lora), team, centralized=True, num_outputs=2)
    saved(team, critics, out)
    folder = str(out / "critic")
    loaded = build_critics(ModelCritic(folder), team, centralized=True, num_outputs=2)
    torch.testing.assert_close(loaded.values(talk(team)), critics.values(talk(team)))
    assert [*loaded.parameter_groups()["critic"]] == [*critics.parameter_groups()["critic"]]
    # By transformers alone.
    (AutoModelForCausalLM if lora is None else AutoPeftModelForCausalLM).from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("a").input_ids == tiny_tokenizer(reverse=True)("a").input_ids


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)])
def test_models_by_name_for_each_agent(base: str, tmp_path: Path, lora: LoraSettings | None) -> None:
    other = save_tiny(tmp_path / "other", tiny_gpt2(), tiny_tokenizer(reverse=True))
    team, out = new_team(base), tmp_path / "out"
    critics = critics_of(ModelCritic(other, lora=lora, max_tokens=50), team)
    assert len(critics.own_models) == (2 if lora is None else 1)
    saved(team, critics, out)
    settings = ModelCritic(models=folders(out, "critic_0", "critic_1"), max_tokens=50)
    loaded = build_critics(settings, team, centralized=False)
    torch.testing.assert_close(loaded.values(talk(team)), critics.values(talk(team)))


def test_an_adapter_on_a_saved_critic_takes_its_head_along(base: str, tmp_path: Path) -> None:
    team, out = new_team(base), tmp_path / "out"
    critics = critics_of(ModelCritic(base), team, centralized=True)
    critics.save(out)
    settings = ModelCritic(str(out / "critic"), lora=LoraSettings(rank=2))
    loaded = build_critics(settings, team, centralized=True)
    # A new adapter changes nothing yet.
    torch.testing.assert_close(loaded.values(talk(team)), critics.values(talk(team)))


def test_a_tokenizer_stays_at_the_base_of_an_adapter_without_one(base: str, tmp_path: Path) -> None:
    team, out = new_team(base), tmp_path / "out"
    critics = critics_of(ModelCritic(base, lora=LoraSettings(rank=2)), team, centralized=True)
    critics.save(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / "critic" / name).unlink()
    loaded = build_critics(ModelCritic(str(out / "critic")), team, centralized=True)
    torch.testing.assert_close(loaded.values(talk(team)), critics.values(talk(team)))


def test_an_adapter_folder_without_a_base_is_an_error(base: str, tmp_path: Path) -> None:
    team, out = new_team(base), tmp_path / "out"
    critics_of(ModelCritic(base, lora=LoraSettings(rank=2)), team, centralized=True).save(out)
    path = out / "critic" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(ValueError, match=r"ModelCritic\(...\): the adapter folder .*critic' does not say which model"):
        build_critics(ModelCritic(str(out / "critic")), team, centralized=True)


def test_number_formats(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "half", tiny_llama().to(torch.bfloat16))
    team = new_team(base)
    for settings, dtype in (
        (ModelCritic(base), torch.float32),
        (ModelCritic(base, lora=LoraSettings(rank=2)), torch.bfloat16),
        (ModelCritic(base, dtype="float32", lora=LoraSettings(rank=2)), torch.float32),
    ):
        critics = build_critics(settings, team, centralized=True)
        assert critics.bodies[0].model.causal.get_input_embeddings().weight.dtype == dtype
        trained = {p.dtype for p in critics.parameter_groups()["critic"].values()}
        assert trained == {torch.float32}
        assert critics.values(talk(team)).dtype == torch.float32
    frozen = build_critics(ModelCritic(base), team, centralized=True, freeze_backbone=True)
    assert {p.dtype for p in frozen.own_models.parameters()} == {torch.bfloat16}


def test_folders_without_a_head_or_with_another(base: str, tmp_path: Path) -> None:
    team, out = new_team(base), tmp_path / "out"
    saved(team, critics_of(ValueHead(), team), out)
    names = folders(out, "agent_0", "agent_1")
    with pytest.raises(ValueError, match=r"base' holds no value_head.safetensors. Use one that save_agents wrote"):
        build_critics(ValueHead(heads=[base, base]), team, centralized=False)
    with pytest.raises(ValueError, match=r"has the shapes .* this critic .*Use the same model, hidden_size"):
        build_critics(ValueHead(3, heads=names), team, centralized=False)


@pytest.mark.parametrize(
    ("settings", "centralized", "message"),
    [
        (None, False, r"critic=None is no critic. Use ValueHead\(\), AdapterCritic\(\) or ModelCritic"),
        (ValueHead(), True, r"critic=ValueHead\(\) reads the history of one agent"),
        (ValueHead(heads=["a"]), False, r"critic=ValueHead\(heads=\['a'\]\) does not fit 2 critics"),
        (AdapterCritic(adapters=["a", "b"]), True, r"AdapterCritic\(adapters=\['a', 'b'\]\) does not fit 1 critics"),
        (ValueHead(heads=cast("list[str]", "ab")), False, r"critic=ValueHead\(heads='ab'\) does not fit 2"),
        (
            ModelCritic(models=["a"]),
            True,
            r"ModelCritic\(models=...\) has 1 models for one central critic. Give model=",
        ),
        (ModelCritic(models=["a"]), False, r"ModelCritic\(models=...\) has 1 models for 2 agents. Give one model per"),
        (
            ModelCritic(object(), tokenizer="t"),
            False,
            r"ModelCritic\(model=...\) is one loaded model, but 2 agents have a critic each",
        ),
    ],
)
def test_critics_that_do_not_fit(base: str, settings: Any, centralized: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_critics(settings, new_team(base), centralized=centralized)


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        (ValueHead, {"hidden_size": 0}, r"ValueHead\(hidden_size=0\) is out of range"),
        (AdapterCritic, {"hidden_size": 1.5}, r"AdapterCritic\(hidden_size=1.5\) is out of range"),
        (AdapterCritic, {"lora": 16}, r"AdapterCritic\(lora=16\) is not a LoraSettings"),
        (AdapterCritic, {"max_tokens": 0}, r"AdapterCritic\(max_tokens=0\) is out of range"),
        (ModelCritic, {"model": "a", "max_tokens": 0}, r"ModelCritic\(max_tokens=0\) is out of range"),
        (ModelCritic, {"model": "a", "hidden_size": -1}, r"ModelCritic\(hidden_size=-1\) is out of range"),
        (ModelCritic, {}, r"ModelCritic\(model=None, models=None\) must have exactly one of the two"),
        (ModelCritic, {"model": "a", "models": ["b"]}, "must have exactly one of the two"),
        (ModelCritic, {"models": "ab"}, r"ModelCritic\(models='ab', tokenizers=None\) do not match"),
        (ModelCritic, {"models": ["a"], "tokenizers": ["b", "c"]}, "do not match. Give two lists"),
        (ModelCritic, {"model": object()}, r"has a loaded model without a tokenizer. Pass tokenizer="),
        (ModelCritic, {"models": ["a", object()], "tokenizers": ["t", None]}, "has a loaded model without a tokenizer"),
        (
            ModelCritic,
            {"model": object(), "tokenizer": "t", "dtype": "auto"},
            r"ModelCritic\(dtype='auto', model",
        ),
    ],
)
def test_wrong_critics(settings: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**arguments)


def test_a_model_that_carries_adapters_already(base: str) -> None:
    team = new_team(base)
    model = tiny_llama()
    settings = ModelCritic(model, tokenizer=tiny_tokenizer(), lora=LoraSettings(rank=2))
    build_critics(settings, team, centralized=True)
    with pytest.raises(ValueError, match="ModelCritic got a loaded LlamaForCausalLM that carries adapters already"):
        build_critics(settings, team, centralized=True)
