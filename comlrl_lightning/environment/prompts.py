"""The user's functions behind checked calls: formatters, reward, transition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from comlrl_lightning.environment.reward import RewardFunction as RewardFunction
from comlrl_lightning.types import Prompt
from comlrl_lightning.utilities.calls import Place, UserFunction, check_unicode, copied_item, qualified_name, short

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
            prompt = function(place, copied_item(item, place))
        else:
            changed = {**copied_item(item, place), "prompt": external_prompt}
            prompt = function(place, changed, external_prompts=external_prompt)
        return checked_prompt(prompt, function.label, place)


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
            prompt=copied_item(item, place).get("prompt", ""),
            agent_completions=list(agent_completions),
            num_agents=self._num_agents,
            prompt_history_per_agent=[deepcopy([*history]) for history in prompt_history_per_agent],
            response_history_per_agent=[list(history) for history in response_history_per_agent],
            item=copied_item(item, place),
        )
        fits = isinstance(prompts, list | tuple) and len(prompts) == self._num_agents
        if not fits or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError(
                f"{self._function.label} returned {short(prompts)} for {place}. "
                f"Return a list or tuple of {self._num_agents} texts, one per agent."
            )
        for prompt in prompts:
            check_unicode(prompt, self._function.label, place)
        return tuple(map(str, prompts))


def checked_prompt(prompt: Any, source: str, place: object) -> Prompt:
    """What a function of the user returned as a prompt, in builtin types.

    Args:
        prompt: What it returned.
        source: Label of the function, for the message.
        place: Where, for the message.

    Raises:
        ValueError: If it is neither a text nor chat messages, or holds what is no Unicode.
    """
    if not isinstance(prompt, str) and not _is_chat(prompt):
        raise ValueError(
            f"{source} returned {short(prompt)} for {place}. "
            "Return a text or a list of chat messages, each a dict with a text as role and as content."
        )
    plain = plain_prompt(prompt)
    for text in [plain] if isinstance(plain, str) else _texts_of(plain):
        check_unicode(text, source, place)
    return plain


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
        raise ValueError(f"The task item has no field 'prompt', only {short([*item])}. Add it, or give formatters=.")
    prompt: Prompt = item["prompt"]
    return prompt


def _texts_of(messages: list[dict[str, str]]) -> list[str]:
    return [text for message in messages for text in message.values() if isinstance(text, str)]


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
