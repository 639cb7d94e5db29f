"""Settings as plain values and back."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np
import pytest
import torch

from comlrl_lightning.agents.settings import LoraSettings, Sampling, Separate, SharedBase
from comlrl_lightning.algorithms import MAGRPO
from comlrl_lightning.algorithms.checkpoint import check_settings
from comlrl_lightning.rewards import RewardProcessors
from comlrl_lightning.utilities.plain import callable_from_plain, from_plain, is_remark, to_plain
from tests.algorithms.support import echo, fit, tiny_agents, uneven_reward
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
        (lambda text: text, "<tests.algorithms.test_hparams.<lambda> object>"),
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


class Scorer:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def scaled(self, *texts: list[str]) -> list[float]:
        return [self.scale * len(text) for text in texts[0]]

    @classmethod
    def of_class(cls, *texts: list[str]) -> list[float]:
        return [float(cls is Scorer)] * len(texts[0])

    @staticmethod
    def alone(*texts: list[str]) -> list[float]:
        return [1.0] * len(texts[0])


class Heir(Scorer):
    pass


def plain_reward(*texts: Any, **settings: Any) -> list[float]:
    return [1.0] * len(texts[0])


def times_ten(function: Callable[..., list[float]]) -> Callable[..., list[float]]:
    @functools.wraps(function)
    def wrapper(*texts: list[str]) -> list[float]:
        return [10 * value for value in function(*texts)]

    return wrapper


@times_ten
def decorated_reward(*texts: list[str]) -> list[float]:
    return [1.0] * len(texts[0])


@functools.lru_cache
def cached(value: float) -> float:
    return value


class Level(StrEnum):
    LOW = "low"


class Wrapper:
    """An object with the name of the function that it wraps."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)

    def __call__(self, *texts: list[str]) -> list[float]:
        return [5.0] * len(texts[0])


@dataclasses.dataclass
class Factor:
    factor: float

    def __call__(self, value: float) -> float:
        return value * self.factor


class Doubled(Factor):
    def __init__(self, half: float) -> None:
        super().__init__(2 * half)


def renamed() -> Callable[[list[str]], list[float]]:
    def reward(texts: list[str]) -> list[float]:
        return [0.0] * len(texts)

    reward.__qualname__ = "plain_reward"
    return reward


TELLS = "tests.algorithms.test_hparams."


@pytest.mark.parametrize(
    ("function", "remark"),
    [
        (Scorer(2.0).scaled, f"<{TELLS}Scorer.scaled object>"),
        (Heir.of_class, f"<{TELLS}Scorer.of_class object>"),
        (times_ten(plain_reward), f"<{TELLS}plain_reward object>"),
        (Wrapper(plain_reward), f"<{TELLS}plain_reward object>"),
        (renamed(), f"<{TELLS}plain_reward object>"),
        (Scorer(2.0), f"<{TELLS}Scorer object>"),
        (Doubled(1.0), f"<{TELLS}Doubled object>"),
        (random.gauss, "<random.Random.gauss object>"),
        ("abc".count, "<None.str.count object>"),
        (partial(Scorer(2.0).scaled, ["a"]), f"<{TELLS}Scorer.scaled object>"),
        (partial(plain_reward, other=times_ten(plain_reward)), f"<{TELLS}plain_reward object>"),
        (RewardProcessors.chain(Factor(2.0).__call__), f"<{TELLS}Factor.__call__ object>"),
        (partial(plain_reward, level=Level.LOW), f"<{TELLS}Level.LOW object>"),
    ],
)
def test_names_that_lead_elsewhere_are_asked_for(function: Any, remark: str) -> None:
    plain = to_plain([function])
    with pytest.raises(ValueError, match="Pass setting= to load it, as in load_from_checkpoint") as caught:
        callable_from_plain("setting", plain)
    assert str(caught.value).startswith(f"setting was {remark} when")


@pytest.mark.parametrize(
    "function", [Scorer.of_class, Scorer.alone, plain_reward, decorated_reward, cached, math.exp, len]
)
def test_names_that_lead_to_the_function_load_it(function: Callable[..., Any]) -> None:
    plain = to_plain(function)
    assert not is_remark(plain)
    assert callable_from_plain("setting", plain) == function


@pytest.mark.parametrize(
    "settings",
    [
        RewardProcessors.chain(abs, RewardProcessors.scale(2.0)),
        RewardProcessors.chain(partial(pow, exp=2)),
        RewardProcessors.chain(cached, Factor(3.0)),
    ],
)
def test_functions_within_objects_come_back(settings: Any) -> None:
    again = from_plain("setting", to_plain(settings))
    assert again(-3.0 if again.processors[0] is abs else 3.0) == settings(3.0)


def test_arguments_of_partials_come_back_as_they_were() -> None:
    given = partial(plain_reward, ("a", 1), folder=PurePosixPath("a"), weights={1: 0.5}, sizes=(1, 2), names=["x"])
    again = from_plain("setting", to_plain(given))
    assert (again.func, again.args, again.keywords) == (given.func, given.args, given.keywords)


def test_other_wrapped_functions_are_no_resume() -> None:
    """A wrapper keeps the name of a function, and scores otherwise."""
    wrapped = to_plain(times_ten(plain_reward))
    check_settings({"reward_func": wrapped}, {"reward_func": wrapped})
    check_settings({"f": "<__main__.make.<locals>.f object>"}, {"f": "<train.make.<locals>.f object>"})
    with pytest.raises(ValueError, match=r"reward_func='<.*plain_reward object>' differs from"):
        check_settings({"reward_func": to_plain(plain_reward)}, {"reward_func": wrapped})


def test_a_checkpoint_names_all_functions_of_a_script_that_it_misses() -> None:
    """What ``__main__`` is depends on the script that runs: its names are asked for everywhere."""
    script: Any = "__main__.reward_func", ["__main__.brief", "__main__.detailed"]
    with pytest.raises(ValueError, match="reward_func was") as caught:
        MAGRPO(tiny_agents(), script[0], formatters=script[1], reward_processor=cast("Any", "<a.b object>"))
    assert str(caught.value) == (
        "reward_func was __main__.reward_func, formatters was __main__.brief, reward_processor was <a.b object> when"
        " the checkpoint was saved, whose names in a script lead nowhere in another one. Pass reward_func=,"
        " formatters=, reward_processor= to load it, as in load_from_checkpoint(path, reward_func=..., formatters=...,"
        " reward_processor=...)."
    )


def test_a_checkpoint_of_a_script_loads_with_its_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reward(first: list[str], second: list[str]) -> list[float]:
        return [0.0] * len(first)

    reward.__module__, reward.__qualname__ = "__main__", "reward"
    monkeypatch.setattr(sys.modules["__main__"], "reward", reward, raising=False)
    path = tmp_path / "run.ckpt"
    fit(MAGRPO(tiny_agents(), reward, sampling=Sampling(max_new_tokens=2)), [{"prompt": "a"}], 1).save_checkpoint(path)
    with pytest.raises(ValueError, match=r"agents was .*, reward_func was __main__.reward when"):
        MAGRPO.load_from_checkpoint(path)
    loaded = MAGRPO.load_from_checkpoint(path, agents=tiny_agents(), reward_func=reward)
    assert loaded.task_functions.reward.label == "reward_func=__main__.reward"


def test_an_optimizer_of_a_script_is_missed_by_the_next_fit_alone() -> None:
    module = MAGRPO(tiny_agents(), uneven_reward, optimizer=cast("Any", "__main__.make"))
    with pytest.raises(ValueError, match=r"optimizer was __main__.make when .* Pass optimizer= to load it"):
        module.configure_optimizers()
