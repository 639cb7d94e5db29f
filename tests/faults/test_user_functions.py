"""Functions of the user that hang, crash, quit or give nonsense."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comlrl_lightning.agents.prompts import PromptEncoder
from comlrl_lightning.environment.prompts import Formatters, Transition
from comlrl_lightning.environment.reward import RewardFunction
from comlrl_lightning.environment.reward_workers import RewardWorkers
from comlrl_lightning.utilities.calls import Place
from tests.faults.registry import Fault, Refused, faults
from tests.rollouts.fakes import FakeTeam, make_collector
from tests.rollouts.reward_functions import as_told
from tests.rollouts.scoring import is_told_to_hang, limit_only
from tests.tiny_lm import tiny_tokenizer

AREA = "user functions"
PLACE = Place({"prompt": "p"}, 7, 2)


def rolls_out(reward: Callable[..., Any], *settings: Any, **item: Any) -> Callable[[Path], object]:
    """An attempt to score item 7 at turn 1, with `RewardWorkers` of these settings."""

    def attempt(folder: Path) -> object:
        collector = make_collector(FakeTeam(1), reward, workers=RewardWorkers(*settings))
        return collector.collect([{"prompt": "p", "number": 1, **item}], [7])

    return attempt


def formats(prompt: Any) -> Callable[[Path], object]:
    return lambda folder: Formatters(lambda item: prompt, 1).format({"prompt": "p"}, 0, item_index=7, turn=1)


async def awaited(first: list[str]) -> list[float]:
    return [0.0] * len(first)


def refused_by_the_template(folder: Path) -> None:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    PromptEncoder(tokenizer).encode(1, messages, place=PLACE)


def goes_on(prompts: Any) -> Callable[[Path], object]:
    transition = Transition(lambda: prompts, 2)
    histories: dict[str, Any] = {"prompt_history_per_agent": [[], []], "response_history_per_agent": [[], []]}
    return lambda folder: transition(item={}, agent_completions=["a", "b"], turn=1, item_index=7, **histories)


@faults(
    Refused(
        AREA,
        "a reward hangs, in a thread",
        "reward_func=tests.rollouts.reward_functions.as_told takes longer than reward_timeout_seconds=0.2 for task item"
        " 7 ... at turn 1. Make it faster, allow more time, or give reward_timeout_value, the reward of such a call.",
        rolls_out(as_told, 1, "thread", 0.2, do="hang"),
        TimeoutError,
    ),
    Refused(
        AREA,
        "a reward hangs, in a process, which is killed",
        "as_told takes longer than reward_timeout_seconds=0.2 for task item 7",
        rolls_out(as_told, 1, "process", 0.2, do="hang"),
        TimeoutError,
    ),
    Refused(
        AREA,
        "a reward ends its process by `os._exit`",
        "The worker process of reward_func=tests.rollouts.reward_functions.as_told ended with exit code 3 for task item"
        " 7 ... at turn 1. Let the function raise an exception instead of ending its process",
        rolls_out(as_told, 1, "process", do="exit"),
        RuntimeError,
    ),
    Refused(
        AREA,
        "a reward's process is killed for its memory",
        "was killed by SIGKILL for task item 7",
        rolls_out(as_told, 1, "process", do="die"),
        RuntimeError,
    ),
    Refused(
        AREA,
        "a reward raises, in another thread",
        "1 ... Raised in reward_func=tests.rollouts.reward_functions.as_told for task item 7",
        rolls_out(as_told, 2, do="raise"),
        KeyError,
    ),
    Refused(
        AREA,
        "a reward raises in a process what cannot be sent back",
        "tests.rollouts.reward_functions.OddError: leftright ... Raised in reward_func=",
        rolls_out(as_told, 1, "process", do="raise odd"),
        RuntimeError,
    ),
    Refused(
        AREA,
        "a reward for processes is a lambda",
        "cannot be sent to a worker process: ... Give a function, or an object of a class, from the top level of a"
        ' module, or use reward_backend="thread".',
        lambda folder: RewardWorkers(1, "process").check(RewardFunction(lambda first: [0.0], 1)),
    ),
    Refused(
        AREA,
        "a reward for processes is a model",
        "it holds a Linear, and modules of torch stay where they are",
        lambda folder: RewardWorkers(1, "process").check(RewardFunction(torch.nn.Linear(1, 1), 1)),
    ),
    Refused(
        AREA,
        "a task item holds a lock",
        "task item 7 ... cannot be copied: ... Keep such objects out of task items.",
        rolls_out(lambda first: [0.0, 0.0], lock=threading.Lock()),
    ),
    Refused(
        AREA,
        "a reward is NaN",
        "gave nan for task item 7 ... at turn 1. Return a finite float.",
        rolls_out(lambda first: [0.0, float("nan")]),
    ),
    Refused(
        AREA,
        "a reward is None",
        'gave None for task item 7 ... at turn 1, which is not a number. ... reward_none="skip" leaves joint'
        " completions whose reward is None out of their groups.",
        rolls_out(lambda first: [0.0, None]),
    ),
    Refused(
        AREA,
        "a reward is so large that means of it are infinite",
        "gave 1e+300 for task item 7 ... which is beyond 3.40e+38, the largest number that an update can compute with.",
        rolls_out(lambda first: [0.0, 1e300]),
    ),
    Refused(
        AREA,
        "a reward is an async function",
        "reward_func=tests.faults.test_user_functions.awaited is an async function, and what it returns would have to"
        " be awaited. Give a function that runs it",
        lambda folder: RewardFunction(awaited, 1),
    ),
    Refused(
        AREA,
        "a chat template refuses a system message",
        "refuses the prompt of agent_1 for task item 7 ... at turn 2, messages with the roles system, user: no system"
        " role. Return messages that it takes from the formatter: where it has no system role, put that text into",
        refused_by_the_template,
    ),
    Refused(
        AREA,
        "a task item names a special token, and `special_tokens` forbids it",
        "The prompt of agent_0 for task item 7 ... at turn 2 names the special token '<eos>'",
        lambda folder: PromptEncoder(tiny_tokenizer(), special_tokens="error").encode(0, "a<eos>b", place=PLACE),
    ),
    Refused(
        AREA,
        "a reward is a tensor without data",
        "whose numbers cannot be read: ... Return finite floats.",
        rolls_out(lambda first: torch.zeros(2, device="meta")),
    ),
    Refused(
        AREA,
        "a reward is a number with thousands of digits",
        "gave inf for task item 7",
        rolls_out(lambda first: [0, 10**5000]),
    ),
    Refused(
        AREA,
        "a reward is one list too short",
        "returned 1 value for 2 joint completions of task item 7 ... : [0.0]. Return a list of 2 finite floats",
        rolls_out(lambda first: [0.0]),
    ),
    Refused(
        AREA,
        "a prompt holds half of a surrogate pair",
        "formatters=... returned 'a\\ud800' for task item 7 ... at turn 1, with the lone surrogate '\\ud800' at"
        " position 1. Return valid Unicode, for example text.encode('utf-8', 'replace').decode().",
        formats("a\ud800"),
    ),
    Refused(
        AREA,
        "a prompt is a number",
        "returned 5 for task item 7 ... at turn 1. Return a text or a list of chat messages",
        formats(5),
    ),
    Refused(
        AREA,
        "a chat message has no role",
        "for task item 7 ... at turn 1. Return a text or a list of chat messages, each a dict with a text as role",
        formats([{"content": "hi"}]),
    ),
    Refused(
        AREA,
        "a transition returns one prompt for two agents",
        "external_transition=... returned ['x'] for task item 7 ... at turn 1. Return a list or tuple of 2 texts",
        goes_on(["x"]),
    ),
    Refused(
        AREA,
        "a transition returns half of a surrogate pair",
        "external_transition=... with the lone surrogate '\\udfff' at position 0",
        goes_on(["x", "\udfff"]),
    ),
)
def test_refused(fault: Refused, tmp_path: Path) -> None:
    fault.check(tmp_path)


@faults(
    Fault(AREA, "a reward hangs, and `reward_timeout_value` is given", "it earns the value, and others their rewards")
)
def test_hanging_calls_earn_the_value(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_only(monkeypatch, is_told_to_hang)
    collector = make_collector(FakeTeam(1), as_told, workers=RewardWorkers(2, "thread", 0.3, -1.0))
    items = [{"prompt": "p", "number": 5}, {"prompt": "p", "number": 6, "do": "hang"}]
    assert [node.rewards for node in collector.collect(items, [0, 1]).nodes] == [(5.0, 5.0), (-1.0, -1.0)]


@faults(Fault(AREA, "a reward quits by `sys.exit` in a worker", "the program quits with its code"))
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_quitting(fault: Fault, backend: str) -> None:
    with pytest.raises(SystemExit) as caught:
        rolls_out(as_told, 1, backend, do="quit")(Path())
    assert caught.value.code == 4
