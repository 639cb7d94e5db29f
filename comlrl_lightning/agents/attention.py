"""Attention that is quick where torch's is slow: in half precision on a CPU.

There the backward pass of torch's fused attention takes several times as long as a few products of matrices, for short
sequences. Everything else goes on to transformers' own function for torch's attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
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
    if model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)


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
        understood = attention_mask is not None or (queries == keys and causal)
        plain = not dropout and more.get("position_bias") is None and more.get("softcap") is None
        if queries > 1 and queries * keys <= MAX_SCORES and understood and plain:
            return _attend_by_products(query, key, value, _bias(attention_mask, queries, query), scaling), None
    found, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **more
    )
    return found, None


def _attend_by_products(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float | None) -> Tensor:
    """`[B, Q, heads, D]` by two products of matrices, a group's heads together; arguments as for `attend`."""
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    scores = torch.baddbmm(
        bias.expand(batch, groups, heads // groups, queries, keys).reshape(batch * groups, -1, keys),
        query.reshape(batch * groups, -1, width),
        key.reshape(batch * groups, keys, width).mT,
        alpha=width**-0.5 if scaling is None else scaling,
    )
    found = torch.bmm(scores.softmax(-1), value.reshape(batch * groups, keys, -1))
    return found.view(batch, heads, queries, -1).transpose(1, 2).contiguous()


def _bias(mask: Tensor | None, length: int, like: Tensor) -> Tensor:
    """`[B or 1, 1, 1, Q, S]` what is added to the scores, finite also where a query sees nothing.

    Args:
        mask: As for `attend`.
        length: Q, and S too if there is no mask.
        like: Of the wanted dtype.
    """
    if mask is None:
        mask = like.new_ones(1, 1, length, length, dtype=torch.bool).tril()
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, torch.finfo(like.dtype).min / 2)
    return mask.to(like.dtype).unsqueeze(2)


# Here, and not when a model first uses it: a process that was sent such a model has only imported this.
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
