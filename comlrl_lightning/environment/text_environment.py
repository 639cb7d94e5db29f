"""Environments with state, in which some of the agents act at a time: tools, games, loops, orders of speaking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

import numpy as np

from comlrl_lightning.environment.prompts import checked_prompt
from comlrl_lightning.rewards import RewardProcessor
from comlrl_lightning.types import Prompt
from comlrl_lightning.utilities.calls import (
    Place,
    UserFunction,
    copied_item,
    finite_float,
    qualified_name,
    readable_signature,
    short,
)


@runtime_checkable
class TextEnvironment(Protocol):
    """One episode of a task: PettingZoo's parallel form with texts. Agents are numbered from 0.

    Agents without a prompt do not act. Every episode has an environment of its own. Any class with these two methods
    will do. A class with settings is given as ``functools.partial(Game, size=4)``.
    """

    def reset(self, item: dict[str, Any], seed: int, /) -> Mapping[int, Prompt]:
        """Begin an episode.

        Args:
            item: A copy of the task item.
            seed: The same number for all episodes of an item in an epoch, so that they begin alike.

        Returns:
            The prompts of the agents that act first: texts or chat messages.
        """
        ...

    def step(self, completions: dict[int, str], /) -> tuple[Mapping[int, Prompt], float | Mapping[int, float], bool]:
        """Go on with what the acting agents answered.

        Args:
            completions: Answers by agent.

        Returns:
            The prompts of the agents that act next, the reward of this step (one for the team, or by agent; agents
            that are not in it get 0), and whether the episode is over.
        """
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """The checked answer of an environment."""

    prompts: dict[int, Prompt]
    """Prompts of the agents that act next; empty when the episode is over."""
    rewards: tuple[float, ...]
    """`[1]` processed reward of the team, or `[N]`, one per agent."""
    is_over: bool


class Episode:
    """A running environment behind checked calls.

    Args:
        environment: An object with `reset` and `step`.
        settings: Where it comes from.
        item: The task item.
        index: Position of the item in its dataset.

    Raises:
        ValueError: If it lacks a method.
    """

    def __init__(self, environment: Any, settings: Environments, item: Mapping[str, Any], index: int) -> None:
        self._settings, self._item, self._index = settings, item, index
        if not isinstance(environment, TextEnvironment):
            raise ValueError(
                f"{settings.label} made {short(environment)}, which lacks reset or step. Give a class with"
                " reset(item, seed) and step(completions), see TextEnvironment."
            )
        self._reset = UserFunction(environment.reset, settings.label + ".reset", 2, (), "a task item and a seed")
        self._step = UserFunction(environment.step, settings.label + ".step", 1, (), "completions by agent")
        self.prompts: dict[int, Prompt] = {}
        """Prompts of the agents that act next."""

    def begin(self, seed: int) -> None:
        """Reset the environment."""
        place = self._place(1)
        prompts = self._reset(place, copied_item(self._item, place), seed)
        self.prompts = self._checked_prompts(prompts, self._reset.label, place)

    def step(self, completions: dict[int, str], turn: int) -> Step:
        """Go on.

        Args:
            completions: Answers of the acting agents.
            turn: The step that they belong to, from 1.

        Raises:
            ValueError: If the environment returns anything but prompts, rewards and whether the episode is over.
        """
        place = self._place(turn)
        answer = self._step(place, completions)
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise ValueError(
                f"{self._step.label} returned {short(answer)} for {place}. Return a tuple (prompts, rewards, over)."
            )
        prompts, rewards, is_over = answer
        if not isinstance(is_over, bool | np.bool_):
            raise ValueError(f"{self._step.label} returned over={short(is_over)} for {place}. Return True or False.")
        row = self._processed(self._row(rewards, place), place)
        self.prompts = {} if is_over else self._checked_prompts(prompts, self._step.label, self._place(turn + 1))
        return Step(self.prompts, row, bool(is_over))

    def _place(self, turn: int) -> Place:
        return Place(self._item, self._index, turn)

    def _checked_prompts(self, prompts: Any, source: str, place: Place) -> dict[int, Prompt]:
        if not isinstance(prompts, Mapping) or not prompts:
            raise ValueError(
                f"{source} returned the prompts {short(prompts)} for {place}. Return a dict with the prompt of each"
                " agent that acts next, at least one while the episode is not over."
            )
        self._check_agents(prompts, source, place)
        return {int(agent): checked_prompt(prompts[agent], source, place) for agent in sorted(prompts)}

    def _check_agents(self, by_agent: Mapping[Any, Any], source: str, place: Place) -> None:
        agents = range(self._settings.num_agents)
        for agent in by_agent:
            if not isinstance(agent, Integral) or agent not in agents:
                raise ValueError(
                    f"{source} names agent {short(agent)} for {place}. Agents are the numbers 0 to {agents[-1]}."
                )

    def _row(self, rewards: Any, place: Place) -> tuple[float, ...]:
        """`[1]` reward of the team, or `[N]`."""
        source, num_agents = self._step.label, self._settings.num_agents
        if not isinstance(rewards, Mapping):
            return (finite_float(rewards, source, place),) * (num_agents if self._settings.per_agent else 1)
        if not self._settings.per_agent:
            raise ValueError(
                f"{source} returned rewards by agent for {place}, and per_agent_rewards=False. Return one number for"
                " the team, or use per_agent_rewards=True."
            )
        self._check_agents(rewards, source, place)
        return tuple(finite_float(rewards.get(agent, 0.0), source, place) for agent in range(num_agents))

    def _processed(self, row: tuple[float, ...], place: Place) -> tuple[float, ...]:
        processor = self._settings.processor
        if processor is None:
            return row
        return tuple(finite_float(processor(place, reward), processor.label, place) for reward in row)


class Environments:
    """Makes the environments of episodes.

    Args:
        factory: A class, or a function without arguments; called once per episode.
        num_agents: N.
        per_agent: Each agent is credited with rewards of its own.
        processor: Maps each reward.

    Raises:
        ValueError: If it is an object, or takes arguments.
    """

    part_names: tuple[str, ...] = ()
    """Parts of the reward: an environment's rewards have none."""
    joint_format: None = None
    """One model that answers for all agents: not in an environment."""

    def __init__(
        self,
        factory: Any,
        num_agents: int,
        *,
        per_agent: bool = False,
        processor: RewardProcessor | None = None,
    ) -> None:
        if not callable(factory):
            raise ValueError(
                f"environment={short(factory)} is not callable. Give a class, or a function that makes an environment:"
                " every episode has one of its own."
            )
        self.label = f"environment={qualified_name(factory)}"
        signature = readable_signature(factory)
        try:
            if signature is not None:
                signature.bind()
        except TypeError as error:
            raise ValueError(
                f"{self.label} cannot be called without arguments: {error}. Bind them with functools.partial."
            ) from None
        self._factory, self.num_agents, self.per_agent = factory, num_agents, per_agent
        self.processor = None if processor is None else UserFunction(processor, "reward_processor", 1, (), "a reward")

    def episode(self, item: Mapping[str, Any], index: int, seed: int) -> Episode:
        """Begin an episode of a task item.

        Args:
            item: The task item.
            index: Its position in its dataset.
            seed: For the environment's own random numbers.
        """
        try:
            environment = self._factory()
        except Exception as error:
            error.add_note(f"Raised in {self.label} for {Place(item, index, 1)}.")
            raise
        episode = Episode(environment, self, item, index)
        episode.begin(seed)
        return episode
