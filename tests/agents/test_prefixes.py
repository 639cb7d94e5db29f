"""Prompts that begin with what the turn before has read: the same completions, fewer tokens read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, FalconConfig, FalconForCausalLM, PreTrainedModel

from comlrl_lightning.agents.decoding import native as generation
from comlrl_lightning.agents.decoding.native import Row, generate
from comlrl_lightning.agents.decoding.prefixes import Prefixes, _pays, is_plain
from comlrl_lightning.agents.engine import Sampled
from comlrl_lightning.agents.kv_cache import new_cache
from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import LoraSettings, Sampling, Separate
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.environment.functions import TaskFunctions
from comlrl_lightning.environment.prompts import Formatters, RewardFunction, Transition
from comlrl_lightning.rollouts.collect import Collector, RolloutShape
from comlrl_lightning.types import Completion, Rollouts
from tests.agents.helpers import counting, model_of, requests, shared_team
from tests.tiny_lm import tiny_gemma, tiny_gpt2, tiny_llama, tiny_qwen2, tiny_qwen3, tiny_tokenizer

GREEDY = Sampling(max_new_tokens=12, temperature=0)
SAMPLED = Sampling(max_new_tokens=12)
FIRST = [(256, 1, 2), (256, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49), (256, 9, 8, 7, 6, 5)]
"""Prompts of the first turn."""


def tiny_falcon() -> PreTrainedModel:
    """A model that adds a bias to the scores which grows with the distance, as the mask tells it."""
    sizes = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FalconForCausalLM(FalconConfig(**sizes, alibi=True, initializer_range=0.3)).eval()


def tiny_bloom() -> PreTrainedModel:
    """A model that is not told positions."""
    return BloomForCausalLM(BloomConfig(vocab_size=259, hidden_size=32, n_layer=2, n_head=4)).eval()


PLAIN: list[Callable[[], PreTrainedModel]] = [tiny_llama, tiny_qwen2, tiny_qwen3, tiny_gpt2, tiny_falcon]


def ask(team: AgentTeam, rows: Sequence[Row], sampling: Sampling) -> list[Sampled]:
    """One completion per row, model by model and, if one cannot mix agents, agent by agent."""
    results: list[Sampled | None] = [None] * len(rows)
    with team.rollout_mode():
        for model, batches in team.rows_by_model([row.agent for row in rows]).items():
            for batch in batches:
                for index, sampled in zip(
                    batch, generate(model, [rows[index] for index in batch], sampling), strict=True
                ):
                    results[index] = sampled
    return [result for result in results if result is not None]


def first_turn(samples: int = 3) -> list[Row]:
    """Rows of two agents, of which the second answers one prompt less: rows without a completion fill up its group."""
    return [
        Row(agent, prompt, (agent, number, sample))
        for agent in (0, 1)
        for number, prompt in enumerate(FIRST[: 3 - agent])
        for sample in range(samples)
    ]


def next_turn(rows: Sequence[Row], answers: Sequence[Sampled], samples: int = 2) -> list[Row]:
    """Rows that go on in several ways from those of the first turn."""
    following = []
    for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        whole, length = row.prompt_ids + answer.token_ids, len(row.prompt_ids)
        ways = (
            (*whole, *range(60, 63 + number % 4)),  # all of it, and more
            whole,  # all of it: the last token was never read
            whole[:-1],  # what was read, of which one must be read again
            (*whole[: length + 2], 99, 98, 97),  # another end of the completion
            (*whole[: length - 1], 99, 98, 97),  # another end of the prompt
            (55, 54, 53),  # nothing in common
        )
        following += [
            Row(row.agent, ways[number % len(ways)], (row.agent, number, sample)) for sample in range(samples)
        ]
    return following


def keeping(rows: Sequence[Row], prefixes: Prefixes) -> list[Row]:
    return [replace(row, prefixes=prefixes) for row in rows]


def assert_equal(found: Sequence[Sampled], expected: Sequence[Sampled]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    scores = [torch.tensor([*chain.from_iterable(one.log_probs for one in many)]) for many in (found, expected)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-6, atol=1e-6)


def ending(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose answers have many lengths."""
    model.generation_config.eos_token_id = [*range(0, 240, 8)]
    return model


