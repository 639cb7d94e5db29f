"""Whatever the user's functions get and give: results in builtin types, or an error that names the function.

About 3,000 generated cases, the same ones in every run.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comlrl_lightning.callbacks import EvalMetrics, RolloutMetrics
from comlrl_lightning.environment.joint_format import TaggedSections, merged_prompt
from comlrl_lightning.environment.prompts import Formatters, Transition
from comlrl_lightning.environment.reward import RewardCall, RewardFunction
from comlrl_lightning.environment.reward_workers import RewardWorkers
from tests.rollouts.fakes import FakeTeam, make_collector

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype", "ignore:.*CSR tensor support")


def cases(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """So many generated cases."""
    return settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


class Unprintable:
    """An object that cannot even be shown."""

    def __repr__(self) -> NoReturn:
        raise RuntimeError("no repr")


class Uncopyable:
    """An object that refuses to be copied, in its own way."""

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise RuntimeError("not twice")


ImpostorDict = type("dict", (), {})
"""A class that has the name of a builtin type."""


def endless() -> list[Any]:
    """A list that holds itself."""
    values: list[Any] = []
    values.append(values)
    return values


TEXTS = ["", " ", "\x00", "\ud800", "a\udfffb", "\u202e", "🙂" * 300, "x" * 100_000, "<agent_0>", "{prompt}", "%s"]
ODD_TEXTS = st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=()), max_size=8)
ODD_NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from([10**400, True, -0.0, 1e308, Fraction(1, 3), Fraction(10**400, 3), Decimal(1), 1j])
)
MAKERS: list[Callable[[], Any]] = [
    lambda: None,
    Unprintable,
    object,
    ImpostorDict,
    endless,
    threading.Lock,
    lambda: np.ndarray,
    lambda: (number for number in (1.0, 2.0)),
    lambda: -(10**5000),
    lambda: b"bytes",
    lambda: {1.0, 2.0},
    lambda: np.float16(1.5),
    lambda: np.longdouble(2),
    lambda: np.str_("text"),
    lambda: np.bool_(True),
    lambda: np.array([1.0, 2.0]),
    lambda: np.array([[1.0, 2.0], [3.0, 4.0]]),
    lambda: np.array(3.0),
    lambda: np.array([None, "a"], dtype=object),
    lambda: np.array(["2020-01-01", "2021-01-01"], dtype="datetime64[D]"),
    lambda: np.array([1.0, np.nan]),
    lambda: np.ma.masked_array([1.0, 2.0], mask=[True, False]),
    lambda: torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    lambda: torch.tensor([1.0, 2.0], requires_grad=True) * 2,
    lambda: torch.tensor([1, 2]),
    lambda: torch.tensor([[1.0], [2.0]]),
    lambda: torch.tensor(5.0),
    lambda: torch.tensor([]),
    lambda: torch.tensor([1j, 2j]),
    lambda: torch.tensor(float("inf")),
    lambda: torch.zeros(2, device="meta"),
    lambda: torch.zeros((), device="meta"),
    lambda: torch.eye(2).to_sparse(),
    lambda: [torch.tensor([1.0]), torch.tensor(2.0)],
    lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
]
ODD_LEAVES = st.sampled_from(MAKERS).map(lambda make: make()) | ODD_NUMBERS | ODD_TEXTS
ODD = st.recursive(
    ODD_LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(ODD_TEXTS | st.integers(), inner, max_size=3)
    ),
    max_leaves=5,
)
"""Values of any kind."""
PLAIN = st.recursive(
    st.none() | st.integers() | st.floats() | ODD_TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(ODD_TEXTS, inner, max_size=2),
    max_leaves=3,
)
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "prompt": ODD_TEXTS | ODD,
        "more": PLAIN,
        "odd": st.sampled_from([Unprintable, Uncopyable]).map(lambda kind: kind()),
    },
)
CHATS = st.lists(
    st.fixed_dictionaries({"role": ODD_TEXTS, "content": ODD_TEXTS | ODD_LEAVES}, optional={"name": ODD_LEAVES}),
    max_size=2,
)
ERRORS = st.builds(
    lambda kind, text: kind(text), st.sampled_from([ValueError, KeyError, StopIteration, OSError]), ODD_TEXTS
)


@dataclass(frozen=True)
class Raises:
    """Something that a function raises instead of returning it."""

    error: Exception


def answers(*strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What a function comes to: values that fit or nearly do, any value, or an exception."""
    return st.one_of(*strategies, ODD, ERRORS.map(Raises))


