"""What both sides of a comparison share: the job, the task and the measurement. No torch: each side brings its own."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict, dataclass
from typing import Any

from comlrl_lightning.tasks import length_ratio

NUM_AGENTS = 2
NUM_GENERATIONS = 4
FORMATTERS = [length_ratio.brief_formatter, length_ratio.detailed_formatter]


@dataclass(frozen=True)
class Job:
    """One run of one side."""

    model: str
    """Name or folder."""
    dtype: str
    """Number format of the loaded weights."""
    full: bool
    """Train all weights, not an adapter."""
    num_items: int
    items_per_update: int
    num_tokens: int
    """Tokens of every completion, no fewer and no more."""
    seed: int

    def task_items(self) -> list[dict[str, Any]]:
        """Return the first `num_items` of the open prompts, over and over."""
        prompts = length_ratio.OPEN_PROMPTS
        texts = [prompts[position % len(prompts)] for position in range(self.num_items)]
        return [{"prompt": text, "target_min": 2.0, "target_max": 3.0} for text in texts]


@dataclass(frozen=True)
class Work:
    """What was done; a comparison needs it to be equal on both sides."""

    num_updates: int
    num_joint: int
    num_prompt_tokens: int
    """Of each distinct prompt once."""
    num_completion_tokens: int


@dataclass(frozen=True)
class Measurement:
    """What one run took, training only: loading comes before."""

    work: Work
    wall_seconds: float
    generation_seconds: float
    update_seconds: float
    peak_bytes: int
    """Largest resident size of the process, the mapped model file included."""
    versions: dict[str, str]

    @classmethod
    def from_json(cls, text: str) -> Measurement:
        """Inverse of `report`."""
        fields = json.loads(text)
        return cls(**{**fields, "work": Work(**fields["work"])})


def read_job() -> Job:
    """Return the job that the parent process wrote to standard input."""
    return Job(**json.load(sys.stdin))


def report(measurement: Measurement) -> None:
    """Hand the measurement to the parent process, as the last line of standard output."""
    print(json.dumps(asdict(measurement)), flush=True)


def peak_bytes() -> int:
    """Return the largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
