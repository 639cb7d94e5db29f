"""Functions of the user that break in a rollout: the error names the function, the item and the turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from comlrl_lightning.environment.reward_workers import RewardWorkers
from tests.faults.registry import Refused, faults
from tests.rollouts.fakes import FakeTeam, make_collector
from tests.waiting import HANG_SECONDS

HERE = "tests.faults.test_broken_functions"
AREA = "user functions"


def rollout(reward: Callable[..., Any] | None = None, **settings: Any) -> Callable[[Path], object]:
    """A rollout of two agents with K=2, for item 7."""
    arguments = () if reward is None else (reward,)
    return lambda _: make_collector(FakeTeam(2), *arguments, **settings).collect([{"prompt": "hi"}], [7])


def raises(*args: Any, **keywords: Any) -> NoReturn:
    raise KeyError("missing")


def stops(*args: Any, **keywords: Any) -> NoReturn:
    next(iter(()))
    raise AssertionError


def one_reward(first: list[str], second: list[str]) -> list[float]:
    return [1.0]


def no_number(first: list[str], second: list[str]) -> list[Any]:
    return [1.0, "good"]


def not_finite(first: list[str], second: list[str]) -> list[float]:
    return [1.0, float("nan")]


def sleeps(first: list[str], second: list[str]) -> list[float]:
    time.sleep(HANG_SECONDS)
    return [1.0, 1.0]


def nothing(*args: Any, **keywords: Any) -> None:
    """Forgets its return statement."""


def generator() -> Iterator[int]:
    yield 1


def one_prompt(agent_completions: list[str]) -> list[str]:
    return agent_completions[:1]


def surrogate(item: dict[str, Any]) -> str:
    return "cut \ud83d"


ITEM = "task item 7 {'prompt': 'hi'} at turn 1"
CASES = (
    Refused(
        AREA,
        "the reward raises an exception",
        f"missing ... Raised in reward_func={HERE}.raises for {ITEM}.",
        rollout(raises),
        KeyError,
    ),
    Refused(
        AREA,
        "the reward raises `StopIteration`, which a loop would take for its end",
        f"reward_func={HERE}.stops raised StopIteration for {ITEM}. Catch it, or give next() a default.",
        rollout(stops),
        RuntimeError,
    ),
    Refused(
        AREA,
        "the reward returns one number for two joint completions",
        f"reward_func={HERE}.one_reward returned 1 value for 2 joint completions of {ITEM}",
        rollout(one_reward),
    ),
    Refused(
        AREA,
        "the reward returns a text",
        f"reward_func={HERE}.no_number ... 'good' ... {ITEM} ... finite float",
        rollout(no_number),
    ),
    Refused(
        AREA,
        "the reward returns NaN",
        f"reward_func={HERE}.not_finite ... nan ... {ITEM}. Return a finite float.",
        rollout(not_finite),
    ),
    Refused(
        AREA,
        "the reward returns nothing",
        f"reward_func={HERE}.nothing returned None for {ITEM}.",
        rollout(nothing),
    ),
    Refused(
        AREA,
        "the formatter returns nothing",
        f"formatters={HERE}.nothing returned None for {ITEM}. Return a text or a list of chat messages",
        rollout(formatters=nothing),
    ),
    Refused(
        AREA,
        "the formatter returns half of an emoji",
        f"formatters={HERE}.surrogate ... with the lone surrogate '\\ud83d' at position 4. Return valid Unicode",
        rollout(formatters=surrogate),
    ),
    Refused(
        AREA,
        "the transition returns one prompt for two agents",
        f"external_transition={HERE}.one_prompt returned ['a1'] for {ITEM}. Return a list or tuple of 2 texts",
        rollout(transition=one_prompt, num_turns=2),
    ),
    Refused(
        AREA,
        "a task item without a prompt and without a formatter",
        "The task item has no field 'prompt', only ['text']. Add it, or give formatters=.",
        lambda _: make_collector(FakeTeam(2)).collect([{"text": "hi"}], [7]),
    ),
    Refused(
        AREA,
        "a task item that cannot be copied",
        "cannot be copied: ... Keep such objects out of task items.",
        lambda _: make_collector(FakeTeam(2)).collect([{"prompt": "hi", "open": generator()}], [7]),
    ),
    Refused(
        AREA,
        "a reward in a thread that takes too long",
        "takes longer than reward_timeout_seconds=0.05 for task item 7 ... Make it faster, allow more time, or give"
        " reward_timeout_value",
        rollout(sleeps, workers=RewardWorkers(1, "thread", 0.05)),
        TimeoutError,
    ),
)


@faults(*CASES)
def test_broken(fault: Refused, tmp_path: Path) -> None:
    fault.check(tmp_path)
