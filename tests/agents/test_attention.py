"""Attention by products against torch's fused attention, in half precision on a CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import FalconConfig, FalconForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from comlrl_lightning.agents import attention
from comlrl_lightning.agents.attention import NAME, attend, use_quick_attention
from tests.agents.helpers import model_of, shared_team, written
from tests.tiny_lm import tiny_llama


class Layer(nn.Module):
    """What the functions ask of an attention layer."""

    num_key_value_groups = 3

    def __init__(self) -> None:
        super().__init__()
        self.is_causal = True


def states(queries: int, keys: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 6 heads; keys and values of 2 groups."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 6, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    query, key, value = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return query, key, value


def masks(queries: int, keys: int) -> dict[str, Tensor | None]:
    """Masks of every kind; in "padded" the second row sees none of the first two keys, and its first query nothing."""
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    padded = causal.expand(2, 1, queries, keys).clone()
    padded[1, :, :, :2] = False
    added = torch.zeros(2, 1, queries, keys, dtype=torch.bfloat16).masked_fill(~padded, -1e4)
    return {"causal": causal[None, None], "padded": padded, "added": added}


def run(function: Any, tensors: Sequence[Tensor], mask: Tensor | None, **settings: Any) -> tuple[Tensor, ...]:
    """Result and gradients, of the queries that see something."""
    found, nothing = function(Layer(), *tensors, mask, **settings)
    assert nothing is None
    sees = torch.ones(found.shape[:2], dtype=torch.bool)
    if mask is not None:
        sees = (mask if mask.dtype == torch.bool else mask == 0).any(-1)[:, 0].expand(found.shape[:2])
    loss = (found.float() * sees[..., None, None]).square().sum()
    return (found.float() * sees[..., None, None], *(part.float() for part in torch.autograd.grad(loss, tensors)))


# What no mask means for more keys than queries is up to torch.
@pytest.mark.parametrize(
    ("kind", "queries", "keys"),
    [("none", 5, 5), *((kind, *shape) for kind in ("causal", "padded", "added") for shape in ((5, 5), (3, 7)))],
)
@pytest.mark.parametrize("scaling", [None, 0.5])
def test_equals_the_fused_one(kind: str, queries: int, keys: int, scaling: float | None) -> None:
    mask = {"none": None, **masks(queries, keys)}[kind]
    ours = run(attend, states(queries, keys), mask, scaling=scaling)
    wide = mask.float() if mask is not None and mask.dtype == torch.bfloat16 else mask
    exact = [tensor.detach().float().requires_grad_() for tensor in states(queries, keys)]
    theirs = run(sdpa_attention_forward, exact, wide, scaling=scaling)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0.05, atol=0.05)


def test_is_at_least_as_exact_as_the_fused_one() -> None:
    exact = [tensor.detach().float().requires_grad_() for tensor in states(16, 16)]
    truth = run(sdpa_attention_forward, exact, None)
    errors = [
        sum(
            float((part - true).detach().square().sum())
            for part, true in zip(run(kind, states(16, 16), None), truth, strict=True)
        )
        for kind in (attend, sdpa_attention_forward)
    ]
    assert errors[0] < 2 * errors[1]


def test_large_scores_keep_their_differences() -> None:
    # Around 2000, numbers in bfloat16 are 8 apart; those of a softmax must not be.
    query, key, value = (tensor.detach() for tensor in states(16, 16))
    key = (key + 600).to(torch.bfloat16)
    found, _ = attend(Layer(), query, key, value, None, scaling=1.0)
    exact, _ = attend(Layer(), query.float(), key.float(), value.float(), None, scaling=1.0)
    torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=0.02)


def test_a_query_that_sees_nothing_stays_finite() -> None:
    seen = masks(5, 5)["padded"]
    assert seen is not None
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).to(torch.bfloat16)
    tensors = states(5, 5)
    found, _ = attend(Layer(), *tensors, mask)
    gradients = torch.autograd.grad(found.float().sum(), tensors)
    assert all(bool(part.isfinite().all()) for part in (found, *gradients))


@pytest.mark.parametrize(
    ("tensors", "mask", "settings"),
    [
        (states(5, 5, torch.float32), None, {}),
        (states(1, 5), masks(1, 5)["causal"], {}),
        (states(5, 5), None, {"is_causal": False}),
        (states(3, 5), None, {}),
        (states(5, 5), None, {"dropout": 0.5}),
        (states(600, 600), None, {}),
        (states(5, 5), torch.ones(2, 6, 5, 5, dtype=torch.bool), {}),
    ],
    ids=["single precision", "one token", "not causal", "no mask for other keys", "dropout", "long", "mask per head"],
)
def test_all_else_is_left_to_torch(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("not by products")

    monkeypatch.setattr(attention._ByProducts, "apply", refuse)
    attend(Layer(), *tensors, mask, **settings)
    with pytest.raises(AssertionError, match="not by products"):
        attend(Layer(), *states(5, 5), None)


class TestModels:
    def test_in_single_precision_nothing_changes(self) -> None:
        team, rows = shared_team(), written(0, [0, 1, 1])
        causal = model_of(team).causal
        assert causal.config._attn_implementation == NAME
        found = team.log_probs(rows, temperature=1.0).log_probs
        causal.set_attn_implementation("sdpa")
        torch.testing.assert_close(found, team.log_probs(rows, temperature=1.0).log_probs, rtol=0, atol=0)

    def test_what_the_user_chose_stays(self) -> None:
        model = tiny_llama()
        model.set_attn_implementation("eager")
        assert model_of(shared_team(model)).causal.config._attn_implementation == "eager"

    def test_a_model_whose_code_asks_for_the_name_keeps_it(self) -> None:
        # Falcon's masks depend on it; with another name, some models lose their causality.
        model = FalconForCausalLM(FalconConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
        use_quick_attention(model)
        assert model.config._attn_implementation == "sdpa"

    def test_a_model_without_source_keeps_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "notebook", ModuleType("notebook"))
        model = tiny_llama()
        model.lm_head.__class__ = type("Head", (nn.Linear,), {"__module__": "notebook"})
        use_quick_attention(model)
        assert model.config._attn_implementation == "sdpa"

    def test_a_model_sent_to_another_process_works_there(self, tmp_path: Any) -> None:
        torch.save(model_of(shared_team()).causal, tmp_path / "model.pt")
        code = (
            "import sys, torch; import comlrl_lightning.agents.language_model;"
            "model = torch.load(sys.argv[1], weights_only=False);"
            "print(tuple(model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.shape))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "model.pt"], capture_output=True, text=True, check=False
        )
        assert done.stdout.strip() == "(1, 3, 259)", done.stderr

    def test_folders_do_not_name_it(self, tmp_path: Any) -> None:
        causal = model_of(shared_team()).causal
        causal.save_pretrained(tmp_path)
        assert NAME not in (tmp_path / "config.json").read_text(encoding="utf-8")
