"""The user's functions behind checked calls: formatters, reward, transition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from comlrl_lightning.calls import (
    Place,
    UserFunction,
    finite_float,
    finite_floats,
    qualified_name,
    rows_of,
    short,
)
from comlrl_lightning.rewards import REWARD_KEYWORDS, RewardProcessor, RewardProcessors, WeightedRewards
from comlrl_lightning.rollouts.types import Prompt

Formatter = Callable[..., Prompt]
"""Makes an agent's prompt out of a task item."""

TRANSITION_KEYWORDS = (
    "prompt",
    "agent_completions",
    "num_agents",
    "prompt_history_per_agent",
    "response_history_per_agent",
    "item",
)
"""Names that an external transition gets by keyword, if its signature has them."""


class Formatters:
    """One prompt per agent out of a task item.

    Args:
        formatters: None reads ``item["prompt"]``; one function for all agents; or one per agent, in order.
        num_agents: N.

    Raises:
        ValueError: If their number does not fit, or one cannot be called with a task item.
    """

    def __init__(self, formatters: Formatter | Sequence[Formatter] | None, num_agents: int) -> None:
        self._functions = [
            UserFunction(formatter, argument, 1, ("external_prompts",), "a task item")
            for argument, formatter in _per_agent(formatters, num_agents)
        ]
        self.num_agents = num_agents
        for function, (_, formatter) in zip(self._functions, _per_agent(formatters, num_agents), strict=True):
            UserFunction(formatter, function.label.partition("=")[0], 1, (), "a task item alone, as at turn 1")

    def format(
        self,
        item: Mapping[str, Any],
        agent: int,
        external_prompt: str | None = None,
        *,
        item_index: int | None = None,
        turn: int | None = None,
    ) -> Prompt:
        """Make one agent's prompt.

        Args:
            item: The original task item; the formatter gets a copy.
            agent: Index of the agent.
            external_prompt: What the transition returned for the agent: replaces ``prompt`` in the copy, and is passed
                as `external_prompts` if the formatter has that.
            item_index: Position of the item in its dataset, for messages.
            turn: Turn from 1, for messages.

        Returns:
            A text or chat messages.

        Raises:
            ValueError: If the formatter returns anything else.
        """
        function, place = self._functions[agent], Place(item, item_index, turn)
        if external_prompt is None:
            prompt = function(place, _copied(item, place))
        else:
            changed = {**_copied(item, place), "prompt": external_prompt}
            prompt = function(place, changed, external_prompts=external_prompt)
        return checked_prompt(prompt, function.label, place)


class RewardFunction:
    """The reward of joint completions, checked and processed.

    Args:
        func: Takes one list of completions per agent and, by keyword if its signature has them, `batch_items`,
            `prompts` and `turn`; returns one finite number per joint completion.
        num_agents: N.
        processor: Maps each reward.
        per_agent: The function returns `num_agents` numbers per joint completion, one per agent.

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
    ) -> None:
        passes = f"{num_agents} list{'s' if num_agents > 1 else ''} of completions, one per agent"
        self._function = UserFunction(func, "reward_func", num_agents, REWARD_KEYWORDS, passes)
        self._num_agents = num_agents
        self.per_agent = per_agent
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
        place = Place(item, item_index, turn)
        values = self._call(place, completions, item, prompts, turn)
        return self._processed(finite_floats(values, len(completions[0]), self._function.label, place), place)

    def of_agents(
        self,
        completions: Sequence[Sequence[str]],
        *,
        item: Mapping[str, Any],
        prompts: Sequence[Prompt] | None,
        turn: int,
        item_index: int | None = None,
    ) -> list[list[float]]:
        """`[J][N]` processed rewards of each agent; arguments and errors as for a call."""
        place, label = Place(item, item_index, turn), self._function.label
        values = self._call(place, completions, item, prompts, turn)
        rows = rows_of(values, len(completions[0]), len(completions), label, place)
        return [self._processed(row, place) for row in rows]

    def _call(
        self,
        place: Place,
        completions: Sequence[Sequence[str]],
        item: Mapping[str, Any],
        prompts: Sequence[Prompt] | None,
        turn: int,
    ) -> Any:
        keywords: dict[str, Any] = {"batch_items": [_copied(item, place)], "turn": turn}
        if prompts is not None:
            keywords["prompts"] = deepcopy([*prompts])
        return self._function(place, *(list(texts) for texts in completions), **keywords)

    def _processed(self, rewards: list[float], place: Place) -> list[float]:
        if (processor := self._processor) is None:
            return rewards
        return [finite_float(processor(place, reward), processor.label, place) for reward in rewards]

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
            UserFunction(func, "reward_func", num_agents, keywords, "completions and no prompts, as after turn 1")
        processor = None if self._processor is None else self._processor.func
        return RewardFunction(func, num_agents, processor, per_agent=per_agent)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts of `WeightedRewards`; none for other functions."""
        return () if self._weighted is None else tuple(self._weighted.rewards)

    def pop_parts(self) -> dict[str, float]:
        """Mean of each part of `WeightedRewards` since the last call, before processing; empty for other functions."""
        return {} if self._weighted is None else self._weighted.pop_parts()


