"""Encoding of prompts."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
from tokenizers import processors

from comlrl_lightning.agents.engine import GenerationRequest
from comlrl_lightning.agents.prompts import PromptEncoder
from comlrl_lightning.agents.settings import TEMPLATE_ARGUMENTS, Sampling, Separate, SharedBase
from comlrl_lightning.utilities.calls import Place
from tests.agents.helpers import requests, shared_team
from tests.rollouts.fakes import FakeTeam, make_collector
from tests.tiny_lm import tiny_gpt2, tiny_llama, tiny_tokenizer

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def decoded(encoder: PromptEncoder, ids: tuple[int, ...]) -> str:
    text: str = encoder.tokenizer.decode(ids)
    return text


def test_text_gets_the_special_tokens_of_its_tokenizer() -> None:
    encoder = PromptEncoder(tiny_tokenizer())
    ids = encoder.encode(0, "hi")
    assert ids[0] == 256
    assert decoded(encoder, ids) == "<bos>hi"


def test_messages_go_through_the_template_once() -> None:
    encoder = PromptEncoder(tiny_tokenizer(chat=True))
    ids = encoder.encode(0, MESSAGES)
    assert decoded(encoder, ids) == "<bos>[system]be brief\n[user]hi\n[assistant]"
    assert ids.count(256) == 1


def test_template_arguments_reach_the_template() -> None:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = "{{ mood }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    encoder = PromptEncoder(tokenizer, {"mood": "glad:"})
    assert decoded(encoder, encoder.encode(0, MESSAGES)) == "glad:be briefhi"


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt of agent_1 is a list of chat messages.*no chat template"):
        PromptEncoder(tiny_tokenizer()).encode(1, MESSAGES)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt of agent_2 is empty: ''"):
        PromptEncoder(tiny_tokenizer(add_bos=False)).encode(2, "")


def test_long_prompts_are_cut_from_the_left_with_one_warning() -> None:
    encoder = PromptEncoder(tiny_tokenizer(), max_tokens=4)
    with pytest.warns(UserWarning, match="agent_0 has 7 tokens, more than the 4.*: its first 3 are cut from the left"):
        assert decoded(encoder, encoder.encode(0, "abcdef")) == "<bos>def"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decoded(encoder, encoder.encode(0, "uvwxyz", limit=9)) == "<bos>xyz"
        assert decoded(encoder, encoder.encode(0, "uvwxyz", limit=3)) == "<bos>yz"
        assert decoded(encoder, encoder.encode(0, "xyz", limit=4)) == "<bos>xyz"


def test_a_prompt_without_a_first_token_of_its_own_keeps_its_end() -> None:
    encoder = PromptEncoder(tiny_tokenizer(add_bos=False), max_tokens=3)
    with pytest.warns(UserWarning, match="cut from the left"):
        assert decoded(encoder, encoder.encode(0, "abcdef")) == "def"


def test_long_prompts_can_be_an_error() -> None:
    encoder = PromptEncoder(tiny_tokenizer(), max_tokens=4, long_prompts="error")
    with pytest.raises(ValueError, match=r"prompt of agent_1 has 7 tokens, more than the 4.*Shorten it"):
        encoder.encode(1, "abcdef")


def test_the_model_has_room_for_prompt_and_completion() -> None:
    # 16 positions, 10 new tokens of which the last is never read: 7 tokens of prompt.
    team = shared_team(tiny_gpt2(n_positions=16))
    with pytest.warns(UserWarning, match="has 21 tokens, more than the 7"):
        ((completion, _),) = team.generate(requests(["x" * 20], [0]), Sampling(max_new_tokens=10, min_new_tokens=10))
    assert len(completion.prompt_ids) == 7
    assert len(completion.token_ids) == 10
    team.log_probs([completion], temperature=1.0)


def test_a_model_without_room_for_a_prompt_is_an_error() -> None:
    team = shared_team(tiny_llama(max_position_embeddings=16))
    with pytest.raises(ValueError, match=r"max_new_tokens=17\) leaves no room.*agent_1 reads 16 tokens"):
        team.generate([GenerationRequest(1, "hi", ((0,),))], Sampling(max_new_tokens=17))


def test_team_encodes_for_each_agent() -> None:
    team = shared_team(max_prompt_tokens=3)
    with pytest.warns(UserWarning, match="agent_1 has 6 tokens"):
        assert team.encode(1, "abcde") == team.encode(0, "de")


def test_an_end_that_the_tokenizer_appends_is_dropped() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 256), ("<eos>", 257)]
    )
    encoder = PromptEncoder(tokenizer)
    assert encoder.encode(0, "hi") == tuple(tiny_tokenizer()("hi").input_ids)
    assert encoder.encode(0, "hi<eos>")[-1] == 257


PLACE = Place({"prompt": "p"}, 7, 2)


def test_errors_name_item_and_turn() -> None:
    where = r"agent_1 for task item 7 \{'prompt': 'p'\} at turn 2"
    with pytest.raises(ValueError, match=rf"A prompt of {where} has 7 tokens"):
        PromptEncoder(tiny_tokenizer(), max_tokens=4, long_prompts="error").encode(1, "abcdef", place=PLACE)
    with pytest.raises(ValueError, match=rf"The prompt of {where} is empty"):
        PromptEncoder(tiny_tokenizer(add_bos=False)).encode(1, "", place=PLACE)
    with pytest.raises(ValueError, match=rf"The prompt of {where} is a list of chat messages"):
        PromptEncoder(tiny_tokenizer()).encode(1, MESSAGES, place=PLACE)


def test_requests_of_a_rollout_carry_item_and_turn() -> None:
    team = FakeTeam(1)
    make_collector(team, num_turns=2).collect([{"prompt": "p"}], [7])
    assert [str(call[0].place) for call in team.calls] == [
        f"task item 7 {{'prompt': 'p'}} at turn {turn}" for turn in (1, 2)
    ]
    shared = shared_team(max_prompt_tokens=2, long_prompts="error")
    with pytest.raises(ValueError, match=r"A prompt of agent_0 for task item 7 .* at turn 2 has"):
        shared.generate([GenerationRequest(0, "abc", ((0,),), place=PLACE)], Sampling(max_new_tokens=1))


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
            MESSAGES,
            "roles system, user: System role not supported",
        ),
        (
            "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}",
            [MESSAGES[1], MESSAGES[1]],
            "roles user, user: Conversation roles must alternate",
        ),
    ],
)
def test_a_template_that_refuses_the_roles(template: str, messages: Any, problem: str) -> None:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"the prompt of agent_0 for task item 7 .*{problem}") as caught:
        PromptEncoder(tokenizer).encode(0, messages, place=PLACE)
    assert "put that text into the first user message; where roles must alternate, join neighbours" in str(caught.value)


def test_a_text_that_went_through_the_template_has_one_bos() -> None:
    tokenizer = tiny_tokenizer(chat=True)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    encoder = PromptEncoder(tokenizer, is_formatted=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert encoder.encode(0, text) == encoder.encode(0, MESSAGES)
    assert encoder.encode(0, "<bos><bos>a") == (256, *encoder.encode(0, "<bos>a"))


def test_texts_beside_a_template_are_mentioned_once() -> None:
    encoder = PromptEncoder(tiny_tokenizer(chat=True), is_formatted=True)
    with pytest.warns(UserWarning, match=r"Prompts of agent_0 are texts, .* return messages, \[\{\"role\": \"user\""):
        encoder.encode(0, "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.encode(1, "b")
        PromptEncoder(tiny_tokenizer(), is_formatted=True).encode(0, "a")
        PromptEncoder(tiny_tokenizer(chat=True)).encode(0, "a")
        PromptEncoder(tiny_tokenizer(chat=True), is_formatted=True).encode(0, MESSAGES)


def test_agents_are_told_of_their_template() -> None:
    team = shared_team()
    with pytest.warns(UserWarning, match="Prompts of agent_1 are texts"):
        team.encode(1, "a")


@pytest.mark.parametrize("prompt", ["a <eos> b", [{"role": "user", "content": "a <eos> b"}]])
def test_special_tokens_in_texts(prompt: Any) -> None:
    tokenizer = tiny_tokenizer(chat=True)
    assert tokenizer.eos_token_id in PromptEncoder(tokenizer).encode(0, prompt)
    strict = PromptEncoder(tokenizer, special_tokens="error")
    with pytest.raises(ValueError, match=r"The prompt of agent_0 for task item 7 .* names the special token '<eos>'"):
        strict.encode(0, prompt, place=PLACE)
    strict.encode(0, MESSAGES)


def test_special_tokens_are_a_setting_of_agents() -> None:
    team = shared_team(special_tokens="error")
    with pytest.raises(ValueError, match="names the special token '<eos>'"):
        team.encode(0, "<eos>")
    with pytest.raises(ValueError, match="special_tokens='drop'"):
        SharedBase("name", 2, special_tokens="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TEMPLATE_ARGUMENTS)
@pytest.mark.parametrize("make", [lambda **settings: SharedBase("a", 2, **settings), lambda **s: Separate(["a"], **s)])
def test_template_arguments_that_agents_set_are_refused(make: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"chat_template_kwargs=...\) holds '{name}', which agents set themselves"):
        make(chat_template_kwargs={name: False})


def test_our_warning_of_long_prompts_is_the_only_one(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.model_max_length = 4
    encoder = PromptEncoder(tokenizer, max_tokens=4)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            encoder.encode(0, "abcdef")
            encoder.encode(0, MESSAGES)
    finally:
        logger.removeHandler(caplog.handler)
    assert ["are cut from the left" in str(one.message) for one in heard] == [True]
    assert not caplog.records
