"""User functions run without autocast and with float32 as torch's default dtype."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from comlrl_lightning.environment.torch_modes import user_code
from tests.rollouts.fakes import FakeTeam, make_collector


@contextmanager
def half_precision() -> Iterator[None]:
    """What Lightning sets up around a training step under ``bf16-true`` and ``bf16-mixed`` together."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield
    finally:
        torch.set_default_dtype(dtype)


def product_dtype() -> torch.dtype:
    return (torch.ones(2, 2, dtype=torch.float32) @ torch.ones(2, 2, dtype=torch.float32)).dtype


def test_neither_autocast_nor_a_half_precision_default() -> None:
    with half_precision():
        assert product_dtype() == torch.bfloat16
        with user_code():
            assert product_dtype() == torch.float32
            assert torch.tensor(1.0).dtype == torch.float32
        assert torch.tensor(1.0).dtype == torch.bfloat16
        assert product_dtype() == torch.bfloat16


def test_the_default_dtype_comes_back_after_an_exception() -> None:
    with half_precision():
        with pytest.raises(KeyError), user_code():
            raise KeyError
        assert torch.get_default_dtype() == torch.bfloat16


def test_every_user_function_runs_so() -> None:
    seen: list[str] = []

    def note(name: str) -> None:
        if torch.tensor(1.0).dtype == torch.float32 and product_dtype() == torch.float32:
            seen.append(name)

    def formatter(item: dict[str, Any]) -> str:
        note("formatter")
        return "f"

    def reward(first: list[str]) -> list[float]:
        note("reward")
        return [0.0] * len(first)

    def transition() -> list[str]:
        note("transition")
        return ["x"]

    collector = make_collector(
        FakeTeam(1), reward, transition=transition, formatters=formatter, num_generations=1, num_turns=2
    )
    with half_precision():
        collector.collect([{"prompt": "p"}], [0])
    assert seen == ["formatter", "reward", "transition", "formatter", "reward"]


def test_modes_and_defaults_come_back() -> None:
    with user_code():
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
    assert torch.is_grad_enabled()
    assert torch.get_default_device() == torch.device("cpu")


def test_gradients_work_in_an_evaluation() -> None:
    weight = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        with user_code():
            torch.autograd.backward((weight * 3).sum())
        assert torch.is_inference_mode_enabled()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]


def test_what_a_function_does_to_its_arguments_stays_with_it() -> None:
    seen: list[Any] = []

    def formatter(item: dict[str, Any]) -> list[dict[str, str]]:
        item["tags"].append("formatter")
        return CHAT

    def reward(first: list[str], batch_items: list[dict[str, Any]], prompts: list[Any]) -> list[float]:
        seen.append(([*batch_items[0]["tags"]], prompts[0][0]["content"]))
        batch_items[0]["tags"].append("reward")
        prompts[0][0]["content"] = "changed"
        return [0.0] * len(first)

    def transition(item: dict[str, Any], prompt_history_per_agent: list[list[Any]]) -> list[str]:
        seen.append(([*item["tags"]], prompt_history_per_agent[0][0][0]["content"]))
        item["tags"].append("transition")
        prompt_history_per_agent[0][0][0]["content"] = "changed"
        return ["x"]

    collector = make_collector(
        FakeTeam(1), reward, transition=transition, formatters=formatter, num_generations=1, num_turns=2
    )
    item = {"tags": ["a"]}
    rollouts = collector.collect([item], [0])
    assert item == {"tags": ["a"]}
    assert seen == [(["a"], "hi")] * 3
    assert rollouts.nodes[0].prompts[0] == [{"role": "user", "content": "hi"}]
    assert CHAT[0]["content"] == "hi"


CHAT = [{"role": "user", "content": "hi"}]


def test_prompts_are_builtin_texts() -> None:
    collector = make_collector(
        FakeTeam(1), transition=lambda: [np.str_("x")], num_generations=1, num_turns=2, passthrough=True
    )
    rollouts = collector.collect([{"prompt": np.str_("p")}], [0])
    assert [type(node.prompts[0]) for node in rollouts.nodes] == [str, str]


def test_an_item_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(ValueError, match=r"task item 3 .* cannot be copied: .*lock.* Keep such objects out"):
        make_collector(FakeTeam(1)).collect([{"prompt": "p", "lock": threading.Lock()}], [3])