@pytest.mark.parametrize("make", [*PLAIN, tiny_gemma, tiny_bloom])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lora", [LoraSettings(), LoraSettings(use_dora=True)], ids=["grouped", "one by one"])
def test_completions_are_the_same(make: Callable[[], PreTrainedModel], sampling: Sampling, lora: LoraSettings) -> None:
    # The others read everything anew, by the same steps; their masks of float64 are infinite in a softmax of float32.
    model = make().double() if make in PLAIN else make()
    # Bloom and Falcon do not call their layers as the others do.
    lora = replace(lora, target_modules=["query_key_value"]) if make in (tiny_bloom, tiny_falcon) else lora
    team, prefixes = shared_team(ending(model), lora=lora), Prefixes()
    rows = first_turn()
    answers = ask(team, keeping(rows, prefixes), sampling)
    assert answers == ask(team, rows, sampling)
    if sampling is SAMPLED:
        assert len({len(answer.token_ids) for answer in answers}) > 3
    following = next_turn(rows, answers)
    with counting(model_of(team).causal.base_model) as all_calls:
        expected = ask(team, following, sampling)
    third = next_turn(following, expected, samples=1)
    with counting(model_of(team).causal.base_model) as calls:
        second = ask(team, keeping(following, prefixes), sampling)
    assert_equal(second, expected)
    assert (calls[0] == all_calls[0]) == (make not in PLAIN)
    prefixes.keeps = False
    assert_equal(ask(team, keeping(third, prefixes), sampling), ask(team, third, sampling))
    assert not prefixes._known


def test_only_the_rest_of_a_prompt_is_read() -> None:
    # Agent 0 read 3 + 3 tokens (of 4 sampled) and goes on with 2 more, agent 1 with 4: of 9 and 11 tokens 3 and 5 are
    # left. The third prompt shares 1 token with the first turn and has 2 more.
    team, prefixes = shared_team(), Prefixes()
    sampling = Sampling(max_new_tokens=4, min_new_tokens=4)
    rows = [Row(agent, FIRST[0], (agent,)) for agent in (0, 1)]
    answers = ask(team, keeping(rows, prefixes), sampling)
    asked = [Row(agent, (*FIRST[0], *answers[agent].token_ids, *range(2 + 2 * agent)), (agent,)) for agent in (0, 1)]
    asked.append(Row(1, (256, 99, 98), (3,)))
    with counting(model_of(team).causal.base_model) as calls:
        ask(team, keeping(asked, prefixes), sampling)
    assert calls == [(3, 5), *[(4, 1)] * 3]


def test_adapters_do_not_share_what_they_read() -> None:
    team, prefixes = shared_team(tiny_llama().double(), num_agents=3), Prefixes()
    rows = [Row(0, FIRST[1], (0,)), Row(1, FIRST[1], (1,))]
    answers = ask(team, keeping(rows, prefixes), GREEDY)
    # Each goes on from the other's answer: what they have in common is no more than the prompt. Agent 2 knows nothing.
    swapped = [Row(1 - row.agent, row.prompt_ids + one.token_ids, (5,)) for row, one in zip(rows, answers, strict=True)]
    expected = ask(team, swapped, GREEDY)
    with counting(model_of(team).causal.base_model) as calls:
        assert_equal(ask(team, keeping(swapped, prefixes), GREEDY), expected)
    assert answers[0].token_ids[0] != answers[1].token_ids[0]
    assert calls[0] == (2, 12)
    ask(team, keeping(rows, prefixes), GREEDY)
    with counting(model_of(team).causal.base_model) as calls:
        ask(team, keeping([Row(2, FIRST[1], (5,))], prefixes), GREEDY)
    assert calls[0] == (1, len(FIRST[1]))


def test_nothing_in_common_is_read_as_ever() -> None:
    team, prefixes = shared_team(tiny_llama().double()), Prefixes()
    ask(team, keeping(first_turn(), prefixes), SAMPLED)
    other = [Row(agent, (50 + agent, 51, 52), (agent,)) for agent in (0, 1)]
    with counting(model_of(team).causal.base_model) as calls:
        assert ask(team, keeping(other, prefixes), SAMPLED) == ask(team, other, SAMPLED)
    assert calls[0] == (2, 3)


def test_states_are_let_go_before_the_next_prompts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    team, prefixes = shared_team(), Prefixes()
    rows = first_turn()
    answers = ask(team, keeping(rows, prefixes), SAMPLED)
    assert {agent: len(known) for agent, known in prefixes._known.items()} == {0: 9, 1: 6}
    sizes: list[int] = []
    model_of(team).causal.base_model.register_forward_pre_hook(lambda *_: sizes.append(len(prefixes._known)))
    prefixes.keeps = False
    ask(team, keeping(next_turn(rows, answers), prefixes), SAMPLED)
    assert set(sizes) == {0}
    assert not prefixes._known


def test_agents_with_models_of_their_own() -> None:
    models: list[Any] = [ending(tiny_llama().double()), ending(tiny_gpt2().double())]
    team = build_team(Separate(models, tokenizers=[tiny_tokenizer(), tiny_tokenizer()], lora=None))
    prefixes, rows = Prefixes(), first_turn()
    answers = ask(team, keeping(rows, prefixes), SAMPLED)
    following = next_turn(rows, answers)
    assert_equal(ask(team, keeping(following, prefixes), SAMPLED), ask(team, following, SAMPLED))


