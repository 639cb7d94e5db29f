"""MADPO's gradients in a real fit against its closed form, one unpadded sequence at a time through plain transformers.

The gradient of agent i is ``-beta * sigmoid(-beta * S)`` times the gradient of its own margin, where S sums the margins
of all agents as they were before the step. Nothing of the library takes part but the records of what was sampled.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from comlrl_lightning.agents.settings import Sampling, Separate, SharedBase
from comlrl_lightning.algorithms import MADPO
from comlrl_lightning.learning.preferences import PreferenceStats
from comlrl_lightning.preferences.pairs import PreferencePair
from comlrl_lightning.types import Completion, Rollouts
from tests.algorithms.reference import Agent, Gradients
from tests.algorithms.support import (
    ENDS,
    ITEMS,
    LORA,
    Kind,
    RecordingSGD,
    fit,
    tiny_agents,
    trained_a_little,
    uneven_reward,
    weights,
)
from tests.algorithms.test_gradients import bare, compare, reference_agents
from tests.tiny_lm import tiny_gpt2, tiny_tokenizer

LEARNING_RATE = 0.05
Sides = tuple[tuple[Completion, ...], tuple[Completion, ...]]
"""The N answers of the winner and of the loser."""


@dataclass(frozen=True)
class Objective:
    """What is optimized."""

    beta: float = 0.3
    reference_free: bool = True
    length_normalized: bool = False
    temperature: float = 1.0


@dataclass(frozen=True)
class Step:
    """What an optimizer step should have done."""

    batch: Sequence[Sides]
    """`[R]` its pairs."""
    gradients: list[Gradients]
    """Of each agent."""
    losses: list[float]
    """`[R]`."""
    margins: list[list[float]]
    """`[R][N]`."""
    gaps: list[list[float]]
    """`[R][N]` margins minus those of the reference."""


class Candidates(Callback):
    """Keeps what every step of a collection sampled."""

    def __init__(self) -> None:
        self.rollouts: list[Rollouts] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, MADPO)
        if pl_module.rollouts is not None:
            self.rollouts.append(pl_module.rollouts)


def worth(log_probs: Tensor, objective: Objective) -> Tensor:
    """`[]` log-probability of an answer, from those of its tokens, or their mean."""
    return log_probs.mean() if objective.length_normalized else log_probs.sum()


def margin(agent: Agent, sides: Sequence[Completion], objective: Objective) -> Tensor:
    """`[]` how much more an agent's part of the winner is worth than its part of the loser."""
    winner, loser = (worth(agent.scores(one, objective.temperature)[0], objective) for one in sides)
    return winner - loser


def reference_margin(agent: Agent, sides: Sequence[Completion], objective: Objective) -> float:
    """0 without a reference."""
    if objective.reference_free:
        return 0.0
    winner, loser = (worth(agent.reference_scores(one, objective.temperature), objective) for one in sides)
    return float(winner - loser)


def learn(agents: Sequence[Agent], batches: Sequence[Sequence[Sides]], objective: Objective) -> list[Step]:
    """Train by plain gradient descent on the pairs of each batch; the agents are changed."""
    return [one_step(agents, batch, objective) for batch in batches]


def one_step(agents: Sequence[Agent], batch: Sequence[Sides], objective: Objective) -> Step:
    rows = [list(zip(agents, zip(*sides, strict=True), strict=True)) for sides in batch]
    with torch.no_grad():
        margins = [[float(margin(*row, objective)) for row in pair] for pair in rows]
    gaps = [
        [now - reference_margin(*row, objective) for now, row in zip(values, pair, strict=True)]
        for values, pair in zip(margins, rows, strict=True)
    ]
    totals: list[Gradients] = []
    for index, agent in enumerate(agents):
        total: Gradients = {}
        for pair, gap in zip(rows, gaps, strict=True):
            factor = -objective.beta / (1 + math.exp(objective.beta * sum(gap)))
            named = agent.parameters()
            gradients = torch.autograd.grad(margin(*pair[index], objective), list(named.values()))
            for name, gradient in zip(named, gradients, strict=True):
                total[name] = total.get(name, torch.zeros_like(gradient)) + factor * gradient / len(batch)
        totals.append(total)
    for agent, total in zip(agents, totals, strict=True):
        for name, gradient in total.items():
            agent.parameters()[name].data -= LEARNING_RATE * gradient
    losses = [math.log1p(math.exp(-objective.beta * sum(gap))) for gap in gaps]
    return Step(batch, totals, losses, margins, gaps)


