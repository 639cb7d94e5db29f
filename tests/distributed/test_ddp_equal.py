"""Two ranks with four items each do what one process does with eight: tokens, gradients, metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comlrl_lightning.algorithms import (
    ALGORITHMS,
    IAC,
    MAAC,
    MADPO,
    MAGRPO,
    MARLHF,
    PREFERENCE_ALGORITHMS,
    CooperativeModule,
)
from comlrl_lightning.critics.settings import ValueHead
from tests.algorithms.support import RecordingSGD
from tests.distributed.support import Fit, Gradients, Run, all_tokens, assert_in_step, tasks

EXACT: dict[str, Any] = {"optimizer": RecordingSGD, "max_grad_norm": None, "agent_learning_rate": 0.05}
STALE: dict[str, Any] = {"num_turns": 2, "num_generations": 2, "num_inner_epochs": 2, "clip_epsilon": 0.2}
"""Two optimizer steps per update, on all nodes at once, the second with ratios other than 1."""


class Relay:
    """Agents act in turn, sometimes both; the length of an episode hangs on what they write."""

    def reset(self, item: dict[str, Any], seed: int) -> dict[int, str]:
        self.turn = 0
        return {0: item["prompt"]}

    def step(self, completions: dict[int, str]) -> tuple[dict[int, str], float, bool]:
        self.turn += 1
        said = " ".join(completions[agent] for agent in sorted(completions))
        score = sum(said.encode()) % 7
        prompts = {self.turn % 2: f"so {said}", **({0: said, 1: said} if score == 2 else {})}
        return prompts, score / 3, score in (1, 4)


STOPS: dict[str, Any] = {"num_turns": 2, "early_termination_threshold": 1.0, "advantage_normalization": False}
EPISODES: dict[str, Any] = {"environment": Relay, "num_turns": 4, "num_generations": 2}


def assert_equal(ours: Gradients, theirs: Gradients) -> None:
    assert len(ours) == len(theirs) > 0
    for step, other in zip(ours, theirs, strict=True):
        for group, same in zip(step, other, strict=True):
            torch.testing.assert_close(group, same, rtol=1e-9, atol=1e-9)
    for groups in zip(*theirs, strict=True):
        assert max(gradient.abs().max() for group in groups for gradient in group if gradient is not None) > 1e-4


def assert_same_logs(ours: Fit, theirs: Fit) -> None:
    assert [step for step, _ in ours.metrics] == [step for step, _ in theirs.metrics]
    for (_, row), (_, other) in zip(ours.metrics, theirs.metrics, strict=True):
        assert row == pytest.approx(other, rel=1e-6, abs=1e-9)


def pairs_of(fit: Fit) -> list[list[tuple[Any, ...]]]:
    """The pairs of each round that is kept: item, tokens and rewards of both sides."""
    assert fit.rounds is not None
    return [
        [
            (
                pair.item_index,
                pair.winner_reward,
                pair.loser_reward,
                [one.token_ids for one in pair.winner + pair.loser],
            )
            for pair in one_round.pairs
        ]
        for one_round in fit.rounds.kept
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_tokens(algorithm: type[CooperativeModule]) -> None:
    is_preference = algorithm in PREFERENCE_ALGORITHMS
    settings = {"num_candidates": 3} if is_preference else {"num_turns": 2, "num_generations": 2}
    if algorithm in (IAC, MAAC):
        settings = {"num_turns": 2}
    run = Run(algorithm, settings, {"train_dataset": tasks(8), "batch_size": 8})
    (whole,), parts = run.on(1), run.on(2)
    assert all_tokens(parts) == all_tokens([whole])
    # Each rank has every other item, and no node without its parent.
    assert [{place[0] for place in part.steps[0].tokens} for part in parts] == [{0, 2, 4, 6}, {1, 3, 5, 7}]
    assert [part.env_step for part in parts] == [whole.env_step] * 2


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (
            MAGRPO,
            {
                **STALE,
                "reference_kl_coef": 0.1,
                "entropy_coef": 0.01,
                "advantage_normalization": "batch",
                "loss_aggregation": "token_mean",
            },
        ),
        (MAGRPO, {**STOPS, "num_generations": 2}),
        (MAGRPO, EPISODES),
        (IAC, {**EPISODES, "gae_lambda": 0.5}),
        (IAC, {"num_turns": 2, "critic": ValueHead(), "num_inner_epochs": 2, "clip_epsilon": 0.2}),
        (MAAC, {"num_turns": 2, "critic_type": "q", "reference_kl_coef": 0.1, "advantage_normalization": "batch"}),
    ],
)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_same_gradients_and_metrics(
    algorithm: type[CooperativeModule], settings: dict[str, Any], world_size: int
) -> None:
    # On three ranks two of the eight items are left for the second step, and one rank has none.
    data = {"train_dataset": tasks(8), "batch_size": 8 if world_size == 2 else 6}
    run = Run(algorithm, {**EXACT, **settings}, data, dtype=torch.float64)
    (whole,), parts = run.on(1), run.on(world_size)
    assert all_tokens(parts) == all_tokens([whole])
    assert_in_step(parts)
    for part in parts:
        assert_equal(part.gradients, whole.gradients)
        assert_same_logs(part, whole)


@pytest.mark.parametrize("train_batch_size", [None, 4])
def test_madpo_has_the_same_rounds_gradients_and_metrics(train_batch_size: int | None) -> None:
    settings = {**EXACT, "num_candidates": 3, "pair_selection": "all", "train_batch_size": train_batch_size}
    run = Run(MADPO, settings, {"train_dataset": tasks(8), "batch_size": 8}, {"max_epochs": 4}, dtype=torch.float64)
    (whole,), parts = run.on(1), run.on(2)
    assert_in_step(parts)
    for part in parts:
        assert pairs_of(part) == pairs_of(whole)
        assert_equal(part.gradients, whole.gradients)
        assert_same_logs(part, whole)
    # In the order of the items, not in that of the ranks.
    items = [item for item, *_ in pairs_of(parts[1])[-1]]
    assert items == sorted(items)
    assert len(set(items)) > 4


def test_marlhf_has_the_same_rounds_gradients_and_metrics() -> None:
    settings = {**EXACT, "num_candidates": 3, "policy": "IAC", "num_generations": 1}
    run = Run(MARLHF, settings, {"train_dataset": tasks(8), "batch_size": 8}, dtype=torch.float64)
    module = run.module()
    assert isinstance(module, MARLHF)
    epochs = 2 * module.epochs_per_round
    (whole,), parts = run.on(1, max_epochs=epochs), run.on(2, max_epochs=epochs)
    assert_in_step(parts)
    for part in parts:
        assert part.rounds is not None
        assert whole.rounds is not None
        assert pairs_of(part) == pairs_of(whole)
        assert part.rounds.scale == pytest.approx(whole.rounds.scale, rel=1e-9)
        assert_equal(part.gradients, whole.gradients)
        assert_same_logs(part, whole)
