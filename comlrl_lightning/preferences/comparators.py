"""Comparators: whose answers the agents' candidates are compared with.

A comparator's `sampler` takes the place of the team in a `Collector`. Its completions are in the agents' own tokens, so
that they can be learned from; those of other models come without log-probabilities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from threading import Event
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comlrl_lightning.agents.engine import Finished, GenerationProgress, GenerationRequest
from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import Sampling, Separate, SharedBase
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.environment.joint_format import Collaboration
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.preferences.api import Answer, HTTPChat, Messages, complete_all, messages_of, wait_unless
from comlrl_lightning.preferences.external import ForeignSampler, SectionCounts, generation_format, same_tokens
from comlrl_lightning.preferences.providers import PROVIDERS
from comlrl_lightning.preferences.snapshots import borrowed_weights, weights_of
from comlrl_lightning.rollouts.collect import Sampler
from comlrl_lightning.types import Completion
from comlrl_lightning.utilities.checks import check_whole

TAG_TOKENS = 16
"""What the tags of one agent's section may take of a joint completion, beside its answer."""


class Comparator(ABC, KnownKeywords):
    """Answers the prompts of the agents, for comparison.

    Settings are arguments; whatever changes during a run is in `state_dict`.
    """

    def begin_run(self) -> None:
        """Forget what an earlier run has left; one that goes on loads its state afterwards."""
        return

    def begin_round(self, number: int, team: AgentTeam) -> None:
        """Get ready for a round, before its first sample; doing it again for the same round changes nothing.

        Args:
            number: Number of the round, from 0.
            team: The agents, with the weights that they begin the round with.
        """
        return

    @abstractmethod
    def sampler(self, team: AgentTeam) -> Sampler:
        """Who answers in the place of `team`."""

    def build(self) -> None:
        """Load models of its own, unless they are there."""
        return

    def modules(self) -> list[nn.Module]:
        """Models of its own, all frozen; they belong to no checkpoint."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on needs, equal on all ranks, in values that load with ``weights_only=True``."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        return

    def pop_counts(self) -> SectionCounts:
        """Joint completions that one model wrote for all agents on this rank since the last call."""
        return SectionCounts()


@dataclass(eq=False)
class CurrentPolicy(Comparator):
    """The agents themselves, with other random numbers."""

    def sampler(self, team: AgentTeam) -> Sampler:
        """The team."""
        return team


@dataclass(eq=False)
class HistoryPolicy(Comparator):
    """The agents as they were at the start of an earlier round; the earliest one while there are too few.

    It keeps `rounds_back` + 1 copies of the trained weights, on the CPU and in every checkpoint.
    """

    rounds_back: int = 1
    """How much earlier: 1 is the policy before the last round's learning, 0 the one at the start of this round."""
    _weights: dict[int, dict[str, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_whole(0, type(self).__name__, rounds_back=self.rounds_back)

    def begin_run(self) -> None:
        """Drop all weights."""
        self._weights.clear()

    def begin_round(self, number: int, team: AgentTeam) -> None:
        """Keep the weights that the agents begin a round with, and drop those that no later round needs."""
        if number not in self._weights:
            self._weights[number] = weights_of(team)
        for kept in [kept for kept in self._weights if kept < number - self.rounds_back]:
            del self._weights[kept]

    def sampler(self, team: AgentTeam) -> Sampler:
        """The team with its earlier weights."""
        assert self._weights, "begin_round comes first"
        return _BorrowingSampler(team, self._weights[min(self._weights)])

    def state_dict(self) -> dict[str, Any]:
        """The weights that are kept, by the number of the round that began with them."""
        return {"weights": {number: dict(weights) for number, weights in self._weights.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the kept weights, and nothing else."""
        self._weights = {
            number: {name: weight.cpu() for name, weight in weights.items()}
            for number, weights in state["weights"].items()
        }


@dataclass(eq=False)
class FrozenCopy(HistoryPolicy):
    """The agents as they were at the start of the round."""

    rounds_back: int = field(default=0, init=False)


class _BorrowingSampler:
    """A team that speaks with other weights."""

    def __init__(self, team: AgentTeam, weights: Mapping[str, Tensor]) -> None:
        self.team = team
        self.weights = weights
        self.num_agents = team.num_agents

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        progress: GenerationProgress | None = None,
        finished: Finished | None = None,
    ) -> list[tuple[Completion, ...]]:
        """Completions of the team with these weights."""
        with borrowed_weights(self.team, self.weights):
            return self.team.generate(requests, sampling, progress, finished)


@dataclass(eq=False)
class FixedModel(Comparator):
    """Other language models, which never learn."""

    agents: SharedBase | Separate
    """The models, as for the agents of an algorithm: by name, folder or adapters."""
    generation: Collaboration = "decentralized"
    """"decentralized": one model per agent. "centralized", or a joint format: ``SharedBase(num_agents=1)`` writes the
    answers of all agents. Agents that are centralized themselves need one model in either case."""
    sampling: Sampling | None = None
    """How its answers are drawn; None: as the agents' (a joint completion gets the tokens of all of them)."""
    _team: AgentTeam | None = field(default=None, init=False, repr=False)
    _counts: SectionCounts = field(default_factory=SectionCounts, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.agents, SharedBase | Separate):
            raise ValueError(
                f"FixedModel(agents={self.agents!r}) describes no models. Use SharedBase(...) or Separate(...)."
            )
        if self.sampling is not None and not isinstance(self.sampling, Sampling):
            raise ValueError(f"FixedModel(sampling={self.sampling!r}) is no Sampling. Use Sampling(...) or None.")
        joint = generation_format("FixedModel", self.generation) is not None
        if joint and self.agents.num_agents != 1:
            raise ValueError(
                f"FixedModel(generation={self.generation!r}) has one model write all answers, but agents= describes "
                f"{self.agents.num_agents} agents. Use SharedBase(model, num_agents=1)."
            )
        if isinstance(self.agents, SharedBase):
            self.agents = self.agents.of_size(self.agents.num_agents)

    def build(self) -> None:
        """Load the models once, frozen."""
        if self._team is None:
            # Adapters are drawn from the global random state, which must not depend on when this happens.
            with torch.random.fork_rng(devices=[]):
                self._team = build_team(self.agents).requires_grad_(False)

    def modules(self) -> list[nn.Module]:
        """The team, once it is built."""
        return [] if self._team is None else [self._team]

    def sampler(self, team: AgentTeam) -> Sampler:
        """The models, each on the device of its agent.

        Raises:
            ValueError: There is not one model per agent.
        """
        self.build()
        assert self._team is not None
        joint_format = None if team.num_agents == 1 else generation_format("FixedModel", self.generation)
        if joint_format is None and self._team.num_agents != team.num_agents:
            raise ValueError(
                f"FixedModel(agents=...) describes {self._team.num_agents} agents, but {team.num_agents} are trained. "
                "Describe as many, or let one model write all answers: generation='centralized'."
            )
        self._team.follow(team)
        return ForeignSampler(team, partial(self._ask, team), joint_format, self._counts)

    def _ask(
        self,
        team: AgentTeam,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        num_joint: int,
        progress: GenerationProgress | None,
    ) -> list[list[Answer]]:
        assert self._team is not None
        own = sampling if self.sampling is None else self.sampling
        if num_joint > 1 and self.sampling is None:
            own = replace(sampling, max_new_tokens=joint_tokens(sampling, num_joint), min_new_tokens=0, stop=())
        groups = self._team.generate(requests, own, progress)
        uncut = num_joint == 1 and own.stop == sampling.stop
        return [[_answer(self._team, team, completion, uncut) for completion in group] for group in groups]

    def pop_counts(self) -> SectionCounts:
        """Joint completions of a model that writes for all agents, since the last call."""
        return self._counts.pop()


def _answer(writer: AgentTeam, team: AgentTeam, completion: Completion, uncut: bool) -> Answer:
    """What a model of `writer` wrote; its token ids too, where they are those of the agent.

    Args:
        writer: Who wrote.
        team: The agents.
        completion: What `writer` sampled.
        uncut: Whether it is an answer of one agent that stopped where the agent's own would: stop strings then stay in.
    """
    if not uncut:
        return Answer(completion.text, not completion.truncated)
    speaker, agents = writer.speaker(completion.agent), team.speaker(completion.agent)
    ids = completion.token_ids
    if ids[-1] in speaker.end_ids:
        ids = ids[:-1]
    text = speaker.tokenizer.decode(ids, skip_special_tokens=True)
    shared = same_tokens(speaker.tokenizer, agents.tokenizer) and max(ids, default=0) < agents.vocabulary_size
    return Answer(text, not completion.truncated, ids if shared else None)


def joint_tokens(sampling: Sampling, num_agents: int) -> int:
    """Tokens for a completion that holds the answers of all agents and their tags."""
    return num_agents * (sampling.max_new_tokens + TAG_TOKENS)


@dataclass(eq=False)
class APIComparator(Comparator):
    """A chat model behind an HTTP interface. It needs ``pip install "comlrl-lightning[api]"``.

    Requests are repeated after status 408, 409, 425, 429 or 5xx, after time-outs, lost connections and malformed
    responses, with pauses of 1, 2, 4, ... seconds or as long as the server asks for; an `api.ChatError` tells that this
    did not help. Its answers are not reproducible.
    """

    provider: Literal["openai", "anthropic"]
    """"openai": chat completions, of OpenAI or of any server with that interface; "anthropic": messages."""
    model: str
    """Name of the model there."""
    base_url: str | None = None
    """Where the interface is, such as "http://localhost:8000/v1"; None: the provider's own."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; None: OPENAI_API_KEY or ANTHROPIC_API_KEY, "": no key."""
    generation: Collaboration = "decentralized"
    """"decentralized": it is asked for every agent by itself. "centralized", or a joint format: one answer holds those
    of all agents."""
    temperature: float | None = 1.0
    """Of its sampling; None: what the provider takes by itself, for models that refuse the field."""
    max_tokens: int | None = None
    """Most tokens of an answer, hidden reasoning included; None: as many as an agent's (as all agents' together)."""
    answers_per_request: int = 1
    """Answers that a request asks for, where "openai" servers support more than one (``n``)."""
    request_fields: dict[str, Any] | None = None
    """More fields of the request, such as ``{"top_p": 0.9}``."""
    timeout_seconds: float = 60.0
    """How long the server may say nothing."""
    max_retries: int = 5
    """Attempts after the first one."""
    max_concurrency: int = 8
    """Requests at a time, per process."""
    _counts: SectionCounts = field(default_factory=SectionCounts, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.provider not in PROVIDERS:
            raise ValueError(
                f"APIComparator(provider={self.provider!r}) is unknown. Use one of {', '.join(map(repr, PROVIDERS))}."
            )
        for name in ("answers_per_request", "max_concurrency"):
            check_whole(1, "APIComparator", **{name: vars(self)[name]})
        if self.provider == "anthropic" and self.answers_per_request > 1:
            raise ValueError(
                f"APIComparator(answers_per_request={self.answers_per_request!r}) is more than provider='anthropic' "
                "gives at a time. Use 1."
            )
        if self.max_tokens is not None:
            check_whole(1, "APIComparator", max_tokens=self.max_tokens)
        generation_format("APIComparator", self.generation)
        self.client(self.max_tokens or 1)

    def client(self, max_tokens: int, stop: Event | None = None) -> HTTPChat:
        """What makes the requests.

        Args:
            max_tokens: Most tokens of an answer, unless that is set.
            stop: Once it is set, no request is repeated.
        """
        return PROVIDERS[self.provider](
            self.model,
            self.max_tokens or max_tokens,
            base_url=self.base_url,
            api_key_env=self.api_key_env,
            temperature=self.temperature,
            request_fields=self.request_fields,
            timeout_seconds=self.timeout_seconds,
            max_retries=self.max_retries,
            sleep=wait_unless(stop or Event()),
        )

    def begin_round(self, number: int, team: AgentTeam) -> None:
        """Find out before the round whether requests can be made.

        Raises:
            ImportError: The extra is not installed.
            ValueError: The environment variable of the key is not set.
        """
        self.client(1).check()

    def sampler(self, team: AgentTeam) -> Sampler:
        """The chat model."""
        joint_format = None if team.num_agents == 1 else generation_format("APIComparator", self.generation)
        return ForeignSampler(team, self._ask, joint_format, self._counts)

    def _ask(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        num_joint: int,
        progress: GenerationProgress | None,
    ) -> list[list[Answer]]:
        chats: list[tuple[Messages, int]] = []
        ends = []
        for request in requests:
            missing = len(request.keys)
            while missing > 0:
                chats.append((messages_of(request.prompt), min(missing, self.answers_per_request)))
                missing -= self.answers_per_request
            ends.append(len(chats))
        stop = Event()
        client = self.client(joint_tokens(sampling, num_joint) if num_joint > 1 else sampling.max_new_tokens, stop)
        answers = complete_all(client, chats, self.max_concurrency, stop, progress)
        starts = [0, *ends[:-1]]
        return [list(chain.from_iterable(answers[start:end])) for start, end in zip(starts, ends, strict=True)]

    def pop_counts(self) -> SectionCounts:
        """Joint answers since the last call."""
        return self._counts.pop()
