"""Micro-batches: rows of similar length, cut so that a padded batch stays within a token budget."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from comlrl_lightning.agents.log_probs import PaddedTokens
from comlrl_lightning.types import Completion


def sequence_lengths(completions: Sequence[Completion]) -> list[int]:
    """`[R]` tokens of each completion with its prompt."""
    return [len(one.prompt_ids) + len(one.token_ids) for one in completions]


def micro_batches(lengths: Sequence[int], token_budget: int, kinds: Sequence[int] | None = None) -> list[list[int]]:
    """Positions of rows of similar length, cut so that a padded batch stays within the token budget.

    There are as few batches as that allows, and the largest, which decides about memory, is as small as so many allow.

    Args:
        lengths: `[R]` tokens of each row.
        token_budget: Padded tokens per batch; a longer row gets a batch of its own.
        kinds: `[R]` rows of the same length stand together by this; None: they are all alike.
    """
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], 0 if kinds is None else kinds[row], row))
    num_batches = len(_cut(order, lengths, token_budget))
    enough = bisect_left(range(token_budget), -num_batches, key=lambda budget: -len(_cut(order, lengths, budget)))
    return _cut(order, lengths, enough)


def _cut(order: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Greedy batches of rows in this order, by ascending length."""
    batches: list[list[int]] = []
    for position in order:
        if batches and (len(batches[-1]) + 1) * lengths[position] <= token_budget:
            batches[-1].append(position)
        else:
            batches.append([position])
    return batches


def completion_batches(
    completions: Sequence[Completion], token_budget: int, *, reads_prompts_once: bool
) -> list[list[int]]:
    """Positions of completions, cut so that a padded batch stays within the token budget.

    Completions of the same prompt stand together if that makes fewer tokens to read than the order by length.

    Args:
        completions: `[R]` completions of one language model.
        token_budget: Padded tokens per batch; a longer row gets a batch of its own.
        reads_prompts_once: Of the language model.
    """
    by_length = micro_batches(sequence_lengths(completions), token_budget, [one.agent for one in completions])
    if not reads_prompts_once:
        return by_length

    by_prompt: list[list[int]] = []
    tokens = PaddedTokens(reads_prompts_once=True)
    for position in sorted(range(len(completions)), key=lambda row: _by_prompt(completions[row], row)):
        if by_prompt and tokens.add(completions[position]).total <= token_budget:
            by_prompt[-1].append(position)
        else:
            by_prompt.append([position])
            tokens = PaddedTokens([completions[position]], reads_prompts_once=True)

    def cost(rows: Sequence[int]) -> int:
        return PaddedTokens((completions[row] for row in rows), reads_prompts_once=True).total

    return min(by_length, by_prompt, key=lambda batches: sum(map(cost, batches)))


def _by_prompt(one: Completion, row: int) -> tuple[int, int, tuple[int, ...], int, int]:
    return len(one.prompt_ids), one.agent, one.prompt_ids, len(one.token_ids), row
