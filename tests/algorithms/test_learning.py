"""Every algorithm learns: the reward of a tiny team must rise clearly within twenty updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comlrl_lightning.agents.settings import LoraSettings, Sampling, SharedBase
from comlrl_lightning.algorithms import ALGORITHMS, MAGRPO, CooperativeModule
from tests.algorithms.support import MemoryLogger, echo, fit, make_module
from tests.tiny_lm import tiny_llama, tiny_tokenizer

NUM_UPDATES = 20
ITEMS = [{"prompt": prompt} for prompt in "abcd"]


def ascii_reward(*completions: list[str]) -> list[float]:
    """From -1 to 1: the share of agents who say an ASCII character, which about half of the vocabulary is."""
    return [
        2 * sum(text != "" and text.isascii() for text in joint) / len(joint) - 1
        for joint in zip(*completions, strict=True)
    ]


def rise(algorithm: type[CooperativeModule], **settings: Any) -> float:
    """Mean reward of the last four updates minus that of the first four."""
    torch.manual_seed(0)
    logger = MemoryLogger()
    agents = SharedBase(tiny_llama(), num_agents=2, lora=LoraSettings(rank=4), tokenizer=tiny_tokenizer())
    module = make_module(
        algorithm,
        agents,
        reward_func=ascii_reward,
        sampling=Sampling(max_new_tokens=1),
        agent_learning_rate=0.02,
        **settings,
    )
    fit(module, ITEMS * NUM_UPDATES, len(ITEMS), logger=logger)
    rewards = [metrics["turn_1/reward_mean"] for _, metrics in logger.rows]
    assert len(rewards) == NUM_UPDATES
    return (sum(rewards[-4:]) - sum(rewards[:4])) / 4


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_reward_rises(algorithm: type[CooperativeModule]) -> None:
    # Five seeds rose by .3 to .95.
    assert rise(algorithm, num_generations=8) > 0.3


def test_with_everything_on() -> None:
    settings = {
        "num_turns": 2,
        "external_transition": echo,
        "joint_mode": "cross",
        "num_generations": 3,
        "advantage_normalization": "batch",
        "reference_kl_coef": 0.01,
        "entropy_coef": 0.001,
        "num_inner_epochs": 2,
        "clip_epsilon": 0.2,
        "clip_epsilon_high": 0.3,
    }
    assert rise(MAGRPO, **settings) > 0.3
