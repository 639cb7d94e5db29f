"""What is measured, on which sides, and what is to be reached. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["magrpo", "generate", "update", "iac", "maac", "madpo"]

MICRO_BATCH_TOKENS = 768
"""Our side's setting: padded tokens per forward and backward pass of an update."""


@dataclass(frozen=True)
class Work:
    """One thing to measure. Completions have exactly `num_tokens` tokens."""

    name: str
    kind: Kind
    """``"generate"`` samples only, ``"update"`` learns from given sequences only, the others train end to end."""
    num_items: int
    items_per_update: int
    num_agents: int = 2
    num_turns: int = 1
    num_tokens: int = 64
    num_generations: int = 4
    """K, samples per agent and node; candidates of `madpo`."""

    def shortened(self, tokens: int) -> Work:
        """The same with completions in proportion, so that those of 64 tokens have `tokens`."""
        return replace(self, num_tokens=max(1, self.num_tokens * tokens // 64))


def _generate(num_items: int) -> Work:
    return Work(f"generate-{8 * num_items}", "generate", num_items, num_items)


WORKS = {
    work.name: work
    for work in (
        Work("magrpo-4", "magrpo", 4, 4),
        Work("magrpo-2", "magrpo", 2, 2),
        Work("magrpo-1", "magrpo", 2, 1),
        *map(_generate, (1, 2, 4, 8)),
        Work("update", "update", 4, 4),
        Work("tree", "magrpo", 1, 1, num_turns=2, num_tokens=32),
        Work("iac", "iac", 2, 2),
        Work("maac", "maac", 2, 2),
        Work("madpo", "madpo", 2, 2),
        Work("agents-4", "magrpo", 2, 2, num_agents=4),
        Work("agents-8", "magrpo", 2, 2, num_agents=8),
    )
}
QUICK = ("magrpo-2", "generate-8", "generate-32", "update")
"""The works of ``--quick``."""
OVER_AGENTS = ("magrpo-2", "agents-4", "agents-8")
"""The same work for 2, 4 and 8 agents."""

NOT_COMPARED = {"tree": ("num_updates",)}
"""Counts that differ by design. Of a tree comlrl makes one optimizer step per turn, this package one in all."""


@dataclass(frozen=True)
class Goal:
    """What must be reached, and what is aimed at."""

    must: float
    aim: float


SPEED_GOALS = {
    "magrpo-4": Goal(4, 6),
    "generate-8": Goal(2.5, 3),
    "generate-32": Goal(5, 7),
    "update": Goal(3.5, 6),
    "tree": Goal(4, 8),
    "iac": Goal(4, 7),
    "maac": Goal(4, 7),
    "madpo": Goal(3, 5),
}
"""Times as fast as comlrl."""
MEMORY_GOALS = {"magrpo-4": Goal(0.40, 0.25), "agents-4": Goal(0.25, 0.15)}
"""Share of comlrl's peak memory."""


@dataclass(frozen=True)
class Side:
    """One way to run a work."""

    is_comlrl: bool
    dtype: str
    full: bool
    """All weights are trained, in a model per agent."""

    @property
    def library(self) -> str:
        """Whose code runs."""
        return "comlrl 1.4.3" if self.is_comlrl else "comlrl_lightning"

    def trained(self, kind: Kind) -> str:
        """What is trained in works of a kind, for the tables."""
        policies = "all weights, a model per agent" if self.full else "LoRA rank 16, one frozen base"
        if kind not in ("iac", "maac"):
            return policies
        number = "a critic per agent" if kind == "iac" else "one critic"
        return f"{policies}; {number}: {'a model, all weights' if self.full else 'AdapterCritic on the same base'}"


SIDES = {
    "comlrl-fp32": Side(True, "float32", True),
    "comlrl-bf16": Side(True, "bfloat16", True),
    "ours-bf16": Side(False, "bfloat16", False),
    "ours-fp32": Side(False, "float32", False),
    "ours-full-fp32": Side(False, "float32", True),
}
FP32_ROWS = ("magrpo-4", "generate-8", "generate-32", "update")
"""Works that this package does in float32 too, to be compared number format for number format."""


def sides_of(work: Work, chosen: Sequence[str] | None, quick: bool) -> list[str]:
    """Names of the sides that run a work, in the order in which they run.

    Args:
        work: The work.
        chosen: What the user wants; None: the usual ones.
        quick: Whether the usual ones are those of ``--quick``.
    """
    if chosen is not None:
        return list(chosen)
    if quick:
        return ["comlrl-fp32", "ours-bf16"]
    has_goal = work.name in (*SPEED_GOALS, *MEMORY_GOALS)
    usual = [*(["comlrl-fp32"] if has_goal else []), "comlrl-bf16", "ours-bf16"]
    return [*usual, "ours-fp32"] if work.name in FP32_ROWS else usual
