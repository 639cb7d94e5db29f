"""The policy loss of sampled completions, on policy or with importance ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from comlrl_lightning.functional.log_probs import masked_sum

ImportanceLevel = Literal["token", "sequence"]
"""Whether each token has its own importance ratio or a completion has one, the geometric mean of them."""


class PolicyLoss(NamedTuple):
    """Losses and counts per completion, to be added over completions, micro-batches and ranks."""

    loss: Tensor
    """`[R]` loss of each completion, summed over its tokens."""
    num_clipped: Tensor
    """`[R]` tokens whose gradient the clip stopped."""
    num_tokens: Tensor
    """`[R]` tokens that count."""
    sums: Mapping[str, Tensor] = MappingProxyType({})
    """Further `[R]` sums to log, by name."""


def policy_loss(
    log_probs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    clip_epsilon: float | None = None,
    clip_epsilon_high: float | None = None,
    importance_level: ImportanceLevel = "token",
) -> PolicyLoss:
    """`[R]` loss of each completion as a sum over its tokens; the mean over a group is the loss of its node.

    Without old log-probs ``-A * sum(log pi)`` (REINFORCE). With them ``-sum(min(rho * A, clip(rho) * A))``, where the
    clip is ``[1 - clip_epsilon, 1 + clip_epsilon_high]`` or absent (PPO, https://arxiv.org/abs/1707.06347, equation 7;
    a wider upper bound is DAPO's, https://arxiv.org/abs/2503.14476). rho is ``pi / pi_old`` of each token, or
    of the completion, ``exp(mean(log pi - log pi_old))`` (GSPO, https://arxiv.org/abs/2507.18071), times the number of
    its tokens so that both levels have the same size.

    Args:
        log_probs: `[R, C]` log-probabilities under the policy, at the sampling temperature.
        advantages: `[R]` advantage of each completion.
        completion_mask: `[R, C]` True = a sampled token that counts.
        old_log_probs: `[R, C]` log-probabilities under the policy that the ratio compares with.
        clip_epsilon: How far below 1 a ratio may push, from 0 to below 1; None: no clip.
        clip_epsilon_high: How far above 1 a ratio may push, at least 0; None: `clip_epsilon`.
        importance_level: Ratio per token or per completion.

    Returns:
        `[R]` losses, clipped tokens and tokens.

    Raises:
        ValueError: If the level is unknown, or a clip is out of range or given without old log-probs.
    """
    if importance_level not in get_args(ImportanceLevel):
        raise ValueError(f"importance_level={importance_level!r} is unknown. Use 'token' or 'sequence'.")
    low, high = _log_ratio_bounds(clip_epsilon, clip_epsilon_high)
    num_tokens = completion_mask.sum(-1)
    if old_log_probs is None:
        if clip_epsilon is not None:
            raise ValueError(f"clip_epsilon={clip_epsilon} has no ratio to clip. Pass old_log_probs.")
        return PolicyLoss(
            -advantages * masked_sum(log_probs, completion_mask), torch.zeros_like(num_tokens), num_tokens
        )
    log_ratio = (log_probs - old_log_probs.detach()).masked_fill(~completion_mask, 0.0)
    if importance_level == "sequence":
        log_ratio = (log_ratio.sum(-1) / num_tokens.clamp(min=1)).unsqueeze(-1).expand_as(log_probs)
    weights = advantages.unsqueeze(-1)
    too_high, too_low = (weights > 0) & (log_ratio > high), (weights < 0) & (log_ratio < low)
    # Clipping the logarithm, not the ratio: exp() of a stopped token cannot turn its zero gradient into NaN.
    ratio = log_ratio.masked_fill(too_high, high).masked_fill(too_low, low).exp()
    clipped = (too_high | too_low) & completion_mask
    return PolicyLoss(-masked_sum(weights * ratio, completion_mask), clipped.sum(-1), num_tokens)


def _log_ratio_bounds(clip_epsilon: float | None, clip_epsilon_high: float | None) -> tuple[float, float]:
    """Logarithms of the lowest and the highest ratio that still has a gradient."""
    if clip_epsilon is None:
        if clip_epsilon_high is not None:
            raise ValueError(f"clip_epsilon_high={clip_epsilon_high} needs a lower bound too. Give clip_epsilon.")
        return -math.inf, math.inf
    high = clip_epsilon if clip_epsilon_high is None else clip_epsilon_high
    if not 0 <= clip_epsilon < 1:
        raise ValueError(f"clip_epsilon={clip_epsilon} is out of range. Use a number from 0 to below 1.")
    if high < 0:
        raise ValueError(f"clip_epsilon_high={high} is out of range. Use a number of at least 0.")
    return math.log1p(-clip_epsilon), math.log1p(high)