class Transition:
    """What the world answers to a joint completion: the next prompt of each agent.

    Args:
        func: Takes, by keyword, those of `TRANSITION_KEYWORDS` that its signature has; returns N texts.
        num_agents: N.

    Raises:
        ValueError: If the function cannot be called so.
    """

    def __init__(self, func: Callable[..., Sequence[str]], num_agents: int) -> None:
        self._function = UserFunction(func, "external_transition", 0, TRANSITION_KEYWORDS, "no positional arguments")
        self._num_agents = num_agents

    def __call__(
        self,
        *,
        item: Mapping[str, Any],
        agent_completions: Sequence[str],
        prompt_history_per_agent: Sequence[Sequence[Prompt]],
        response_history_per_agent: Sequence[Sequence[str]],
        turn: int,
        item_index: int | None = None,
    ) -> tuple[str, ...]:
        """Ask for the prompts of the next turn.

        Args:
            item: The original task item.
            agent_completions: `[N]` texts of the joint completion.
            prompt_history_per_agent: `[N][t]` prompts so far, this turn's included.
            response_history_per_agent: `[N][t]` completions so far, this turn's included.
            turn: The turn that was just played, from 1, for messages.
            item_index: Position of the item in its dataset, for messages.

        Returns:
            `[N]` texts.

        Raises:
            ValueError: If the function returns anything but N texts.
        """
        place = Place(item, item_index, turn)
        prompts = self._function(
            place,
            prompt=deepcopy(item.get("prompt", "")),
            agent_completions=list(agent_completions),
            num_agents=self._num_agents,
            prompt_history_per_agent=[deepcopy([*history]) for history in prompt_history_per_agent],
            response_history_per_agent=[list(history) for history in response_history_per_agent],
            item=_copied(item, place),
        )
        fits = isinstance(prompts, list | tuple) and len(prompts) == self._num_agents
        if not fits or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError(
                f"{self._function.label} returned {short(prompts)} for {place}. "
                f"Return a list or tuple of {self._num_agents} texts, one per agent."
            )
        return tuple(map(str, prompts))


def _copied(item: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """A copy of a task item that a function may change."""
    try:
        return deepcopy(dict(item))
    except TypeError as error:
        raise ValueError(f"{place} cannot be copied: {error}. Keep such objects out of task items.") from error


def checked_prompt(prompt: Any, source: str, place: object) -> Prompt:
    """What a function of the user returned as a prompt, in builtin types.

    Args:
        prompt: What it returned.
        source: Label of the function, for the message.
        place: Where, for the message.

    Raises:
        ValueError: If it is neither a text nor chat messages.
    """
    if not isinstance(prompt, str) and not _is_chat(prompt):
        raise ValueError(
            f"{source} returned {short(prompt)} for {place}. "
            "Return a text or a list of chat messages, each a dict with a text as role and as content."
        )
    return plain_prompt(prompt)


def plain_prompt(prompt: Prompt) -> Prompt:
    """A copy of a prompt in builtin types, which checkpoints can hold and nobody else can change."""
    if isinstance(prompt, str):
        return str(prompt)
    return [{key: str(value) if isinstance(value, str) else value for key, value in one.items()} for one in prompt]


def read_prompt(item: Mapping[str, Any]) -> Prompt:
    """The default formatter: the item's ``prompt``.

    Raises:
        ValueError: If the item has no such field.
    """
    if "prompt" not in item:
        raise ValueError(f"The task item has no field 'prompt', only {sorted(item)}. Add it, or give formatters=.")
    prompt: Prompt = item["prompt"]
    return prompt


def _per_agent(formatters: Formatter | Sequence[Formatter] | None, num_agents: int) -> list[tuple[str, Formatter]]:
    if formatters is None:
        return [("formatters", read_prompt)] * num_agents
    if not isinstance(formatters, Sequence):
        return [("formatters", formatters)] * num_agents
    if isinstance(formatters, str):
        raise ValueError(f"formatters={formatters!r} is a text. Give one function, or a list with one per agent.")
    if len(formatters) != num_agents:
        names = ", ".join(qualified_name(one) if callable(one) else short(one) for one in formatters)
        raise ValueError(
            f"formatters=[{names}] holds {len(formatters)}, which does not fit {num_agents} agents. "
            "Give one function for all of them, or a list with one per agent."
        )
    return [(f"formatters[{agent}]", formatter) for agent, formatter in enumerate(formatters)]


def _is_chat(prompt: object) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
            for message in prompt
        )
    )


def _checked_processor(processor: RewardProcessor) -> UserFunction:
    makers: tuple[object, ...] = (RewardProcessors.chain,)
    if processor in makers:
        raise ValueError(
            f"reward_processor={qualified_name(processor)} makes a processor but is none. "
            "Call it with its parts, RewardProcessors.chain(...)."
        )
    return UserFunction(processor, "reward_processor", 1, (), "a reward")
