"""The door for sampling: requests and completions of a generation engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from comlrl_lightning.agents.sampling import Sampling
from comlrl_lightning.types import Completion, Prompt

GenerationProgress = Callable[[int], None]
"""Called with the number of completions that are still being sampled."""
Finished = Callable[[int, tuple[Completion, ...]], None]
"""Called with the number of a request and its K completions, which are over."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """K completions of one prompt by one agent."""

    agent: int
    """Index of the agent."""
    prompt: Prompt
    """Its prompt, as the formatter returned it."""
    keys: tuple[tuple[int, ...], ...]
    """`[K]` integers that seed each completion by itself."""
    prefixes: Any = field(default=None, compare=False, repr=False)
    """Keys and values that the native loop keeps from the turn before; other engines ignore them."""
    place: object | None = field(default=None, compare=False, repr=False)
    """Task item and turn, for messages."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled completion: tokens, the end-of-sequence token included, and their log-probabilities."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


class EngineTeam(Protocol):
    """The part of a team that an engine needs."""

    num_agents: int

    def encode_request(self, request: GenerationRequest, sampling: Sampling) -> tuple[int, ...]:
        """`[P]` token ids of a request's prompt, cut so that `sampling.max_new_tokens` fit behind it."""
        ...

    def completion(
        self, request: GenerationRequest, prompt_ids: tuple[int, ...], sampled: Sampled, sampling: Sampling
    ) -> Completion:
        """The record of sampled tokens: decoded text, stop strings cut, whether the token limit ended it."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write the agents' present weights: one standard folder per agent."""
        ...


class GenerationEngine(ABC):
    """Samples completions for a team, in this process or elsewhere.

    Its log-probabilities are compared with those of the trained model: the difference is logged as ``sampler_gap``.
    """

    @abstractmethod
    def generate(
        self,
        team: Any,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        progress: GenerationProgress | None = None,
        finished: Finished | None = None,
    ) -> list[tuple[Completion, ...]]:
        """K completions per request, in the order of the requests.

        Args:
            team: The agents, see `EngineTeam`.
            requests: Any mix of agents and prompts.
            sampling: How to draw.
            progress: Called with the number of completions that are still being sampled.
            finished: May be called with the number of a request and its completions, at most once each and from any
                thread, as soon as they are there.
        """

    def weights_changed(self, team: Any) -> None:  # noqa: B027  (engines in this process need none)
        """Called before the first generation, and before a generation after the agents' weights changed.

        Args:
            team: The agents, see `EngineTeam`.
        """
