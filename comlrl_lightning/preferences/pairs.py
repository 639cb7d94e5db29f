"""Pairs of joint completions, the better one first, out of scored candidates of one prompt.

A pair holds the sampled token ids of both sides: what is learned from is exactly what was sampled, never text that was
encoded again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

from comlrl_lightning.types import Completion, Node
from comlrl_lightning.utilities.checks import is_whole
from comlrl_lightning.utilities.rng import generator_of

T = TypeVar("T")

PairSelection = Literal["disjoint", "reward_gap", "random", "all", "comparator_reward"]
"""Which pairs of an item are taken, and in which order.

``"disjoint"`` uses each candidate once, the best with the worst and so on inward; ``"reward_gap"`` takes the largest
gaps first, whichever candidates they share; ``"random"`` takes any; ``"all"`` every one; ``"comparator_reward"`` those
of the comparator's best answers first.
"""

Source = Literal["policy", "comparator"]
"""Who wrote a joint completion."""

_Side = tuple[Node, int, Source]
"""A joint completion of a node, by its index, and who wrote it."""


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two joint completions of one item, the one with the larger reward and the other."""

    item_index: int
    """Position of the item in its dataset."""
    winner: tuple[Completion, ...]
    """`[N]` completions of the joint completion with the larger reward; `[1]` of a model that answers for all."""
    loser: tuple[Completion, ...]
    """`[N]` completions of the other one, or `[1]`."""
    winner_reward: float
    loser_reward: float
    winner_source: Source = "policy"
    loser_source: Source = "policy"

    @property
    def gap(self) -> float:
        """How much larger the winner's reward is."""
        return self.winner_reward - self.loser_reward

    def to_state(self) -> dict[str, Any]:
        """Plain values for a checkpoint that loads with ``weights_only=True``."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PreferencePair:
        """Inverse of `to_state`."""
        sides = {side: tuple(Completion(**entry) for entry in state[side]) for side in ("winner", "loser")}
        return cls(**{**state, **sides})


@dataclass(frozen=True, slots=True)
class Round:
    """What one collecting epoch brought, over all ranks."""

    number: int
    """Rounds before it."""
    pairs: tuple[PreferencePair, ...]
    """All pairs in the order of their items; there may be none."""
    candidate_reward_mean: float
    """Mean reward of the candidates, by whatever ranked them."""

    def to_state(self) -> dict[str, Any]:
        """Plain values for a checkpoint that loads with ``weights_only=True``."""
        return {
            "number": self.number,
            "pairs": [pair.to_state() for pair in self.pairs],
            "candidate_reward_mean": self.candidate_reward_mean,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Round:
        """Inverse of `to_state`."""
        return cls(**{**state, "pairs": tuple(map(PreferencePair.from_state, state["pairs"]))})


@runtime_checkable
class RoundSource(Protocol):
    """A module that learns from preferences, as callbacks see it."""

    last_round: Round | None
    """The last round whose collecting epoch is over, with the pairs of all ranks; None before the first."""


@dataclass(frozen=True)
class PairSettings:
    """How many pairs an item gives, and which.

    Raises:
        ValueError: If the selection is unknown, the number is not a whole number from 1, or ``"all"`` has a number.
    """

    selection: PairSelection | None = None
    """Which pairs are taken; None: ``"comparator_reward"`` with a comparator, ``"disjoint"`` without."""
    num_pairs_per_item: int | None = None
    """Largest number of pairs per item; None: no limit."""

    def __post_init__(self) -> None:
        allowed, limit = get_args(PairSelection), self.num_pairs_per_item
        if self.selection is not None and self.selection not in allowed:
            raise ValueError(f"pair_selection={self.selection!r} is unknown. Use one of {list(allowed)}, or None.")
        if limit is None:
            return
        if not is_whole(limit, 1):
            raise ValueError(f"num_pairs_per_item={limit!r} is out of range. Use a whole number from 1, or None.")
        if self.selection == "all":
            raise ValueError(
                f"num_pairs_per_item={limit} contradicts pair_selection='all', which takes every pair. "
                "Use num_pairs_per_item=None, or pair_selection='reward_gap' or 'random'."
            )

    def resolved(self, with_comparator: bool) -> PairSelection:
        """The selection that holds.

        Args:
            with_comparator: Whether candidates are compared with a comparator's instead of with each other.

        Raises:
            ValueError: If the selection makes no sense so.
        """
        if self.selection is None:
            return "comparator_reward" if with_comparator else "disjoint"
        if with_comparator and self.selection == "disjoint":
            raise ValueError(
                "pair_selection='disjoint' pairs the candidates with each other, but there is a comparator. "
                "Use 'comparator_reward', 'reward_gap', 'random' or 'all', or comparator=None."
            )
        if not with_comparator and self.selection == "comparator_reward":
            raise ValueError(
                "pair_selection='comparator_reward' needs a comparator, and comparator=None. "
                "Give one, or use 'disjoint', 'reward_gap', 'random' or 'all'."
            )
        return self.selection


def candidate_pairs(
    node: Node, item_index: int, selection: PairSelection, limit: int | None, key: tuple[int, ...]
) -> list[PreferencePair]:
    """Pairs among the joint completions of a node.

    Equal rewards, gaps that are not finite and equal answers give no pair.

    Args:
        node: Its J rewards say which of its joint completions is better.
        item_index: Position of the item in its dataset.
        selection: ``"disjoint"``: the joint completions in descending order of their rewards, the first with the last
            and so on inward; ``"reward_gap"``: all pairs, the largest gap first; ``"random"``: all pairs, shuffled;
            ``"all"``: all pairs. What is equal stays in the order of the winner's index, then the loser's.
        limit: Pairs that are taken from the front; None: all.
        key: Integers that, with the item's position, seed ``"random"``.

    Returns:
        The pairs, in the order of the selection.
    """
    rewards = node.rewards
    if selection == "disjoint":
        # A number that is not finite has no place in the order, and must not take a partner from another one.
        order = [j for j, reward in enumerate(rewards) if math.isfinite(reward)]
        order.sort(key=lambda j: -rewards[j])
        indices = list(zip(order[: len(order) // 2], reversed(order), strict=False))
    else:
        indices = [(i, j) for i in range(len(rewards)) for j in range(len(rewards))]
    pairs = (_preference(item_index, (node, i, "policy"), (node, j, "policy")) for i, j in indices)
    kept = [pair for pair in pairs if pair is not None]
    if selection == "reward_gap":
        kept.sort(key=lambda pair: -pair.gap)
    elif selection == "random":
        kept = shuffled(kept, (*key, item_index))
    else:
        assert selection in ("disjoint", "all"), selection
    return kept[:limit]


def compared_pairs(
    node: Node,
    comparator: Node,
    item_index: int,
    selection: PairSelection,
    limit: int | None,
    key: tuple[int, ...],
) -> list[PreferencePair]:
    """Pairs of each joint completion of a node with the comparator's of the same index; either may win.

    Equal rewards, gaps that are not finite and equal answers give no pair, nor do joint completions without a partner.

    Args:
        node: The policy's joint completions.
        comparator: The comparator's on the same item.
        item_index: Position of the item in its dataset.
        selection: ``"comparator_reward"``: the comparator's largest reward first, of equal ones the largest gap;
            ``"reward_gap"``: the largest gap first; ``"random"``: shuffled; ``"all"``. What is equal stays in the order
            of the index.
        limit: Pairs that are taken from the front; None: all.
        key: Integers that, with the item's position, seed ``"random"``.

    Returns:
        The pairs, in the order of the selection.
    """
    kept = []
    for index, (own, other) in enumerate(zip(node.rewards, comparator.rewards, strict=False)):
        sides: tuple[_Side, _Side] = ((node, index, "policy"), (comparator, index, "comparator"))
        better, worse = sides if own > other else sides[::-1]
        pair = _preference(item_index, better, worse)
        if pair is not None:
            kept.append(pair)
    if selection == "comparator_reward":
        kept.sort(key=lambda pair: (-_comparator_reward(pair), -pair.gap))
    elif selection == "reward_gap":
        kept.sort(key=lambda pair: -pair.gap)
    elif selection == "random":
        kept = shuffled(kept, (*key, item_index))
    else:
        assert selection == "all", selection
    return kept[:limit]


def _preference(item_index: int, better: _Side, worse: _Side) -> PreferencePair | None:
    """The pair, if the first is better indeed, by a finite gap, and another answer."""
    (winning, i, winner_source), (losing, j, loser_source) = better, worse
    winner_reward, loser_reward = winning.rewards[i], losing.rewards[j]
    if not 0 < winner_reward - loser_reward < math.inf or winning.answers(i) == losing.answers(j):
        return None
    winner, loser = winning.joint_completion(i), losing.joint_completion(j)
    return PreferencePair(item_index, winner, loser, winner_reward, loser_reward, winner_source, loser_source)


def _comparator_reward(pair: PreferencePair) -> float:
    return pair.winner_reward if pair.winner_source == "comparator" else pair.loser_reward


def shuffled(values: Sequence[T], key: Sequence[int]) -> list[T]:
    """The values in an order made from a key alone."""
    return [values[index] for index in generator_of(key).permutation(len(values))]
