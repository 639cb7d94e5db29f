"""What a critic reads: an agent's own tokens, or the texts of one agent or of all through its own tokenizer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from comlrl_lightning.agents.prompts import PromptEncoder
from comlrl_lightning.types import Completion, prompt_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reading = Literal["tokens", "text", "joint"]
"""The tokens of one agent of the same model, the text of one agent, or one text of all agents."""


class CriticReader:
    """Turns completions into the token ids that a critic reads, of the critic's own tokenizer.

    What is too long is cut from the left. Where one text holds the answers of all agents, the left of each prompt goes
    first, then that of each answer: no agent's answer is lost, or cut alone.

    Args:
        tokenizer: The critic's.
        reading: What the critic reads; "tokens" only if the agents use the same tokenizer.
        with_completions: Read prompts and completions (q), or prompts alone (v).
        limit: Most tokens; None: no limit.
        name: Of the critic, for messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        reading: Reading,
        with_completions: bool,
        limit: int | None,
        name: str = "critic",
    ) -> None:
        self.tokenizer = tokenizer
        self.reading = reading
        self.with_completions = with_completions
        self.limit = limit
        self.name = name
        self._prompts = PromptEncoder(tokenizer)
        self._warned = False

    def ids(self, completions: Sequence[Completion]) -> tuple[int, ...]:
        """`[S]` tokens, not more than there may be.

        Args:
            completions: Those of all agents for a joint reading, else one.

        Raises:
            ValueError: There is no room for the answers of all agents.
        """
        if self.reading == "joint":
            ids = self.tokenizer(joint_text(completions, self.with_completions), verbose=False).input_ids
            if self.with_completions and self.limit is not None and len(ids) > self.limit:
                return self._cut_evenly(completions, ids)
            return self._cut(ids)
        (completion,) = completions
        if self.reading == "tokens":
            return self._cut(completion.prompt_ids + (completion.token_ids if self.with_completions else ()))
        messages = not isinstance(completion.prompt, str) and self.tokenizer.chat_template is not None
        prompt = completion.prompt if messages else prompt_text(completion.prompt)
        ids = self._prompts.encode(completion.agent, prompt)
        if self.with_completions:
            ids += self._bare(completion.text)
        return self._cut(ids)

    def _cut(self, ids: Sequence[int]) -> tuple[int, ...]:
        if self.limit is None or len(ids) <= self.limit:
            return tuple(ids)
        self._warn(len(ids), "from the left")
        start = tuple(ids[:1]) if ids[0] == self.tokenizer.bos_token_id and self.limit > 1 else ()
        return start + tuple(ids[len(ids) - self.limit + len(start) :])

    def _cut_evenly(self, completions: Sequence[Completion], ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens of a joint text, part by part, within the limit."""
        assert self.limit is not None
        self._warn(len(ids), "from the left, prompts before answers")
        before, after = self._special(ids, self._bare(joint_text(completions, True)))
        parts = joint_parts(completions, True)
        headings = [self._bare(heading) for heading, _ in parts]
        contents = [self._bare(content) for _, content in parts]
        room = self._room(len(before) + len(after) + sum(map(len, headings)), len(completions))
        sizes = [len(content) for content in contents]
        first = len(parts) - len(completions)
        kept = even_shares(sizes[:first], max(0, room - sum(sizes[first:]))) + even_shares(sizes[first:], room)
        tokens = [*before]
        for heading, content, count in zip(headings, contents, kept, strict=True):
            tokens += [*heading, *content[len(content) - count :]]
        return (*tokens, *after)

    def check_room(self, num_agents: int) -> None:
        """Refuse a limit under which the answers of all agents cannot be read, however short they are.

        Raises:
            ValueError: It is too low.
        """
        if self.limit is not None:
            joint = [Completion(agent, "?", (), (), (), "?", False) for agent in range(num_agents)]
            headings = [self._bare(heading) for heading, _ in joint_parts(joint, self.with_completions)]
            self._room(len(self.tokenizer("").input_ids) + sum(map(len, headings)), num_agents)

    def _room(self, num_taken: int, num_agents: int) -> int:
        """Tokens for prompts and answers beside the `num_taken` ones of headings."""
        assert self.limit is not None
        room = self.limit - num_taken
        if room < num_agents:
            raise ValueError(
                f"{self.name} can read {self.limit} tokens, but {num_taken} are headings, which leaves no room for the "
                f"answers of {num_agents} agents. Raise max_tokens, or use a model that reads more."
            )
        return room

    def _special(self, ids: Sequence[int], bare: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the tokenizer writes before and after a text."""
        added = len(ids) - len(bare)
        start = next((start for start in range(added + 1) if tuple(ids[start : start + len(bare)]) == bare), added)
        return tuple(ids[:start]), tuple(ids[start + len(bare) :])

    def _bare(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _warn(self, length: int, how: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.name} was to read {length} tokens, more than the {self.limit} that it may. Such texts are "
                f"cut {how}.",
                stacklevel=4,
            )


def even_shares(sizes: Sequence[int], room: int) -> list[int]:
    """How much is kept of each part, the same share of each, and at least 1 while there is so much room.

    Args:
        sizes: Of the parts.
        room: Largest sum of what is kept.
    """
    total = sum(sizes)
    if total <= room:
        return list(sizes)
    if room < sum(map(bool, sizes)):
        return [0] * len(sizes)
    kept = [max(size * room // total, min(size, 1)) for size in sizes]
    while sum(kept) > room:
        kept[max(range(len(kept)), key=lambda part: kept[part])] -= 1
    return kept


def joint_text(completions: Sequence[Completion], with_completions: bool) -> str:
    """One text of what all agents were asked, and answered: the answers stand last.

    Args:
        completions: `[N]` a joint completion.
        with_completions: Whether the answers are part of it.
    """
    return "".join(heading + content for heading, content in joint_parts(completions, with_completions))


def joint_parts(completions: Sequence[Completion], with_completions: bool) -> list[tuple[str, str]]:
    """Headings and contents that make up a joint text: prompts, but no empty list of messages, then answers."""
    parts = [(f"[Prompt of agent {one.agent}]\n", prompt_text(one.prompt)) for one in completions if one.prompt != []]
    if with_completions:
        parts += [(f"[Completion of agent {one.agent}]\n", one.text) for one in completions]
    return [((heading if place == 0 else "\n\n" + heading), content) for place, (heading, content) in enumerate(parts)]
