"""What a critic reads: an agent's own tokens, or the texts of one agent or of all through its own tokenizer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from comlrl_lightning.agents.prompts import PromptEncoder
from comlrl_lightning.rollouts.types import Completion, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reading = Literal["tokens", "text", "joint"]
"""The tokens of one agent of the same model, the text of one agent, or one text of all agents."""


class CriticReader:
    """Turns completions into the token ids that a critic reads, of the critic's own tokenizer.

    Args:
        tokenizer: The critic's.
        reading: What the critic reads; "tokens" only if the agents use the same tokenizer.
        with_completions: Read prompts and completions (q), or prompts alone (v).
        limit: Most tokens; None: no limit.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, reading: Reading, with_completions: bool, limit: int | None
    ) -> None:
        self.tokenizer = tokenizer
        self.reading = reading
        self.with_completions = with_completions
        self.limit = limit
        self._prompts = PromptEncoder(tokenizer)
        self._warned = False

    def ids(self, completions: Sequence[Completion]) -> tuple[int, ...]:
        """`[S]` tokens, the last ones if there are too many.

        Args:
            completions: Those of all agents for a joint reading, else one.
        """
        if self.reading == "joint":
            return self._cut(self.tokenizer(joint_text(completions, self.with_completions)).input_ids)
        (completion,) = completions
        if self.reading == "tokens":
            return self._cut(completion.prompt_ids + (completion.token_ids if self.with_completions else ()))
        messages = not isinstance(completion.prompt, str) and self.tokenizer.chat_template is not None
        prompt = completion.prompt if messages else prompt_text(completion.prompt)
        ids = self._prompts.encode(completion.agent, prompt)
        if self.with_completions:
            ids += tuple(self.tokenizer(completion.text, add_special_tokens=False).input_ids)
        return self._cut(ids)

    def _cut(self, ids: Sequence[int]) -> tuple[int, ...]:
        if self.limit is None or len(ids) <= self.limit:
            return tuple(ids)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"A critic was to read {len(ids)} tokens, more than the {self.limit} that it may. Such texts are cut "
                "from the left.",
                stacklevel=3,
            )
        start = tuple(ids[:1]) if ids[0] == self.tokenizer.bos_token_id and self.limit > 1 else ()
        return start + tuple(ids[len(ids) - self.limit + len(start) :])


def joint_text(completions: Sequence[Completion], with_completions: bool) -> str:
    """One text of what all agents were asked, and answered: the answers stand last, where no cut reaches them.

    Args:
        completions: `[N]` a joint completion.
        with_completions: Whether the answers are part of it.
    """
    parts = [f"[Prompt of agent {one.agent}]\n{prompt_text(one.prompt)}" for one in completions]
    if with_completions:
        parts += [f"[Completion of agent {one.agent}]\n{one.text}" for one in completions]
    return "\n\n".join(parts)


def prompt_text(prompt: Prompt) -> str:
    """A prompt without any tokenizer's chat template."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
