"""Length ratio: two writers, rewarded when the detailed text is 2 to 3 times as long as the brief one.

Neither writer sees what the other one writes, so they have to settle on lengths that fit. The reward looks at
characters, not at the quality of the writing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from comlrl_lightning.assets.grammar import ANIMALS, PLACES, story_prompt
from comlrl_lightning.tasks.task import Task

OPEN_PROMPTS = (
    "Describe a city in the clouds.",
    "Invent a new holiday.",
    "Write a bedtime story for a dragon.",
    "Explain how teleportation might work.",
    "Tell a story about dinosaurs.",
    "Describe a world without electricity.",
    "Create a superhero with a unique power.",
    "Write a scene where the moon talks.",
    "Invent a new type of fruit.",
    "Design a playground on Mars.",
)
"""Ten open-ended prompts for general language models."""


class Sample(Protocol):
    """What `metrics_callback` reads of a rollout record."""

    @property
    def completion(self) -> str:
        """The completion's text."""


def train_items() -> list[dict[str, Any]]:
    """Return 32 task items whose prompts the embedded story model knows."""
    return [_item(story_prompt(ANIMALS[i % 12], PLACES[(5 * i + i // 12) % 8])) for i in range(32)]


def eval_items() -> list[dict[str, Any]]:
    """Return 8 task items for the embedded story model, of pairs of animal and place that `train_items` lacks."""
    return [_item(story_prompt(ANIMALS[i], PLACES[(5 * i + 4) % 8])) for i in range(8)]


def open_train_items() -> list[dict[str, Any]]:
    """Return the first eight of `OPEN_PROMPTS` as task items."""
    return [_item(prompt) for prompt in OPEN_PROMPTS[:8]]


def open_eval_items() -> list[dict[str, Any]]:
    """Return the last two of `OPEN_PROMPTS` as task items."""
    return [_item(prompt) for prompt in OPEN_PROMPTS[8:]]


def brief_formatter(item: Mapping[str, Any]) -> str:
    """Format the first agent's prompt."""
    return f"Write a short response to this task:\n{item['prompt']}"


def detailed_formatter(item: Mapping[str, Any]) -> str:
    """Format the second agent's prompt."""
    return f"Write a detailed response to this task:\n{item['prompt']}"


def reward_func(
    brief_completions: Sequence[str], detailed_completions: Sequence[str], *, batch_items: Sequence[Mapping[str, Any]]
) -> list[float]:
    """`[J]` exp(-distance of the ratio of lengths from the item's range), 0 for an empty brief text.

    Args:
        brief_completions: `[J]` texts of the first agent.
        detailed_completions: `[J]` texts of the second agent.
        batch_items: The task item, with `target_min` and `target_max`.
    """
    item = batch_items[0]
    pairs = zip(brief_completions, detailed_completions, strict=True)
    return [math.exp(-abs(_miss(brief, detailed, item))) if brief else 0.0 for brief, detailed in pairs]


def external_transition(*, prompt: str, agent_completions: Sequence[str], item: Mapping[str, Any]) -> tuple[str, str]:
    """`[N=2]` the prompts of the next turn: the task again, how far the ratio was off, and what to do about it.

    Args:
        prompt: The task.
        agent_completions: `[N=2]` the brief and the detailed text of this turn.
        item: The task item, with `target_min` and `target_max`.

    Raises:
        ValueError: If there are not two agents.
    """
    if len(agent_completions) != 2:
        raise ValueError(
            f"length_ratio.external_transition got completions of {len(agent_completions)} agents. "
            "Use it with two agents, a brief and a detailed one."
        )
    brief, detailed = agent_completions
    if not brief:
        return (
            f"{prompt}\nThe short text was empty. Write more.",
            f"{prompt}\nThe short text was empty. Write as before.",
        )
    miss = _miss(brief, detailed, item)
    return f"{prompt}\n{feedback(miss, grow=miss > 0)}", f"{prompt}\n{feedback(miss, grow=miss < 0)}"


def feedback(miss: float, *, grow: bool) -> str:
    """Return one agent's sentence on the last turn.

    Args:
        miss: How far the ratio was off: negative below the range, 0 in it, positive above it.
        grow: Whether this agent should write more, if the ratio was off.
    """
    if miss == 0.0:
        return "The ratio was right. Write as before."
    side = "high" if miss > 0 else "low"
    return f"The ratio was {min(abs(miss), 9.9):.1f} too {side}. Write {'more' if grow else 'less'}."


def eval_logger(
    *,
    agent_completions_turns: Sequence[Sequence[Sequence[str]]],
    batch_items: Sequence[Mapping[str, Any]],
    prompts: Sequence[Any],
) -> list[dict[str, float]]:
    """One row per task item: the mean number of characters per agent at each turn.

    Args:
        agent_completions_turns: Texts as `[agent][item][turn]`.
        batch_items: The task items.
        prompts: The items' raw prompts, unused.
    """
    rows = []
    for row in range(len(batch_items)):
        turns = zip(*(agent[row] for agent in agent_completions_turns), strict=True)
        rows.append({f"turn_{turn}/response_chars": _mean_chars(texts) for turn, texts in enumerate(turns, start=1)})
    return rows


def eval_aggregator(rows: Sequence[Mapping[str, float]], *, num_turns: int) -> dict[str, float]:
    """Average the rows of `eval_logger`; no rows give no metrics.

    Args:
        rows: One mapping per task item.
        num_turns: Number of turns that every row covers.
    """
    if not rows:
        return {}
    keys = [f"turn_{turn}/response_chars" for turn in range(1, num_turns + 1)]
    return {key: sum(row[key] for row in rows) / len(rows) for key in keys}


def metrics_callback(rollouts: Sequence[Sample]) -> dict[str, float]:
    """Return the mean number of characters over rollout records; no records give no metrics.

    Args:
        rollouts: Records with a `completion`.
    """
    if not rollouts:
        return {}
    return {"response_chars": _mean_chars([sample.completion for sample in rollouts])}


TASK = Task(
    reward_func=reward_func,
    num_agents=2,
    formatters=[brief_formatter, detailed_formatter],
    external_transition=external_transition,
    train_items=train_items,
    eval_items=eval_items,
    eval_logger=eval_logger,
    eval_aggregator=eval_aggregator,
    metrics_callback=metrics_callback,
)
"""The whole task set, for the embedded story model."""


def _item(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "target_min": 2.0, "target_max": 3.0}


def _miss(brief: str, detailed: str, item: Mapping[str, Any]) -> float:
    low, high = float(item["target_min"]), float(item["target_max"])
    ratio = len(detailed) / len(brief)
    return min(ratio - low, 0.0) or max(ratio - high, 0.0)


def _mean_chars(texts: Iterable[str]) -> float:
    lengths = [len(text) for text in texts]
    return sum(lengths) / len(lengths)