def best_with_worst(rollouts: Sequence[Rollouts]) -> list[Sides]:
    """The pairs of all items: the best candidate with the worst, the second with the second worst, ..."""
    found: list[Sides] = []
    for node in (node for one in rollouts for node in one.nodes):
        order = sorted(range(len(node.rewards)), key=lambda k: -node.rewards[k])
        while len(order) > 1:
            best, worst = order.pop(0), order.pop()
            if node.rewards[best] > node.rewards[worst]:
                winner, loser = (tuple(group[k] for group in node.completions) for k in (best, worst))
                found.append((winner, loser))
    return found


def recorded_batches(module: MADPO, monkeypatch: pytest.MonkeyPatch) -> list[list[Sides]]:
    """Collects the pairs of each optimizer step, whose order the module draws by itself."""
    batches: list[list[Sides]] = []
    losses = module.preference_learner.losses

    def recorded(pairs: Sequence[PreferencePair], stats: PreferenceStats) -> Iterator[Tensor]:
        batches.append([(pair.winner, pair.loser) for pair in pairs])
        return losses(pairs, stats)

    monkeypatch.setattr(module.preference_learner, "losses", recorded)
    return batches


def tiny_module(
    agents: SharedBase | Separate | None = None,
    objective: Objective = Objective(),
    **settings: Any,
) -> MADPO:
    """Two candidates of at most four tokens, plain gradient descent, unless said otherwise."""
    given: dict[str, Any] = {
        **{name: value for name, value in asdict(objective).items() if name != "temperature"},
        "reward_func": uneven_reward,
        "sampling": Sampling(max_new_tokens=4, temperature=objective.temperature),
        "agent_learning_rate": LEARNING_RATE,
        "optimizer": RecordingSGD,
        "max_grad_norm": None,
        "num_candidates": 2,
        "seed": 1,
    }
    return MADPO(tiny_agents() if agents is None else agents, **{**given, **settings})


def check(
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind = "shared",
    num_agents: int = 2,
    objective: Objective = Objective(),
    items: Sequence[dict[str, Any]] = ITEMS[:2],
    batch_size: int | None = None,
    learning_epochs: int = 1,
    **settings: Any,
) -> tuple[list[Step], Trainer]:
    """Train one round and compare each optimizer step's gradients and the weights at the end."""
    module = trained_a_little(
        tiny_module(tiny_agents(kind, num_agents), objective, learning_epochs=learning_epochs, **settings)
    )
    assert isinstance(module, MADPO)
    agents = reference_agents(module, kind)
    batches = recorded_batches(module, monkeypatch)
    size, collected = batch_size or len(items), Candidates()
    trainer = fit(module, items, size, [collected], max_epochs=module.epochs_per_round)
    pairs = best_with_worst(collected.rollouts)
    used = [sides for batch in batches for sides in batch]
    assert len(pairs) >= len(items)
    for epoch in range(learning_epochs):
        mine = used[epoch * len(pairs) : (epoch + 1) * len(pairs)]
        assert sorted(mine, key=repr) == sorted(pairs, key=repr)
    steps = learn(agents, [batch for batch in batches if batch], objective)
    compare(trainer.optimizers[0], module, [step.gradients for step in steps])
    for agent, speaker in enumerate(agents):
        ours = {bare(name): value for name, value in weights(module, agent).items()}
        for name, parameter in speaker.parameters().items():
            # Norms compute in single precision, whatever the model does.
            torch.testing.assert_close(ours[name], parameter.data, rtol=1e-6, atol=1e-6)
    return steps, trainer


