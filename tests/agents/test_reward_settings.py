"""What is refused about a joint reward model, and how fast it learns."""

from __future__ import annotations

from typing import Any, cast

import pytest

from comlrl_lightning.agents.settings import LoraSettings
from comlrl_lightning.critics.reward_settings import JointRewardModel
from comlrl_lightning.critics.settings import AdapterCritic, ModelCritic, ValueHead
from comlrl_lightning.utilities.plain import from_plain, to_plain


@pytest.mark.parametrize(
    ("arguments", "rate"),
    [
        ({}, 1e-4),
        ({"model": ModelCritic("m", lora=LoraSettings())}, 1e-4),
        ({"model": ModelCritic("m")}, 1e-5),
        ({"model": ModelCritic("m"), "freeze_backbone": True}, 1e-4),
        ({"model": ModelCritic("m"), "learning_rate": 0.5}, 0.5),
    ],
)
def test_the_learning_rate(arguments: dict[str, Any], rate: float) -> None:
    assert JointRewardModel(**arguments).initial_learning_rate == rate


def test_it_comes_back_from_plain_values() -> None:
    settings = JointRewardModel(AdapterCritic(LoraSettings(rank=3), max_tokens=7), 1e-3, 2, 8, True, 0.2, False, 0.01)
    assert from_plain("reward_model", to_plain(settings)) == settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"model": ValueHead()},
            r"JointRewardModel\(model=ValueHead\(.*cannot read the answers of all agents. Use A",
        ),
        ({"model": ModelCritic(models=["a", "b"])}, r"\(models=...\)\) has 2 models, but one reads .* Give model=."),
        ({"model": AdapterCritic(adapters=["a", "b"])}, r"adapters=\['a', 'b'\]\)\) is one reward model. Give a list"),
        ({"model": AdapterCritic(adapters=cast("list[str]", "ab"))}, r"adapters='ab'\)\) is one reward model"),
        ({"learning_rate": 0.0}, r"JointRewardModel\(learning_rate=0.0\) is out of range. Use a number above 0"),
        ({"learning_rate": float("nan")}, r"JointRewardModel\(learning_rate=nan\)"),
        ({"num_epochs": 0}, r"JointRewardModel\(num_epochs=0\) is out of range"),
        ({"batch_size": 0}, r"JointRewardModel\(batch_size=0\) is out of range"),
        (
            {"held_out_share": 1.0},
            r"JointRewardModel\(held_out_share=1.0\) is out of range. Use a number from 0 to",
        ),
        ({"held_out_share": -0.1}, r"JointRewardModel\(held_out_share=-0.1\)"),
        (
            {"centering_coef": -1.0},
            r"JointRewardModel\(centering_coef=-1.0\) is out of range. Use a number of at",
        ),
        ({"freeze_backbone": 1}, r"JointRewardModel\(freeze_backbone=1\) is out of range. Use True or False"),
        ({"standardize": None}, r"JointRewardModel\(standardize=None\)"),
        ({"fresh_each_round": "yes"}, r"JointRewardModel\(fresh_each_round='yes'\)"),
    ],
)
def test_wrong_settings(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JointRewardModel(**arguments)


@pytest.mark.parametrize(
    "arguments", [{"held_out_share": 0}, {"centering_coef": 0}, {"learning_rate": 1}, {"batch_size": 1}]
)
def test_the_ends_of_the_ranges(arguments: dict[str, Any]) -> None:
    JointRewardModel(**arguments)
