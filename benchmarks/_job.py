"""What both sides of a comparison share: the job, the task and the measurement. No torch: each side brings its own."""

from __future__ import annotations

import json
import resource
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks._works import Work
from comlrl_lightning.tasks import length_ratio

RECORDED_TEXT = " ".join(length_ratio.OPEN_PROMPTS)
"""What recorded completions are cut from."""


@dataclass(frozen=True)
class Job:
    """One run of one side."""

    model: str
    """Name or folder."""
    work: Work
    dtype: str
    """Number format of the loaded weights."""
    full: bool
    """Train all weights, not an adapter."""
    seed: int
    micro_batch_tokens: int | None = None
    """Padded tokens per forward and backward pass; None on the side that has no such setting."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Job:
        """Inverse of `asdict`."""
        return cls(**{**fields, "work": Work(**fields["work"])})


@dataclass(frozen=True)
class Done:
    """What was done; a comparison needs it to be equal on both sides."""

    num_updates: int
    """Optimizer steps of each agent."""
    num_joint: int
    num_prompt_tokens: int
    """Of each distinct prompt once."""
    num_completion_tokens: int
    num_trained: int
    """Completions that entered a loss, those of each pair counted."""


@dataclass(frozen=True)
class Measurement:
    """What one run took; loading comes before."""

    done: Done
    wall_seconds: float
    generation_seconds: float | None
    """None where only the whole can be timed, or nothing is sampled."""
    update_seconds: float | None
    """None where only the whole can be timed, or nothing is learned."""
    peak_bytes: int
    """Largest resident size of the process, the mapped model file included."""
    versions: dict[str, str]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Measurement:
        """Inverse of `asdict`."""
        return cls(**{**fields, "done": Done(**fields["done"])})


def read_job() -> Job:
    """Return the job that the parent process wrote to standard input."""
    return Job.from_json(json.load(sys.stdin))


def report(measurement: Measurement) -> None:
    """Hand the measurement to the parent process, as the last line of standard output."""
    print(json.dumps(asdict(measurement)), flush=True)


def peak_bytes() -> int:
    """Return the largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def task_items(num_items: int) -> list[dict[str, Any]]:
    """Return the first `num_items` of the open prompts, over and over."""
    prompts = length_ratio.OPEN_PROMPTS
    texts = [prompts[position % len(prompts)] for position in range(num_items)]
    return [{"prompt": text, "target_min": 2.0, "target_max": 3.0} for text in texts]


def formatters(num_agents: int) -> list[Callable[..., str]]:
    """One brief and one detailed writer after the other."""
    both = [length_ratio.brief_formatter, length_ratio.detailed_formatter]
    return [both[agent % 2] for agent in range(num_agents)]


def reward_func(*completions: Sequence[str], batch_items: Sequence[Mapping[str, Any]]) -> list[float]:
    """`[J]` rewards of the length ratio: all brief texts together against all detailed ones.

    Args:
        completions: `[N][J]` texts.
        batch_items: The task item.
    """
    brief, detailed = (["".join(texts) for texts in zip(*completions[first::2], strict=True)] for first in (0, 1))
    return length_ratio.reward_func(brief, detailed, batch_items=batch_items)


def external_transition(*, prompt: str, agent_completions: Sequence[str], num_agents: int, **_: Any) -> list[str]:
    """`[N]` prompts of the second turn, different after each joint completion but of equal length.

    Args:
        prompt: The task.
        agent_completions: `[N]` texts.
        num_agents: N.
    """
    code = zlib.crc32("".join(agent_completions).encode()) % 1000
    return [f"{prompt}\nWrite version {code:03d}."] * num_agents


def recorded(token_ids: Sequence[int], item: int, agent: int, sample: int, count: int) -> list[int]:
    """`[count]` tokens of a recorded completion: the tokens of a text, over and over, from a place of its own.

    Args:
        token_ids: The tokens of `RECORDED_TEXT`.
        item: Position of the task item.
        agent: Index of the agent.
        sample: Number of the completion.
        count: Its length.
    """
    first = 31 * item + 17 * agent + 5 * sample
    return [token_ids[(first + place) % len(token_ids)] for place in range(count)]
