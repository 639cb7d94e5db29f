"""A team without language models, and user functions that remember their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from comlrl_lightning.agents.engine import Finished, GenerationRequest
from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.environment.functions import TaskFunctions
from comlrl_lightning.environment.joint_format import JointFormat, TaggedSections
from comlrl_lightning.environment.prompts import Formatters, RewardFunction, Transition
from comlrl_lightning.environment.reward_workers import RewardWorkers
from comlrl_lightning.rollouts.collect import Collector, RolloutShape
from comlrl_lightning.types import Completion, Prompt

KEY = (7, 0, 3)
"""Seed, stage and epoch that the collectors of these tests put in front of every key."""
SAMPLING = Sampling(max_new_tokens=4)


class FakeTeam:
    """Answers with a letter for the agent and digits for the way: ``b21`` is agent 1's first sample below path (1,)."""

    def __init__(self, num_agents: int) -> None:
        self.num_agents = num_agents
        self.calls: list[list[GenerationRequest]] = []
        self.samplings: list[Sampling] = []

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        progress: Callable[[int], None] | None = None,
        finished: Finished | None = None,
    ) -> list[tuple[Completion, ...]]:
        self.calls.append(list(requests))
        self.samplings.append(sampling)
        if progress is not None:
            progress(sum(len(request.keys) for request in requests))
        return [tuple(_answer(request, key) for key in request.keys) for request in requests]


def _answer(request: GenerationRequest, key: tuple[int, ...]) -> Completion:
    *path, _agent, sample = key[len(KEY) + 1 :]
    text = "abc"[request.agent] + "".join(str(choice + 1) for choice in (*path, sample))
    return Completion(request.agent, request.prompt, (1, 2), (3,), (-1.0,), text, truncated=False)


class CentralTeam(FakeTeam):
    """One model that writes in sections, last agent first, what a `FakeTeam` of so many agents answers.

    Args:
        num_roles: N.
        silent: Texts of agent 0; where it would have one of them, the completion has no section.
    """

    def __init__(self, num_roles: int, silent: Sequence[str] = ()) -> None:
        super().__init__(1)
        self.num_roles = num_roles
        self.silent = silent

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        progress: Callable[[int], None] | None = None,
        finished: Finished | None = None,
    ) -> list[tuple[Completion, ...]]:
        groups = super().generate(requests, sampling, progress)
        return [tuple(replace(one, text=self._sections(one.text)) for one in group) for group in groups]

    def _sections(self, first: str) -> str:
        if first in self.silent:
            return f"only {first}"
        said = ["abc"[agent] + first[1:] for agent in range(self.num_roles)]
        return "".join(f"<agent_{agent}> {text} </agent_{agent}>" for agent, text in reversed([*enumerate(said)]))


class Recorder:
    """A reward that remembers its calls and gives every joint completion what a table says, else 0."""

    def __init__(self, rewards: Mapping[str, float] | None = None) -> None:
        self.rewards = dict(rewards or {})
        self.calls: list[tuple[tuple[list[str], ...], dict[str, Any]]] = []
        self.dtypes: list[torch.dtype] = []

    def __call__(self, *completions: list[str], **keywords: Any) -> list[float]:
        self.calls.append((completions, keywords))
        self.dtypes.append(torch.tensor(1.0).dtype)
        return [self.rewards.get(" ".join(joint), 0.0) for joint in zip(*completions, strict=True)]


class World:
    """A transition that remembers its calls and answers with letters from the end of the alphabet."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **keywords: Any) -> tuple[str, ...]:
        self.calls.append(keywords)
        return ("x", "y", "z")[: keywords["num_agents"]]


class Formatter:
    """A formatter that remembers its calls and writes its name around the prompt."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[dict[str, Any], str | None]] = []

    def __call__(self, item: dict[str, Any], external_prompts: str | None = None) -> Prompt:
        self.calls.append((item, external_prompts))
        return f"{self.name}({item['prompt']})"


def make_collector(
    team: FakeTeam,
    reward: Callable[..., Any] | None = None,
    *,
    transition: Callable[..., Any] | None = None,
    formatters: Any = None,
    passthrough: bool = False,
    processor: Callable[[float], float] | None = None,
    progress: Callable[[int, int], None] | None = None,
    per_agent: bool = False,
    none_as_nan: bool = False,
    joint_format: JointFormat | None = None,
    workers: RewardWorkers | None = None,
    **shape: Any,
) -> Collector:
    """A collector for a fake team; what is not said is K=2, one turn, aligned, reward 0, a silent world.

    A `CentralTeam` is asked in tagged sections.
    """
    num_agents = team.num_agents
    if isinstance(team, CentralTeam):
        num_agents, joint_format = team.num_roles, joint_format or TaggedSections()
    interface = TaskFunctions(
        Formatters(formatters, num_agents),
        RewardFunction(reward or Recorder(), num_agents, processor, per_agent=per_agent, none_as_nan=none_as_nan),
        Transition(transition or World(), num_agents),
        passthrough,
        joint_format,
        workers or RewardWorkers(),
    )
    return Collector(team, interface, RolloutShape(**{"num_generations": 2, **shape}), SAMPLING, KEY, progress)
