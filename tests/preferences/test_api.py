"""Chat clients against a server on this machine: what is sent, read and retried, and where no key shows."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event, Semaphore
from typing import Any

import pytest

from comlrl_lightning.preferences.api import (
    Answer,
    ChatError,
    HTTPChat,
    Messages,
    complete_all,
    messages_of,
    wait_unless,
)
from comlrl_lightning.preferences.providers import AnthropicChat, OpenAIChat
from tests.preferences.asking import KEY
from tests.preferences.chat_server import ChatServer, Reply, anthropic_reply, both, chat_of, chat_server, openai_reply
from tests.waiting import PATIENCE_SECONDS

CHAT: Messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def everything(error: BaseException) -> str:
    """All that a report of an error could show: its text, and the variables and clients along its traceback."""
    # The libraries' exceptions hold the request, whose headers hold the key.
    assert error.__cause__ is None
    assert error.__context__ is None
    seen = ["".join(traceback.format_exception(error)), repr(error), str(vars(error))]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # The frames of tests know the key themselves.
        if "tests" not in Path(frame.f_code.co_filename).parts:
            seen += [repr(value) for value in frame.f_locals.values()]
            seen += [repr(vars(value)) for value in frame.f_locals.values() if isinstance(value, HTTPChat)]
    return "\n".join(seen)


def test_what_openai_is_sent_and_what_is_read(server: ChatServer) -> None:
    server.script = [openai_reply("one", "two", "three"), openai_reply("cut", reason="length")]
    with chat_of(OpenAIChat, server, base_url=server.url + "/v1/", request_fields={"top_p": 0.5}) as chat:
        # More choices than asked for: the first ones count.
        assert chat.complete(CHAT, 2) == [Answer("one", True), Answer("two", True)]
        assert chat.complete(CHAT, 1) == [Answer("cut", False)]
    common = {"model": "tiny", "messages": CHAT, "max_tokens": 9, "temperature": 1.0, "top_p": 0.5}
    assert server.bodies == [{**common, "n": 2}, common]
    assert server.paths == ["/v1/chat/completions"] * 2
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


def test_what_anthropic_is_sent_and_what_is_read(server: ChatServer) -> None:
    thinking = {"type": "thinking", "thinking": "hm"}
    text = [{"type": "text", "text": "on"}, {"type": "text", "text": "e"}]
    server.script = [
        Reply(body={"content": [thinking, *text], "stop_reason": "end_turn"}),
        anthropic_reply("cut", reason="max_tokens"),
        anthropic_reply(),
    ]
    with chat_of(AnthropicChat, server, temperature=None) as chat:
        assert chat.complete(CHAT, 3) == [Answer("one", True), Answer("cut", False), Answer("", True)]
    body = {"model": "tiny", "messages": CHAT[1:], "system": "Be brief.", "max_tokens": 9}
    assert server.bodies == [body] * 3
    server.script = [anthropic_reply("x")]
    with chat_of(AnthropicChat, server, base_url=server.url + "/v1/") as chat:
        chat.complete(CHAT, 1)
    assert server.paths == ["/v1/messages"] * 4
    assert server.headers[0]["x-api-key"] == KEY
    assert server.headers[0]["anthropic-version"] == "2023-06-01"


def test_openai_itself_gets_the_new_name_of_the_limit() -> None:
    assert OpenAIChat("m", 9)._body([], 1)["max_completion_tokens"] == 9
    assert "max_tokens" not in OpenAIChat("m", 9)._body([], 1)


@pytest.mark.parametrize(
    ("message", "reason", "answer"),
    [
        ({"content": None, "refusal": "No."}, "stop", Answer("", True)),
        ({"content": None}, "content_filter", Answer("", True)),
        # A reasoning model that thought for too long.
        ({"content": None}, "length", Answer("", False)),
        ({"content": "x"}, None, Answer("x", True)),
    ],
)
def test_openai_answers_without_text_are_empty(
    server: ChatServer, message: dict[str, Any], reason: str | None, answer: Answer
) -> None:
    server.script = [Reply(body={"choices": [{"message": message, "finish_reason": reason}]})]
    with chat_of(OpenAIChat, server) as chat:
        assert chat.complete(CHAT, 1) == [answer]


def test_no_key_is_sent_where_there_is_none(server: ChatServer) -> None:
    with chat_of(OpenAIChat, server, api_key_env="") as chat:
        chat.complete(CHAT, 1)
    server.script = [anthropic_reply("x")]
    with chat_of(AnthropicChat, server, api_key_env="") as chat:
        chat.complete(CHAT, 1)
    assert server.headers[0]["authorization"] == "Bearer none"
    assert "x-api-key" not in server.headers[1]


OPENAI_MALFORMED: list[Any] = [
    "{not json",
    "",
    [],
    {},
    {"choices": []},
    {"choices": "x"},
    {"choices": [1]},
    {"choices": [{"message": None}]},
    {"choices": [{"message": {"content": 5}}]},
    {"choices": [{"message": {}, "finish_reason": "stop"}]},
]
ANTHROPIC_MALFORMED: list[Any] = [
    "{not json",
    "",
    [],
    {},
    {"content": "x"},
    {"content": [1]},
    {"content": [{"type": "text"}]},
    {"content": [{"type": "text", "text": 5}]},
]


@pytest.mark.parametrize(
    ("provider", "reply", "body"),
    [(OpenAIChat, openai_reply, body) for body in OPENAI_MALFORMED]
    + [(AnthropicChat, anthropic_reply, body) for body in ANTHROPIC_MALFORMED],
)
def test_malformed_responses_are_retried(
    server: ChatServer, provider: type[HTTPChat], reply: Callable[..., Reply], body: Any
) -> None:
    pauses: list[float] = []
    server.script = [Reply(body=body), Reply(body=body), reply("good")]
    with chat_of(provider, server, pauses) as chat:
        assert chat.complete(CHAT, 1) == [Answer("good")]
    assert pauses == [1.0, 2.0]


def test_fewer_choices_than_asked_for_are_retried(server: ChatServer) -> None:
    server.script = [openai_reply("one"), openai_reply("one", "two")]
    with chat_of(OpenAIChat, server) as chat:
        assert [answer.text for answer in chat.complete(CHAT, 2)] == ["one", "two"]


@both
@pytest.mark.parametrize("status", [408, 409, 429, 500, 503, 529])
def test_passing_statuses_are_retried(
    server: ChatServer, provider: type[HTTPChat], reply: Callable[..., Reply], status: int
) -> None:
    pauses: list[float] = []
    server.script = [Reply(status, {}, {"Retry-After": "0"}), Reply(status, "<html>"), reply("good")]
    with chat_of(provider, server, pauses) as chat:
        assert chat.complete(CHAT, 1) == [Answer("good")]
    # At once, as the server asks; it asks for nothing the second time, whose pause is the second of 1, 2, 4, ...
    assert pauses == [0.0, 2.0]
    assert len(server.bodies) == 3


@both
def test_timeouts_are_retried(server: ChatServer, provider: type[HTTPChat], reply: Callable[..., Reply]) -> None:
    silent = replace(reply("late"), after=server.silence)
    server.script, server.otherwise = [silent], lambda _: reply("good")
    # A busy machine may need more than half a second for the good reply, too, but not twenty times.
    with chat_of(provider, server, timeout_seconds=0.5, max_retries=20) as chat:
        assert chat.complete(CHAT, 1) == [Answer("good")]
    assert len(server.bodies) >= 2
    server.script = [silent] * 3
    with (
        chat_of(provider, server, timeout_seconds=0.05) as chat,
        pytest.raises(ChatError, match=r"after 3 attempts: no response within 0.05 seconds") as caught,
    ):
        chat.complete(CHAT, 1)
    assert KEY not in everything(caught.value)


@both
def test_lost_connections_are_retried(provider: type[HTTPChat], reply: Callable[..., Reply]) -> None:
    with chat_server() as gone:
        pass
    pauses: list[float] = []
    with (
        chat_of(provider, gone, pauses) as chat,
        pytest.raises(ChatError, match="after 3 attempts: no connection") as caught,
    ):
        chat.complete(CHAT, 1)
    assert pauses == [1.0, 2.0]
    assert KEY not in everything(caught.value)


@both
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (429, {"error": {"message": f"slow down {KEY}"}}),
        (500, {"error": f"broken {KEY}"}),
        (503, f"<p>{KEY}</p>"),
        (200, {"error": {"message": f"no {KEY} today"}}),
        (200, f'{{"choices": "{KEY}'),
    ],
)
def test_the_error_after_all_attempts_names_everything_but_the_key(
    server: ChatServer, provider: type[HTTPChat], reply: Callable[..., Reply], status: int, body: Any
) -> None:
    server.script = [Reply(status, body, {"Retry-After": "0", "x-echo": KEY})] * 3
    with chat_of(provider, server) as chat, pytest.raises(ChatError) as caught:
        chat.complete(CHAT, 1)
    message = str(caught.value)
    for part in (provider.provider, "'tiny'", server.url, "after 3 attempts", "CHAT_KEY", "max_retries"):
        assert part in message
    assert (f"status {status}" if status != 200 else "malformed") in message
    assert KEY not in everything(caught.value)
    assert KEY not in repr(vars(chat))
    assert str(pickle.loads(pickle.dumps(caught.value))) == message
    assert len(server.bodies) == 3


def test_what_the_server_says_is_told(server: ChatServer) -> None:
    server.script = [Reply(404, {"error": {"message": f"no model\n'tiny' for {KEY}"}})]
    with chat_of(OpenAIChat, server) as chat, pytest.raises(ChatError, match="status 404: no model 'tiny' for <key>"):
        chat.complete(CHAT, 1)
    # 290 characters and the key, which a cut at 300 would leave in parts.
    server.script = [Reply(400, {"error": {"message": "x" * 290 + KEY}})]
    with chat_of(OpenAIChat, server) as chat, pytest.raises(ChatError) as caught:
        chat.complete(CHAT, 1)
    assert KEY[:6] not in str(caught.value)


@both
@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 302])
def test_refusals_are_not_retried(
    server: ChatServer, provider: type[HTTPChat], reply: Callable[..., Reply], status: int
) -> None:
    server.script = [Reply(status, {"error": {"message": f"Incorrect key {KEY[:-4]}**** given"}})]
    with (
        chat_of(provider, server) as chat,
        pytest.raises(ChatError, match=f"after 1 attempt: status {status}") as caught,
    ):
        chat.complete(CHAT, 1)
    assert len(server.bodies) == 1
    assert KEY not in everything(caught.value)
    if status in (401, 403):
        # Not even a part of it, as providers like to show one.
        assert KEY[:8] not in str(caught.value)


@both
def test_no_log_shows_the_key(
    server: ChatServer, provider: type[HTTPChat], reply: Callable[..., Reply], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("openai", "openai._base_client", "httpx", "httpx2", "httpcore"):
        caplog.set_level(logging.DEBUG, name)
    server.script = [Reply(500, {}, {"Retry-After": "0"}), reply("good")]
    with chat_of(provider, server) as chat:
        chat.complete(CHAT, 1)
    assert caplog.records
    assert KEY not in "\n".join(f"{record.getMessage()} {record.args}" for record in caplog.records)


def test_backoff_doubles_up_to_a_limit(server: ChatServer) -> None:
    pauses: list[float] = []
    server.otherwise = lambda _: Reply(500)
    with chat_of(OpenAIChat, server, pauses, max_retries=8) as chat, pytest.raises(ChatError, match="after 9 attempts"):
        chat.complete(CHAT, 1)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


def text_of(body: dict[str, Any]) -> str:
    text = body["messages"][-1]["content"]
    assert isinstance(text, str)
    return text


def test_many_chats_run_together_and_keep_their_order() -> None:
    # The first three requests wait for each other, and the first of all is answered when no other one is left.
    meeting, others = Barrier(3, timeout=PATIENCE_SECONDS), Semaphore(0)

    def last() -> None:
        meeting.wait()
        assert all(others.acquire(timeout=PATIENCE_SECONDS) for _ in range(5))

    def echo(body: dict[str, Any]) -> Reply:
        text = text_of(body)
        after = last if text == "0" else meeting.wait if text in "12" else lambda: None
        return replace(openai_reply(*[text] * body.get("n", 1)), after=after)

    heard: list[int] = []

    def hear(left: int) -> None:
        heard.append(left)
        others.release()

    with chat_server(echo) as server:
        chats = [(messages_of(str(number)), 1 + number % 2) for number in range(6)]
        answers = complete_all(chat_of(OpenAIChat, server), chats, 3, Event(), hear)
    assert [[answer.text for answer in group] for group in answers] == [
        ["0"],
        ["1"] * 2,
        ["2"],
        ["3"] * 2,
        ["4"],
        ["5"] * 2,
    ]
    # 9 answers are awaited at first; the last call is with 0.
    assert heard[-1] == 0
    assert heard == sorted(heard, reverse=True)
    assert len(heard) == 6
    assert server.most_at_once == 3


def test_one_failure_ends_all_requests_soon() -> None:
    def refuse(body: dict[str, Any]) -> Reply:
        # The first chat is refused for good, the others would be repeated after 200 seconds.
        if text_of(body) == "0":
            return Reply(400, after=lambda: waiting.wait(PATIENCE_SECONDS))
        return Reply(429, headers={"Retry-After": "200"})

    stop, waiting = Event(), Event()
    ends: list[bool] = []

    def sleep(seconds: float) -> None:
        assert seconds == 200
        waiting.set()
        try:
            wait_unless(stop)(seconds)
        finally:
            ends.append(stop.is_set())

    with chat_server(refuse) as server:
        chat = OpenAIChat("m", 9, base_url=server.url, api_key_env="CHAT_KEY", sleep=sleep)
        with pytest.raises(ChatError, match="status 400") as caught:
            complete_all(chat, [(messages_of(str(number)), 1) for number in range(9)], 2, stop)
        # No pause lasted until its end.
        assert ends
        assert all(ends)
        # Two were under way; each thread may have begun another one before it heard.
        assert len(server.bodies) <= 4
    assert KEY not in everything(caught.value)
