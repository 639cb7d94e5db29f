"""Ranks with different numbers of turns, nodes, mini-batches and items stay in step and never wait for ever."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

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
from comlrl_lightning.learning.gradients import average_gradients
from tests.algorithms.support import RecordingSGD, beside_the_impossible
from tests.distributed.launch import run_ranks
from tests.distributed.support import Fit, Run, all_tokens, assert_in_step, tasks

UNEVEN: dict[str, Any] = {
    "num_turns": 2,
    "early_termination_threshold": 1.0,
    "rollout_buffer_size": 5,
    "train_batch_size": 4,
    "num_inner_epochs": 2,
    "clip_epsilon": 0.2,
    "agent_learning_rate": 0.01,
}
"""About every other node stops after its first turn; a buffer of five nodes or more makes two or three mini-batches."""


def uneven(algorithm: type[CooperativeModule]) -> dict[str, Any]:
    if algorithm is MADPO:
        return {"num_candidates": 4, "train_batch_size": 4, "agent_learning_rate": 0.01}
    if algorithm is MARLHF:
        settings = {name: UNEVEN[name] for name in ("rollout_buffer_size", "train_batch_size", "agent_learning_rate")}
        return {**settings, "num_candidates": 3, "num_generations": 2}
    return {**UNEVEN, "num_generations": 1 if algorithm in (IAC, MAAC) else 2}


def default_or_slow(algorithm: type[CooperativeModule]) -> Any:
    """Four algorithms stand for the others in the default tests."""
    marks = () if algorithm in (MAGRPO, MAAC, MADPO, MARLHF) else pytest.mark.slow
    return pytest.param(algorithm, marks=marks, id=algorithm.__name__)


def epochs_of(algorithm: type[CooperativeModule]) -> int:
    """One round of preferences, with two epochs that learn from seven steps each or more."""
    return {MADPO: 2, MARLHF: 4}.get(algorithm, 1)


@pytest.mark.parametrize("algorithm", [default_or_slow(one) for one in ALGORITHMS])
def test_twenty_uneven_steps(algorithm: type[CooperativeModule]) -> None:
    # 39 items are 19 steps of one item per rank, and a last one without any for rank 1.
    epochs = epochs_of(algorithm)
    num_items = -(-39 // epochs)
    data = {"train_dataset": tasks(num_items), "batch_size": 2, "shuffle": True}
    run = Run(algorithm, uneven(algorithm), data, {"max_epochs": epochs})
    first, second = run.on(2)
    assert_in_step([first, second])
    assert len(first.steps) >= 20
    assert first.update_step >= 8
    assert first.weights[0] != first.weights[-1]
    nodes = [(ours.num_nodes, theirs.num_nodes) for ours, theirs in zip(first.steps, second.steps, strict=True)]
    if algorithm not in PREFERENCE_ALGORITHMS:
        assert sum(ours != theirs for ours, theirs in nodes) >= 5  # they did not end at the same turns
    if num_items % 2:
        assert second.steps[-1].indices == ()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_three_ranks(algorithm: type[CooperativeModule]) -> None:
    # Seven items: two steps of three, then one rank has an item and two have none.
    settings = {**uneven(algorithm), "train_batch_size": 6}
    data = {"train_dataset": tasks(7), "batch_size": 3, "shuffle": True}
    fits = Run(algorithm, settings, data, {"max_epochs": 2 * epochs_of(algorithm)}).on(3)
    assert_in_step(fits)
    assert fits[0].update_step > 2


@pytest.mark.parametrize("algorithm", [MAGRPO, MAAC, MADPO, MARLHF])
def test_a_rank_without_any_item(algorithm: type[CooperativeModule]) -> None:
    """One item for two ranks: rank 1 never has a node, and the run is that of one process."""
    settings = {**uneven(algorithm), "optimizer": RecordingSGD, "train_batch_size": None}
    data = {"train_dataset": tasks(1), "batch_size": 2}
    run = Run(algorithm, settings, data, {"max_epochs": 2 * epochs_of(algorithm)}, dtype=torch.float64)
    (whole,), parts = run.on(1), run.on(2)
    assert_in_step(parts)
    assert whole.update_step > 0
    for part in parts:
        assert (part.env_step, part.update_step) == (whole.env_step, whole.update_step)
        for ours, theirs in zip(part.gradients, whole.gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert not any(step.num_nodes for step in parts[1].steps)


def partial_reward(first: list[str], second: list[str], *, batch_items: list[dict[str, Any]]) -> list[float]:
    """Item 0 is about the first agent alone, item 1 about both, item 2 about nobody."""
    weights = {"hi": (1, 0), "there": (1, 2), "you": (0, 0)}[batch_items[0]["prompt"]]
    return [
        float(weights[0] * sum(a.encode()) % 23 + weights[1] * sum(b.encode()) % 29)
        for a, b in zip(first, second, strict=True)
    ]


def test_an_agent_without_gradient_on_one_rank_only() -> None:
    # With all pairs of two answers each, an agent's answers differ in their mean reward only if the reward asks for
    # them. Step 1: rank 0 has a gradient for the first agent, rank 1 for both. Step 2: item 2, for nobody, which
    # counts on both ranks and moves nothing.
    settings = {
        "reward_func": partial_reward,
        "joint_mode": "cross",
        "num_generations": 2,
        "optimizer": RecordingSGD,
        "max_grad_norm": None,
    }
    run = Run(MAGRPO, settings, {"train_dataset": tasks(3), "batch_size": 2}, dtype=torch.float64)
    (whole,), parts = run.on(1), run.on(2)
    assert_in_step(parts)
    assert (len(whole.gradients), whole.update_step) == (2, 1)
    assert all(gradient is None for group in whole.gradients[1] for gradient in group)
    for part in parts:
        torch.testing.assert_close(part.gradients, whole.gradients, rtol=1e-9, atol=1e-9)
    # Rank 0 alone would have left the second agent where it is.
    alone = Run(MAGRPO, settings, {"train_dataset": tasks(1), "batch_size": 1}, dtype=torch.float64)
    assert all(gradient is None for gradient in alone.on(1)[0].gradients[0][1])


def averaged(num_nodes: list[int], gradients: list[list[float | None]]) -> list[float | None]:
    """What one rank has after the averaging: parameters of two groups, the last alone in its own."""
    torch.distributed.init_process_group("gloo")
    here = torch.distributed.get_rank()
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]
    for parameter, value in zip(parameters, gradients[here], strict=True):
        parameter.grad = None if value is None else torch.tensor([value])
    active = [any(value is not None for value in part) for part in (gradients[here][:3], gradients[here][3:])]
    result = average_gradients([parameters[:3], parameters[3:]], num_nodes[here], active)
    assert result == [True, False]
    return [None if one.grad is None else float(one.grad) for one in parameters]


def test_a_parameter_without_gradient_on_any_rank_keeps_none() -> None:
    # Three nodes: (6 + 3) / 3, (0 + 6) / 3; the third parameter of the group and the other group have nothing.
    gradients = [[6.0, None, None, None], [3.0, 6.0, None, None]]
    assert run_ranks(averaged, 2, [1, 2], gradients) == [[3.0, 2.0, None, None]] * 2


class ImpossibleOnRank1(Callback):
    """A loss that is infinite on one rank, in the first training step, with gradients that are finite."""

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, CooperativeModule)
        if trainer.global_rank == 1 and batch_idx == 0:
            self.log_probs = pl_module.team.log_probs
            pl_module.team.log_probs = beside_the_impossible(self.log_probs)  # type: ignore[method-assign]

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, CooperativeModule)
        if trainer.global_rank == 1:
            pl_module.team.log_probs = self.log_probs  # type: ignore[method-assign]


def test_a_loss_that_is_infinite_on_one_rank_is_left_out_by_all() -> None:
    # Two steps, of which all ranks leave out the first.
    settings = {"num_generations": 2, "on_nonfinite": "skip"}
    run = Run(MAGRPO, settings, {"train_dataset": tasks(4), "batch_size": 2})
    parts = run.on(2, callbacks=[ImpossibleOnRank1()])
    assert_in_step(parts)
    assert [part.update_step for part in parts] == [1, 1]
    assert [row["nonfinite_updates"] for row in parts[0].metrics[0][1:]] == [1.0]
    assert any("the losses of agent_1 are not finite" in text for text in parts[0].warned)


@pytest.mark.parametrize("shuffle", [False, True])
def test_five_items_on_two_ranks_are_trained_once_per_epoch(shuffle: bool) -> None:
    data = {"train_dataset": tasks(5), "batch_size": 2, "shuffle": shuffle}
    fits = Run(MAGRPO, {"num_generations": 2}, data, {"max_epochs": 2}).on(2)
    # Three steps per epoch, the last with one item.
    orders = []
    for epoch in (slice(0, 3), slice(3, 6)):
        steps = list(zip(*(fit.steps[epoch] for fit in fits), strict=True))
        orders.append([index for pair in steps for step in pair for index in step.indices])
        assert sorted(orders[-1]) == [0, 1, 2, 3, 4]
        assert [len(step.indices) for step in steps[-1]] == [1, 0]
    assert (orders[0] == orders[1] == [0, 1, 2, 3, 4]) is not shuffle
    # One process reads the same order.
    (whole,) = Run(MAGRPO, {"num_generations": 2}, data, {"max_epochs": 2}).on(1)
    assert [index for step in whole.steps for index in step.indices] == orders[0] + orders[1]


def samples_of_items(fits: list[Fit]) -> dict[int, tuple[Any, ...]]:
    """All sampled tokens of each item's first turn."""
    return {item: tuple(tokens) for step in all_tokens(fits) for (item, turn, _), tokens in step.items() if turn == 1}


def test_ranks_sample_differently_and_reproducibly() -> None:
    # The same prompt everywhere: only the streams of random numbers can tell the items apart.
    settings = {"num_generations": 3, "num_turns": 2, "agent_learning_rate": 0.0}
    run = Run(MAGRPO, settings, {"train_dataset": [{"prompt": "hi"}] * 5, "batch_size": 2})
    fits = run.on(2)
    samples = samples_of_items(fits)
    assert len(samples) == 5
    assert len(set(samples.values())) == 5
    assert samples_of_items(run.on(2)) == samples
    # The whole tree of an item grows on one rank: K = 3 answers of both agents at the root and at three children.
    owners = [{item for step in fit.steps for item, _, _ in step.tokens} for fit in fits]
    assert owners == [{0, 2, 4}, {1, 3}]
    for fit in fits:
        nodes = Counter(item for step in fit.steps for item, _, _ in step.tokens)
        assert set(nodes.values()) == {4}
        assert all(len(tokens) == 2 * 3 for step in fit.steps for tokens in step.tokens.values())
