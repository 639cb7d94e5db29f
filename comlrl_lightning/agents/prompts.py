"""From prompts to token ids: chat templates and length limits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from comlrl_lightning.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Encodes the prompts of the agents that share a tokenizer.

    Args:
        tokenizer: The tokenizer.
        chat_template_kwargs: More arguments for its chat template.
        max_tokens: Longest prompt that the user wants; None: no limit.
        long_prompts: "truncate" cuts from the left and warns once, "error" raises.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        long_prompts: Literal["truncate", "error"] = "truncate",
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.max_tokens = max_tokens
        self.long_prompts = long_prompts
        self._warned = False

    def encode(self, agent: int, prompt: Prompt, limit: int | None = None) -> tuple[int, ...]:
        """`[P]` token ids of a prompt; of chat messages through the template, which writes the special tokens itself.

        Args:
            agent: Who gets it, for messages.
            prompt: A text or chat messages.
            limit: Longest prompt that the model has room for; None: no limit.

        Raises:
            ValueError: It is empty, too long, or a list of messages without a template to write them.
        """
        ids = self._encode_text(prompt) if isinstance(prompt, str) else self._encode_messages(agent, prompt)
        if not ids:
            raise ValueError(
                f"The prompt of agent_{agent} is empty: {prompt!r}. Return a text with at least one token."
            )
        limits = [bound for bound in (self.max_tokens, limit) if bound is not None]
        return tuple(self._shorten(agent, ids, min(limits)) if limits and len(ids) > min(limits) else ids)

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text).input_ids
        end = self.tokenizer.eos_token
        # Some tokenizers end every text: nothing would be left to say.
        added = end is not None and len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id and not text.endswith(end)
        return ids[:-1] if added else ids

    def _encode_messages(self, agent: int, messages: list[dict[str, str]]) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"The prompt of agent_{agent} is a list of chat messages, but its tokenizer has no chat template. "
                "Return a string, or use a model that was trained to chat."
            )
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.chat_template_kwargs
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _shorten(self, agent: int, ids: list[int], limit: int) -> list[int]:
        message = f"A prompt of agent_{agent} has {len(ids)} tokens, more than the {limit} that it may have"
        if self.long_prompts == "error":
            raise ValueError(f"{message}. Shorten it, raise max_prompt_tokens, or set long_prompts='truncate'.")
        if not self._warned:
            self._warned = True
            warnings.warn(f"{message}. Such prompts are cut from the left.", stacklevel=4)
        start = [ids[0]] if ids[0] == self.tokenizer.bos_token_id and limit > 1 else []
        return start + ids[len(ids) - limit + len(start) :]
