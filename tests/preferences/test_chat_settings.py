"""What a chat client can be told, and what it finds out before it asks."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from comlrl_lightning.preferences.api import (
    HTTPChat,
    Messages,
    messages_of,
    retry_after_seconds,
)
from comlrl_lightning.preferences.providers import AnthropicChat, OpenAIChat
from tests.preferences.asking import KEY
from tests.preferences.chat_server import ChatServer, Reply, both, chat_of

CHAT: Messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@both
def test_a_missing_key_is_named_before_anything_is_sent(
    server: ChatServer,
    provider: type[HTTPChat],
    reply: Callable[..., Reply],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}[provider.provider]
    with pytest.raises(ValueError, match=f"api_key_env='{usual}' is an environment variable that is not set"):
        chat_of(provider, server, api_key_env=None).check()
    monkeypatch.setenv("CHAT_KEY", " ")
    with pytest.raises(ValueError, match="api_key_env='CHAT_KEY' is an environment variable that is not set"):
        chat_of(provider, server).__enter__()
    # HTTP libraries would show such a header in their error.
    monkeypatch.setenv("CHAT_KEY", f"{KEY}\nmore")
    with pytest.raises(ValueError, match=r"api_key_env='CHAT_KEY' .* no key has") as caught:
        chat_of(provider, server).check()
    assert KEY not in str(caught.value)
    # A line feed at the end comes with many ways to set a variable.
    monkeypatch.setenv("CHAT_KEY", f"{KEY}\n")
    chat_of(provider, server).check()
    assert server.bodies == []


@both
def test_a_missing_package_names_the_extra(
    server: ChatServer, provider: type[HTTPChat], reply: Callable[..., Reply], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comlrl_lightning.preferences.api.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "comlrl-lightning\[api\]"'):
        chat_of(provider, server).__enter__()


def test_the_extra_is_part_of_the_development_tools() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {entry.split(">")[0] for entry in extras["api"]} == {OpenAIChat.package, AnthropicChat.package}
    assert set(extras["api"]) <= set(extras["dev"])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"base_url": "localhost:8000"}, "base_url=... is no address"),
        ({"base_url": f"http://me:{KEY}@host/v1"}, "base_url=... holds a user name"),
        ({"base_url": f"http://host/v1?key={KEY}"}, "base_url=... holds a user name, a password or a query"),
        ({"api_key_env": KEY}, "api_key_env=... is no name of an environment variable"),
        ({"api_key_env": "lower"}, "api_key_env=... is no name"),
        ({"temperature": -1}, "temperature=-1 is out of range"),
        ({"temperature": True}, "temperature=True is out of range"),
        ({"timeout_seconds": 0}, "timeout_seconds=0 is out of range"),
        ({"timeout_seconds": None}, "timeout_seconds=None is out of range"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"request_fields": ["a"]}, "request_fields=.* is no mapping"),
        ({"request_fields": {"n": 3}}, "request_fields=... holds 'n'"),
        ({"request_fields": {"API_key": KEY}}, "request_fields=... holds 'API_key'"),
        ({"request_fields": {"extra": [{"x-api-key": KEY}]}}, "request_fields=... holds 'x-api-key'"),
    ],
)
def test_arguments_are_checked_and_no_key_is_shown(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        OpenAIChat("m", 9, **settings)
    assert KEY not in str(caught.value)


def test_other_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="model='' is no name"):
        OpenAIChat("", 9)
    with pytest.raises(ValueError, match="max_tokens=0"):
        OpenAIChat("m", 0)


@pytest.fixture
def _far_from_greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("_far_from_greenwich")
@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        ("1.5", 1.5),
        ("-3", 0.0),
        ("99999", 300.0),
        ("nan", None),
        ("soon", None),
        ("", None),
        # 12:00:05 against 12:00:00; the zone is Greenwich's, said or not.
        ("Sun, 01 Mar 2026 12:00:05 GMT", 5.0),
        ("Sun, 01 Mar 2026 12:00:05 -0000", 5.0),
        ("Sun, 01 Mar 2026 11:00:00 GMT", 0.0),
    ],
)
def test_how_long_a_server_asks_to_wait(value: str | None, seconds: float | None) -> None:
    assert retry_after_seconds(value, datetime(2026, 3, 1, 12, tzinfo=UTC)) == seconds


def test_a_text_is_the_message_of_a_user() -> None:
    assert messages_of("Hi") == [{"role": "user", "content": "Hi"}]
    assert messages_of(CHAT) == CHAT


def test_importing_the_clients_is_light() -> None:
    heavy = ["openai", "httpx", "torch", "transformers"]
    code = f"import sys, comlrl_lightning.preferences.providers; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
