"""Fixtures of the comparators' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.preferences.asking import KEY
from tests.preferences.chat_server import ChatServer, chat_server
from tests.tiny_lm import save_tiny, tiny_llama


@pytest.fixture(autouse=True)
def _seed_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setenv("CHAT_KEY", KEY)
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder, with other weights than the agents'."""
    return save_tiny(tmp_path_factory.mktemp("fixed"), tiny_llama(seed=5))


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running
