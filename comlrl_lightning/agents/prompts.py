"""From prompts to token ids: chat templates and length limits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from comlrl_lightning.types import Prompt
from comlrl_lightning.utilities.special_tokens import starts_with_bos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Encodes the prompts of the agents that share a tokenizer.

    Args:
        tokenizer: The tokenizer.
        chat_template_kwargs: More arguments for its chat template.
        max_tokens: Longest prompt that the user wants; None: no limit.
        long_prompts: "truncate" cuts from the left and warns once, "error" raises.
        special_tokens: "keep" lets a text within a prompt name special tokens, "error" raises.
        is_formatted: Prompts come from formatters, which may choose messages: texts beside a template are mentioned
            once.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        long_prompts: Literal["truncate", "error"] = "truncate",
        special_tokens: Literal["keep", "error"] = "keep",
        *,
        is_formatted: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.max_tokens = max_tokens
        self.long_prompts = long_prompts
        self.special_tokens = special_tokens
        self._warned = False
        self._mentions_template = is_formatted and tokenizer.chat_template is not None
        self._markers = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]

    def encode(
        self, agent: int, prompt: Prompt, limit: int | None = None, place: object | None = None
    ) -> tuple[int, ...]:
        """`[P]` token ids of a prompt; of chat messages through the template, which writes the special tokens itself.

        Args:
            agent: Who gets it, for messages.
            prompt: A text or chat messages.
            limit: Longest prompt that the model has room for; None: no limit.
            place: Task item and turn, for messages.

        Raises:
            ValueError: It is empty, too long, a list of messages without a template to write them or one that the
                template refuses, or names special tokens where it must not.
        """
        reader = f"agent_{agent}" if place is None else f"agent_{agent} for {place}"
        if self.special_tokens == "error":
            self._check_markers(reader, prompt)
        if isinstance(prompt, str):
            self._mention_template(agent, prompt)
            ids = self._encode_text(prompt)
        else:
            ids = self._encode_messages(reader, prompt)
        if not ids:
            raise ValueError(f"The prompt of {reader} is empty: {prompt!r}. Return a text with at least one token.")
        limits = [bound for bound in (self.max_tokens, limit) if bound is not None]
        return tuple(self._shorten(reader, ids, min(limits)) if limits and len(ids) > min(limits) else ids)

    def _check_markers(self, reader: str, prompt: Prompt) -> None:
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        for marker in (marker for text in texts for marker in self._markers if marker in text):
            raise ValueError(
                f"The prompt of {reader} names the special token {marker!r}, which special_tokens='error' forbids."
                " Take it out of the task item, or set special_tokens='keep'."
            )

    def _mention_template(self, agent: int, text: str) -> None:
        """Say once that a text is no message; one that names special tokens went through a template elsewhere."""
        if not self._mentions_template or any(marker in text for marker in self._markers):
            return
        self._mentions_template = False
        warnings.warn(
            f"Prompts of agent_{agent} are texts, which do not go through the chat template of its tokenizer. For a"
            ' model that was trained to chat return messages, [{"role": "user", "content": ...}]. Others need none.',
            stacklevel=5,
        )

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, verbose=False).input_ids
        if starts_with_bos(self.tokenizer, text) and ids[:2] == [self.tokenizer.bos_token_id] * 2:
            ids = ids[1:]  # a template has written the first one, the tokenizer another
        end = self.tokenizer.eos_token
        # Some tokenizers end every text: nothing would be left to say.
        added = end is not None and len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id and not text.endswith(end)
        return ids[:-1] if added else ids

    def _encode_messages(self, reader: str, messages: list[dict[str, str]]) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"The prompt of {reader} is a list of chat messages, but its tokenizer has no chat template. "
                "Return a string, or use a model that was trained to chat."
            )
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.chat_template_kwargs
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"The chat template of the tokenizer refuses the prompt of {reader}, messages with the roles {roles}:"
                f" {error}. Return messages that it takes from the formatter: where it has no system role, put that"
                " text into the first user message; where roles must alternate, join neighbours of the same role."
            ) from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def _shorten(self, reader: str, ids: list[int], limit: int) -> list[int]:
        message = f"A prompt of {reader} has {len(ids)} tokens, more than the {limit} that it may have"
        if self.long_prompts == "error":
            raise ValueError(f"{message}. Shorten it, raise max_prompt_tokens, or set long_prompts='truncate'.")
        if not self._warned:
            self._warned = True
            cut = f"its first {len(ids) - limit} are cut from the left, as of all prompts that are too long"
            warnings.warn(f"{message}: {cut}.", stacklevel=4)
        start = [ids[0]] if ids[0] == self.tokenizer.bos_token_id and limit > 1 else []
        return start + ids[len(ids) - limit + len(start) :]
