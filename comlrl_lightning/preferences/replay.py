"""Which pairs of which rounds a round learns from.

A *round* is one collecting epoch and what is learned from it; rounds are listed oldest first, and the last one is the
current one. Rounds without any pair count for nothing: neither as one of the nearest, nor in anybody's age.

Apart from `CurrentRound` all strategies draw with the same rule. Each of the n draws chooses a round by its weight,
independently of the others; a round that is chosen c times gives c of its pairs without replacement, and starts over in
a new order when all have been used. The result is shuffled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.preferences.pairs import PreferencePair, Round
from comlrl_lightning.utilities.checks import check_whole
from comlrl_lightning.utilities.rng import generator_of


def round_weights(
    sizes: Sequence[int], *, decay: float = 1.0, num_nearest: int | None = None, weigh_by_size: bool = False
) -> list[float]:
    """Probability that a draw falls on each round.

    Args:
        sizes: Number of pairs of each round, oldest first.
        decay: Factor per round of age, from 0 (the newest only) to 1 (equal weights); the newest with pairs has age 0.
        num_nearest: How many of the newest rounds with pairs take part; None: all.
        weigh_by_size: Multiply by the number of pairs, so that without decay each pair is as likely as any other.

    Returns:
        One probability per round, 0 for those that are empty or too old; all 0 if every round is empty.
    """
    weights = [0.0] * len(sizes)
    filled = [position for position, size in enumerate(sizes) if size]
    for age, position in enumerate(reversed(filled)):
        if num_nearest is None or age < num_nearest:
            weights[position] = float(decay) ** age * (sizes[position] if weigh_by_size else 1)
    total = sum(weights)
    return [weight / total for weight in weights] if filled else weights


def draw_pairs(
    rounds: Sequence[Round], weights: Sequence[float], num_pairs: int, key: Sequence[int]
) -> list[PreferencePair]:
    """Pairs out of rounds that are chosen by their weights.

    Args:
        rounds: Where the pairs come from.
        weights: Probability of each round, as `round_weights` gives it.
        num_pairs: Number of draws.
        key: Integers that seed them.

    Returns:
        The pairs in random order; none if all weights are 0.
    """
    if not any(weights):
        return []
    generator = generator_of(key)
    chosen = generator.choice(len(rounds), size=num_pairs, p=weights)
    counts = np.bincount(chosen, minlength=len(rounds))
    drawn: list[PreferencePair] = []
    for source, count in zip(rounds, counts.tolist(), strict=True):
        size = len(source.pairs)
        while count > 0:
            drawn += [source.pairs[index] for index in generator.permutation(size)[:count]]
            count -= size
    return [drawn[index] for index in generator.permutation(len(drawn))]


class Replay(ABC, KnownKeywords):
    """Chooses the pairs that a round learns from."""

    @property
    @abstractmethod
    def num_kept(self) -> int | None:
        """How many of the newest rounds with pairs must be kept; None: all."""

    @abstractmethod
    def sample(self, rounds: Sequence[Round], key: tuple[int, ...]) -> list[PreferencePair]:
        """The pairs of this round.

        Args:
            rounds: The rounds so far, oldest first, the current one last; any may be empty, and those that `num_kept`
                does not ask for may be missing.
            key: Integers that seed what is random.

        Returns:
            Pairs, in which one may come more than once; none where there are none.
        """


@dataclass(frozen=True)
class CurrentRound(Replay):
    """All pairs of the current round, each once, in the order of the items."""

    @property
    @override
    def num_kept(self) -> int:
        return 1

    @override
    def sample(self, rounds: Sequence[Round], key: tuple[int, ...]) -> list[PreferencePair]:
        return list(rounds[-1].pairs) if rounds else []


@dataclass(frozen=True)
class NearestK(Replay):
    """Pairs of the k newest rounds that have any, the current one among them, with equal weights.

    Args:
        k: Number of rounds.
        sample_size: Pairs per round of learning; None: as many as the newest round with pairs has.
        weigh_by_size: Weigh rounds by their number of pairs.

    Raises:
        ValueError: If `k` or `sample_size` is not a whole number from 1.
    """

    k: int
    sample_size: int | None = None
    weigh_by_size: bool = False

    def __post_init__(self) -> None:
        check_whole(1, k=self.k)
        _check_sample_size(self.sample_size)

    @property
    @override
    def num_kept(self) -> int:
        return self.k

    @override
    def sample(self, rounds: Sequence[Round], key: tuple[int, ...]) -> list[PreferencePair]:
        weights = round_weights(_sizes(rounds), num_nearest=self.k, weigh_by_size=self.weigh_by_size)
        return draw_pairs(rounds, weights, _num_draws(self.sample_size, rounds), key)


@dataclass(frozen=True)
class AllHistory(Replay):
    """Pairs of all rounds, with equal weights.

    Args:
        sample_size: Pairs per round of learning; None: as many as the newest round with pairs has.
        weigh_by_size: Weigh rounds by their number of pairs, which makes all pairs equally likely.

    Raises:
        ValueError: If `sample_size` is not a whole number from 1.
    """

    sample_size: int | None = None
    weigh_by_size: bool = False

    def __post_init__(self) -> None:
        _check_sample_size(self.sample_size)

    @property
    @override
    def num_kept(self) -> None:
        return None

    @override
    def sample(self, rounds: Sequence[Round], key: tuple[int, ...]) -> list[PreferencePair]:
        weights = round_weights(_sizes(rounds), weigh_by_size=self.weigh_by_size)
        return draw_pairs(rounds, weights, _num_draws(self.sample_size, rounds), key)


@dataclass(frozen=True)
class LambdaDecay(Replay):
    """Pairs of all rounds, older ones more rarely: the weight is ``decay ** age``.

    Args:
        decay: Factor per round of age, from 0 (the newest round only) to 1 (as `AllHistory`).
        sample_size: Pairs per round of learning; None: as many as the newest round with pairs has.
        weigh_by_size: Weigh rounds by their number of pairs too.

    Raises:
        ValueError: If `decay` is out of range, or `sample_size` is not a whole number from 1.
    """

    decay: float
    sample_size: int | None = None
    weigh_by_size: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay={self.decay} is out of range. Use a number from 0 to 1.")
        _check_sample_size(self.sample_size)

    @property
    @override
    def num_kept(self) -> int | None:
        return 1 if self.decay == 0 else None

    @override
    def sample(self, rounds: Sequence[Round], key: tuple[int, ...]) -> list[PreferencePair]:
        weights = round_weights(_sizes(rounds), decay=self.decay, weigh_by_size=self.weigh_by_size)
        return draw_pairs(rounds, weights, _num_draws(self.sample_size, rounds), key)


def _sizes(rounds: Sequence[Round]) -> list[int]:
    return [len(source.pairs) for source in rounds]


def _num_draws(sample_size: int | None, rounds: Sequence[Round]) -> int:
    if sample_size is not None:
        return sample_size
    return next((size for size in reversed(_sizes(rounds)) if size), 0)


def _check_sample_size(sample_size: object) -> None:
    if sample_size is not None:
        check_whole(1, sample_size=sample_size)
