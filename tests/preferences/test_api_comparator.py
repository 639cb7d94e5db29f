"""A chat model as a comparator: what it is asked, what becomes of its answers, and where no key shows."""

from __future__ import annotations

from typing import Any

import pytest

from comlrl_lightning.environment.joint_format import TaggedSections
from comlrl_lightning.preferences.api import ChatError
from comlrl_lightning.preferences.external import SectionCounts
from comlrl_lightning.types import Completion
from tests.agents.helpers import flat, shared_team
from tests.preferences.asking import EOS, KEY, SAMPLING, api, asked, ids_of
from tests.preferences.chat_server import Reply, anthropic_reply, chat_server, openai_reply


def test_an_api_answers_every_agent() -> None:
    heard: list[int] = []
    with chat_server(lambda body: openai_reply(body["messages"][0]["content"].upper())) as server:
        comparator = api(server.url, temperature=0.5)
        team = shared_team()
        comparator.begin_round(0, team)
        spoken = comparator.sampler(team).generate(asked(), SAMPLING, heard.append)
    assert [[completion.text for completion in group] for group in spoken] == [["AB"] * 2] * 2 + [["C"] * 2] * 2
    assert flat(spoken)[0] == Completion(0, "ab", (256, *ids_of("ab")), (*ids_of("AB"), EOS), (), "AB", False)
    assert len(server.bodies) == 8
    assert {(body["max_tokens"], body["temperature"]) for body in server.bodies} == {(8, 0.5)}
    assert heard[-1] == 0
    assert comparator.pop_counts() == SectionCounts(0, 0)


def test_several_answers_may_come_with_one_request() -> None:
    def numbered(body: dict[str, Any]) -> Reply:
        return openai_reply(*[f"{body['messages'][0]['content']}{place}" for place in range(body.get("n", 1))])

    with chat_server(numbered) as server:
        sampler = api(server.url, answers_per_request=2).sampler(shared_team())
        spoken = sampler.generate(asked(samples=3), SAMPLING)
    # Three answers are two requests, for 2 and for 1.
    assert [[completion.text for completion in group] for group in spoken] == [["ab0", "ab1", "ab0"]] * 2 + [
        ["c0", "c1", "c0"]
    ] * 2
    assert sorted(body.get("n", 1) for body in server.bodies) == [1] * 4 + [2] * 4


def test_one_api_call_may_answer_for_all_agents() -> None:
    with chat_server() as server:
        server.script = [openai_reply("<agent_1>b</agent_1>"), openai_reply("nothing")]
        comparator = api(server.url, generation="centralized", max_concurrency=1)
        spoken = comparator.sampler(shared_team()).generate(asked(samples=1), SAMPLING)
    assert [completion.text for completion in flat(spoken)] == ["", "b", "", ""]
    assert comparator.pop_counts() == SectionCounts(2, 1)
    assert len(server.bodies) == 2
    prompt = TaggedSections().build_prompt(["ab", "ab"])
    assert server.bodies[0]["messages"] == [{"role": "user", "content": prompt}]
    assert server.bodies[0]["max_tokens"] == 2 * (8 + 16)


def test_chats_and_limits_of_its_own_reach_an_api() -> None:
    chat: list[dict[str, str]] = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    with chat_server(lambda _: anthropic_reply("yes")) as server:
        comparator = api(server.url, provider="anthropic", max_tokens=77, request_fields={"top_k": 5})
        sampler = comparator.sampler(shared_team())
        (completion,) = flat(sampler.generate(asked([chat], [0], 1), SAMPLING))
    assert server.bodies[0]["system"] == "S"
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "U"}]
    assert (server.bodies[0]["max_tokens"], server.bodies[0]["top_k"]) == (77, 5)
    assert (completion.text, completion.prompt) == ("yes", chat)


def test_an_api_that_fails_names_itself_and_no_key() -> None:
    with chat_server(lambda _: Reply(500, {"error": {"message": KEY}}, {"Retry-After": "0"})) as server:
        sampler = api(server.url).sampler(shared_team())
        with pytest.raises(ChatError, match=r"openai model 'tiny' at http://127.* 2 attempts: status 500") as caught:
            sampler.generate(asked(), SAMPLING)
    assert KEY not in str(caught.value)


def test_a_round_does_not_begin_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAT_KEY")
    comparator = api("http://127.0.0.1:9")  # a checkpoint loads without the key, though
    with pytest.raises(ValueError, match="api_key_env='CHAT_KEY' is an environment variable that is not set"):
        comparator.begin_round(0, shared_team())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"provider": "other"}, r"APIComparator\(provider='other'\) is unknown"),
        ({"answers_per_request": 0}, "answers_per_request=0"),
        ({"max_concurrency": 0}, "max_concurrency=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"generation": "both"}, r"APIComparator\(generation='both'\)"),
        ({"api_key_env": KEY}, "api_key_env=... is no name"),
        ({"provider": "anthropic", "answers_per_request": 2}, "answers_per_request=2"),
    ],
)
def test_settings_of_an_api_are_checked(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        api("http://127.0.0.1:9", **settings)
    assert KEY not in str(caught.value)
