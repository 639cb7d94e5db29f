"""Descriptions of agents, adapters and sampling."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from comlrl_lightning.agents.settings import LoraSettings, Sampling, Separate, SharedBase


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, r"LoraSettings\(rank=0\) is out of range"),
        ({"rank": 2.0}, r"LoraSettings\(rank=2.0\) is out of range"),
        ({"alpha": 0}, r"LoraSettings\(alpha=0\) is out of range"),
        ({"alpha": float("nan")}, r"LoraSettings\(alpha=nan\) is out of range"),
        ({"alpha": "x"}, r"LoraSettings\(alpha='x'\) is out of range"),
        ({"target_modules": 5}, r"LoraSettings\(target_modules=5\) names no layers"),
        ({"modules_to_save": [1]}, r"LoraSettings\(modules_to_save=\[1\]\) names no layers"),
        ({"use_dora": "yes"}, r"LoraSettings\(use_dora='yes'\) is unknown. Use one of True, False"),
        ({"dropout": 0.1}, r"LoraSettings\(dropout=0.1\) would let rollouts and updates score different policies"),
    ],
)
def test_wrong_lora_settings(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraSettings(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, r"Sampling\(max_new_tokens=0\) is out of range"),
        ({"max_new_tokens": True}, r"Sampling\(max_new_tokens=True\) is out of range"),
        ({"min_new_tokens": -1}, r"Sampling\(min_new_tokens=-1\) is out of range"),
        ({"min_new_tokens": 300}, r"Sampling\(min_new_tokens=300\) is above max_new_tokens=256"),
        ({"temperature": -1.0}, r"Sampling\(temperature=-1.0\) is out of range"),
        ({"temperature": float("inf")}, r"Sampling\(temperature=inf\) is out of range"),
        ({"temperature": "1"}, r"Sampling\(temperature='1'\) is out of range"),
        ({"temperature": None}, r"Sampling\(temperature=None\) is out of range"),
        ({"temperature": True}, r"Sampling\(temperature=True\) is out of range"),
        ({"top_p": "a"}, r"Sampling\(top_p='a'\) is out of range"),
        ({"stop": 5}, r"Sampling\(stop=5\) holds something other than texts"),
        ({"top_p": 0.0}, r"Sampling\(top_p=0.0\) is out of range"),
        ({"top_p": 1.1}, r"Sampling\(top_p=1.1\) is out of range"),
        ({"top_k": 0}, r"Sampling\(top_k=0\) is out of range"),
        ({"stop": ("a", "")}, r"Sampling\(stop=\('a', ''\)\) holds something other than texts"),
        ({"backend": "vllm"}, r"Sampling\(backend='vllm'\) is unknown. Use one of 'native', 'transformers'"),
    ],
)
def test_wrong_sampling(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)


def test_one_stop_string_is_not_its_letters() -> None:
    assert Sampling(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_agents": 0}, r"SharedBase\(num_agents=0\) is out of range"),
        ({"dtype": "int8"}, r"SharedBase\(dtype='int8'\) is unknown"),
        ({"reference": "last"}, r"SharedBase\(reference='last'\) is unknown. Use one of 'auto', 'base', 'initial'"),
        ({"long_prompts": "drop"}, r"SharedBase\(long_prompts='drop'\) is unknown"),
        ({"max_prompt_tokens": 0}, r"SharedBase\(max_prompt_tokens=0\) is out of range"),
        ({"lora": None}, r"SharedBase\(lora=None\) is not a LoraSettings. .* use Separate"),
        ({"adapters": "nowhere"}, r"SharedBase\(adapters='nowhere'\) holds no folder 'agent_0'. Give the folder"),
        ({"adapters": 5}, r"SharedBase\(adapters=5\) is no list"),
        ({"model_kwargs": "x"}, r"SharedBase\(model_kwargs='x'\) is no mapping"),
        ({"gradient_checkpointing": "no"}, r"SharedBase\(gradient_checkpointing='no'\) is unknown"),
        ({"adapters": ["a"]}, r"SharedBase\(adapters=...\) holds 1 folders for num_agents=2"),
        ({"model": object()}, r"SharedBase\(model=...\) is a loaded model without a tokenizer"),
        ({"model": object(), "tokenizer": "t", "dtype": "float32"}, r"SharedBase\(dtype='float32'\) cannot apply"),
        ({"model": object(), "tokenizer": "t", "model_kwargs": {}}, r"SharedBase\(model_kwargs=\{\}\) cannot apply"),
    ],
)
def test_wrong_shared_base(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SharedBase(**{"model": "name", "num_agents": 2, **arguments})


def test_wrong_separate() -> None:
    loaded = object()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"models": []}, r"Separate\(models=\[\]\) is no list of models"),
        ({"models": "name"}, r"Separate\(models='name'\) is no list of models"),
        ({"models": ["a", "b"], "tokenizers": ["t"]}, r"Separate\(tokenizers=...\) holds 1 tokenizers for 2 models"),
        ({"models": ["a", loaded]}, "holds a loaded model for agent_1 without a tokenizer"),
        ({"models": [loaded, "b"], "tokenizers": [None, "t"]}, "holds a loaded model for agent_0 without a tokenizer"),
        (
            {"models": [loaded, "b", loaded], "tokenizers": ["t", "t", "t"]},
            "holds the same loaded model for agent_0 and agent_2",
        ),
        (
            {"models": ["a", loaded], "tokenizers": ["t", "t"], "dtype": "auto"},
            r"Separate\(dtype='auto'\) cannot apply",
        ),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            Separate(**arguments)


def test_number_of_agents_and_dtype() -> None:
    assert SharedBase("name", 3).num_agents == 3
    assert Separate(["a", "a"]).num_agents == 2
    assert SharedBase("name", 1, dtype=torch.bfloat16).dtype == "bfloat16"  # type: ignore[arg-type]


def test_descriptions_need_no_heavy_library() -> None:
    code = "import sys, comlrl_lightning.agents.settings; print({'torch', 'transformers', 'peft'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize("models", [5, object(), iter(["a"]), "ab", []])
def test_models_are_a_list(models: Any) -> None:
    with pytest.raises(
        ValueError, match=r"Separate\(models=.*\) is no list of models. Give a list, one model per agent"
    ):
        Separate(models)


def test_separate_takes_lora_settings_only() -> None:
    with pytest.raises(ValueError, match=r"Separate\(lora={'rank': 4}\) is not a LoraSettings. Give LoraSettings"):
        Separate(["a"], lora={"rank": 4})  # type: ignore[arg-type]


def test_one_folder_of_adapters_holds_one_per_model(tmp_path: Path) -> None:
    folders = [str(tmp_path / f"agent_{agent}") for agent in range(2)]
    Path(folders[0]).mkdir()
    settings = SharedBase("name", 2, adapters=str(tmp_path))
    assert settings.of_size(1) == SharedBase("name", 1, adapters=folders[:1])
    with pytest.raises(ValueError, match=r"SharedBase\(adapters='.*'\) holds no folder 'agent_1'. Give the folder"):
        settings.of_size(2)
    Path(folders[1]).mkdir()
    assert settings.of_size(2) == SharedBase("name", 2, adapters=folders)


def test_a_list_of_adapters_is_cut_to_the_models() -> None:
    assert SharedBase("name", 2, adapters=["a", "b"]).of_size(1) == SharedBase("name", 1, adapters=["a"])
    assert SharedBase("name", 2).of_size(1) == SharedBase("name", 1)
