"""Chat models behind an HTTP interface: one request at a time with retries, or many at once.

A key is only ever named by its environment variable. It is read when a request is made and handed to that request; no
object keeps it, and no message shows it.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from comlrl_lightning.preferences.api_checks import check_arguments
from comlrl_lightning.types import Prompt
from comlrl_lightning.utilities.checks import check_whole

if TYPE_CHECKING:
    from comlrl_lightning.agents.engine import GenerationProgress

Messages = list[dict[str, str]]
"""Chat messages with ``role`` and ``content``."""
MAX_BACKOFF_SECONDS = 60.0
"""Longest pause before a retry that the server asked no pause for."""
MAX_WAIT_SECONDS = 300.0
"""Longest pause before a retry, whatever the server asks for."""
RETRIED = frozenset({408, 409, 425, 429})
"""Status codes below 500 after which a request is worth repeating."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model answered."""

    text: str
    ended: bool = True
    """Whether the model ended it, and no limit did."""
    token_ids: tuple[int, ...] | None = None
    """The answer in the agent's tokens, without an end-of-sequence token; None: they are to be found."""


class ChatError(RuntimeError):
    """A chat model gave no answer, after retries where these could help."""


class ChatClient(Protocol):
    """Asks a chat model, from several threads at once, inside of a ``with``."""

    def complete(self, messages: Messages, num: int) -> list[Answer]:
        """`num` answers to one chat.

        Raises:
            ChatError: There are none.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Response:
    """What a server sent."""

    status: int
    text: str
    retry_after: str | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt brought nothing. No exception: those of the libraries hold the request, key and all."""

    reason: str
    retry: bool = True
    wait_seconds: float | None = None


