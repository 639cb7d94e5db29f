"""Formatters and reward: what the user's functions get, and what happens to what they return."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from comlrl_lightning.environment.prompts import Formatters, RewardFunction, Transition, read_prompt
from comlrl_lightning.rewards import RewardProcessors, WeightedRewards

ITEM = {"prompt": "p", "target": 3}
PAIR = [["a1", "a2"], ["b1", "b2"]]
"""`[N=2][J=2]` texts."""


def score(func: Callable[..., Any], completions: Sequence[Sequence[str]] = PAIR, **settings: Any) -> list[float]:
    """Call a reward function as a rollout does, for item 7 at turn 2."""
    reward = RewardFunction(func, len(completions), **settings)
    return reward(completions, item=ITEM, prompts=("f0", "f1"), turn=2, item_index=7)


class Recorder:
    """Remembers the arguments of each call and returns zeros."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *completions: list[str], **keywords: Any) -> list[float]:
        self.calls.append((completions, keywords))
        return [0.0] * len(completions[0])


class TestRewardKeywords:
    def test_all_keywords_go_to_a_signature_that_takes_any(self) -> None:
        recorder = Recorder()
        score(recorder)
        ((completions, keywords),) = recorder.calls
        assert completions == (["a1", "a2"], ["b1", "b2"])
        assert keywords == {"batch_items": [ITEM], "prompts": ["f0", "f1"], "turn": 2}
        assert keywords["batch_items"][0] == ITEM

    def test_optional_names_get_what_they_say(self) -> None:
        got: dict[str, Any] = {}

        def with_prompts(a: list[str], b: list[str], prompts: Any = None) -> list[float]:
            got["prompts"] = prompts
            return [0.0, 0.0]

        def with_items(a: list[str], b: list[str], batch_items: Any = None) -> list[float]:
            got["batch_items"] = batch_items
            return [0.0, 0.0]

        score(with_prompts)
        score(with_items)
        assert got == {"prompts": ["f0", "f1"], "batch_items": [ITEM]}

    def test_only_names_of_the_signature_are_passed(self) -> None:
        got: list[int] = []

        def reward(*completions: list[str], turn: int) -> list[float]:
            got.append(turn)
            return [0.0, 0.0]

        score(reward)
        score(lambda a, b: [0.0, 0.0])
        assert got == [2]

    def test_a_positional_only_parameter_is_no_keyword(self) -> None:
        def reward(prompts: list[str], b: list[str], /) -> list[float]:
            return [float(len(prompts)), float(len(b))]

        assert score(reward) == [2.0, 2.0]

    def test_partials_and_objects_are_read_too(self) -> None:
        def reward(factor: float, a: list[str], b: list[str], *, batch_items: Any) -> list[float]:
            return [factor * item["target"] for item in batch_items] * len(a)

        class Reward:
            def __call__(self, a: list[str], b: list[str], turn: int) -> list[int]:
                return [turn] * len(a)

        assert score(functools.partial(reward, 2.0)) == [6.0, 6.0]
        assert score(Reward()) == [2.0, 2.0]

    def test_a_torch_module_is_read_at_its_forward(self) -> None:
        class Reward(torch.nn.Module):
            def forward(self, a: list[str], b: list[str], *, turn: int) -> torch.Tensor:
                return torch.full((len(a),), float(turn))

        assert score(Reward()) == [2.0, 2.0]

    def test_no_signature_is_accepted_with_a_warning(self) -> None:
        class Unreadable:
            __signature__ = "none"

            def __call__(self, *completions: list[str]) -> list[float]:
                return [1.0, 2.0]

        with pytest.warns(UserWarning, match=r"reward_func=.*Unreadable has no signature .* 2 lists .* no keywords"):
            assert score(Unreadable()) == [1.0, 2.0]


