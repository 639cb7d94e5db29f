"""Log-probabilities and gradients of teams against PEFT and transformers, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from comlrl_lightning.agents import log_probs as scoring
from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import LoraSettings, Separate
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.types import Completion
from tests.agents.helpers import (
    ARCHITECTURES,
    completion,
    counting,
    model_of,
    row_log_probs,
    shared_team,
    stir,
    trained,
    written,
)
from tests.tiny_lm import tiny_gemma, tiny_gpt2, tiny_llama, tiny_qwen2, tiny_tokenizer

AGENTS = [1, 0, 0, 1, 0]


def loss_weights(rows: Sequence[Completion]) -> Tensor:
    """Fixed weights, one per row, so that gradients of different rows cannot stand in for each other."""
    return torch.arange(1.0, len(rows) + 1) * torch.tensor([1.0, -1.0])[torch.arange(len(rows)) % 2]


def peft_gradients(team: AgentTeam, rows: Sequence[Completion], temperature: float) -> dict[str, Tensor]:
    """Gradients through PEFT's public `set_adapter`, one row at a time, right after its forward pass."""
    model = model_of(team)
    assert model.adapters is not None
    gradients: dict[str, Tensor] = {}
    for agent in range(team.num_agents):
        model.adapters.network.set_adapter(f"agent_{agent}")
        for weight, row in zip(loss_weights(rows), rows, strict=True):
            if row.agent == agent:
                torch.autograd.backward(weight * row_log_probs(model.causal, row, temperature).sum())
        gradients |= {n: p.grad.clone() for n, p in team.agent_parameters(agent).items() if p.grad is not None}
    for parameter in team.parameters():
        parameter.grad = None
    model.adapters.freeze_all_but_trained()
    return gradients


def team_gradients(team: AgentTeam, rows: Sequence[Completion], temperature: float) -> dict[str, Tensor]:
    scores = team.log_probs(rows, temperature=temperature)
    torch.autograd.backward((loss_weights(rows) * scores.log_probs.sum(1)).sum())
    gradients = {name: p.grad for name, p in team.named_parameters() if p.grad is not None}
    for parameter in team.parameters():
        parameter.grad = None
    return gradients


def assert_equal_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], rounding: float = 1e-9) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient.abs().sum() > 0, name
        largest = float(gradient.abs().max())
        torch.testing.assert_close(ours[name], gradient, rtol=rounding, atol=rounding / 10 * largest, msg=name)


