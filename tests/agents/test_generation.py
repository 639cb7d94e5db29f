"""Completions of teams: tokens, forward passes, endings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM, GenerationConfig, PreTrainedModel

from comlrl_lightning.agents.engine import GenerationRequest
from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import LoraSettings, Sampling, Separate
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.types import Completion
from tests.agents.helpers import ARCHITECTURES, counting, flat, model_of, requests, shared_team, stir, trained
from tests.tiny_lm import tiny_gemma, tiny_gpt2, tiny_llama, tiny_qwen2, tiny_tokenizer

PROMPTS = ["a", "hello there", "the quick brown fox jumps over it"]
GREEDY = Sampling(max_new_tokens=20, temperature=0)


def peft_greedy(team: AgentTeam, agent: int, prompt: str, max_new_tokens: int) -> list[int]:
    """Greedy tokens through PEFT's `set_adapter` and transformers' `generate`, one prompt alone."""
    model = model_of(team)
    assert model.adapters is not None
    model.adapters.network.set_adapter(f"agent_{agent}")
    ids = torch.tensor([team.encode(agent, prompt)])
    config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=257, pad_token_id=258)
    tokens: list[int] = model.causal.generate(ids, generation_config=config)[0, ids.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("make", ARCHITECTURES)
@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("lora", [LoraSettings(), LoraSettings(use_dora=True)], ids=["grouped", "one by one"])
def test_greedy_tokens_equal_those_of_peft_and_transformers(
    make: Callable[[], PreTrainedModel], backend: str, lora: LoraSettings
) -> None:
    team = shared_team(make(), lora=lora)
    asked = requests(PROMPTS, samples=1)
    answers = flat(team.generate(asked, replace(GREEDY, backend=backend)))  # type: ignore[arg-type]
    assert [(answer.agent, answer.prompt) for answer in answers] == [(r.agent, r.prompt) for r in asked]
    for answer in answers:
        assert isinstance(answer.prompt, str)
        assert list(answer.token_ids) == peft_greedy(team, answer.agent, answer.prompt, 20)
    assert len({answer.token_ids for answer in answers}) > 2


@pytest.mark.parametrize("make", ARCHITECTURES)
def test_a_completion_does_not_depend_on_its_batch(make: Callable[[], PreTrainedModel]) -> None:
    team = shared_team(make())
    prompts = [text * count for count in (1, 2) for text in ("ab", "c", "defgh", "i j")]
    sampling = Sampling(max_new_tokens=16)
    together: dict[tuple[int, str], list[tuple[int, ...]]] = {}
    for answer in flat(team.generate(requests(prompts), sampling)):
        together.setdefault((answer.agent, str(answer.prompt)), []).append(answer.token_ids)
    for prompt in prompts:
        for agent in (1, 0):
            alone = flat(team.generate(requests([prompt], [agent]), sampling))
            assert [answer.token_ids for answer in alone] == together[agent, prompt]


def test_keys_decide_and_global_random_states_are_left_alone() -> None:
    team, sampling = shared_team(), Sampling(max_new_tokens=8)
    request = GenerationRequest(0, "hi", ((1,), (2,), (1,)))
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state(legacy=False)["state"]["key"].tolist()
    for backend in ("native", "transformers"):
        chosen = replace(sampling, backend=backend)
        first, again = team.generate([request], chosen), team.generate([request], chosen)
        assert first == again
        other = team.generate([replace(request, keys=((3,), (4,), (5,)))], chosen)
        assert [c.token_ids for c in first[0]] != [c.token_ids for c in other[0]]
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert np.random.get_state(legacy=False)["state"]["key"].tolist() == numpy_state
    first = team.generate([request], sampling)
    assert first[0][0].token_ids == first[0][2].token_ids != first[0][1].token_ids


def test_one_prefill_and_one_forward_pass_per_token() -> None:
    # 3 prompts x 2 agents x 4 samples = 24 rows. The prefill reads 6 distinct prompts; a token that comes last is
    # never read, so the longest completion of C tokens takes C - 1 more passes, all with one token per row.
    team = shared_team()
    with counting(model_of(team).causal.base_model) as calls:
        answers = flat(team.generate(requests(PROMPTS + PROMPTS[:1], samples=4), Sampling(max_new_tokens=30)))
    assert len(answers) == 32
    assert calls[0] == (6, 1 + len(PROMPTS[2]))
    assert len(calls) == max(len(answer.token_ids) for answer in answers)
    assert all(width == 1 for _, width in calls[1:])


def ending_team(model: PreTrainedModel | None = None, tokenizer: object | None = None) -> AgentTeam:
    """A team whose base is likely to end soon: the head's row of the end-of-sequence token is a mean of others."""
    model = model if model is not None else tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)
    return shared_team(model, tokenizer=tokenizer or tiny_tokenizer(), noise=0.02)