@pytest.mark.parametrize("reference_free", [True, False])
@pytest.mark.parametrize("kind", ["shared", "separate", "full"])
@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_teams_of_every_kind(
    num_agents: int, kind: Kind, reference_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, _ = check(monkeypatch, kind, num_agents, Objective(reference_free=reference_free))
    assert [len(step.losses) for step in steps] == [2]
    far = max(abs(now - gap) for step in steps for now, gap in zip(step.margins[0], step.gaps[0], strict=True))
    assert (far > 0.05) is not reference_free  # the reference is another policy, and is used only if asked for


@pytest.mark.parametrize("kind", ["shared", "full"])
@pytest.mark.parametrize("length_normalized", [False, True])
@pytest.mark.parametrize("reference_free", [True, False])
def test_at_another_temperature(
    reference_free: bool, length_normalized: bool, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = Objective(1.5, reference_free, length_normalized, temperature=0.5)
    check(monkeypatch, kind, objective=objective, num_candidates=5)  # the middle one is in no pair


@pytest.mark.parametrize(
    ("batch_size", "train_batch_size", "sizes"),
    [
        (4, None, [8]),
        (4, 2, [2, 2, 2, 2]),
        (4, 3, [3, 3, 2]),
        (2, None, [4, 4]),
        (2, 3, [3, 3, 2]),  # the first share of 4 is cut to a whole mini-batch, the second takes the rest
        (1, None, [2, 2, 2, 2]),
        (1, 5, [5, 3]),
    ],
)
def test_several_steps(
    batch_size: int, train_batch_size: int | None, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four items with four candidates each: eight pairs.
    steps, _ = check(
        monkeypatch, items=ITEMS, batch_size=batch_size, train_batch_size=train_batch_size, num_candidates=4
    )
    assert [len(step.losses) for step in steps] == sizes


def test_the_reference_stays_the_first_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = Objective(beta=1.0, reference_free=False)
    steps, _ = check(monkeypatch, "full", objective=objective, learning_epochs=2, train_batch_size=1)
    assert len(steps) == 4


def test_every_epoch_has_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # Four pairs; `check` sees to it that each epoch has all of them.
    steps, _ = check(monkeypatch, items=ITEMS, learning_epochs=3, train_batch_size=4)
    first, second, third = (step.batch for step in steps)
    assert first != second != third != first


def test_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = Objective(beta=1.5, reference_free=False)
    steps, trainer = check(monkeypatch, objective=objective, items=ITEMS, num_candidates=4, train_batch_size=3)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    losses = [loss for step in steps for loss in step.losses]
    assert logged["preference/loss"] == pytest.approx(statistics.fmean(losses))
    right = [sum(gap) > 0 for step in steps for gap in step.gaps]
    assert 0 < sum(right) < len(right)
    assert logged["preference/accuracy"] == pytest.approx(statistics.fmean(right))
    for agent in range(2):
        margins = [values[agent] for step in steps for values in step.margins]
        assert logged[f"agent_{agent}/margin"] == pytest.approx(statistics.fmean(margins), abs=1e-5)


def exact_agents() -> SharedBase:
    """Two agents on GPT-2, which computes all of it in double precision (Llama's norms round to single)."""
    model = tiny_gpt2().double()
    model.generation_config.eos_token_id = ENDS
    return SharedBase(model, num_agents=2, lora=LORA, tokenizer=tiny_tokenizer())


@pytest.mark.parametrize(
    "settings", [{}, {"reference_free": False}, {"length_normalized": True, "reference_free": False}]
)
def test_micro_batches_do_not_matter(settings: dict[str, Any]) -> None:
    recorded = []
    for micro_batch_tokens in (4096, 40, 1):
        cut = {"micro_batch_tokens": micro_batch_tokens, "train_batch_size": 5, "num_candidates": 4}
        module = trained_a_little(tiny_module(exact_agents(), Objective(**settings), **cut))
        trainer = fit(module, ITEMS, len(ITEMS), max_epochs=2)
        recorded.append(cast("RecordingSGD", trainer.optimizers[0]).recorded)
    whole = recorded[0]
    assert len(whole) == 2
    for step in whole:
        for group in step:
            assert any(gradient is not None and gradient.abs().max() > 1e-3 for gradient in group)
    for other in recorded[1:]:
        torch.testing.assert_close(other, whole, rtol=1e-9, atol=1e-9)


def made_pair(winner: Sequence[Sequence[int]], loser: Sequence[Sequence[int]]) -> PreferencePair:
    """A pair of the given token ids of each agent, which nobody known has sampled."""

    def side(answers: Sequence[Sequence[int]]) -> tuple[Completion, ...]:
        return tuple(
            Completion(agent, "hi", (256, 71, 72 + agent), tuple(ids), (), "", False)
            for agent, ids in enumerate(answers)
        )

    return PreferencePair(0, side(winner), side(loser), 1.0, 0.0)


def test_the_last_token_counts() -> None:
    # Agent 0 begins both of its answers with token 80; then comes the end token (257), or token 100 at the limit.
    # Agent 1 says the same twice. The margin is what the two last tokens are worth after the same text.
    module = trained_a_little(tiny_module())
    assert isinstance(module, MADPO)
    first = reference_agents(module, "shared")[0]
    pair = made_pair([(80, 257), (90, 257)], [(80, 100), (90, 257)])
    first.model.set_adapter("agent_0")
    with torch.no_grad():
        logits = first.model(input_ids=torch.tensor([[256, 71, 72, 80]])).logits[0, -1]
    expected = float(logits[257] - logits[100])
    assert abs(expected) > 0.1
    stats = module.preference_learner.new_stats()
    with torch.no_grad():
        (loss,) = module.preference_learner.losses([pair], stats)
    assert float(loss) == pytest.approx(math.log1p(math.exp(-0.3 * expected)), abs=1e-6)
    assert stats.margins.tolist() == pytest.approx([expected, 0.0], abs=1e-5)


def test_the_anchor_is_the_mean_log_probability_of_the_winners() -> None:
    # Equal sides have the margin 0: log 2 by itself, and minus half of what two tokens are worth, for both agents.
    module = trained_a_little(tiny_module(nll_coef=0.5))
    assert isinstance(module, MADPO)
    pair = made_pair([(80, 257), (90,)], [(80, 257), (90,)])
    agents = reference_agents(module, "shared")
    with torch.no_grad():
        worth = [float(agent.scores(one, 1.0)[0].mean()) for agent, one in zip(agents, pair.winner, strict=True)]
        (loss,) = module.preference_learner.losses([pair], module.preference_learner.new_stats())
    assert abs(sum(worth)) > 0.1
    assert float(loss) == pytest.approx(math.log(2) - 0.5 * sum(worth), abs=1e-5)


def test_what_nobody_sampled_has_no_drift() -> None:
    module = trained_a_little(tiny_module())
    assert isinstance(module, MADPO)
    pair = made_pair([(80, 257), (90,)], [(80, 100), (90, 257)])
    known = replace(pair.winner[1], log_probs=(-2.0,))
    stats = module.preference_learner.new_stats()
    list(module.preference_learner.losses([replace(pair, winner=(pair.winner[0], known))], stats))
    assert stats.drift[:, 1].tolist() == [0.0, 1.0]
    with torch.no_grad():
        now = float(reference_agents(module, "shared")[1].scores(known, 1.0)[0].sum())
    assert float(stats.drift[1, 0]) == pytest.approx(abs(now + 2.0), abs=1e-5)


def test_drifts_of_either_sign_add_up_and_both_sides_are_logged() -> None:
    # What was sampled at one nat less and at three nats more than now: the mean change is 2, and not -1.
    module = trained_a_little(tiny_module())
    assert isinstance(module, MADPO)
    agent = reference_agents(module, "shared")[0]
    pair = made_pair([(80, 257), (90,)], [(80, 100), (90, 257)])
    with torch.no_grad():
        now = [float(agent.scores(side[0], 1.0)[0].sum()) for side in (pair.winner, pair.loser)]
    winner, loser = (
        replace(side[0], log_probs=(log_prob + moved, 0.0))
        for side, log_prob, moved in zip((pair.winner, pair.loser), now, (-1.0, 3.0), strict=True)
    )
    known = replace(pair, winner=(winner, pair.winner[1]), loser=(loser, pair.loser[1]))
    stats = module.preference_learner.new_stats()
    list(module.preference_learner.losses([known], stats))
    stats.record(module.training_metrics, 1)
    logged = module.training_metrics.pop()
    assert logged["agent_0/log_prob_drift"] == pytest.approx(2.0, abs=1e-5)
    assert logged["agent_0/chosen_log_prob"] == pytest.approx(now[0], abs=1e-5)
    assert logged["agent_0/rejected_log_prob"] == pytest.approx(now[1], abs=1e-5)
    assert logged["agent_0/margin"] == pytest.approx(now[0] - now[1], abs=1e-5)