@pytest.mark.parametrize("make", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_padded_rows_score_as_each_row_alone(make: Callable[[], PreTrainedModel], temperature: float) -> None:
    team, rows = shared_team(make()), written(0, AGENTS)
    with torch.no_grad():
        scores = team.log_probs(rows, temperature=temperature)
        model = model_of(team)
        assert model.adapters is not None
        for index, row in enumerate(rows):
            with model.adapters.acting(f"agent_{row.agent}"):
                alone = row_log_probs(model.causal, row, temperature)
            torch.testing.assert_close(scores.log_probs[index, : len(alone)], alone, rtol=1e-4, atol=1e-4)
            assert scores.completion_mask[index].tolist() == [
                column < len(alone) for column in range(scores.log_probs.shape[1])
            ]
    assert not scores.log_probs[~scores.completion_mask].any()
    assert not scores.entropy[~scores.completion_mask].any()
    assert bool((scores.entropy[scores.completion_mask] > 0).all())


@pytest.mark.parametrize("make", ARCHITECTURES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_through_set_adapter(make: Callable[[], PreTrainedModel], checkpointing: bool) -> None:
    team, rows = shared_team(make(), gradient_checkpointing=checkpointing).double().train(), written(1, AGENTS)
    # Gemma's attention computes its softmax in float32, whatever the model does.
    rounding = 1e-5 if make is tiny_gemma else 1e-9
    assert_equal_gradients(team_gradients(team, rows, 0.7), peft_gradients(team, rows, 0.7), rounding)


@pytest.mark.parametrize("agents", [[0, 0], [0, 1, 1, 0], [2, 1, 0, 2, 2]])
@pytest.mark.parametrize(
    "lora",
    [
        LoraSettings(rank=3, alpha=5),
        LoraSettings(rank=4, target_modules=["q_proj", "lm_head"]),
        LoraSettings(rank=4, use_dora=True),
        LoraSettings(rank=4, target_modules=["embed_tokens", "v_proj"]),
        LoraSettings(rank=4, target_modules=["v_proj"], modules_to_save=["lm_head"]),
    ],
    ids=["odd scale", "head", "dora", "embedding", "modules_to_save"],
)
def test_gradients_of_one_to_three_agents(agents: list[int], lora: LoraSettings) -> None:
    team = shared_team(num_agents=max(agents) + 1, lora=lora, gradient_checkpointing=True).double().train()
    rows = written(2, agents)
    assert_equal_gradients(team_gradients(team, rows, 1.0), peft_gradients(team, rows, 1.0))
    plain = not lora.use_dora and lora.modules_to_save is None and "embed_tokens" not in lora.target_modules
    assert model_of(team).mixes_agents == plain


def test_layers_are_computed_again_in_the_backward_pass() -> None:
    # 2 layers: forward counts 2, the backward pass counts 2 more; in evaluation mode nothing is computed again.
    team = shared_team(gradient_checkpointing=True)
    calls: list[int] = []
    for layer in model_of(team).causal.base_model.layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    for training, expected in ((True, 4), (False, 2)):
        calls.clear()
        torch.autograd.backward(team.train(training).log_probs(written(0, [0, 1]), temperature=1.0).log_probs.sum())
        assert len(calls) == expected


def test_a_chunked_head_gives_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    team, rows = shared_team(lora=LoraSettings(target_modules=["lm_head"])).double(), written(3, [0, 1] * 12)
    whole = team_gradients(team, rows, 1.0)
    monkeypatch.setattr(scoring, "MAX_LOGITS_ON_CPU", 1)
    assert_equal_gradients(team_gradients(team, rows, 1.0), whole)


def test_one_forward_pass_over_what_is_needed() -> None:
    # Rows of 3 + 4 and 2 + 2 tokens; the last token predicts nothing that is scored.
    team = shared_team()
    with counting(model_of(team).causal.base_model) as calls:
        team.log_probs([completion(0, [1, 2, 3], [4, 5, 6, 7]), completion(1, [1, 2], [3, 4])], temperature=1.0)
    assert calls == [(2, 6)]


def test_only_agents_in_the_batch_are_updated() -> None:
    team = shared_team(num_agents=3)
    before = {name: parameter.detach().clone() for name, parameter in team.named_parameters()}
    optimizer = torch.optim.AdamW(trained(team).values(), lr=0.1)
    torch.autograd.backward(team.log_probs(written(0, [0, 2]), temperature=1.0).log_probs.sum())
    optimizer.step()
    changed = {name for name, parameter in team.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {*team.agent_parameters(0), *team.agent_parameters(2)}


def test_training_leaves_the_base_as_it_was() -> None:
    team = shared_team().train()
    base = {name: p.detach().clone() for name, p in team.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(team.parameters(), lr=0.1, weight_decay=0.1)
    for seed in range(3):
        torch.autograd.backward(team.log_probs(written(seed, [0, 1]), temperature=1.0).log_probs.sum())
        optimizer.step()
    now = dict(team.named_parameters())
    assert base
    assert all(torch.equal(now[name], value) for name, value in base.items())


def test_separate_models_score_in_the_order_of_the_rows() -> None:
    models = [tiny_llama(), tiny_gpt2()]
    team = build_team(Separate(models, tokenizers=[tiny_tokenizer(), tiny_tokenizer(reverse=True)]))
    rows = written(4, AGENTS)
    scores = team.log_probs(rows, temperature=0.8)
    for index, row in enumerate(rows):
        alone = row_log_probs(models[row.agent], row, 0.8)
        torch.testing.assert_close(scores.log_probs[index, : len(alone)], alone, rtol=1e-4, atol=1e-4)


def test_scores_stay_float64() -> None:
    team, rows = shared_team(tiny_qwen2()).double(), written(5, AGENTS)
    scores = team.log_probs(rows, temperature=1.0)
    assert scores.log_probs.dtype == torch.float64
    alone = team.log_probs(rows[1:2], temperature=1.0).log_probs[0]
    torch.testing.assert_close(scores.log_probs[1, : len(alone)], alone, rtol=1e-12, atol=1e-12)


def test_the_end_of_sequence_token_has_a_gradient() -> None:
    # One token, the end of the sequence: its loss must reach the adapter.
    team = shared_team()
    torch.autograd.backward(team.log_probs([completion(0, [1, 2], [257])], temperature=1.0).log_probs.sum())
    assert all(p.grad is not None and p.grad.any() for p in team.agent_parameters(0).values())
    assert all(p.grad is None for p in team.agent_parameters(1).values())


def test_no_completions_give_empty_scores() -> None:
    scores = shared_team().log_probs([], temperature=1.0)
    assert scores.log_probs.shape == scores.entropy.shape == scores.completion_mask.shape == (0, 0)


def reference_scores(team: AgentTeam, rows: Sequence[Completion]) -> Tensor:
    with torch.no_grad():
        return team.log_probs(rows, temperature=1.0, reference=True).log_probs


def test_the_reference_is_the_base_model() -> None:
    team, rows = shared_team(noise=0.0), written(6, AGENTS)
    team.add_reference()
    at_first = team.log_probs(rows, temperature=1.0).log_probs.detach()
    stir(team, 0.5)
    torch.testing.assert_close(reference_scores(team, rows), at_first, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(team.log_probs(rows, temperature=1.0).log_probs, at_first, atol=0.1)


@pytest.mark.parametrize("lora", [LoraSettings(), LoraSettings(use_dora=True)], ids=["grouped", "one by one"])
def test_the_reference_is_the_initial_policy(lora: LoraSettings) -> None:
    team, rows = shared_team(noise=0.3, reference="initial", lora=lora), written(6, AGENTS)
    at_first = team.log_probs(rows, temperature=1.0).log_probs.detach()
    names = set(trained(team))
    team.add_reference()
    team.add_reference()
    assert set(trained(team)) == names
    stir(team, 0.5)
    torch.testing.assert_close(reference_scores(team, rows), at_first, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(team.log_probs(rows, temperature=1.0).log_probs, at_first, atol=0.1)


def test_the_reference_of_full_fine_tuning_is_a_frozen_copy() -> None:
    settings: dict[str, Any] = {"tokenizers": [tiny_tokenizer(), tiny_tokenizer()]}
    team, rows = build_team(Separate([tiny_llama(), tiny_qwen2()], **settings)), written(6, AGENTS)
    at_first = team.log_probs(rows, temperature=1.0).log_probs.detach()
    names = set(trained(team))
    team.add_reference()
    assert set(trained(team)) == names
    assert set(team.agent_parameters(0)) | set(team.agent_parameters(1)) == names
    stir(team, 0.1)
    torch.testing.assert_close(reference_scores(team, rows), at_first, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(team.log_probs(rows, temperature=1.0).log_probs, at_first, atol=0.1)


def answers(seed: int, sizes: Sequence[tuple[int, int]]) -> list[Completion]:
    """Random completions; each (agent, K) stands for a prompt of its own that gets K answers."""
    rows = []
    for place, (agent, count) in enumerate(sizes):
        written_once = written(seed + place, [agent] * count)
        prompt = written(100 + seed + place, [agent])[0].prompt_ids * 3
        rows += [completion(agent, prompt, row.token_ids) for row in written_once]
    return rows


class TestPromptsReadOnce:
    SIZES = ((0, 4), (1, 3), (0, 2), (1, 1))

    @pytest.mark.parametrize("make", ARCHITECTURES)
    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_scores_and_gradients_stay(
        self, make: Callable[[], PreTrainedModel], temperature: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        team, rows = shared_team(make()).double().train(), answers(0, self.SIZES)
        assert any(len(row.token_ids) == 1 for row in rows)
        gradients, scores = [], []
        for worth in (0.0, 10.0):  # never, and always
            monkeypatch.setattr(scoring, "WORTH_A_PASS", worth)
            scores.append(team.log_probs(rows, temperature=temperature))
            gradients.append(team_gradients(team, rows, temperature))
        torch.testing.assert_close(scores[1].log_probs, scores[0].log_probs, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(scores[1].entropy, scores[0].entropy, rtol=1e-9, atol=1e-11)
        assert gradients[1].keys() == gradients[0].keys()
        for name, gradient in gradients[0].items():
            # Norms compute in single precision whatever the model does.
            torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-6 * float(gradient.abs().max()))

    def test_to_the_sixth_digit_in_single_precision(self, monkeypatch: pytest.MonkeyPatch) -> None:
        team, rows = shared_team(tiny_llama(initializer_range=0.02)).train(), answers(1, self.SIZES)
        gradients, shapes = [], []
        for worth in (0.0, 10.0):
            monkeypatch.setattr(scoring, "WORTH_A_PASS", worth)
            with counting(model_of(team).causal.base_model) as calls:
                gradients.append(torch.cat([part.flatten() for part in team_gradients(team, rows, 1.0).values()]))
            shapes.append([*calls])
        assert (gradients[1] - gradients[0]).norm() < 1e-6 * gradients[0].norm()
        assert shapes[1] != shapes[0]

    def test_reference_policies_share_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        team, rows = shared_team(reference="initial").double(), answers(2, self.SIZES)
        team.add_reference()
        stir(team, seed=1)
        found = []
        for worth in (0.0, 10.0):
            monkeypatch.setattr(scoring, "WORTH_A_PASS", worth)
            found.append(team.log_probs(rows, temperature=1.0, reference=True).log_probs)
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)
        assert not torch.allclose(found[0], team.log_probs(rows, temperature=1.0).log_probs)

    def test_an_empty_answer(self) -> None:
        rows = [completion(0, range(12), [1, 2, 3]), completion(0, range(12), [])]
        scores = shared_team().log_probs(rows, temperature=1.0)
        assert scores.completion_mask.tolist() == [[True] * 3, [False] * 3]
        assert scores.log_probs[1].tolist() == [0.0] * 3

    def test_what_is_read(self) -> None:
        # Prompts of 12 and answers of 3 and 2 tokens: 2 x 15 = 30 tokens apart, 12 + 2 x 3 = 18 with the prompt once.
        team = shared_team()
        rows = [completion(0, range(12), [1, 2, 3]), completion(0, range(12), [4, 5])]
        with counting(model_of(team).causal.base_model) as calls:
            team.log_probs(rows, temperature=1.0)
        assert calls == [(1, 12), (2, 2)]

    def test_short_prompts_are_not_worth_a_pass(self) -> None:
        # 2 x (2 + 8) = 20 tokens apart, 2 + 2 x 8 = 18 of them with the prompt once.
        team = shared_team()
        with counting(model_of(team).causal.base_model) as calls:
            team.log_probs([completion(0, [1, 2], range(8))] * 2, temperature=1.0)
        assert calls == [(2, 9)]

    @pytest.mark.parametrize(
        ("make", "settings"),
        [(tiny_gemma, {}), (tiny_llama, {"gradient_checkpointing": True})],
        ids=["sliding windows", "checkpointing"],
    )
    def test_models_that_cannot(self, make: Callable[[], PreTrainedModel], settings: dict[str, Any]) -> None:
        assert not model_of(shared_team(make(), **settings)).reads_prompts_once
        assert model_of(shared_team()).reads_prompts_once
