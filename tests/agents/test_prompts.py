"""Encoding of prompts."""

from __future__ import annotations

import warnings

import pytest
from tokenizers import processors

from comlrl_lightning.agents.engine import GenerationRequest
from comlrl_lightning.agents.prompts import PromptEncoder
from comlrl_lightning.agents.settings import Sampling
from tests.agents.helpers import requests, shared_team
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
    with pytest.warns(UserWarning, match="prompt of agent_0 has 7 tokens, more than the 4.*cut from the left"):
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