def test_half_precision_stays_close() -> None:
    # bfloat16 has 8 bits: the log-probability of the first token may move by some hundredths, as in another batch.
    team, prefixes = shared_team(tiny_llama().to(torch.bfloat16), noise=0.02), Prefixes()
    rows = first_turn()
    answers = ask(team, keeping(rows, prefixes), SAMPLED)
    once = replace(GREEDY, max_new_tokens=1)
    following = next_turn(rows, answers)
    expected = ask(team, following, once)
    for one, other in zip(ask(team, keeping(following, prefixes), once), expected, strict=True):
        assert one.log_probs[0] == pytest.approx(other.log_probs[0], abs=0.15)


@pytest.mark.parametrize(
    ("lengths", "starts", "expected"),
    [
        ([10, 10], [0, 0], False),
        ([10, 10], [1, 1], True),
        # The longest is read as a whole: all others wait for it.
        ([10, 10], [0, 9], False),
        # 8 columns instead of 10 are read, and 8 + 8 instead of 10 stand in the cache.
        ([10, 8], [8, 0], False),
        # 4 instead of 10, and 8 + 4.
        ([10, 4], [8, 0], True),
    ],
)
def test_when_it_pays(lengths: list[int], starts: list[int], expected: bool) -> None:
    assert _pays(lengths, starts) == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (tiny_llama(), True),
        (tiny_gemma(), False),
        (tiny_bloom(), False),
        (tiny_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), False),
        (tiny_llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), True),
    ],
)
def test_what_is_plain(model: PreTrainedModel, expected: bool) -> None:
    targets = ["query_key_value"] if isinstance(model, BloomForCausalLM) else ["q_proj"]
    team = shared_team(model, lora=LoraSettings(target_modules=targets))
    language_model = model_of(team)
    cache = new_cache(model.config)
    ids = torch.tensor([[1, 2, 3]])
    language_model.hidden_states(ids, torch.arange(3).unsqueeze(0), None, cache)
    assert is_plain(language_model, cache) == expected


def test_the_other_backend_reads_anew() -> None:
    team, prefixes = shared_team(), Prefixes()
    asked = [replace(request, prefixes=prefixes) for request in requests(["hi"])]
    team.generate(asked, Sampling(max_new_tokens=3, backend="transformers"))
    assert not prefixes._known


def rollouts(team: AgentTeam, sampling: Sampling, **shape: Any) -> Rollouts:
    """Two items, three turns; a prompt is all that was said so far, then the number of the turn."""

    def transition(agent_completions: list[str], prompt_history_per_agent: Any) -> tuple[str, ...]:
        pairs = zip(prompt_history_per_agent, agent_completions, strict=True)
        return tuple(f"{history[-1]}{answer} {len(history)}?" for history, answer in pairs)

    interface = TaskFunctions(
        Formatters(lambda item, external_prompts=None: item["prompt"], 2),
        RewardFunction(lambda *answers, **_: [0.0] * len(answers[0]), 2),
        Transition(transition, 2),
        external_prompt_passthrough=True,
    )
    shapes = RolloutShape(num_generations=2, num_turns=3, **shape)
    collector = Collector(team, interface, shapes, sampling, (1, 2))
    return collector.collect([{"prompt": "one"}, {"prompt": "twenty-two"}], [0, 1])


def completions(found: Rollouts) -> list[Completion]:
    return [one for node in found.nodes for group in node.completions for one in group]


def test_rollouts_of_models_that_work_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Any] = [ending(tiny_llama().double()), ending(tiny_qwen2().double())]
    team = build_team(Separate(models, tokenizers=[tiny_tokenizer(), tiny_tokenizer()], lora=None))
    team.concurrent = True
    with counting(model_of(team, 1).causal.base_model) as calls:
        found = completions(rollouts(team, GREEDY))
    monkeypatch.setattr(generation, "is_plain", lambda *_: False)
    with counting(model_of(team, 1).causal.base_model) as all_calls:
        expected = completions(rollouts(team, GREEDY))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert sum(rows * width for rows, width in calls) < sum(rows * width for rows, width in all_calls)


@pytest.mark.parametrize("shape", [{}, {"joint_mode": "cross"}, {"trajectories": True}], ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rollouts_are_the_same(shape: dict[str, Any], sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    team = shared_team(ending(tiny_llama().double()))
    # Bytes above 127 alone are no text, and would not come back as they were sampled.
    with torch.no_grad():
        model_of(team).causal.get_output_embeddings().weight[[*range(94, 256)]] *= 0.1
    with counting(model_of(team).causal.base_model) as calls:
        found = completions(rollouts(team, sampling, **shape))
    monkeypatch.setattr(generation, "is_plain", lambda *_: False)
    with counting(model_of(team).causal.base_model) as all_calls:
        expected = completions(rollouts(team, sampling, **shape))
    assert [replace(one, log_probs=()) for one in found] == [replace(one, log_probs=()) for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, rel=1e-6, abs=1e-6)
    assert len(calls) == len(all_calls)
    assert sum(rows * width for rows, width in calls) < sum(rows * width for rows, width in all_calls)