class Says:
    """A function of the user that gives one answer to every call, whatever it is called with."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if isinstance(self.answer, Raises):
            raise self.answer.error
        return self.answer


def outcome(call: Callable[[], Any], label: str, answer: Any) -> Any:
    """What a call gives; None if it raised an error that may be."""
    try:
        return call()
    except Exception as error:
        raised = error
    said = "\n".join([str(raised), *vars(raised).get("__notes__", ())])
    # An item may be to blame before any function is called.
    assert label in said or "cannot be copied" in said, said
    if not isinstance(answer, Raises):
        assert isinstance(raised, ValueError)
        assert len(said.encode()) < 4000  # it can be read, and written to any file
    elif label in said and not isinstance(answer.error, StopIteration):
        assert raised is answer.error
    return None


def is_writable(prompt: Any) -> bool:
    """Whether a prompt is a text or chat messages in valid Unicode and builtin types."""
    texts = [prompt] if isinstance(prompt, str) else [one[key] for one in prompt for key in ("role", "content")]
    return all(type(text) is str and text.encode().decode() == text for text in texts)


class TestFunctions:
    @given(answers(st.lists(ODD_NUMBERS, min_size=2, max_size=2)), ITEMS)
    @cases(600)
    def test_rewards(self, answer: Any, item: Mapping[str, Any]) -> None:
        reward = RewardFunction(Says(answer), 2)
        call = RewardCall([["a", "\ud800"], ["", "b" * 10_000]], item, ["p", "q"], 1, 3)
        measured = outcome(lambda: reward.measure(call), "reward_func=tests.faults.test_fuzz.Says", answer)
        if measured is not None:
            assert all(type(value) is float and math.isfinite(value) for (value,) in measured.rows)
            assert len(measured.rows) == 2

    @given(answers(st.lists(st.lists(ODD_NUMBERS, min_size=2, max_size=2) | ODD_LEAVES, min_size=2, max_size=2)))
    @cases(300)
    def test_rewards_per_agent(self, answer: Any) -> None:
        reward = RewardFunction(Says(answer), 2, per_agent=True)
        call = RewardCall([["a", "b"], ["c", "d"]], {"prompt": "p"}, None, 1, 3)
        measured = outcome(lambda: reward.measure(call), "reward_func=tests.faults.test_fuzz.Says", answer)
        if measured is not None:
            assert [[math.isfinite(value) for value in row] for row in measured.rows] == [[True] * 2] * 2

    @given(answers(ODD_NUMBERS))
    @cases(250)
    def test_processors(self, answer: Any) -> None:
        reward = RewardFunction(lambda first: [1.0], 1, Says(answer))
        label = "reward_processor=tests.faults.test_fuzz.Says"
        rewards = outcome(lambda: reward([["a"]], item={"prompt": "p"}, prompts=["p"], turn=1), label, answer)
        assert rewards is None or math.isfinite(rewards[0])

    @given(answers(ODD_TEXTS, CHATS), ITEMS, ODD_TEXTS | st.none())
    @cases(500)
    def test_formatters(self, answer: Any, item: Mapping[str, Any], external_prompt: str | None) -> None:
        formatters, label = Formatters([Says(None), Says(answer)], 2), "formatters[1]=tests.faults.test_fuzz.Says"
        prompt = outcome(lambda: formatters.format(item, 1, external_prompt, item_index=3, turn=2), label, answer)
        if prompt is not None:
            assert is_writable(prompt)
            merged_prompt(TaggedSections(), [prompt, "other"])

    @given(ITEMS)
    @cases(150)
    def test_the_default_formatter(self, item: Mapping[str, Any]) -> None:
        label = "formatters=comlrl_lightning.environment.prompts.read_prompt"
        keys: dict[Any, Any] = {**item, 5: "a key that cannot be sorted among texts"}
        prompt = outcome(lambda: Formatters(None, 1).format(keys, 0, item_index=3, turn=1), label, None)
        assert prompt is None or is_writable(prompt)

    @given(answers(st.lists(ODD_TEXTS, min_size=2, max_size=2), st.tuples(ODD_TEXTS, ODD_TEXTS)), ITEMS)
    @cases(400)
    def test_transitions(self, answer: Any, item: Mapping[str, Any]) -> None:
        transition, label = Transition(Says(answer), 2), "external_transition=tests.faults.test_fuzz.Says"
        histories: dict[str, Any] = {"prompt_history_per_agent": [["p"]] * 2, "response_history_per_agent": [["a"]] * 2}
        prompts = outcome(
            lambda: transition(item=item, agent_completions=["a", "\ud800"], turn=1, item_index=3, **histories),
            label,
            answer,
        )
        assert prompts is None or (len(prompts) == 2 and all(map(is_writable, prompts)))


METRICS = st.dictionaries(ODD_TEXTS, ODD_NUMBERS | ODD_LEAVES, max_size=3)
ROLLOUTS = make_collector(FakeTeam(2)).collect([{"prompt": "p"}, {"prompt": "q", "text": "\ud800"}], [0, 1])
SOURCE: Any = SimpleNamespace(num_agents=2, num_turns=1, env_step=4)


def are_numbers(metrics: Mapping[Any, Any]) -> bool:
    return all(type(value) is float and name.encode() for name, value in metrics.items())


class TestMetrics:
    @given(answers(), answers(METRICS), st.booleans())
    @cases(400)
    def test_eval_logger_and_aggregator(self, rows: Any, metrics: Any, logger_fails: bool) -> None:
        if logger_fails != isinstance(rows, Raises):
            rows = Raises(ValueError("logger")) if logger_fails else "rows"
        callback = EvalMetrics(Says(rows), Says(metrics))
        name, answer = ("eval_logger", rows) if logger_fails else ("eval_aggregator", metrics)
        label = f"{name}=tests.faults.test_fuzz.Says"
        numbers = outcome(lambda: callback._measure(ROLLOUTS, SOURCE), label, answer)
        assert numbers is None or are_numbers(numbers)

    @given(answers(METRICS))
    @cases(400)
    def test_metrics_callback(self, metrics: Any) -> None:
        callback, label = RolloutMetrics(Says(metrics)), "metrics_callback=tests.faults.test_fuzz.Says"
        numbers = outcome(lambda: callback._measure([], 4, ["turn_1/reward_mean"]), label, metrics)
        assert numbers is None or are_numbers(numbers)


FITTING = {"formatter": "f", "reward": [1.0, 2.0], "transition": ["x", "y"], "processor": 0.5}
LABELS = {
    "formatter": "formatters=",
    "reward": "reward_func=",
    "transition": "external_transition=",
    "processor": "reward_processor=",
}


@given(st.data(), st.sampled_from(list(FITTING)), ITEMS, st.booleans(), st.sampled_from([0, 2]))
@cases(400)
def test_rollouts(data: Any, broken: str, item: Mapping[str, Any], passthrough: bool, num_workers: int) -> None:
    """Two agents and turns with K=2, in which one of the functions says anything."""
    near = {
        "formatter": ODD_TEXTS | CHATS,
        "reward": st.lists(ODD_NUMBERS, min_size=2, max_size=2),
        "transition": st.lists(ODD_TEXTS, min_size=2, max_size=2),
        "processor": ODD_NUMBERS,
    }
    answer = data.draw(answers(near[broken]))
    says = {name: Says(answer if name == broken else fitting) for name, fitting in FITTING.items()}
    collector = make_collector(
        FakeTeam(2),
        says["reward"],
        transition=says["transition"],
        formatters=says["formatter"],
        processor=says["processor"],
        passthrough=passthrough,
        workers=RewardWorkers(num_workers),
        num_turns=2,
    )
    label = LABELS[broken] + "tests.faults.test_fuzz.Says"
    rollouts = outcome(lambda: collector.collect([{"prompt": "p"}, item], [0, 1]), label, answer)
    if rollouts is not None:
        assert [len(node.rewards) for node in rollouts.nodes] == [2] * (2 + 4)
        assert all(math.isfinite(reward) for node in rollouts.nodes for reward in node.rewards)
        assert all(is_writable(prompt) for node in rollouts.nodes for prompt in node.prompts)


class TestLoneSurrogates:
    """They come from broken files and from cut JSON, and no tokenizer takes them."""

    MESSAGE = r"\w+=\S+Says returned .*'(.|\n)*, with the lone surrogate '\\ud800' at position 3. Return valid Unicode"

    @pytest.mark.parametrize("prompt", ["abc\ud800", [{"role": "user", "content": "abc\ud800"}]])
    def test_in_prompts(self, prompt: Any) -> None:
        with pytest.raises(ValueError, match=r"formatters=.* for task item 7 .*at turn 2, with the lone surrogate"):
            Formatters(Says(prompt), 1).format({"prompt": "p"}, 0, item_index=7, turn=2)
        with pytest.raises(ValueError, match=self.MESSAGE):
            Formatters(Says(prompt), 1).format({"prompt": "p"}, 0)

    def test_in_texts_of_the_world_that_no_formatter_sees(self) -> None:
        collector = make_collector(
            FakeTeam(1), transition=Says(["abc\ud800"]), passthrough=True, num_turns=2, num_generations=1
        )
        with pytest.raises(ValueError, match=self.MESSAGE):
            collector.collect([{"prompt": "p"}], [0])
