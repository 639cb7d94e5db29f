"""Settings as plain values and back."""

from __future__ import annotations

from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from comlrl_lightning.agents.settings import LoraSettings, Sampling, Separate, SharedBase
from comlrl_lightning.rewards import RewardProcessors
from comlrl_lightning.utilities.plain import callable_from_plain, from_plain, to_plain
from tests.algorithms.support import echo, uneven_reward
from tests.tiny_lm import tiny_llama, tiny_tokenizer


@pytest.mark.parametrize(
    "settings",
    [
        SharedBase("name", 2, lora=LoraSettings(rank=4, target_modules=["a"]), model_kwargs={"x": [1]}),
        Separate(["a", "b"], lora=LoraSettings(), max_prompt_tokens=5),
        Separate(["a"], reference="initial"),
        Sampling(stop=("a", "b")),
        RewardProcessors.scale(10.0),
        RewardProcessors.chain(RewardProcessors.scale(10.0), RewardProcessors.shift(1.0)),
        None,
        [1, 2.5, "x", True],
    ],
)
def test_there_and_back(settings: Any) -> None:
    plain = to_plain({"a": settings})
    assert from_plain("a", plain["a"]) == settings


def test_numpy_values_become_builtin_ones() -> None:
    plain = to_plain({"rate": np.float64(0.5), "name": np.str_("a"), "path": PurePosixPath("a/b")})
    assert plain == {"rate": 0.5, "name": "a", "path": "a/b"}
    assert {type(value) for value in plain.values()} == {float, str}


def test_plain_forms() -> None:
    assert to_plain(SharedBase("name", 2))["init_args"]["lora"]["init_args"]["rank"] == 16
    assert to_plain(Path("some") / "folder") == "some/folder"
    assert to_plain(uneven_reward) == "tests.algorithms.support.uneven_reward"
    assert to_plain(torch.optim.SGD) == "torch.optim.sgd.SGD"


def test_functions_come_back() -> None:
    functions = [uneven_reward, echo]
    assert callable_from_plain("formatters", to_plain(functions)) == functions
    halved = callable_from_plain("optimizer", to_plain(partial(torch.optim.SGD, momentum=0.5)))
    assert (halved.func, halved.keywords) == (torch.optim.SGD, {"momentum": 0.5})


@pytest.mark.parametrize(
    ("value", "remark"),
    [
        (SharedBase(tiny_llama(), 2, tokenizer=tiny_tokenizer()), "LlamaForCausalLM object>"),
        (lambda text: text, "<builtins.function object>"),
        (torch.float32, "<torch.dtype object>"),
    ],
)
def test_what_cannot_be_held_must_be_given_again(value: Any, remark: str) -> None:
    plain = to_plain(value)
    with pytest.raises(ValueError, match=rf"setting was <.*{remark.lstrip('<')} .* Pass setting= to load it"):
        from_plain("setting", plain)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nosuch_module.function", "setting='nosuch_module.function' cannot be imported"),
        ("math.nosuch", r"setting='math.nosuch' is not there: .* has no 'nosuch'"),
        ("plain_name", "setting='plain_name' cannot be imported"),
    ],
)
def test_import_paths_that_lead_nowhere(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        callable_from_plain("setting", path)
