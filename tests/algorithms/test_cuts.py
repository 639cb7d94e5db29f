"""What must not matter: the cut into micro-batches and training steps; and what the sampler saw."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from comlrl_lightning.agents.settings import Sampling, SharedBase
from comlrl_lightning.algorithms import IAC, MAAC, MAGRPO, CooperativeModule
from comlrl_lightning.critics.settings import ValueHead
from comlrl_lightning.types import Rollouts
from tests.algorithms.reference import Agent
from tests.algorithms.support import (
    ENDS,
    ITEMS,
    LORA,
    Collected,
    RecordingSGD,
    fit,
    make_module,
    tiny_agents,
    tiny_model,
    trained_a_little,
)
from tests.algorithms.test_gradients import reference_agents
from tests.tiny_lm import tiny_gpt2, tiny_tokenizer

EIGHT = [{"prompt": text} for text in ("hi", "there", "you", "all", "of", "the", "wide", "world")]


def exact_agents(**settings: Any) -> SharedBase:
    """Two agents on GPT-2, which computes all of it in double precision (Llama's norms round to single)."""
    model = tiny_gpt2().double()
    model.generation_config.eos_token_id = ENDS
    return SharedBase(model, num_agents=2, lora=LORA, tokenizer=tiny_tokenizer(), **settings)


def gradients(
    items: list[dict[str, Any]], batch_size: int, algorithm: type[CooperativeModule] = MAGRPO, **settings: Any
) -> list[list[list[Tensor | None]]]:
    """`[steps][groups][parameters]` of a fit."""
    agents = settings.pop("agents", None) or exact_agents()
    torch.set_default_dtype(torch.float64)  # of the heads of critics, which are float32 otherwise
    try:
        module = trained_a_little(
            make_module(algorithm, agents, optimizer=RecordingSGD, max_grad_norm=None, num_turns=2, **settings)
        )
    finally:
        torch.set_default_dtype(torch.float32)
    trainer = fit(module, items, batch_size)
    return cast("RecordingSGD", trainer.optimizers[0]).recorded


def assert_equal(ours: list[list[list[Tensor | None]]], theirs: list[list[list[Tensor | None]]]) -> None:
    assert len(ours) == len(theirs) > 0
    for step, other in zip(ours, theirs, strict=True):
        for group, same in zip(step, other, strict=True):
            assert any(gradient is not None and gradient.abs().max() > 1e-3 for gradient in group)
            torch.testing.assert_close(group, same, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 100])
def test_micro_batches_do_not_matter(micro_batch_tokens: int) -> None:
    items = EIGHT[:2]
    settings: dict[str, Any] = {
        "reference_kl_coef": 0.1,
        "entropy_coef": 0.01,
        "loss_aggregation": "token_mean",
    }
    whole = gradients(items, 2, micro_batch_tokens=100_000, **settings)
    assert_equal(gradients(items, 2, micro_batch_tokens=micro_batch_tokens, **settings), whole)


def test_eight_items_at_once_or_in_steps() -> None:
    # Two turns of K=2 make 3 nodes per item; the buffer holds those of all eight.
    settings: dict[str, Any] = {"rollout_buffer_size": 24, "advantage_normalization": "batch"}
    whole = gradients(EIGHT, 8, **settings)
    assert len(whole) == 1
    for batch_size in (4, 1):
        assert_equal(gradients(EIGHT, batch_size, **settings), whole)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [(IAC, {"critic": ValueHead()}), (IAC, {"critic_type": "q"}), (MAAC, {"reference_kl_coef": 0.1})],
)
def test_cuts_do_not_matter_to_critics(algorithm: type[CooperativeModule], settings: dict[str, Any]) -> None:
    # K=2, T=2: 4 nodes per item, values and targets by the critics as they are at each step's collection.
    settings = {"rollout_buffer_size": 16, **settings}
    whole = gradients(EIGHT[:4], 4, algorithm, micro_batch_tokens=100_000, **settings)
    assert len(whole) == 1
    assert_equal(gradients(EIGHT[:4], 2, algorithm, micro_batch_tokens=100_000, **settings), whole)
    assert_equal(gradients(EIGHT[:4], 1, algorithm, micro_batch_tokens=60, **settings), whole)


def test_gradient_checkpointing_does_not_matter() -> None:
    plain = gradients(EIGHT[:2], 2)
    assert_equal(gradients(EIGHT[:2], 2, agents=exact_agents(gradient_checkpointing=True)), plain)


class BeforeSecondStep(Callback):
    """Copies the agents after the first update."""

    agents: list[Agent]

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            assert isinstance(module, CooperativeModule)
            self.agents = reference_agents(module, "separate")


def largest_gap(agents: list[Agent], rollouts: Rollouts, temperature: float) -> float:
    """Between the log-probabilities that the sampler recorded and those of a plain forward pass."""
    gaps = [
        (agents[one.agent].scores(one, temperature)[0] - torch.tensor(one.log_probs)).detach().abs().max()
        for node in rollouts.nodes
        for group in node.completions
        for one in group
    ]
    return float(torch.stack(gaps).max())


def test_the_sampler_records_log_probs_at_the_temperature_of_the_present_policy() -> None:
    module = trained_a_little(
        make_module(
            MAGRPO,
            tiny_agents("separate"),
            sampling=Sampling(max_new_tokens=4, temperature=0.5),
            agent_learning_rate=0.1,
            max_grad_norm=None,
            num_turns=2,
        )
    )
    before = reference_agents(module, "separate")
    collected, middle = Collected(), BeforeSecondStep()
    trainer = fit(module, ITEMS[:2], 1, [collected, middle])
    first, second = collected.rollouts
    assert largest_gap(before, first, 0.5) < 1e-5
    assert largest_gap(middle.agents, second, 0.5) < 1e-5
    # The update moved the policy far enough to tell, and temperature 1 is another distribution.
    assert largest_gap(before, second, 0.5) > 1e-3
    assert largest_gap(before, first, 1.0) > 1e-3
    assert trainer.callback_metrics["agent_0/sampler_gap"] < 1e-5


def test_the_end_token_is_part_of_what_is_trained() -> None:
    module = make_module(MAGRPO)
    collected = Collected()
    fit(module, EIGHT, 8, [collected])
    completions = [one for node in collected.rollouts[0].nodes for group in node.completions for one in group]
    ended = [one for one in completions if not one.truncated]
    assert ended
    assert all(one.token_ids[-1] in ENDS and len(one.log_probs) == len(one.token_ids) for one in ended)
    # One-token completions are nothing but their end; they have a gradient like any other.
    assert any(len(one.token_ids) == 1 for one in ended)


def test_one_token_completions_have_a_gradient() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = list(range(259))
    agents = SharedBase(model, num_agents=1, lora=LORA, tokenizer=tiny_tokenizer())
    module = make_module(MAGRPO, agents, optimizer=RecordingSGD)
    collected = Collected()
    trainer = fit(module, callbacks=[collected])
    assert all(len(one.token_ids) == 1 for node in collected.rollouts[0].nodes for one in node.completions[0])
    (step,) = cast("RecordingSGD", trainer.optimizers[0]).recorded
    assert any(gradient is not None and gradient.abs().max() > 1e-3 for gradient in step[0])
