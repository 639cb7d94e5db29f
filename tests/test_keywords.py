"""Unknown keywords of public constructors."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from typing import Any

import pytest

import comlrl_lightning
from comlrl_lightning import (
    IAC,
    MADPO,
    MAGRPO,
    MARLHF,
    FrozenCopy,
    RewardProcessors,
    Sampling,
    TaskDataModule,
    callbacks,
)
from comlrl_lightning.keywords import DATACLASSES, KnownKeywords, keywords_of

PUBLIC: list[Any] = [
    *(getattr(comlrl_lightning, name) for name in comlrl_lightning.__all__ if name != "RewardProcessors"),
    *(vars(callbacks)[name] for name in callbacks.__all__),
    *(RewardProcessors.scale, RewardProcessors.shift, RewardProcessors.clip),
]


CHECKED = [one for one in PUBLIC if inspect.isclass(one) and (issubclass(one, KnownKeywords) or one in DATACLASSES)]


def refused(cls: Any, **keywords: Any) -> str:
    with pytest.raises(TypeError) as caught:
        cls(**keywords)
    return str(caught.value)


@pytest.mark.parametrize(
    "cls",
    [one for one in PUBLIC if inspect.isclass(one) and (issubclass(one, KnownKeywords) or one in DATACLASSES)],
    ids=lambda cls: cls.__name__,
)
def test_every_public_class_says_what_was_meant(cls: type) -> None:
    kind: Any = cls
    for name in keywords_of(kind):
        message = f"{cls.__name__}({name}x=...) has no such setting. Did you mean {name}?"
        assert refused(cls, **{f"{name}x": 1}) == message


@pytest.mark.parametrize(
    ("cls", "name", "advice"),
    [
        (MAGRPO, "learning_rate", "Did you mean agent_learning_rate?"),
        (IAC, "td_lambda", "Did you mean gae_lambda?"),
        (TaskDataModule, "batchsize", "Did you mean batch_size?"),
        # Of another class of ours, and not of one that has a name like it.
        (MAGRPO, "max_new_tokens", "It is one of Sampling: give it there, or leave it out."),
        (MAGRPO, "gae_lambda", "It is one of ActorCritic"),
        (Sampling, "q", "Leave it out; there are max_new_tokens, min_new_tokens, temperature, top_p, top_k, stop,"),
        (FrozenCopy, "number", "Leave it out; there is none."),
        (MAGRPO, "q", "Leave it out; help(MAGRPO) explains those that there are."),
    ],
)
def test_what_to_do(cls: Any, name: str, advice: str) -> None:
    assert refused(cls, **{name: 1}).startswith(f"{cls.__name__}({name}=...) has no such setting. {advice}")


@pytest.mark.parametrize(("cls", "name"), [(MARLHF, "joint_mode"), (MADPO, "num_generations"), (MADPO, "num_turns")])
def test_settings_of_other_algorithms_name_their_owners(cls: Any, name: str) -> None:
    assert re.search(r"has no such setting\. It is one of .*MAGRPO", refused(cls, **{name: 2}))


RECORDS = {
    "Completion",
    "GenerationEngine",
    "GenerationRequest",
    "Node",
    "PolicyBatch",
    "PolicyLoss",
    "Rollouts",
    "Sampled",
    "Task",
    "TaskWandbLogger",
    "TextEnvironment",
}
"""Public classes without settings, or with those of another library."""


def test_all_other_public_classes_do_so() -> None:
    classes = {one for one in PUBLIC if inspect.isclass(one)}
    silent = {one.__name__ for one in classes if not issubclass(one, KnownKeywords) and one not in DATACLASSES}
    assert silent <= RECORDS


class Mine(TaskDataModule):
    """A subclass of a user, whose constructor takes what it likes."""

    def __init__(self, **keywords: Any) -> None:
        self.own = keywords.pop("own")
        super().__init__(**keywords)


class AsBefore(Sampling):
    """One that adds nothing to the constructor."""


def test_constructors_of_users_are_left_alone() -> None:
    assert Mine(own=3, train_dataset=[{"prompt": "hi"}]).own == 3
    assert refused(AsBefore, topp=1.0) == "AsBefore(topp=...) has no such setting. Did you mean top_p?"


def test_copies_need_no_arguments() -> None:
    sampling = Sampling(top_p=0.5)
    assert copy.deepcopy(sampling) == pickle.loads(pickle.dumps(sampling)) == sampling
    assert list(inspect.signature(MAGRPO).parameters)[:3] == ["agents", "reward_func", "formatters"]
