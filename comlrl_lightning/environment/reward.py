"""The user's reward function behind checked calls, apart from where and when it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass
from math import isnan
from typing import Any

from comlrl_lightning.rewards import REWARD_KEYWORDS, PartSums, RewardProcessor, RewardProcessors, WeightedRewards
from comlrl_lightning.types import Prompt
from comlrl_lightning.utilities.calls import (
    Place,
    UserFunction,
    copied_item,
    finite_float,
    finite_floats,
    qualified_name,
    rows_of,
)


@dataclass(frozen=True, slots=True)
class RewardCall:
    """Joint completions of one task item and turn, which one call of the reward function scores."""

    completions: Sequence[Sequence[str]]
    """`[N][J]` texts."""
    item: Mapping[str, Any]
    """The original task item."""
    prompts: Sequence[Prompt] | None
    """`[N]` prompts of the node; None where the joint completions answer different prompts."""
    turn: int
    """Turn, from 1."""
    item_index: int | None = None
    """Position of the item in its dataset, for messages."""
    num_tokens: Sequence[Sequence[int]] = ()
    """`[N][J]` sampled tokens of each completion; empty where nothing was sampled."""
    truncated: Sequence[Sequence[bool]] = ()
    """`[N][J]` True = the token limit ended it; empty where nothing was sampled."""

    @property
    def place(self) -> Place:
        """Where it is, for messages."""
        return Place(self.item, self.item_index, self.turn)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a reward function gave, before processing."""

    rows: list[list[float]]
    """`[J][1]` rewards; `[J][N]` where each agent has its own."""
    parts: Sequence[PartSums] = ()
    """What the parts of `WeightedRewards` gave."""
    is_late: bool = False
    """Whether the call ran out of time and these are the rewards for that."""


class RewardFunction:
    """The reward of joint completions, checked and processed.

    Args:
        func: Takes one list of completions per agent and, by keyword if its signature has them, `batch_items`,
            `prompts`, `turn`, `num_tokens` and `truncated`; returns one finite number per joint completion.
        num_agents: N.
        processor: Maps each reward.
        per_agent: The function returns `num_agents` numbers per joint completion, one per agent.
        none_as_nan: NaN stands for rewards that are None, unprocessed; else None is an error.

    Raises:
        ValueError: If a function cannot be called so.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        num_agents: int,
        processor: RewardProcessor | None = None,
        *,
        per_agent: bool = False,
        none_as_nan: bool = False,
    ) -> None:
        passes = f"{num_agents} list{'s' if num_agents > 1 else ''} of completions, one per agent"
        self._function = UserFunction(func, "reward_func", num_agents, REWARD_KEYWORDS, passes)
        self._num_agents = num_agents
        self.per_agent = per_agent
        self.none_as_nan = none_as_nan
        if per_agent and isinstance(func, WeightedRewards):
            raise ValueError(
                "per_agent_rewards=True does not go with WeightedRewards, which adds up one number per joint"
                " completion. Give a function that returns one number per agent."
            )
        if isinstance(func, WeightedRewards):
            func.check(num_agents)
        self._weighted = func if isinstance(func, WeightedRewards) else None
        self._processor = None if processor is None else _checked_processor(processor)

    def __call__(
        self,
        completions: Sequence[Sequence[str]],
        *,
        item: Mapping[str, Any],
        prompts: Sequence[Prompt] | None,
        turn: int,
        item_index: int | None = None,
    ) -> list[float]:
        """Score joint completions of one task item and turn.

        Args:
            completions: `[N][J]` texts.
            item: The original task item.
            prompts: `[N]` prompts of the node; None where the joint completions answer different prompts.
            turn: Turn, from 1.
            item_index: Position of the item in its dataset, for messages.

        Returns:
            `[J]` processed rewards.

        Raises:
            ValueError: If the function returns anything but J finite numbers.
        """
        call = RewardCall(completions, item, prompts, turn, item_index)
        return [reward for (reward,) in self.processed(call, self.measure(call))]

    def measure(self, call: RewardCall) -> Measured:
        """Call the function and check what it returns. Several threads may do so at the same time.

        Raises:
            ValueError: If the function returns anything but J finite numbers, or `[J][N]` if each agent has its own.
        """
        place, count = call.place, len(call.completions[0])
        keywords: dict[str, Any] = {"batch_items": [copied_item(call.item, place)], "turn": call.turn}
        if call.prompts is not None:
            keywords["prompts"] = deepcopy([*call.prompts])
        if call.num_tokens:
            keywords["num_tokens"] = [list(of_agent) for of_agent in call.num_tokens]
            keywords["truncated"] = [list(of_agent) for of_agent in call.truncated]
        nobody: AbstractContextManager[list[PartSums]] = nullcontext([])
        with nobody if self._weighted is None else self._weighted.collected(self.none_as_nan) as parts:
            values = self._function(place, *(list(texts) for texts in call.completions), **keywords)
        none = {"none_as_nan": self.none_as_nan}
        if self.per_agent:
            return Measured(rows_of(values, count, self._num_agents, self.label, place, **none))
        return Measured([[value] for value in finite_floats(values, count, self.label, place, **none)], parts)

    def processed(self, call: RewardCall, measured: Measured) -> list[list[float]]:
        """`[J][1]` or `[J][N]` rewards after processing, which comes in the order of the calls, unlike measuring."""
        if (processor := self._processor) is None:
            return measured.rows
        place = call.place
        return [
            [
                reward if isnan(reward) else finite_float(processor(place, reward), processor.label, place)
                for reward in row
            ]
            for row in measured.rows
        ]

    @property
    def width(self) -> int:
        """Numbers per joint completion: 1, or N where each agent has its own."""
        return self._num_agents if self.per_agent else 1

    @property
    def label(self) -> str:
        """Argument and name of the function, for messages."""
        return self._function.label

    def without_processor(self) -> RewardFunction:
        """The same function, which only measures."""
        bare = copy(self)
        bare._processor = None
        return bare

    def of_agents(self) -> RewardFunction:
        """The same function, which returns one number per agent and joint completion."""
        return self.of_trajectories(per_agent=True, several_turns=False)

    def of_trajectories(self, per_agent: bool, *, several_turns: bool) -> RewardFunction:
        """The same function for trajectories, which share their prompts at the first turn only.

        Args:
            per_agent: It returns one number per agent and joint completion.
            several_turns: It is called without `prompts` after the first turn.

        Raises:
            ValueError: If it cannot be called so.
        """
        func, num_agents = self._function.func, self._num_agents
        if several_turns:
            keywords = tuple(name for name in REWARD_KEYWORDS if name != "prompts")
            passes = "completions and no prompts, as after turn 1"
            UserFunction(func, "reward_func", num_agents, keywords, passes)
            if isinstance(func, WeightedRewards):
                func.check(num_agents, keywords, passes)
        processor = None if self._processor is None else self._processor.func
        return RewardFunction(func, num_agents, processor, per_agent=per_agent, none_as_nan=self.none_as_nan)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts of `WeightedRewards`; none for other functions."""
        return () if self._weighted is None else tuple(self._weighted.rewards)


def _checked_processor(processor: RewardProcessor) -> UserFunction:
    makers: tuple[object, ...] = (RewardProcessors.chain,)
    if processor in makers:
        raise ValueError(
            f"reward_processor={qualified_name(processor)} makes a processor but is none. "
            "Call it with its parts, RewardProcessors.chain(...)."
        )
    return UserFunction(processor, "reward_processor", 1, (), "a reward")