class TestRewardSignature:
    def test_too_few_parameters(self) -> None:
        def reward(a: list[str]) -> list[float]:
            return [0.0] * len(a)

        with pytest.raises(ValueError, match=r"reward_func=.*reward cannot be called with 2 lists of completions"):
            RewardFunction(reward, 2)

    def test_a_list_of_completions_would_land_on_a_reserved_name(self) -> None:
        def reward(a: list[str], batch_items: Any) -> list[float]:
            return [0.0] * len(a)

        with pytest.raises(ValueError, match=r"keywords batch_items: multiple values for argument 'batch_items'"):
            RewardFunction(reward, 2)

    def test_a_required_name_that_nobody_passes(self) -> None:
        def reward(a: list[str], b: list[str], *, threshold: float) -> list[float]:
            return [threshold]

        with pytest.raises(
            ValueError,
            match=r"missing a required.* 'threshold'.*batch_items, prompts, turn, num_tokens, truncated are passed",
        ):
            RewardFunction(reward, 2)

    def test_not_callable(self) -> None:
        with pytest.raises(ValueError, match=r"reward_func='my.reward' is not callable. Give a function"):
            RewardFunction("my.reward", 2)  # type: ignore[arg-type]

    def test_a_class(self) -> None:
        with pytest.raises(ValueError, match=r"reward_func=.*Recorder is a class. Give an object of it, Recorder\("):
            RewardFunction(Recorder, 2)

    def test_it_is_not_called_at_construction(self) -> None:
        recorder = Recorder()
        RewardFunction(recorder, 2, RewardProcessors.shift(1.0))
        assert recorder.calls == []


class TestRewardValues:
    @pytest.mark.parametrize(
        "values",
        [
            [1, 2.5],
            (1, 2.5),
            np.array([1.0, 2.5]),
            np.array([1.0, 2.5], dtype=np.float16),
            torch.tensor([1.0, 2.5]),
            torch.tensor([1.0, 2.5], dtype=torch.bfloat16, requires_grad=True),
            [np.float32(1), np.int64(2) + np.float64(0.5)],
            [torch.tensor(1.0), torch.tensor(2.5)],
            [Fraction(1), Fraction(5, 2)],
        ],
    )
    def test_numbers_of_every_kind(self, values: Any) -> None:
        rewards = score(lambda a, b: values)
        assert rewards == [1.0, 2.5]
        assert all(type(reward) is float for reward in rewards)

    @pytest.mark.parametrize(
        "values", [[True, False], [np.True_, np.False_], np.array([True, False]), torch.tensor([True, False])]
    )
    def test_booleans_are_1_and_0(self, values: Any) -> None:
        rewards = score(lambda a, b: values)
        assert rewards == [1.0, 0.0]
        assert all(type(reward) is float for reward in rewards)

    @pytest.mark.parametrize(
        ("values", "problem"),
        [
            ([1e300, 1.0], r"gave 1e\+300 .* beyond 3.40e\+38, .* Return smaller rewards"),
            (np.array([1.0, -1e40]), r"gave -1e\+40"),
            ([None, 1.0], "gave None"),
            (["1.0", 1.0], "gave '1.0'"),
            ([1.0, 1j], "gave 1j"),
            ([1.0, float("nan")], "gave nan"),
            (torch.tensor([float("-inf"), 0.0]), "gave -inf"),
            ([10**400, 1.0], "gave inf"),
            (np.ones((2, 1)), r"gave \[1.0\]"),
            ([1.0], "returned 1 value for 2 joint completions"),
            ([1.0, 2.0, 3.0], "returned 3 values for 2 joint completions"),
            (np.array([]), "returned 0 values for 2"),
            (1.0, "returned 1.0 .* list of 2 finite floats"),
            (torch.tensor(1.0), r"returned tensor\(1.\)"),
            (None, "returned None"),
            ("12", "returned '12'"),
            ({0: 1.0, 1: 2.0}, "returned {0: 1.0"),
            ((value for value in (1.0, 2.0)), "returned <generator"),
        ],
    )
    def test_anything_else_is_an_error_with_function_item_and_turn(self, values: Any, problem: str) -> None:
        def bad_reward(a: list[str], b: list[str]) -> Any:
            return values

        with pytest.raises(ValueError, match=problem) as error:
            score(bad_reward)
        assert "reward_func=tests.test_interface.TestRewardValues" in str(error.value)
        assert "bad_reward" in str(error.value)
        assert "task item 7 {'prompt': 'p', 'target': 3} at turn 2" in str(error.value)

    def test_as_many_values_as_agents_is_not_read_as_something_else(self) -> None:
        # N=2 agents, J=3 joint completions: two values are one too few, whatever they were meant to be.
        with pytest.raises(ValueError, match="returned 2 values for 3 joint completions"):
            score(lambda a, b: [1.0, 2.0], [["a", "b", "c"], ["d", "e", "f"]])


