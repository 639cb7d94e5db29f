"""Every gradient of the real training step against the per-row reimplementation in `reference`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Trainer
from peft import LoraConfig, get_peft_model

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.algorithms import MAGRPO, MAREINFORCE, MARLOO, CooperativeModule, CriticFreeModule, MAReMax
from tests.algorithms.reference import MAX_NEW_TOKENS, Agent, Gradients, Objective, learn
from tests.algorithms.support import (
    ITEMS,
    LORA,
    Collected,
    Kind,
    RecordingSGD,
    fit,
    make_module,
    tiny_agents,
    tiny_model,
    trained_a_little,
    weights,
)

BASELINES = {MAREINFORCE: "none", MAGRPO: "mean", MARLOO: "others", MAReMax: "max"}
LEARNING_RATE = 0.05


def bare(name: str) -> str:
    """Name of a parameter in its own model."""
    return name.partition(".network.")[2]


def lora_config() -> Any:
    """A new one per model: PEFT writes into it."""
    return LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear", task_type="CAUSAL_LM")


def reference_agents(module: CooperativeModule, kind: Kind) -> list[Agent]:
    """Fresh plain models with the module's present weights."""
    names = [f"agent_{agent}" for agent in range(module.num_agents)]
    if kind == "full":
        agents = [Agent(tiny_model(agent), None) for agent in range(len(names))]
    elif kind == "separate":
        models = [get_peft_model(tiny_model(agent), lora_config(), name) for agent, name in enumerate(names)]
        agents = [Agent(model, name) for model, name in zip(models, names, strict=True)]
    else:
        shared = get_peft_model(tiny_model(0), lora_config(), names[0])
        for name in names[1:]:
            shared.add_adapter(name, lora_config())
        agents = [Agent(shared, name) for name in names]
    for agent, speaker in enumerate(agents):
        ours = {bare(name): value for name, value in weights(module, agent).items()}
        assert set(ours) == set(speaker.parameters())
        for name, parameter in speaker.parameters().items():
            parameter.data = ours[name]
    return agents


def check(
    algorithm: type[CriticFreeModule],
    kind: Kind = "shared",
    num_agents: int = 2,
    *,
    objective: Objective | None = None,
    items: Sequence[dict[str, Any]] = ITEMS[:1],
    train_batch_size: int | None = None,
    num_inner_epochs: int = 1,
    monkeypatch: pytest.MonkeyPatch | None = None,
    **settings: Any,
) -> Trainer:
    """Train on one buffer of `items` and compare each step's gradients and the weights at the end."""
    aim = Objective(baseline=BASELINES[algorithm]) if objective is None else objective
    module = trained_a_little(
        make_module(
            algorithm,
            tiny_agents(kind, num_agents),
            discount=aim.discount,
            advantage_normalization=aim.normalization,
            reference_kl_coef=aim.kl,
            clip_epsilon=None if aim.clip is None else aim.clip[0],
            clip_epsilon_high=None if aim.clip is None else aim.clip[1],
            importance_level=aim.level,
            entropy_coef=aim.entropy,
            loss_aggregation=aim.aggregation,
            sampling=Sampling(max_new_tokens=MAX_NEW_TOKENS, temperature=aim.temperature),
            agent_learning_rate=LEARNING_RATE,
            optimizer=RecordingSGD,
            max_grad_norm=None,
            train_batch_size=train_batch_size,
            num_inner_epochs=num_inner_epochs,
            **settings,
        )
    )
    agents = reference_agents(module, kind)
    orders = [] if monkeypatch is None else recorded_orders(module, monkeypatch)
    collected = Collected()
    trainer = fit(module, items, batch_size=len(items), callbacks=[collected])
    num_nodes = len(collected.rollouts[0].nodes)
    batches = cut(orders or [list(range(num_nodes))] * num_inner_epochs, train_batch_size or num_nodes)
    expected = learn(agents, collected.rollouts, aim, batches, LEARNING_RATE)
    compare(trainer.optimizers[0], module, expected)
    for agent, speaker in enumerate(agents):
        ours = {bare(name): value for name, value in weights(module, agent).items()}
        for name, parameter in speaker.parameters().items():
            torch.testing.assert_close(ours[name], parameter.data, rtol=1e-6, atol=1e-5)
    return trainer