class HTTPChat(ABC):
    """A chat model at a provider.

    Args:
        model: Its name there.
        max_tokens: Most tokens of an answer.
        base_url: Where the interface is; None: the provider's own.
        api_key_env: Name of the environment variable that holds the key; None: the provider's usual one, "": there is
            no key.
        temperature: Of the sampling; None: what the provider takes by itself.
        request_fields: More fields of the request.
        timeout_seconds: How long the server may say nothing.
        max_retries: Attempts after the first one.
        sleep: Waits before a retry.

    Raises:
        ValueError: An argument is out of range, or holds a key.
    """

    provider: ClassVar[str]
    package: ClassVar[str]
    own_url: ClassVar[str]
    usual_key_env: ClassVar[str]

    def __init__(
        self,
        model: str,
        max_tokens: int,
        *,
        base_url: str | None = None,
        api_key_env: str | None = None,
        temperature: float | None = 1.0,
        request_fields: Mapping[str, Any] | None = None,
        timeout_seconds: float = 60.0,
        max_retries: int = 5,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        check_arguments(model, base_url, api_key_env, temperature, request_fields, timeout_seconds)
        check_whole(1, type(self).__name__, max_tokens=max_tokens)
        check_whole(0, type(self).__name__, max_retries=max_retries)
        self.model = model
        self.max_tokens = max_tokens
        self.base_url = (base_url or self.own_url).rstrip("/")
        self.api_key_env = self.usual_key_env if api_key_env is None else api_key_env
        self.temperature = temperature
        self.request_fields = dict(request_fields or {})
        self.timeout_seconds = timeout_seconds
        self.max_retries = max_retries
        self.sleep = sleep

    def check(self) -> None:
        """Find out whether requests can be made at all.

        Raises:
            ImportError: The package that makes them is not installed.
            ValueError: The environment variable of the key is not set, or holds no key.
        """
        if find_spec(self.package) is None:
            raise ImportError(
                f'provider={self.provider!r} needs the package {self.package}. Run pip install "comlrl-lightning[api]".'
            )
        self._key()

    def __enter__(self) -> Self:
        self.check()
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def complete(self, messages: Messages, num: int) -> list[Answer]:
        """`num` answers to one chat.

        Args:
            messages: The chat.
            num: How many.

        Raises:
            ChatError: The server refuses, or all attempts failed.
        """
        attempt = 1
        while isinstance(outcome := self._attempt(messages, num), Failure):
            if not outcome.retry or attempt > self.max_retries:
                raise ChatError(self._explain(outcome, attempt))
            backoff = min(2.0 ** (attempt - 1), MAX_BACKOFF_SECONDS)
            self.sleep(backoff if outcome.wait_seconds is None else outcome.wait_seconds)
            attempt += 1
        return outcome

    def _attempt(self, messages: Messages, num: int) -> list[Answer] | Failure:
        key = self._key()
        response = self._post(self._body(messages, num), key)
        if isinstance(response, Failure):
            return response
        try:
            body = json.loads(response.text)
        except ValueError:
            body = None
        if not 200 <= response.status < 300:
            return self._refusal(response, body, key)
        answers = self._read(body, num)
        if not isinstance(answers, str):
            return answers
        return Failure(f"its response was malformed: {answers}{_detail(body, key)}")

    def _refusal(self, response: Response, body: Any, key: str) -> Failure:
        if response.status in (401, 403):
            # Such messages like to repeat the key, or most of it.
            return Failure(f"status {response.status}, the key was refused", retry=False)
        return Failure(
            f"status {response.status}{_detail(body, key)}",
            response.status in RETRIED or response.status >= 500,
            retry_after_seconds(response.retry_after, datetime.now(UTC)),
        )

    def _explain(self, failure: Failure, attempts: int) -> str:
        if failure.retry:
            remedy = "Try again later, or raise max_retries or timeout_seconds."
        else:
            remedy = "Correct model, base_url, request_fields or the key."
        source = f"environment variable {self.api_key_env}" if self.api_key_env else "none"
        return (
            f"The {self.provider} model {self.model!r} at {self.base_url} gave no answer after {attempts} "
            f"attempt{'' if attempts == 1 else 's'}: {failure.reason} (key: {source}). {remedy}"
        )

    def _key(self) -> str:
        """The key; "" if there is to be none."""
        if not self.api_key_env:
            return ""
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise ValueError(
                f"api_key_env={self.api_key_env!r} is an environment variable that is not set. Set it to the key of "
                f"provider={self.provider!r}, or name another variable."
            )
        if not re.fullmatch(r"[!-~]+", key):
            raise ValueError(
                f"api_key_env={self.api_key_env!r} is an environment variable with spaces or unusual characters in "
                "it, which no key has. Set it to the key alone."
            )
        return key

    @abstractmethod
    def _open(self) -> None:
        """Get ready for connections, without a key."""

    @abstractmethod
    def _close(self) -> None:
        """Close all connections."""

    @abstractmethod
    def _body(self, messages: Messages, num: int) -> dict[str, Any]:
        """Fields of a request."""

    @abstractmethod
    def _post(self, body: dict[str, Any], key: str) -> Response | Failure:
        """Make a request once."""

    @abstractmethod
    def _read(self, body: Any, num: int) -> list[Answer] | str:
        """`num` answers out of a decoded response, or what is wrong with it."""

    def _no_response(self, error: Exception) -> Failure:
        return Failure(f"no connection ({type(error).__name__})")

    def _timeout(self) -> Failure:
        return Failure(f"no response within {self.timeout_seconds} seconds")


def complete_all(
    client: ChatClient,
    chats: Sequence[tuple[Messages, int]],
    max_concurrency: int,
    stop: Event,
    progress: GenerationProgress | None = None,
) -> list[list[Answer]]:
    """Answers to many chats, in their order.

    Args:
        client: Asks.
        chats: Each with its number of answers.
        max_concurrency: Requests that are under way at a time.
        stop: Set once nobody needs more answers; see `wait_unless`.
        progress: Called with the number of answers that are awaited.

    Raises:
        ChatError: One of them has no answer; requests that were not made yet are not made.
    """
    with client, ThreadPoolExecutor(max_concurrency, thread_name_prefix="chat") as pool:
        futures = [pool.submit(client.complete, messages, num) for messages, num in chats]
        awaited = sum(num for _, num in chats)
        try:
            for future in as_completed(futures):
                awaited -= len(future.result())
                if progress is not None:
                    progress(awaited)
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
    return [future.result() for future in futures]


def wait_unless(stop: Event) -> Callable[[float], None]:
    """A `sleep` that raises a `ChatError` as soon as `stop` is set: nobody waits for a retry after another failure."""

    def sleep(seconds: float) -> None:
        if stop.wait(seconds):
            raise ChatError("Given up, because another request failed.")

    return sleep


def messages_of(prompt: Prompt) -> Messages:
    """A prompt as a chat; a text is the user's only message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def retry_after_seconds(value: str | None, now: datetime) -> float | None:
    """How long a server asks to wait, at most `MAX_WAIT_SECONDS`; None if it does not.

    Args:
        value: The header ``Retry-After``: seconds, or a date.
        now: The present.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = ((date if date.tzinfo else date.replace(tzinfo=UTC)) - now).total_seconds()
    return min(max(seconds, 0.0), MAX_WAIT_SECONDS) if math.isfinite(seconds) else None


def _detail(body: Any, key: str) -> str:
    """What a server says about an error, without the key and not too long."""
    error = body.get("error", body) if isinstance(body, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else error
    if not isinstance(message, str) or not message:
        return ""
    shown = " ".join((message.replace(key, "<key>") if key else message).split())
    return f": {shown if len(shown) <= 300 else shown[:300] + ' ...'}"
