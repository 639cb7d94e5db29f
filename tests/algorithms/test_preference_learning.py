"""Preference learning learns: within one to three rounds a tiny team must clearly get better at its task.

The numbers in the comments are those of four seeds, which made the models, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comlrl_lightning import TaskDataModule, evaluate
from comlrl_lightning.agents.settings import LoraSettings, Sampling, SharedBase
from comlrl_lightning.algorithms import MADPO, MARLHF, PreferenceModule
from comlrl_lightning.critics.reward_settings import JointRewardModel
from comlrl_lightning.preferences.comparators import (
    Comparator,
    CurrentPolicy,
    FixedModel,
    FrozenCopy,
    HistoryPolicy,
)
from comlrl_lightning.preferences.replay import AllHistory, CurrentRound, LambdaDecay, NearestK, Replay
from tests.algorithms.support import MemoryLogger, make_trainer
from tests.algorithms.test_learning import ascii_reward
from tests.tiny_lm import save_tiny, tiny_llama, tiny_tokenizer

ITEMS = [{"prompt": prompt} for prompt in "abcd"]
REWARD_MODEL = JointRewardModel(learning_rate=0.02, num_epochs=2)


def prepared(algorithm: type[PreferenceModule], seed: int = 1, **settings: Any) -> PreferenceModule:
    """Two agents who answer with one token, earn `ascii_reward` and learn fast, unless said otherwise."""
    agents = SharedBase(tiny_llama(seed), num_agents=2, lora=LoraSettings(rank=4), tokenizer=tiny_tokenizer())
    defaults: dict[str, Any] = {
        "reward_func": ascii_reward,
        "sampling": Sampling(max_new_tokens=1),
        "num_candidates": 8,
        "agent_learning_rate": 0.02,
        "seed": seed,
    }
    return algorithm(agents, **{**defaults, **settings})


def trained(
    module: PreferenceModule, num_rounds: int, num_items: int, num_epochs: int | None = None
) -> tuple[float, list[dict[str, float]]]:
    """Rise of the task's reward, measured on 256 items at random answers, and what was logged.

    Args:
        module: What learns.
        num_rounds: Rounds of learning.
        num_items: Task items of each epoch.
        num_epochs: Stop earlier, in the middle of a round.
    """
    data = TaskDataModule(
        ITEMS * (num_items // len(ITEMS)), eval_dataset=ITEMS * 64, batch_size=len(ITEMS), eval_batch_size=256
    )
    before = evaluate(module, data)["eval/final_reward_mean"]
    logger = MemoryLogger()
    trainer = make_trainer(
        max_epochs=num_epochs or num_rounds * module.epochs_per_round,
        logger=logger,
        check_val_every_n_epoch=1000,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, data)
    return evaluate(module, data)["eval/final_reward_mean"] - before, [row for _, row in logger.rows]


def candidate_means(logs: list[dict[str, float]], num_rounds: int) -> list[float]:
    """Mean reward of the candidates of each round: each collection takes as many steps."""
    rewards = [row["turn_1/reward_mean"] for row in logs if "turn_1/reward_mean" in row]
    size = len(rewards) // num_rounds
    assert size * num_rounds == len(rewards)
    return [sum(rewards[start : start + size]) / size for start in range(0, len(rewards), size)]


def test_one_round() -> None:
    # Rose by .32, .64, .33, .47.
    rise, _ = trained(prepared(MADPO, agent_learning_rate=0.01, learning_epochs=2), num_rounds=1, num_items=32)
    assert rise > 0.2


@pytest.mark.parametrize(
    "replay",
    [
        CurrentRound(),  # .75, .60, .34, .63
        pytest.param(NearestK(2), marks=pytest.mark.slow),  # .56, .48, .49, .66
        pytest.param(AllHistory(), marks=pytest.mark.slow),  # .53, .48, .50, .66
        LambdaDecay(0.5),  # .48, .61, .41, .57
    ],
    ids=lambda replay: type(replay).__name__,
)
def test_three_rounds_of_every_replay(replay: Replay) -> None:
    rise, logs = trained(prepared(MADPO, replay=replay), num_rounds=3, num_items=16)
    assert rise > 0.25
    first, second, third = candidate_means(logs, 3)
    assert first < second < third
    assert third - first > 0.2


def fixed_model(folder: Path) -> FixedModel:
    """Another model, from a folder."""
    return FixedModel(SharedBase(save_tiny(folder, tiny_llama(seed=9)), num_agents=2))


@pytest.mark.parametrize(
    "comparator",
    [
        lambda folder: CurrentPolicy(),  # .82, .46, .46, .41
        pytest.param(lambda folder: FrozenCopy(), marks=pytest.mark.slow),  # the same: no weight changes meanwhile
        lambda folder: HistoryPolicy(1),  # .59, .27, .40, .33
        fixed_model,  # .29, .47, .15, .90
    ],
    ids=["CurrentPolicy", "FrozenCopy", "HistoryPolicy", "FixedModel"],
)
def test_three_rounds_against_every_comparator(comparator: Callable[[Path], Comparator], tmp_path: Path) -> None:
    rise, logs = trained(prepared(MADPO, comparator=comparator(tmp_path)), num_rounds=3, num_items=16)
    assert rise > 0.12
    first, _, third = candidate_means(logs, 3)
    assert third > first
    assert any("preference/comparator_reward_mean" in row for row in logs)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"reference_free": False}, {"num_candidates": 16}], ids=repr)
def test_other_settings(settings: dict[str, Any]) -> None:
    # .66, .82, .31, .80 with a reference; .73, .82, .69, .53 with 16 candidates.
    rise, _ = trained(prepared(MADPO, **settings), num_rounds=3, num_items=16)
    assert rise > 0.25


@pytest.mark.parametrize(
    "policy",
    [
        "MAGRPO",  # .46, .53, .28, .44
        "MAAC",  # .46, .32, .51, .41
        pytest.param("IAC", marks=pytest.mark.slow),  # .46, .57, .54, .32
        pytest.param("MAREINFORCE", marks=pytest.mark.slow),  # .68, .56, .17, .45
        pytest.param("MARLOO", marks=pytest.mark.slow),  # .46, .53, .28, .44
        pytest.param("MAReMax", marks=pytest.mark.slow),  # .15, .42, .12, .42
    ],
)
def test_every_policy_on_learned_rewards(policy: str) -> None:
    module = prepared(MARLHF, policy=policy, num_generations=6, reward_model=REWARD_MODEL)
    rise, logs = trained(module, num_rounds=1, num_items=28)
    assert rise > (0.1 if policy == "MAReMax" else 0.2)
    learned = [row["learned/turn_1/reward_mean"] for row in logs if "learned/turn_1/reward_mean" in row]
    assert sum(learned[-4:]) > sum(learned[:4])


@pytest.mark.slow
def test_two_rounds_of_learned_rewards_that_rank_themselves() -> None:
    # Rose by .81, .97, .57, .53. From the second round on the task's reward scores evaluations only.
    module = prepared(MARLHF, num_generations=8, reward_model=REWARD_MODEL, preference_scoring="reward_model")
    rise, _ = trained(module, num_rounds=2, num_items=32)
    assert rise > 0.3
    assert module.rounds.task_reward_scores == 32 * 8


@pytest.mark.filterwarnings("ignore:Trainer\\(max_epochs=3\\) ends inside a round")
def test_the_reward_model_foresees_preferences() -> None:
    # Of 25, 19, 36 and 24 pairs of items that it has not seen, it got .96, .95, .94 and .96 right.
    settings = JointRewardModel(learning_rate=0.01, num_epochs=2, held_out_share=0.3)
    module = prepared(MARLHF, reward_model=settings)
    rise, logs = trained(module, num_rounds=1, num_items=32, num_epochs=3)
    assert rise == 0.0  # only the reward model has learned so far
    accuracies = [row["reward_model/held_out_accuracy"] for row in logs if "reward_model/held_out_accuracy" in row]
    assert len(accuracies) == 2
    assert accuracies[-1] > 0.8
