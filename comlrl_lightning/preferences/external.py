"""Answers of models that are not the agents', as completions in the agents' own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from comlrl_lightning.agents.decoding.tokens import StopStrings
from comlrl_lightning.agents.engine import Finished, GenerationProgress, GenerationRequest
from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.environment.joint_format import (
    Collaboration,
    JointFormat,
    joint_format_of,
    merged_prompt,
    split_or_empty,
)
from comlrl_lightning.environment.torch_modes import user_code
from comlrl_lightning.preferences.api import Answer
from comlrl_lightning.types import Completion
from comlrl_lightning.utilities.calls import short

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class SectionCounts:
    """Joint completions that one model wrote for all agents."""

    num_joint: int = 0
    """How many there were."""
    num_unparsed: int = 0
    """How many of them had no section at all, so that all their answers are empty."""

    def record(self, parsed: bool) -> None:
        """Count one."""
        self.num_joint += 1
        self.num_unparsed += not parsed

    def pop(self) -> SectionCounts:
        """The counts so far; counting starts anew."""
        counted = SectionCounts(self.num_joint, self.num_unparsed)
        self.num_joint = self.num_unparsed = 0
        return counted


class Ask(Protocol):
    """How a model that is not the agents' is asked."""

    def __call__(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        num_joint: int,
        progress: GenerationProgress | None,
    ) -> Sequence[Sequence[Answer]]:
        """K answers per request.

        Args:
            requests: What is asked.
            sampling: How the agents sample.
            num_joint: Agents that one answer is to hold the sections of; 1: it is an answer of one agent.
            progress: Called with the number of answers that are awaited.
        """
        ...


class ForeignSampler:
    """Stands in for a team in a collector; another model answers.

    Args:
        team: The agents, for their tokenizers and limits.
        ask: Gives the answers.
        joint_format: How one model answers for all agents; None: it is asked for one agent at a time.
        counts: Where joint completions are counted.
    """

    def __init__(self, team: AgentTeam, ask: Ask, joint_format: JointFormat | None, counts: SectionCounts) -> None:
        self.team = team
        self.num_agents = team.num_agents
        self._ask = ask
        self._joint_format = joint_format
        self._counts = counts

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        progress: GenerationProgress | None = None,
        finished: Finished | None = None,
    ) -> list[tuple[Completion, ...]]:
        """K completions per request without log-probabilities, in the order of the requests.

        Args:
            requests: With one model for all agents: those of agents 0 to N - 1 in turn, K completions each.
            sampling: How the agents sample; longer answers are cut.
            progress: Called with the number of answers that are awaited.
            finished: Not called: all answers are there at the end.

        Raises:
            ValueError: A prompt does not fit, or an empty answer has no token.
        """
        # Prompts that no agent can read are found out before anyone is asked.
        prompts = [self._prompt_ids(request, sampling) for request in requests]
        if self._joint_format is None:
            answers = self._ask(requests, sampling, 1, progress)
        else:
            answers = self._split(self._joint_format, requests, sampling, progress)
        return [
            tuple(adopted(self.team, request, prompt_ids, answer, sampling) for answer in group)
            for request, prompt_ids, group in zip(requests, prompts, answers, strict=True)
        ]

    def _prompt_ids(self, request: GenerationRequest, sampling: Sampling) -> tuple[int, ...]:
        speaker = self.team.speaker(request.agent)
        limit = speaker.prompt_limit(request.agent, sampling.max_new_tokens)
        return speaker.prompts.encode(request.agent, request.prompt, limit, request.place)

    def _split(
        self,
        joint_format: JointFormat,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        progress: GenerationProgress | None,
    ) -> list[list[Answer]]:
        num_agents = self.num_agents
        blocks = [requests[start : start + num_agents] for start in range(0, len(requests), num_agents)]
        assert all([request.agent for request in block] == list(range(num_agents)) for block in blocks)
        with user_code():
            prompts = [merged_prompt(joint_format, [request.prompt for request in block]) for block in blocks]
        merged = [replace(block[0], agent=0, prompt=prompt) for prompt, block in zip(prompts, blocks, strict=True)]
        groups = self._ask(merged, sampling, num_agents, progress)
        with user_code():
            split = [[self._sections(joint_format, answer) for answer in group] for group in groups]
        return [[sections[agent] for sections in group] for group in split for agent in range(num_agents)]

    def _sections(self, joint_format: JointFormat, answer: Answer) -> list[Answer]:
        """`[N]` answers in one; only a text at the very end of an answer that was cut is cut itself."""
        texts, parsed = split_or_empty(joint_format, answer.text, self.num_agents)
        self._counts.record(parsed)
        end = "" if answer.ended else answer.text.rstrip()
        return [Answer(text, not text or not end.endswith(text)) for text in texts]


def adopted(
    team: AgentTeam, request: GenerationRequest, prompt_ids: tuple[int, ...], answer: Answer, sampling: Sampling
) -> Completion:
    """An answer as if the agent had sampled it, of unknown log-probabilities.

    An answer that ended gets the agent's end-of-sequence token, unless a stop string of the agents ends it; an empty
    answer is that token alone. What is longer than the agent's answers may be is cut.

    Args:
        team: The agents.
        request: What was asked.
        prompt_ids: `[P]` the prompt in the agent's tokens.
        answer: What was answered.
        sampling: How the agents sample.

    Raises:
        ValueError: The answer is empty, and there is no end-of-sequence token.
    """
    speaker = team.speaker(request.agent)
    places = [(answer.text.find(stop), stop) for stop in sampling.stop]
    stops = [place + len(stop) for place, stop in places if place >= 0]
    text = answer.text[: min(stops, default=None)]
    ids = _encoded(speaker.tokenizer, text) if answer.token_ids is None else list(answer.token_ids)
    ended = answer.ended or bool(stops) or not ids
    if ended and not stops:
        ids += _end(speaker.tokenizer.eos_token_id, speaker.end_ids)
    if not ids:
        raise ValueError(
            f"The comparator gave agent_{request.agent} an empty answer, and the agent's tokenizer and model have no "
            "end-of-sequence token that could stand for it. Set the tokenizer's eos_token."
        )
    if len(ids) > sampling.max_new_tokens:
        ids, ended = ids[: sampling.max_new_tokens], False
        text = speaker.tokenizer.decode(ids, skip_special_tokens=True)
    text = StopStrings(sampling.stop, speaker.tokenizer).cut(text)
    return Completion(request.agent, request.prompt, prompt_ids, tuple(ids), (), text, not ended)


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # What a foreign model writes is text, even where it looks like a special token.
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    return ids


def _end(preferred: int | None, end_ids: Sequence[int]) -> list[int]:
    return [preferred] if preferred in end_ids and preferred is not None else list(end_ids[:1])


@lru_cache(maxsize=64)
def same_tokens(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether the token ids of one tokenizer mean the same to another."""
    return tokenizer is other or tokenizer.get_vocab() == other.get_vocab()


def generation_format(owner: str, generation: Collaboration) -> JointFormat | None:
    """The format in which one model writes the answers of all agents; None: it writes one at a time.

    Args:
        owner: Whose argument it is.
        generation: The argument.

    Raises:
        ValueError: If it is neither of the two names and no format.
    """
    if generation in ("decentralized", "centralized") or (
        isinstance(generation, JointFormat) and not isinstance(generation, type)
    ):
        return joint_format_of(generation)
    raise ValueError(
        f"{owner}(generation={short(generation)}) is unknown. Use 'decentralized', 'centralized', or an object with "
        "the methods build_prompt and split_completion, such as TaggedSections()."
    )
