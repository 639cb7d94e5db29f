"""Transitions, and all of the user's functions together in two turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from comlrl_lightning.environment.prompts import Formatters, RewardFunction, Transition

ITEM = {"prompt": "p", "target": 3}
PAIR = [["a1", "a2"], ["b1", "b2"]]
"""`[N=2][J=2]` texts."""


def step(transition: Transition) -> tuple[str, ...]:
    """Ask a transition for the second turn of two agents."""
    return transition(
        item=ITEM,
        agent_completions=("a1", "b1"),
        prompt_history_per_agent=(("f0",), ("f1",)),
        response_history_per_agent=(("a1",), ("b1",)),
        turn=1,
        item_index=7,
    )


class TestTransition:
    def test_the_keywords_of_the_signature(self) -> None:
        got: dict[str, Any] = {}

        def everything(**keywords: Any) -> list[str]:
            got.update(keywords)
            return ["x", "y"]

        assert step(Transition(everything, 2)) == ("x", "y")
        assert got == {
            "prompt": "p",
            "agent_completions": ["a1", "b1"],
            "num_agents": 2,
            "prompt_history_per_agent": [["f0"], ["f1"]],
            "response_history_per_agent": [["a1"], ["b1"]],
            "item": ITEM,
        }

    def test_only_some_keywords(self) -> None:
        def some(agent_completions: list[str], num_agents: int) -> tuple[str, ...]:
            return tuple(text * num_agents for text in agent_completions)

        assert step(Transition(some, 2)) == ("a1a1", "b1b1")

    def test_an_item_without_a_prompt_gives_an_empty_one(self) -> None:
        def transition(prompt: str) -> list[str]:
            return [f"<{prompt}>"]

        histories: list[list[str]] = [["h"]]
        prompts = Transition(transition, 1)(
            item={},
            agent_completions=["a"],
            prompt_history_per_agent=histories,
            response_history_per_agent=histories,
            turn=1,
        )
        assert prompts == ("<>",)

    @pytest.mark.parametrize("prompts", ["xy", ["x"], ("x", "y", "z"), ["x", None], None, {"x": 1, "y": 2}])
    def test_anything_but_n_texts_is_an_error(self, prompts: Any) -> None:
        with pytest.raises(
            ValueError, match=r"external_transition=.* returned .* task item 7 .* at turn 1.*of 2 texts"
        ):
            step(Transition(lambda item: prompts, 2))

    def test_positional_parameters_are_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"external_transition=.* cannot be called .* 'completions'"):
            Transition(lambda completions: completions, 2)

    def test_exceptions_get_a_note(self) -> None:
        with pytest.raises(ZeroDivisionError) as error:
            step(Transition(lambda item: [str(1 // 0)], 1))
        assert "external_transition=" in error.value.__notes__[0]
        assert "task item 7 {'prompt': 'p', 'target': 3} at turn 1" in error.value.__notes__[0]


def test_two_agents_two_turns_by_hand() -> None:
    """Two agents, aligned, K=2, T=2, item {"prompt": "p"}, as a rollout calls the user's functions."""
    calls: list[Any] = []

    def formatter(name: str) -> Callable[..., str]:
        def format_prompt(item: Mapping[str, Any], external_prompts: str | None = None) -> str:
            calls.append((name, dict(item), external_prompts))
            return f"{name}({item['prompt']})"

        return format_prompt

    def reward_func(first: list[str], second: list[str], *, batch_items: list[dict[str, Any]]) -> list[float]:
        calls.append(("reward", first, second, batch_items))
        return [0.0, 0.0]

    def external_transition(
        *, agent_completions: Any, prompt_history_per_agent: Any, response_history_per_agent: Any
    ) -> tuple[str, str]:
        calls.append(("transition", agent_completions, prompt_history_per_agent, response_history_per_agent))
        return "x", "y"

    item = {"prompt": "p"}
    formatters = Formatters([formatter("f0"), formatter("f1")], 2)
    prompts = [formatters.format(item, agent) for agent in range(2)]
    RewardFunction(reward_func, 2)(PAIR, item=item, prompts=prompts, turn=1)
    transition = Transition(external_transition, 2)
    for a, b in zip(*PAIR, strict=True):
        external = transition(
            item=item,
            agent_completions=[a, b],
            prompt_history_per_agent=[[prompt] for prompt in prompts],
            response_history_per_agent=[[a], [b]],
            turn=1,
        )
    assert [formatters.format(item, agent, prompt) for agent, prompt in enumerate(external)] == ["f0(x)", "f1(y)"]
    assert calls == [
        ("f0", {"prompt": "p"}, None),
        ("f1", {"prompt": "p"}, None),
        ("reward", ["a1", "a2"], ["b1", "b2"], [{"prompt": "p"}]),
        ("transition", ["a1", "b1"], [["f0(p)"], ["f1(p)"]], [["a1"], ["b1"]]),
        ("transition", ["a2", "b2"], [["f0(p)"], ["f1(p)"]], [["a2"], ["b2"]]),
        ("f0", {"prompt": "x"}, "x"),
        ("f1", {"prompt": "y"}, "y"),
    ]