class TestUserExceptions:
    def test_stop_iteration_does_not_pass_for_the_end_of_a_loop(self) -> None:
        def exhausted(first: list[str], second: list[str]) -> list[float]:
            return [next(iter([])) for _ in range(2)]

        with pytest.raises(
            RuntimeError, match=r"reward_func=.*exhausted raised StopIteration for task item 7 .* turn 2"
        ):
            score(exhausted)

    def test_they_keep_type_and_traceback_and_get_a_note(self) -> None:
        calls = []

        def failing(a: list[str], b: list[str]) -> list[float]:
            calls.append(a)
            raise TypeError("mine")

        with pytest.raises(TypeError, match="mine") as error:
            score(failing)
        assert len(calls) == 1
        assert str(error.value) == "mine"
        assert error.traceback[-1].name == "failing"
        (note,) = error.value.__notes__
        assert note.startswith("Raised in reward_func=tests.test_interface.TestUserExceptions")
        assert note.endswith("failing for task item 7 {'prompt': 'p', 'target': 3} at turn 2.")

    def test_a_long_item_is_shortened(self) -> None:
        def failing(a: list[str]) -> list[float]:
            raise KeyError("x")

        item = {f"field_{index}": "long " * 100 for index in range(50)}
        with pytest.raises(KeyError) as error:
            RewardFunction(failing, 1)([["a"]], item=item, prompts=("f",), turn=1)
        assert len(error.value.__notes__[0]) < 600


class TestProcessor:
    def test_it_maps_each_reward(self) -> None:
        assert score(lambda a, b: [1, 2], processor=RewardProcessors.scale(factor=10.0)) == [10.0, 20.0]

    def test_its_values_are_checked(self) -> None:
        with pytest.raises(ValueError, match=r"reward_processor=.*lambda.* gave None for task item 7 .* at turn 2"):
            score(lambda a, b: [1, 2], processor=lambda reward: None)

    def test_its_exceptions_get_a_note(self) -> None:
        with pytest.raises(ZeroDivisionError) as error:
            score(lambda a, b: [1, 0], processor=lambda reward: 1 / reward)
        assert "reward_processor=" in error.value.__notes__[0]

    @pytest.mark.parametrize("maker", [RewardProcessors.scale, RewardProcessors.clip, RewardProcessors.chain])
    def test_one_that_was_not_called_is_an_error(self, maker: Any) -> None:
        with pytest.raises(ValueError, match=r"reward_processor=comlrl_lightning.rewards.* (is a class|but is none)"):
            RewardFunction(lambda a, b: [0.0], 2, maker)

    def test_one_that_takes_no_reward_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"reward_processor=.* cannot be called with a reward"):
            RewardFunction(lambda a: [0.0], 1, lambda: 0.0)  # type: ignore[arg-type, misc]


