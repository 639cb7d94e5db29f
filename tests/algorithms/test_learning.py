"""Every algorithm learns: the reward of a tiny team must rise clearly within twenty updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comlrl_lightning.agents.settings import LoraSettings, Sampling, SharedBase
from comlrl_lightning.algorithms import IAC, MAAC, MAGRPO, POLICY_GRADIENT_ALGORITHMS, CooperativeModule
from comlrl_lightning.critics.settings import AdapterCritic, ModelCritic, ValueHead
from tests.algorithms.support import MemoryLogger, echo, fit, make_module
from tests.tiny_lm import tiny_gpt2, tiny_llama, tiny_tokenizer

NUM_UPDATES = 20
ITEMS = [{"prompt": prompt} for prompt in "abcd"]


def ascii_reward(*completions: list[str]) -> list[float]:
    """From -1 to 1: the share of agents who say an ASCII character, which about half of the vocabulary is."""
    return [
        2 * sum(text != "" and text.isascii() for text in joint) / len(joint) - 1
        for joint in zip(*completions, strict=True)
    ]


def prepared(algorithm: type[CooperativeModule], **settings: Any) -> CooperativeModule:
    """Two agents who answer with one token, earn `ascii_reward` and learn fast, unless said otherwise."""
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "reward_func": ascii_reward,
        "sampling": Sampling(max_new_tokens=1),
        "agent_learning_rate": 0.02,
    }
    agents = SharedBase(tiny_llama(), num_agents=2, lora=LoraSettings(rank=4), tokenizer=tiny_tokenizer())
    return make_module(algorithm, agents, **{**defaults, **settings})


def logs(module: CooperativeModule) -> list[dict[str, float]]:
    """What each of the updates of a fit logs."""
    logger = MemoryLogger()
    fit(module, ITEMS * NUM_UPDATES, len(ITEMS), logger=logger)
    assert len(logger.rows) == NUM_UPDATES
    return [metrics for _, metrics in logger.rows]


def rise(module: CooperativeModule) -> float:
    """Mean reward of the last four updates minus that of the first four."""
    rewards = [metrics["turn_1/reward_mean"] for metrics in logs(module)]
    return (sum(rewards[-4:]) - sum(rewards[:4])) / 4


@pytest.mark.parametrize("algorithm", POLICY_GRADIENT_ALGORITHMS)
def test_the_reward_rises(algorithm: type[CooperativeModule]) -> None:
    # Five seeds rose by .3 to .95.
    assert rise(prepared(algorithm, num_generations=8)) > 0.3


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
    assert rise(prepared(MAGRPO, **settings)) > 0.3


def gpt2_critic() -> ModelCritic:
    """A critic of another family for the Llama agents, with a tokenizer that counts the other way round."""
    return ModelCritic(tiny_gpt2(seed=5), tokenizer=tiny_tokenizer(reverse=True), lora=LoraSettings(rank=4))


@pytest.mark.parametrize("critic_type", ["v", pytest.param("q", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("algorithm", "critic"), [(IAC, ValueHead), (IAC, AdapterCritic), (IAC, gpt2_critic), (MAAC, gpt2_critic)]
)
def test_with_every_kind_of_critic(algorithm: type[CooperativeModule], critic: Any, critic_type: str) -> None:
    # Two seeds rose by .8 to 1.
    settings = {"critic": critic(), "critic_type": critic_type, "critic_learning_rate": 0.01}
    assert rise(prepared(algorithm, num_generations=8, **settings)) > 0.3


def test_with_a_converged_q() -> None:
    # Its TD errors are almost 0 before the agents take their first step: they must not be what teaches them.
    module = prepared(MAAC, num_generations=8, critic_type="q", agent_learning_rate=0.0, critic_learning_rate=0.02)
    module.configure_model()
    assert logs(module)[-1]["agent_0/explained_variance"] > 0.6
    module.learning_rates[:2] = [0.02, 0.02]
    module.seed += 1
    assert rise(module) > 0.3


@pytest.mark.parametrize(("algorithm", "critic"), [(IAC, ValueHead()), (IAC, AdapterCritic()), (MAAC, AdapterCritic())])
def test_critics_foresee_what_a_prompt_is_worth(algorithm: type[CooperativeModule], critic: Any) -> None:
    # "a" to "d" earn -1 to 2 beside what the agents add: two seeds explained .8 of the variance.
    def reward(*completions: list[str], batch_items: list[dict[str, Any]]) -> list[float]:
        worth = "abcd".index(batch_items[0]["prompt"]) - 1.0
        return [worth + 0.5 * value for value in ascii_reward(*completions)]

    module = prepared(algorithm, reward_func=reward, critic=critic, critic_learning_rate=0.02, agent_learning_rate=0.01)
    explained = [metrics["agent_1/explained_variance"] for metrics in logs(module)]
    assert sum(explained[-4:]) / 4 > 0.3
