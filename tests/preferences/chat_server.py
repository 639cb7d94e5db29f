"""A chat server on this machine that answers by a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

import pytest

from comlrl_lightning.preferences.api import HTTPChat
from comlrl_lightning.preferences.providers import AnthropicChat, OpenAIChat
from tests.waiting import HANG_SECONDS


@dataclass
class Reply:
    """What the server sends: a status, a body (JSON unless it is text) and more headers, after a condition."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    after: Callable[[], object] = lambda: None
    """Waits for what must come first."""


@dataclass
class ChatServer:
    """The server's script and what it was asked."""

    url: str
    script: list[Reply]
    """Replies of the first requests."""
    otherwise: Callable[[dict[str, Any]], Reply]
    """Reply to the body of any further request."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    """With names in lower case."""
    paths: list[str] = field(default_factory=list)
    most_at_once: int = 0
    is_over: Event = field(default_factory=Event)

    def silence(self) -> None:
        """Wait as long as the test takes."""
        self.is_over.wait(HANG_SECONDS)


def openai_reply(*texts: str, reason: str = "stop") -> Reply:
    choices = [{"message": {"role": "assistant", "content": text}, "finish_reason": reason} for text in texts]
    return Reply(body={"choices": choices})


def anthropic_reply(*texts: str, reason: str = "end_turn") -> Reply:
    return Reply(body={"content": [{"type": "text", "text": text} for text in texts], "stop_reason": reason})


@contextmanager
def chat_server(otherwise: Callable[[dict[str, Any]], Reply] | None = None) -> Iterator[ChatServer]:
    """A running server."""
    lock, under_way = Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                state.bodies.append(body)
                state.headers.append({name.lower(): value for name, value in self.headers.items()})
                state.paths.append(self.path)
                reply = state.script.pop(0) if state.script else None
                under_way[0] += 1
                state.most_at_once = max(state.most_at_once, under_way[0])
            reply = state.otherwise(body) if reply is None else reply
            reply.after()
            with lock:
                under_way[0] -= 1
            self._send(reply)

        def _send(self, reply: Reply) -> None:
            content = (reply.body if isinstance(reply.body, str) else json.dumps(reply.body)).encode()
            try:
                self.send_response(reply.status)
                for name, value in {"content-type": "application/json", **reply.headers}.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:  # the client has hung up
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state = ChatServer(f"http://127.0.0.1:{server.server_port}", [], otherwise or (lambda _: openai_reply("hello")))
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()


PROVIDERS: list[tuple[type[HTTPChat], Callable[..., Reply]]] = [
    (OpenAIChat, openai_reply),
    (AnthropicChat, anthropic_reply),
]
both = pytest.mark.parametrize(("provider", "reply"), PROVIDERS, ids=["openai", "anthropic"])


def chat_of(
    provider: type[HTTPChat], server: ChatServer, pauses: list[float] | None = None, **settings: Any
) -> HTTPChat:
    settings = {"base_url": server.url, "api_key_env": "CHAT_KEY", "max_retries": 2, **settings}
    return provider("tiny", 9, sleep=(pauses if pauses is not None else []).append, **settings)
