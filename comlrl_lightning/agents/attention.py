"""Attention that is quick where torch's is slow: in half precision on a CPU.

There the backward pass of torch's fused attention takes several times as long as a few products of matrices, for short
sequences. Everything else goes on to transformers' own function for torch's attention.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

HALF = (torch.float16, torch.bfloat16)
NAME = "short_sdpa"
"""What transformers knows it by."""
MAX_SCORES = 512**2
"""Most scores per head and row: they are kept for the backward pass, as the fused attention's are not."""


def use_quick_attention(model: PreTrainedModel) -> None:
    """Let a model that attends by torch's fused function use `attend`, which calls it where it is the better one."""
    is_fused = model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation()
    if is_fused and not _asks_for_its_name(model):
        model.set_attn_implementation(NAME)


def _asks_for_its_name(model: nn.Module) -> bool:
    """Whether the code of a model treats torch's function by name, as for masks that only this function needs."""
    names = {type(module).__module__ for module in model.modules()}
    return any(_names_it(name) for name in names if name.partition(".")[0] not in ("torch", "peft"))


def _names_it(module: str) -> bool:
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # there is no source to read, as in a notebook
        return True
    return '"sdpa"' in source or "'sdpa'" in source


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention with the arguments and the result of transformers' functions.

    Args:
        module: The layer.
        query: `[B, heads, Q, D]`.
        key: `[B, groups, S, D]`, each group for `heads / groups` consecutive heads.
        value: `[B, groups, S, D]`.
        attention_mask: `[B or 1, 1, Q, S]` True where a query sees a key, or what is added to their score; None: all
            that come before.
        dropout: Left to torch.
        scaling: Factor of the scores; None: one over the root of D.
        is_causal: Whether None as a mask means so; None: as the layer says.
        more: Left to torch.

    Returns:
        `[B, Q, heads, D]` and no weights.
    """
    queries, keys = query.shape[2], key.shape[2]
    if query.device.type == "cpu" and query.dtype in HALF and key.dtype == value.dtype == query.dtype:
        if queries == 1 and attention_mask is None:
            # With a mask, even one that hides nothing, transformers does not repeat the keys of a group for its heads.
            attention_mask = torch.ones(1, dtype=torch.bool).expand(len(query), 1, 1, keys)
        causal = bool(vars(module).get("is_causal", True)) if is_causal is None else is_causal
        understood = (queries == keys and causal) if attention_mask is None else attention_mask.shape[1] == 1
        plain = not dropout and more.get("position_bias") is None and more.get("softcap") is None
        if queries > 1 and queries * keys <= MAX_SCORES and understood and plain:
            scale = query.shape[3] ** -0.5 if scaling is None else scaling
            return _ByProducts.apply(query, key, value, _bias(attention_mask, queries), scale), None  # type: ignore[no-untyped-call]
    found, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **more
    )
    return found, None


class _ByProducts(Function):
    """Attention by products of matrices, a group's heads together; scores in float32, as torch's own has them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
        """`[B, Q, heads, D]`; arguments as for `attend`, `[B or 1, 1, Q, S]` what is added to the scores."""
        (batch, heads, queries, width), (groups, keys) = query.shape, key.shape[1:3]
        ctx.scale, ctx.shapes = scale, (query.shape, key.shape, value.shape)
        query = query.reshape(batch * groups, -1, width)
        key, value = key.reshape(batch * groups, keys, width), value.reshape(batch * groups, keys, -1)
        bias = bias.unsqueeze(2).expand(batch, groups, heads // groups, queries, keys).reshape(batch * groups, -1, keys)
        weights = torch.baddbmm(bias, query.float(), key.float().mT, alpha=scale).softmax(-1).to(value.dtype)
        found = torch.bmm(weights, value)
        ctx.save_for_backward(query, key, value, weights)
        return found.view(batch, heads, queries, -1).transpose(1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, weights = ctx.saved_tensors
        gradient = gradient.transpose(1, 2).reshape(*query.shape[:2], -1)
        slopes = torch.bmm(gradient, value.mT).float()
        slopes -= torch.linalg.vecdot(slopes, weights.float()).unsqueeze(-1)
        of_scores = slopes.mul_(weights).mul_(ctx.scale).to(query.dtype)
        found = torch.bmm(of_scores, key), torch.bmm(of_scores.mT, query), torch.bmm(weights.mT, gradient)
        of_query, of_key, of_value = (one.view(shape) for one, shape in zip(found, ctx.shapes, strict=True))
        return of_query, of_key, of_value, None, None


def _bias(mask: Tensor | None, length: int) -> Tensor:
    """`[B or 1, 1, Q, S]` what is added to the scores, finite also where a query sees nothing.

    Args:
        mask: As for `attend`.
        length: Q, and S too if there is no mask.
    """
    if mask is None:
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    lowest = torch.finfo(torch.float32).min / 2
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=torch.float32).masked_fill_(~mask, lowest)
    return mask.float().clamp(min=lowest)


# Here, and not when a model first uses it: a process that was sent such a model has only imported this.
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
