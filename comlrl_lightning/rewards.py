"""Ready-made parts of a reward: processors, sums of several rewards, reward models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.reward_model import RewardModel
from comlrl_lightning.utilities.calls import Place, UserFunction, finite_floats
from comlrl_lightning.utilities.checks import is_finite

__all__ = [
    "REWARD_KEYWORDS",
    "Chain",
    "Clip",
    "RewardModel",
    "RewardProcessor",
    "RewardProcessors",
    "Scale",
    "Shift",
    "WeightedRewards",
]

REWARD_KEYWORDS = ("batch_items", "prompts", "turn", "num_tokens", "truncated")
"""Names that a reward function gets by keyword, if its signature has them."""

RewardProcessor = Callable[[float], float]
"""Maps one reward to the reward that is trained on."""


@dataclass(frozen=True)
class Scale(KnownKeywords):
    """Multiplies each reward."""

    factor: float
    """What each reward is multiplied with."""

    def __post_init__(self) -> None:
        _check_finite("factor", self.factor)

    def __call__(self, reward: float) -> float:
        """The scaled reward."""
        return reward * self.factor


@dataclass(frozen=True)
class Shift(KnownKeywords):
    """Adds a constant to each reward."""

    value: float
    """What is added to each reward."""

    def __post_init__(self) -> None:
        _check_finite("value", self.value)

    def __call__(self, reward: float) -> float:
        """The shifted reward."""
        return reward + self.value


@dataclass(frozen=True)
class Clip(KnownKeywords):
    """Keeps each reward within bounds."""

    low: float
    """Smallest reward that is left."""
    high: float
    """Largest reward that is left."""

    def __post_init__(self) -> None:
        for name, value in (("low", self.low), ("high", self.high)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name}={value!r} is not a number. Give one.")
        if not self.low < self.high:
            raise ValueError(f"low={self.low} is not below high={self.high}. Give two bounds in order.")

    def __call__(self, reward: float) -> float:
        """The clipped reward."""
        return min(max(reward, self.low), self.high)


@dataclass(frozen=True)
class Chain(KnownKeywords):
    """Applies several processors, the first one first."""

    processors: Sequence[RewardProcessor]
    """The processors in the order of their use."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "processors", tuple(self.processors))
        for index, processor in enumerate(self.processors):
            UserFunction(processor, f"processors[{index}]", 1, (), "a reward")

    def __call__(self, reward: float) -> float:
        """The reward after all processors."""
        for processor in self.processors:
            reward = processor(reward)
        return reward


class RewardProcessors:
    """Makes the usual reward processors: picklable objects that compare by value.

    In YAML they are ``class_path: comlrl_lightning.RewardProcessors.scale`` with ``init_args: {factor: 10.0}``;
    `chain` is ``class_path: comlrl_lightning.rewards.Chain`` there, with ``init_args: {processors: [...]}``.

    Example:
        >>> RewardProcessors.chain(RewardProcessors.scale(factor=10.0), RewardProcessors.clip(-1.0, 1.0))(0.25)
        1.0
    """

    scale = Scale
    shift = Shift
    clip = Clip

    @staticmethod
    def chain(*processors: RewardProcessor) -> Chain:
        """Apply several processors, the first one first."""
        return Chain(processors)


def part_means(parts: Sequence[PartSums]) -> dict[str, float]:
    """Mean of each part over all joint completions of several calls; empty without any."""
    sums: dict[str, float] = {}
    for call in parts:
        for name, total in call.sums.items():
            sums[name] = sums.get(name, 0.0) + total
    count = sum(call.num_joint for call in parts)
    return {name: total / count for name, total in sums.items()} if count else {}


@dataclass(frozen=True, slots=True)
class PartSums:
    """What the parts of `WeightedRewards` gave in one call, unweighted."""

    sums: dict[str, float]
    """Sum of each part over the joint completions."""
    num_joint: int
    """J."""


_COLLECTING: ContextVar[tuple[WeightedRewards, list[PartSums], bool] | None] = ContextVar("_COLLECTING", default=None)
"""Whose calls, in this thread, leave their parts in a list, and whether parts may be None there."""


