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
LossAggregation = Literal["sum", "constant", "sequence_mean", "token_mean"]
"""What the loss of a completion, a sum over its tokens, is divided by: see `token_divisors`."""


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
    dual_clip: float | None = None,
) -> PolicyLoss:
    """`[R]` loss of each completion as a sum over its tokens; the mean over a group is the loss of its node.

    Without old log-probs ``-A * sum(log pi)`` (REINFORCE). With them ``-sum(min(rho * A, clip(rho) * A))``, where the
    clip is ``[1 - clip_epsilon, 1 + clip_epsilon_high]`` or absent (PPO, https://arxiv.org/abs/1707.06347, equation 7;
    a wider upper bound is DAPO's, https://arxiv.org/abs/2503.14476). rho is ``pi / pi_old`` of each token, or
    of the completion, ``exp(mean(log pi - log pi_old))`` (GSPO, https://arxiv.org/abs/2507.18071), times the number of
    its tokens so that both levels have the same size.

    Where A is negative, nothing bounds ``rho * A`` from below. With `dual_clip` c the term is
    ``max(min(rho * A, clip(rho) * A), c * A)`` there (https://arxiv.org/abs/1912.09729): a ratio above c has
    no gradient any more.

    Args:
        log_probs: `[R, C]` log-probabilities under the policy, at the sampling temperature.
        advantages: `[R]` advantage of each completion.
        completion_mask: `[R, C]` True = a sampled token that counts.
        old_log_probs: `[R, C]` log-probabilities under the policy that the ratio compares with.
        clip_epsilon: How far below 1 a ratio may push, from 0 to below 1; None: no clip.
        clip_epsilon_high: How far above 1 a ratio may push, at least 0; None: `clip_epsilon`.
        importance_level: Ratio per token or per completion.
        dual_clip: Largest ratio that still counts where the advantage is negative, above 1; None: no limit.

    Returns:
        `[R]` losses, clipped tokens and tokens.

    Raises:
        ValueError: If the level is unknown, or a clip is out of range or given without old log-probs.
    """
    if importance_level not in get_args(ImportanceLevel):
        raise ValueError(f"importance_level={importance_level!r} is unknown. Use 'token' or 'sequence'.")
    low, high = _log_ratio_bounds(clip_epsilon, clip_epsilon_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip} is out of range. Use a number above 1, such as 3.0, or None.")
    highest = math.inf if dual_clip is None else math.log(dual_clip)
    num_tokens = completion_mask.sum(-1)
    if old_log_probs is None:
        for name, value in (("clip_epsilon", clip_epsilon), ("dual_clip", dual_clip)):
            if value is not None:
                raise ValueError(f"{name}={value} has no ratio to clip. Pass old_log_probs.")
        return PolicyLoss(
            -advantages * masked_sum(log_probs, completion_mask), torch.zeros_like(num_tokens), num_tokens
        )
    log_ratio = (log_probs - old_log_probs.detach()).masked_fill(~completion_mask, 0.0)
    if importance_level == "sequence":
        log_ratio = (log_ratio.sum(-1) / num_tokens.clamp(min=1)).unsqueeze(-1).expand_as(log_probs)
    weights = advantages.unsqueeze(-1)
    too_high, too_low = (weights > 0) & (log_ratio > high), (weights < 0) & (log_ratio < low)
    far_too_high = (weights < 0) & (log_ratio > highest)
    # Clipping the logarithm, not the ratio: exp() of a stopped token cannot turn its zero gradient into NaN.
    bounded = log_ratio.masked_fill(too_high, high).masked_fill(too_low, low).masked_fill(far_too_high, highest)
    ratio = bounded.exp()
    clipped = (too_high | too_low | far_too_high) & completion_mask
    return PolicyLoss(-masked_sum(weights * ratio, completion_mask), clipped.sum(-1), num_tokens)


def token_divisors(lengths: Tensor, aggregation: LossAggregation, *, max_tokens: float, mean_tokens: float) -> Tensor:
    """`[R]` divisor of the loss of each completion, which `policy_loss` sums over its tokens.

    The gradient of the expected return is ``E[A * grad log pi(y)]``, and ``log pi(y)`` is a sum over tokens:

    - ``"sum"`` divides by 1: as unbiased as the advantages are. The norm of the gradient grows with the lengths.
    - ``"constant"`` divides by `max_tokens`: Dr. GRPO (https://arxiv.org/abs/2503.20783). The same direction at
      ``1 / max_tokens`` of the size: unbiased up to that scale.
    - ``"sequence_mean"`` divides by the completion's own length: GRPO (https://arxiv.org/abs/2402.03300). Biased,
      whatever the number of samples: returns of short completions count more, and the sign may turn.
    - ``"token_mean"`` divides by `mean_tokens` of the sampled completions: DAPO (https://arxiv.org/abs/2503.14476).
      Biased, as the divisor depends on what was sampled; the bias falls as one over the number of completions.

    A short completion ("s", one token) or a long one (three) with probability .5 each, returns 1 and 2: the gradient to
    the logit of the short one is -.25, ``"constant"`` with 4 gives -.0625 and ``"sequence_mean"`` +.0833.

    Args:
        lengths: `[R]` tokens of each completion.
        aggregation: One of the four.
        max_tokens: The constant, such as the largest number of tokens that sampling allows.
        mean_tokens: Mean number of tokens over a set of completions that hangs neither on micro-batches nor on ranks.

    Returns:
        `[R]` divisors, at least 1.

    Raises:
        ValueError: If the aggregation is unknown.
    """
    divisors = {
        "sum": torch.ones_like(lengths),
        "constant": torch.full_like(lengths, max_tokens),
        "sequence_mean": lengths,
        "token_mean": torch.full_like(lengths, mean_tokens),
    }
    if aggregation not in divisors:
        allowed = "'sum', 'constant', 'sequence_mean' or 'token_mean'"
        raise ValueError(f"loss_aggregation={aggregation!r} is unknown. Use {allowed}.")
    return divisors[aggregation].clamp(min=1.0)


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