def test_finished_rows_leave_the_batch() -> None:
    team = ending_team()
    with counting(model_of(team).causal.base_model) as calls:
        answers = flat(team.generate(requests(PROMPTS, samples=8), Sampling(max_new_tokens=120)))
    lengths = {agent: [len(a.token_ids) for a in answers if a.agent == agent] for agent in (0, 1)}
    assert min(map(min, lengths.values())) < 60
    # At each step both groups are as wide as the fuller of them, and a group without running rows is gone.
    for step, (rows, _) in enumerate(calls[1:], start=1):
        running = [sum(length > step for length in group) for group in lengths.values()]
        assert rows == max(running) * sum(count > 0 for count in running)
    # One row each: when one agent is done, only the other one's row is left.
    with counting(model_of(team).causal.base_model) as calls:
        pair = flat(team.generate(requests(["go"], samples=1), Sampling(max_new_tokens=120)))
    shorter, longer = sorted(len(answer.token_ids) for answer in pair)
    assert [rows for rows, _ in calls] == [2] * shorter + [1] * (longer - shorter)
    assert shorter < longer
    # What is left of the batch has not mixed its rows up.
    for answer in answers[::7]:
        assert isinstance(answer.prompt, str)
        alone = team.generate(requests([answer.prompt], [answer.agent], 8), Sampling(max_new_tokens=120))
        assert answer.token_ids in {other.token_ids for other in alone[0]}


@pytest.mark.parametrize("pad", ["own", "eos", None])
def test_the_end_of_sequence_token_is_kept_whatever_pads(pad: str | None) -> None:
    team = ending_team(tokenizer=tiny_tokenizer(pad))  # type: ignore[arg-type]
    for backend in ("native", "transformers"):
        sampling = Sampling(max_new_tokens=90, backend=backend)
        answers = flat(team.generate(requests(PROMPTS, samples=8), sampling))
        assert {answer.truncated for answer in answers} == {True, False}
        for answer in answers:
            assert answer.truncated == (answer.token_ids[-1] != 257)
            assert 257 not in answer.token_ids[:-1]
            assert len(answer.log_probs) == len(answer.token_ids)
            assert len(answer.token_ids) == 90 or not answer.truncated
            assert "<eos>" not in answer.text
        scores = team.log_probs(answers, temperature=1.0)
        assert scores.completion_mask.sum(1).tolist() == [len(answer.token_ids) for answer in answers]


def test_generation_settings_and_tokenizer_both_say_what_ends() -> None:
    model = tiny_llama()
    model.generation_config.eos_token_id = [5, 6]
    team = shared_team(model)
    assert model_of(team).end_ids == (5, 6, 257)
    answers = flat(team.generate(requests(PROMPTS, samples=30), Sampling(max_new_tokens=60)))
    assert {answer.token_ids[-1] for answer in answers if not answer.truncated} >= {5, 6}
    assert all(token not in (5, 6, 257) for answer in answers for token in answer.token_ids[:-1])


def test_no_end_before_the_least_number_of_tokens() -> None:
    team = ending_team()
    for backend in ("native", "transformers"):
        sampling = Sampling(max_new_tokens=60, min_new_tokens=25, backend=backend)
        lengths = [len(answer.token_ids) for answer in flat(team.generate(requests(PROMPTS, samples=8), sampling))]
        assert min(lengths) >= 25
        assert min(lengths) < 60


