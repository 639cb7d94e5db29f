"""The chat interfaces of two providers, and of all servers that speak like them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from comlrl_lightning.preferences.api import Answer, Failure, HTTPChat, Messages, Response

if TYPE_CHECKING:
    import httpx
    import openai


class OpenAIChat(HTTPChat):
    """A chat model at OpenAI or at any server with the same interface, asked through the package ``openai``."""

    provider = "openai"
    package = "openai"
    own_url = "https://api.openai.com/v1"
    usual_key_env = "OPENAI_API_KEY"

    def _open(self) -> None:
        import openai

        # The key comes with each request. Retries are ours.
        self._client: openai.OpenAI = openai.OpenAI(
            api_key="none", base_url=self.base_url, timeout=self.timeout_seconds, max_retries=0
        )

    def _close(self) -> None:
        self._client.close()

    def _body(self, messages: Messages, num: int) -> dict[str, Any]:
        # OpenAI's reasoning models refuse the old name of the limit, other servers may not know the new one.
        limit = "max_completion_tokens" if self.base_url == self.own_url else "max_tokens"
        body = {**self.request_fields, "model": self.model, "messages": messages, limit: self.max_tokens}
        if num > 1:
            body["n"] = num
        if self.temperature is not None:
            body["temperature"] = self.temperature
        return body

    def _post(self, body: dict[str, Any], key: str) -> Response | Failure:
        import openai

        headers = {"Authorization": f"Bearer {key}"} if key else {}
        model, messages = body.pop("model"), body.pop("messages")
        try:
            raw = self._client.chat.completions.with_raw_response.create(
                model=model, messages=messages, extra_body=body, extra_headers=headers
            )
            return Response(raw.status_code, raw.http_response.text, None)
        except openai.APITimeoutError:
            return self._timeout()
        except openai.APIConnectionError as error:
            return self._no_response(error)
        except openai.APIStatusError as error:
            return Response(error.status_code, error.response.text, error.response.headers.get("retry-after"))

    def _read(self, body: Any, num: int) -> list[Answer] | str:
        choices = body.get("choices") if isinstance(body, Mapping) else None
        if not isinstance(choices, list) or len(choices) < num:
            return f"it holds no {num} choices"
        answers = [_choice(choice) for choice in choices[:num]]
        return [answer for answer in answers if answer] if all(answers) else "a choice holds no text"


def _choice(choice: Any) -> Answer | None:
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(message, Mapping):
        return None
    content, reason = message.get("content"), choice.get("finish_reason")
    if content is None and (reason in ("content_filter", "length") or isinstance(message.get("refusal"), str)):
        content = ""
    return Answer(content, reason != "length") if isinstance(content, str) else None


class AnthropicChat(HTTPChat):
    """A chat model at Anthropic, asked through the package ``httpx``; several answers take as many requests."""

    provider = "anthropic"
    package = "httpx"
    own_url = "https://api.anthropic.com"
    usual_key_env = "ANTHROPIC_API_KEY"

    def complete(self, messages: Messages, num: int) -> list[Answer]:
        """As for every provider."""
        return [answer for _ in range(num) for answer in super(AnthropicChat, self).complete(messages, 1)]

    def _open(self) -> None:
        import httpx

        self._client: httpx.Client = httpx.Client(timeout=self.timeout_seconds)

    def _close(self) -> None:
        self._client.close()

    def _body(self, messages: Messages, num: int) -> dict[str, Any]:
        chat = [message for message in messages if message["role"] != "system"]
        system = [message["content"] for message in messages if message["role"] == "system"]
        body = {**self.request_fields, "model": self.model, "messages": chat, "max_tokens": self.max_tokens}
        if system:
            body["system"] = "\n\n".join(system)
        if self.temperature is not None:
            body["temperature"] = self.temperature
        return body

    def _post(self, body: dict[str, Any], key: str) -> Response | Failure:
        import httpx

        headers = {"anthropic-version": "2023-06-01", **({"x-api-key": key} if key else {})}
        try:
            url = f"{self.base_url.removesuffix('/v1')}/v1/messages"
            response = self._client.post(url, json=body, headers=headers)
        except httpx.TimeoutException:
            return self._timeout()
        except httpx.HTTPError as error:
            return self._no_response(error)
        return Response(response.status_code, response.text, response.headers.get("retry-after"))

    def _read(self, body: Any, num: int) -> list[Answer] | str:
        content = body.get("content") if isinstance(body, Mapping) else None
        if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
            return "it holds no content"
        texts = [block.get("text") for block in content if block.get("type") == "text"]
        if not all(isinstance(text, str) for text in texts):
            return "a block of text holds none"
        return [Answer("".join(texts), body.get("stop_reason") not in ("max_tokens", "model_context_window_exceeded"))]


PROVIDERS: dict[str, type[HTTPChat]] = {chat.provider: chat for chat in (OpenAIChat, AnthropicChat)}
