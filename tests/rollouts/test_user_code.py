"""User functions run without autocast and with float32 as torch's default dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from comlrl_lightning.rollouts.collect import user_code
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