def indifferent_team() -> AgentTeam:
    """A team whose every token is equally likely; greedy choice takes the first one, which ends a completion."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.generation_config.eos_token_id = [0]
    return shared_team(model)


def test_the_end_may_come_right_after_the_least_number() -> None:
    for backend in ("native", "transformers"):
        sampling = Sampling(max_new_tokens=9, min_new_tokens=3, temperature=0, backend=backend)
        (answer,) = flat(indifferent_team().generate(requests(["hi"], [0], 1), sampling))
        assert answer.token_ids == (1, 1, 1, 0)
        assert not answer.truncated


def test_every_token_has_its_chance() -> None:
    # transformers would keep 50 of them if it were not told otherwise. 259 equal tokens, 600 draws: about 233 come.
    request = GenerationRequest(0, "hi", tuple((sample,) for sample in range(600)))
    for backend in ("native", "transformers"):
        ((*answers,),) = indifferent_team().generate([request], Sampling(max_new_tokens=1, backend=backend))
        assert len({answer.token_ids for answer in answers}) > 200


def spoken(answers: Sequence[Completion]) -> list[str]:
    return [answer.text for answer in answers]


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_stop_strings_end_the_row_and_leave_its_text(backend: str) -> None:
    team = shared_team(tokenizer=tiny_tokenizer())
    whole = flat(team.generate(requests(PROMPTS, samples=1), GREEDY))
    # Two plain characters out of an answer end it; they and what followed them must be gone from its text.
    decode = model_of(team).tokenizer.decode
    ended, place = next(
        (index, place)
        for index, answer in enumerate(whole)
        for place in range(1, 18)
        if decode(answer.token_ids[place : place + 2]).isalpha()
    )
    stop = decode(whole[ended].token_ids[place : place + 2])
    sampling = replace(GREEDY, stop=(stop,), backend=backend)  # type: ignore[arg-type]
    for before, after in zip(whole, flat(team.generate(requests(PROMPTS, samples=1), sampling)), strict=True):
        stopped = stop in decode(before.token_ids)
        assert after.truncated == (before.truncated and not stopped)
        assert after.text == before.text.partition(stop)[0]
        if not stopped:
            assert after.token_ids == before.token_ids
        elif before is whole[ended]:
            assert after.token_ids == before.token_ids[: place + 2]


@pytest.mark.parametrize("make", ARCHITECTURES)
def test_the_sampler_and_the_update_agree(make: Callable[[], PreTrainedModel]) -> None:
    # Gemma's masks of float64 are infinite in the softmax, which computes in float32.
    model, close = (make(), 1e-4) if make is tiny_gemma else (make().double(), 1e-6)
    team = shared_team(model, noise=0.02)
    for settings in (Sampling(12, temperature=0.5), Sampling(12, temperature=0.5, top_p=0.9, backend="transformers")):
        answers = flat(team.generate(requests(PROMPTS), settings))
        scores = team.log_probs(answers, temperature=0.5)
        for row, answer in enumerate(answers):
            sampled = torch.tensor(answer.log_probs, dtype=torch.float64)
            ours = scores.log_probs[row, : len(sampled)].detach().double()
            torch.testing.assert_close(ours, sampled, rtol=close, atol=close)


@pytest.mark.parametrize("settings", [{}, {"min_new_tokens": 3}, {"top_k": 5}, {"temperature": 0.0}])
def test_transformers_log_probs_are_those_of_the_passes_that_sampled(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The head is larger while tokens are drawn, and only then: what is scored afterwards is another distribution.
    model = tiny_gpt2(tie_word_embeddings=False)
    model.generation_config.eos_token_id = list(range(130))
    team = shared_team(model, noise=0.02)
    head = model.get_output_embeddings().weight
    generate = model.generate

    def sharper(*arguments: Any, **keywords: Any) -> Any:
        head.data *= 1.5
        try:
            return generate(*arguments, **keywords)
        finally:
            head.data /= 1.5

    monkeypatch.setattr(model, "generate", sharper)
    sampling = Sampling(**{"max_new_tokens": 6, "temperature": 0.8, "backend": "transformers", **settings})
    answers = flat(team.generate(requests(PROMPTS), sampling))
    lengths = [len(one.token_ids) for one in answers]
    assert min(lengths) == sampling.min_new_tokens + 1
    temperature = sampling.temperature or 1.0
    later = team.log_probs(answers, temperature=temperature).log_probs
    then = team.log_probs(answers, temperature=temperature / 1.5).log_probs
    for row, answer in enumerate(answers):
        sampled = torch.tensor(answer.log_probs)
        torch.testing.assert_close(then[row, : len(sampled)].detach(), sampled, rtol=1e-4, atol=1e-4)
        assert (later[row, : len(sampled)] - sampled).abs().max() > 1e-3


def test_a_changed_adapter_changes_the_text_at_once() -> None:
    team = shared_team(noise=0)
    before = spoken(flat(team.generate(requests(PROMPTS, samples=1), GREEDY)))
    # At first all agents are the base model and say the same.
    assert before[::2] == before[1::2]
    with torch.no_grad():
        for name, parameter in team.agent_parameters(1).items():
            if "lora_B" in name:
                parameter.normal_(std=3.0, generator=torch.Generator().manual_seed(0))
    after = spoken(flat(team.generate(requests(PROMPTS, samples=1), GREEDY)))
    assert after[::2] == before[::2]
    assert all(new != old for new, old in zip(after[1::2], before[1::2], strict=True))


def test_progress_counts_running_rows() -> None:
    team = ending_team()
    for backend in ("native", "transformers"):
        heard: list[int] = []
        sampling = Sampling(max_new_tokens=60, backend=backend)
        answers = flat(team.generate(requests(PROMPTS, samples=8), sampling, heard.append))
        # After step t the rows with more than t tokens are running; rows at the limit count as running to the last.
        ends = [len(a.token_ids) + a.truncated for a in answers]
        assert heard == [
            sum(end > step for end in ends) for step in range(1, max(len(a.token_ids) for a in answers) + 1)
        ]


@pytest.mark.parametrize("full", [True, False])
def test_heterogeneous_agents(full: bool) -> None:
    tokenizers = [tiny_tokenizer(), tiny_tokenizer(reverse=True, pad=None)]
    models = [tiny_llama(), tiny_gpt2()]
    team = build_team(Separate(models, tokenizers=tokenizers, lora=None if full else LoraSettings()))
    if not full:
        stir(team, 0.1)
    asked = requests(PROMPTS, samples=1)
    answers = flat(team.generate(asked, GREEDY))
    for agent, model in enumerate(models):
        for answer in answers[agent::2]:
            ids = torch.tensor([tokenizers[agent](answer.prompt).input_ids])
            assert ids[0].tolist() == list(answer.prompt_ids)
            config = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=257, pad_token_id=258)
            expected = model.generate(ids, generation_config=config)[0, ids.shape[1] :].tolist()
            assert list(answer.token_ids) == expected
            assert answer.text == tokenizers[agent].decode(expected, skip_special_tokens=True)
    assert set(trained(team)) == set(team.agent_parameters(0)) | set(team.agent_parameters(1))


def test_models_own_generation_settings_have_no_say() -> None:
    model = tiny_qwen2()
    for name, value in {"top_k": 1, "repetition_penalty": 9.0, "temperature": 0.01, "do_sample": True}.items():
        setattr(model.generation_config, name, value)
    team = shared_team(model)
    request = GenerationRequest(0, "hi", tuple((sample,) for sample in range(20)))
    for backend in ("native", "transformers"):
        sampling = Sampling(max_new_tokens=1, backend=backend)
        assert len({answer.token_ids for answer in team.generate([request], sampling)[0]}) > 5
    assert model.generation_config.top_k == 1


def test_logits_that_are_not_finite_are_an_error() -> None:
    team = shared_team()
    with torch.no_grad():
        next(iter(team.agent_parameters(1).values())).fill_(float("nan"))
    for backend in ("native", "transformers"):
        with pytest.raises(FloatingPointError, match=r"agent_1 gives .* Training has made \S*agent_1.weight NaN"):
            team.generate(requests(["hi"]), replace(GREEDY, backend=backend))


def test_nothing_to_generate() -> None:
    assert shared_team().generate([], GREEDY) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_biases_of_alibi(dtype: torch.dtype) -> None:
    sizes = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = FalconForCausalLM(FalconConfig(**sizes, alibi=True)).to(dtype)
    team = shared_team(model)
    answers = team.generate(requests(["hi", "there"]), Sampling(max_new_tokens=5))
    assert all(completion.token_ids for group in answers for completion in group)


def test_end_tokens_beyond_the_vocabulary_are_ignored() -> None:
    model = tiny_llama()
    model.generation_config.eos_token_id = [257, 100_000]
    assert model_of(shared_team(model)).end_ids == (257,)
