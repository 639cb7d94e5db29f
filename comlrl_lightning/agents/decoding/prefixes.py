"""Keys and values that a turn leaves behind, for prompts of the next one that begin with what was read in this one."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from comlrl_lightning.agents.kv_cache import RoomyLayer, counts_columns, rotation_is_fixed
from comlrl_lightning.agents.language_model import LanguageModel


@dataclass(frozen=True, slots=True, eq=False)
class _States:
    """Keys and values of some rows of a batch, as they stood in its cache."""

    layers: list[tuple[Tensor, ...]]
    """`[B, heads, S, D]` keys and values of each layer."""
    columns: Tensor
    """`[B, S]` where the tokens of each row stand, one after the other; what comes after the last is not looked at."""

    def beginnings(self, rows: Tensor, lengths: Tensor, width: int) -> Iterator[list[Tensor]]:
        """`[layers][2]` `[r, heads, width, D]` states of the first tokens of some rows, padded on the left.

        Args:
            rows: `[r]` whose.
            lengths: `[r]` how many tokens.
            width: At least the longest.
        """
        tokens = (torch.arange(width) - width + lengths.unsqueeze(1)).clamp(min=0)
        columns = self.columns[rows.to(self.columns.device)].gather(1, tokens.to(self.columns.device))
        for layer in self.layers:
            yield [one[rows.to(one.device).unsqueeze(1), :, columns.to(one.device)].transpose(1, 2) for one in layer]


@dataclass(frozen=True, slots=True)
class _Known:
    """Tokens of which keys and values are there."""

    ids: tuple[int, ...]
    states: _States
    row: int


class Leavers:
    """Takes the keys and values of rows when they leave their batch.

    Args:
        holders: `[B]` the completion that each row of the batch is sampled for; None: it only fills up.
    """

    def __init__(self, holders: Sequence[int | None]) -> None:
        self.holders = list(holders)
        self.left: list[tuple[list[int | None], _States]] = []

    def part(self, cache: DynamicCache, mask: Tensor | None, staying: Sequence[int]) -> None:
        """Copy what the others have; afterwards the batch consists of the rows that stay, in this order."""
        others = set(range(len(self.holders))) - set(staying)
        leaving = [row for row in sorted(others) if self.holders[row] is not None]
        if leaving:
            rows = torch.tensor(leaving)
            layers = [tuple(one[rows.to(one.device)] for one in (layer.keys, layer.values)) for layer in cache.layers]
            self._take(leaving, layers, None if mask is None else mask[rows.to(mask.device)])
        self.holders = [self.holders[row] for row in staying]

    def end(self, cache: DynamicCache, mask: Tensor | None) -> None:
        """Take over what is left, uncopied: the batch is done."""
        self._take(range(len(self.holders)), [(layer.keys, layer.values) for layer in cache.layers], mask)

    def _take(self, rows: Sequence[int], layers: list[tuple[Tensor, ...]], mask: Tensor | None) -> None:
        keys = layers[0][0]
        if mask is None:
            columns = torch.arange(keys.shape[2], device=keys.device).expand(len(keys), -1)
        else:
            columns = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
        self.left.append(([self.holders[row] for row in rows], _States(layers, columns)))


class Prefixes:
    """Keys and values of the rows of one turn, until the prompts of the next turn have been read.

    The weights must not change in between, and the rows of an agent must be sampled in one batch per turn.
    """

    def __init__(self) -> None:
        self.keeps = True
        """Whether there is another turn, for which it pays to keep anything."""
        self._known: dict[int, list[_Known]] = {}

    def keep(self, leavers: Leavers, read: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Remember what the rows of a batch have left.

        Args:
            leavers: Who took it.
            read: The agent of each completion, and the tokens that it has read.
        """
        for holders, states in leavers.left:
            for row, holder in enumerate(holders):
                if holder is not None:
                    agent, ids = read[holder]
                    self._known.setdefault(agent, []).append(_Known(ids, states, row))
        for agent in {agent for agent, _ in read}:
            self._known[agent].sort(key=attrgetter("ids"))

    def load(self, prompts: Sequence[tuple[int, tuple[int, ...]]], cache: DynamicCache) -> list[int]:
        """Put into an empty cache what is known of the prompts, and forget what their agents have read.

        Args:
            prompts: `[R]` agents and token ids.
            cache: Gets the states of the first tokens, padded on the left.

        Returns:
            `[R]` how many tokens of each prompt are in the cache; at least one never is.
        """
        known = {agent: self._known.pop(agent, []) for agent in {agent for agent, _ in prompts}}
        found = [_longest(known[agent], ids) for agent, ids in prompts]
        starts = [start for start, _ in found]
        if not _pays([len(ids) for _, ids in prompts], starts):
            return [0] * len(prompts)
        _fill(cache, found)
        return starts


def is_plain(model: LanguageModel, cache: DynamicCache) -> bool:
    """Whether states depend on nothing but the tokens up to theirs, wherever padding stands, and all are in the cache.

    Args:
        model: Who has read.
        cache: What it has read.
    """
    return (
        model.takes_positions
        and all(type(layer) is RoomyLayer and layer.get_seq_length() > 0 for layer in cache.layers)
        and not counts_columns(model.causal.config)
        and rotation_is_fixed(model.causal.config)
    )


def _longest(known: Sequence[_Known], ids: tuple[int, ...]) -> tuple[int, _Known | None]:
    """Length of the longest known beginning of a prompt without its last token, and where it is known from.

    Args:
        known: Ordered by token ids.
        ids: `[P]` the prompt.
    """
    place = bisect(known, ids, key=attrgetter("ids"))
    lengths = [(_common(one.ids, ids[:-1]), one) for one in known[max(place - 1, 0) : place + 1]]
    return max(lengths, key=lambda pair: pair[0], default=(0, None))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    shorter = min(len(first), len(second))
    return next((place for place in range(shorter) if first[place] != second[place]), shorter)


def _pays(lengths: Sequence[int], starts: Sequence[int]) -> bool:
    """Whether fewer columns have to be read, and by more than padding adds.

    Args:
        lengths: `[R]` tokens of each prompt.
        starts: `[R]` how many of them are known.
    """
    rest = max(length - start for length, start in zip(lengths, starts, strict=True))
    saved, added = max(lengths) - rest, max(starts) + rest - max(lengths)
    return saved > added


def _fill(cache: DynamicCache, found: Sequence[tuple[int, _Known | None]]) -> None:
    """Put the first tokens of known texts into an empty cache, one row each, padded on the left."""
    past = max(start for start, _ in found)
    by_states: dict[_States, list[tuple[int, int, int]]] = {}
    for row, (start, known) in enumerate(found):
        if known is not None and start > 0:
            by_states.setdefault(known.states, []).append((row, known.row, start))
    like = next(iter(by_states)).layers
    filled = [[one.new_zeros(len(found), one.shape[1], past, one.shape[3]) for one in layer] for layer in like]
    for states, entries in by_states.items():
        rows, sources, starts = (torch.tensor(column) for column in zip(*entries, strict=True))
        for targets, found_states in zip(filled, states.beginnings(sources, starts, past), strict=True):
            for target, values in zip(targets, found_states, strict=True):
                target[rows.to(target.device)] = values
    for layer, (keys, values) in zip(cache.layers, filled, strict=True):
        layer.begin_with(keys, values)