class TestFormatters:
    def test_none_reads_the_prompt(self) -> None:
        formatters = Formatters(None, 2)
        assert [formatters.format(ITEM, agent) for agent in range(2)] == ["p", "p"]
        assert formatters.format(ITEM, 1, external_prompt="x") == "x"

    def test_none_needs_a_prompt(self) -> None:
        with pytest.raises(
            ValueError, match=r"no field 'prompt', only \['question'\]. Add it, or give formatters="
        ) as e:
            Formatters(None, 1).format({"question": "q"}, 0, item_index=4)
        assert "task item 4 {'question': 'q'}" in e.value.__notes__[0]

    def test_one_for_all(self) -> None:
        formatters = Formatters(lambda item: f"<{item['prompt']}>", 3)
        assert [formatters.format(ITEM, agent) for agent in range(3)] == ["<p>"] * 3

    def test_one_per_agent_in_order(self) -> None:
        formatters = Formatters([lambda item: "first", lambda item: "second"], 2)
        assert [formatters.format(ITEM, agent) for agent in range(2)] == ["first", "second"]

    def test_an_external_prompt_replaces_the_prompt_in_a_copy(self) -> None:
        seen: list[Any] = []

        def formatter(item: dict[str, Any], external_prompts: str | None = None) -> str:
            seen.append((dict(item), external_prompts))
            item.clear()
            return "f"

        Formatters(formatter, 1).format(ITEM, 0)
        Formatters(formatter, 1).format(ITEM, 0, external_prompt="x")
        assert seen == [(ITEM, None), ({"prompt": "x", "target": 3}, "x")]
        assert ITEM == {"prompt": "p", "target": 3}

    def test_a_formatter_without_external_prompts_does_not_get_them(self) -> None:
        assert Formatters(lambda item: item["prompt"], 1).format(ITEM, 0, external_prompt="x") == "x"

    def test_chat_messages(self) -> None:
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        assert Formatters(lambda item: messages, 1).format(ITEM, 0) == messages

    @pytest.mark.parametrize(
        "prompt",
        [None, 3, [], ["text"], [{"role": "user"}], [{"role": "user", "content": 3}], ({"role": "u", "content": "c"},)],
    )
    def test_anything_else_is_an_error(self, prompt: Any) -> None:
        with pytest.raises(
            ValueError, match=r"formatters\[1\]=.* returned .* for task item 5 .* at turn 3. Return a text"
        ):
            Formatters([lambda item: "f", lambda item: prompt], 2).format(ITEM, 1, item_index=5, turn=3)

    @pytest.mark.parametrize("formatters", [[lambda item: ""], [], "abc", [lambda item: ""] * 3])
    def test_their_number_must_fit(self, formatters: Any) -> None:
        with pytest.raises(
            ValueError, match=r"formatters=.*(which does not fit 2 agents|is a text). Give one function"
        ):
            Formatters(formatters, 2)

    def test_the_error_names_them(self) -> None:
        with pytest.raises(
            ValueError, match=r"formatters=\[comlrl_lightning.*read_prompt\] holds 1, which does not fit"
        ):
            Formatters([read_prompt], 2)

    def test_each_must_take_an_item(self) -> None:
        with pytest.raises(ValueError, match=r"formatters\[1\]=.* cannot be called with a task item"):
            Formatters([lambda item: "", lambda: ""], 2)

    def test_external_prompts_must_be_optional(self) -> None:
        def formatter(item: Mapping[str, Any], external_prompts: str) -> str:
            return external_prompts

        with pytest.raises(ValueError, match="cannot be called with a task item alone, as at turn 1: missing"):
            Formatters(formatter, 1)

    def test_exceptions_get_a_note(self) -> None:
        with pytest.raises(KeyError) as error:
            Formatters(lambda item: item["missing"], 1).format(ITEM, 0, item_index=9, turn=1)
        assert "formatters=" in error.value.__notes__[0]
        assert "task item 9" in error.value.__notes__[0]


async def awaited(*completions: Any) -> list[float]:
    return [0.0] * len(completions[0])


async def generated(*completions: Any) -> Any:
    yield [0.0] * len(completions[0])


class Asks:
    async def __call__(self, *completions: Any) -> list[float]:
        return [0.0] * len(completions[0])

    async def ask(self, *completions: Any) -> list[float]:
        return [0.0] * len(completions[0])


ASYNC: list[Any] = [awaited, generated, Asks(), Asks().ask, partial(awaited)]


class TestAsyncFunctions:
    @pytest.mark.parametrize("function", ASYNC)
    @pytest.mark.parametrize(
        "take",
        [
            lambda function: RewardFunction(function, 2),
            lambda function: RewardFunction(WeightedRewards({"a": function}), 2),
            lambda function: RewardFunction(lambda *_: [0.0], 2, function),
            lambda function: Formatters(function, 2),
            lambda function: Transition(function, 2),
            RewardProcessors.chain,
        ],
    )
    def test_they_are_refused_at_construction(self, function: Any, take: Callable[[Any], Any]) -> None:
        with pytest.raises(ValueError, match=r" is an async function, .* Give a function that runs it"):
            take(function)

    def test_what_hides_one_is_found_at_the_first_call(self) -> None:
        with pytest.raises(ValueError, match=r"returned a coroutine for task item .* Give a function that runs it"):
            score(lambda a, b: awaited(a, b))