class WeightedRewards(KnownKeywords):
    """A weighted sum of several rewards; the mean of each part is logged under ``reward/``.

    Args:
        rewards: Name of each part and its function, called as a `reward_func` is.
        weights: Weight of each part, by name or in the order of `rewards`; None weighs all 1.

    Raises:
        ValueError: If there is no part, or the weights do not fit.

    Example:
        >>> reward = WeightedRewards({"short": lambda texts: [-len(text) for text in texts]}, {"short": 0.5})
        >>> with reward.collected() as parts:
        ...     reward(["abcd", "ab"])
        [-2.0, -1.0]
        >>> part_means(parts)
        {'short': -3.0}
    """

    def __init__(
        self,
        rewards: Mapping[str, Callable[..., Any]],
        weights: Mapping[str, float] | Sequence[float] | None = None,
    ) -> None:
        if not isinstance(rewards, Mapping):
            raise ValueError(f"rewards={rewards!r} must be a dict name -> function. Give one.")
        if wrong := [name for name in rewards if not isinstance(name, str) or not name or "." in name]:
            raise ValueError(f"rewards has a part named {wrong[0]!r}. Use a text without dots, which metrics can hold.")
        if not rewards:
            raise ValueError("rewards={} names no reward. Give at least one, by name.")
        self.rewards = dict(rewards)
        self.weights = _weights_by_name(list(rewards), weights)
        self._functions: dict[str, UserFunction] = {}

    def check(self, num_agents: int, keywords: Sequence[str] = REWARD_KEYWORDS, passes: str | None = None) -> None:
        """Read the signature of every part.

        Args:
            num_agents: N.
            keywords: Reserved names that every call passes.
            passes: What a call passes, in words; None: one list of completions per agent.

        Raises:
            ValueError: If a part cannot be called so.
        """
        passes = passes or _lists(num_agents)
        self._functions = {
            name: UserFunction(func, f"rewards[{name!r}]", num_agents, keywords, passes)
            for name, func in self.rewards.items()
        }
        for func in self.rewards.values():
            if isinstance(func, WeightedRewards):
                func.check(num_agents, keywords, passes)

    def __call__(
        self,
        *completions: Sequence[str],
        batch_items: Sequence[Mapping[str, Any]] | None = None,
        prompts: Sequence[Any] | None = None,
        turn: int | None = None,
        num_tokens: Sequence[Sequence[int]] | None = None,
        truncated: Sequence[Sequence[bool]] | None = None,
    ) -> Sequence[float | None]:
        """`[J]` weighted sums of the parts' rewards; a part gets the keywords that this call got."""
        if not self._functions:
            self.check(len(completions))
        given = {"batch_items": batch_items, "prompts": prompts, "turn": turn}
        given |= {"num_tokens": num_tokens, "truncated": truncated}
        keywords = {name: value for name, value in given.items() if value is not None}
        place = Place(batch_items[0] if batch_items else {}, None, turn)
        num_joint = len(completions[0])
        collecting = _COLLECTING.get()
        is_collecting = collecting is not None and collecting[0] is self
        none_as_nan = collecting is not None and is_collecting and collecting[2]
        totals, by_name = [0.0] * num_joint, {}
        for name, function in self._functions.items():
            values = function(place, *completions, **keywords)
            by_name[name] = rewards = finite_floats(values, num_joint, function.label, place, none_as_nan=none_as_nan)
            totals = [total + self.weights[name] * reward for total, reward in zip(totals, rewards, strict=True)]
        known = [index for index, total in enumerate(totals) if not math.isnan(total)]
        if collecting is not None and is_collecting:
            sums = {name: math.fsum(rewards[index] for index in known) for name, rewards in by_name.items()}
            collecting[1].append(PartSums(sums, len(known)))
        return [None if math.isnan(total) else total for total in totals] if none_as_nan else totals

    @contextmanager
    def collected(self, none_as_nan: bool = False) -> Iterator[list[PartSums]]:
        """Calls of this thread inside the context add the sums of their parts to a list.

        Args:
            none_as_nan: A joint completion for which any part is None gets None and counts in no part's mean.
        """
        parts: list[PartSums] = []
        token = _COLLECTING.set((self, parts, none_as_nan))
        try:
            yield parts
        finally:
            _COLLECTING.reset(token)


def _weights_by_name(names: list[str], weights: Mapping[str, float] | Sequence[float] | None) -> dict[str, float]:
    if weights is None:
        return dict.fromkeys(names, 1.0)
    named = isinstance(weights, Mapping)
    if set(weights) != set(names) if named else len(weights) != len(names):
        raise ValueError(f"weights={weights} does not fit rewards={names}. Give one weight per reward.")
    by_name = dict(weights) if isinstance(weights, Mapping) else dict(zip(names, weights, strict=True))
    for weight in by_name.values():
        _check_finite("weights", weight)
    return by_name


def _check_finite(argument: str, value: float) -> None:
    if not is_finite(value):
        raise ValueError(f"{argument}={value!r} is not a finite number. Give one.")


def _lists(num_agents: int) -> str:
    return f"{num_agents} list{'s' if num_agents > 1 else ''} of completions, one per agent"