def recorded_orders(module: CriticFreeModule, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Collects the order of the nodes in each pass over the buffer, which the module draws by itself."""
    orders: list[list[int]] = []
    draw = module._order

    def recorded(num_nodes: int, inner_epoch: int) -> list[int]:
        orders.append(draw(num_nodes, inner_epoch))
        assert sorted(orders[-1]) == list(range(num_nodes))
        return orders[-1]

    monkeypatch.setattr(module, "_order", recorded)
    return orders


def cut(orders: Sequence[Sequence[int]], size: int) -> list[Sequence[int]]:
    return [order[start : start + size] for order in orders for start in range(0, len(order), size)]


def compare(optimizer: Any, module: CooperativeModule, expected: Sequence[Sequence[Gradients]]) -> None:
    recorded = cast("RecordingSGD", optimizer).recorded
    assert len(recorded) == len(expected)
    for step, (ours, theirs) in enumerate(zip(recorded, expected, strict=True)):
        for agent, (gradients, reference) in enumerate(zip(ours, theirs, strict=True)):
            names = [bare(name) for name in module.team.agent_parameters(agent)]
            assert step or any(gradient.abs().max() > 1e-3 for gradient in reference.values())
            for name, gradient in zip(names, gradients, strict=True):
                assert gradient is not None
                # Norms compute in single precision, whatever the model does, and each step widens what it rounds.
                rounding = 1e-6 * 10 ** min(step, 2) * float(reference[name].abs().max())
                torch.testing.assert_close(gradient, reference[name], rtol=0, atol=rounding)


@pytest.mark.parametrize("kind", ["shared", "separate", "full"])
@pytest.mark.parametrize("num_turns", [1, 2])
@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_teams_of_every_kind(kind: Kind, num_agents: int, joint_mode: str, num_turns: int) -> None:
    check(MAGRPO, kind, num_agents, joint_mode=joint_mode, num_turns=num_turns)


@pytest.mark.parametrize("algorithm", BASELINES)
@pytest.mark.parametrize("normalization", ["group", "batch", False])
def test_baselines(algorithm: type[CriticFreeModule], normalization: str | bool) -> None:
    if algorithm is MAREINFORCE and normalization == "group":
        pytest.skip("refused")
    objective = Objective(BASELINES[algorithm], normalization, discount=0.7, temperature=0.5)
    check(algorithm, objective=objective, num_turns=2, joint_mode="cross")


@pytest.mark.parametrize("kind", ["shared", "full"])
@pytest.mark.parametrize("algorithm", BASELINES)
def test_reference_kl(algorithm: type[CriticFreeModule], kind: Kind) -> None:
    objective = Objective(BASELINES[algorithm], normalization=False, temperature=0.8, kl=0.3)
    check(algorithm, kind, objective=objective, items=ITEMS[:2], num_generations=3)


def test_reference_kl_of_single_completions_is_not_centered() -> None:
    objective = Objective("none", normalization=False, kl=0.3)
    check(MAREINFORCE, objective=objective, items=ITEMS[:2], num_generations=1)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("clip", [None, (0.1, 0.1), (0.1, 0.3)])
@pytest.mark.filterwarnings("ignore:.*use the same rollouts without clipping")
def test_inner_epochs(level: str, clip: tuple[float, float] | None) -> None:
    objective = Objective(clip=clip, level=level, temperature=0.8)
    trainer = check(MAGRPO, objective=objective, num_inner_epochs=3, num_turns=2)
    assert (trainer.callback_metrics["agent_0/clip_share"] > 0) == (clip is not None)


@pytest.mark.parametrize("kind", ["shared", "full"])
def test_mini_batches_with_penalty_and_entropy(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    # Six nodes of two items and two turns, four and two in a mini-batch, twice.
    objective = Objective("others", "batch", 0.9, 0.8, kl=0.1, clip=(0.2, 0.2), entropy=0.01)
    check(
        MARLOO,
        kind,
        objective=objective,
        items=ITEMS[:2],
        num_turns=2,
        num_inner_epochs=2,
        train_batch_size=4,
        monkeypatch=monkeypatch,
    )


@pytest.mark.parametrize("aggregation", ["constant", "sequence_mean", "token_mean"])
def test_aggregations_with_an_entropy_bonus(aggregation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two items and turns, in mini-batches: the mean of the tokens is over the buffer, not over a mini-batch.
    objective = Objective("others", "batch", clip=(0.2, 0.2), entropy=0.1, aggregation=aggregation)
    settings: dict[str, Any] = {"num_turns": 2, "train_batch_size": 4, "monkeypatch": monkeypatch}
    check(MARLOO, objective=objective, items=ITEMS[:2], **settings)


def test_entropy_bonus() -> None:
    check(MAGRPO, "separate", objective=Objective(entropy=0.1), items=ITEMS[:2])
