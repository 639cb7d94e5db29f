"""Advantages without a critic: a baseline from the group, a scale, and the penalty for leaving the reference policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["none", "group_mean", "leave_one_out", "group_max"] | Callable[[Tensor], Tensor]
"""What is subtracted from the returns of a group: a name, or a function of `[..., K]` returns."""
Normalization = Literal["group", "batch", False]
"""What the advantages are divided by: their group's standard deviation, one scale for the buffer, or nothing."""


def subtract_baseline(returns: Tensor, baseline: Baseline) -> Tensor:
    """`[..., K]` returns minus the baseline of their group.

    - ``"none"``: the returns (REINFORCE).
    - ``"group_mean"``: minus the mean of the group (GRPO, https://arxiv.org/abs/2402.03300).
    - ``"leave_one_out"``: minus the mean of the K-1 others (RLOO, https://arxiv.org/abs/2402.14740); equal to
      K/(K-1) times ``"group_mean"``.
    - a function: minus what it returns for the group.
    - ``"group_max"``: minus the best of the group. This compares with the best of K samples, hence is biased as an
      estimate of the policy gradient: for a success of probability .2 and K=4 it expects .078 where the true gradient
      is .16. ReMax (https://arxiv.org/abs/2310.10505) subtracts the reward of the greedy completion instead.

    Args:
        returns: `[..., K]` returns, one group per row.
        baseline: What to subtract.

    Returns:
        `[..., K]` differences; a group of equal returns gives exact zeros unless the baseline is ``"none"``.

    Raises:
        ValueError: If the baseline is unknown, or a function returns another shape.
    """
    if callable(baseline):
        difference = returns - _checked_baseline(baseline(returns), returns)
        best = returns.amax(-1, keepdim=True)
        rounding = 8 * torch.finfo(returns.dtype).eps * best.abs()
        is_constant = best == returns.amin(-1, keepdim=True)
        return difference.masked_fill(is_constant & (difference.abs() <= rounding), 0.0)
    if baseline == "none":
        return returns
    best = returns.amax(-1, keepdim=True)
    if baseline == "group_max":
        return returns - best
    centered = returns - returns.mean(-1, keepdim=True)
    if baseline == "leave_one_out":
        centered = centered * (returns.shape[-1] / max(returns.shape[-1] - 1, 1))
    elif baseline != "group_mean":
        raise ValueError(f"baseline={baseline!r} is unknown. Use 'none', 'group_mean', 'leave_one_out' or 'group_max'.")
    # The mean of equal numbers is not always that number.
    return centered.masked_fill(best == returns.amin(-1, keepdim=True), 0.0)


def _checked_baseline(baseline: object, returns: Tensor) -> Tensor:
    """What a function returned as baseline, `[..., 1]` or `[..., K]`."""
    shapes = [(*returns.shape[:-1], 1), tuple(returns.shape)]
    if not isinstance(baseline, Tensor) or tuple(baseline.shape) not in shapes:
        found = tuple(baseline.shape) if isinstance(baseline, Tensor) else repr(baseline)
        raise ValueError(
            f"baseline(returns) gave {found} for returns of shape {shapes[1]}. Return a tensor of shape {shapes[0]}."
        )

    return baseline


def group_mean(returns: Tensor) -> Tensor:
    """`[..., 1]` mean of each group of `[..., K]` returns."""
    return returns.mean(-1, keepdim=True)


def leave_one_out(returns: Tensor) -> Tensor:
    """`[..., K]` mean of the other K-1 returns of the group, for each of `[..., K]` returns."""
    return (returns.sum(-1, keepdim=True) - returns) / max(returns.shape[-1] - 1, 1)


def group_max(returns: Tensor) -> Tensor:
    """`[..., 1]` largest of each group of `[..., K]` returns."""
    return returns.amax(-1, keepdim=True)


def batch_moments(returns: Tensor) -> Tensor:
    """`[2]` sum of squares of the group-centered returns, and their number.

    Add them over ranks (and over groups of another size), then take `batch_rms`.

    Args:
        returns: `[..., K]` returns of one agent and turn, one group per row.

    Returns:
        `[2]` sum of squares and count in float64.
    """
    centered = subtract_baseline(returns.double(), "group_mean")
    return torch.stack((centered.square().sum(), centered.new_tensor(float(centered.numel()))))


def batch_rms(moments: Tensor) -> Tensor:
    """`[]` root mean square of the group-centered returns, 0 when there are none.

    Args:
        moments: `[2]` added results of `batch_moments`.

    Returns:
        `[]` scale for ``normalization="batch"``.
    """
    return (moments[0] / moments[1].clamp(min=1.0)).sqrt()


def group_advantages(
    returns: Tensor,
    baseline: Baseline,
    normalization: Normalization,
    *,
    rms: Tensor | None = None,
    eps: float = 1e-4,
) -> Tensor:
    """`[..., K]` advantages ``(R - baseline) / (sigma + eps)``.

    sigma is the population standard deviation of the group's *returns* (``"group"``, as in GRPO), the root mean square
    of the group-centered returns of the buffer (``"batch"``, which leaves a group of nearly equal returns small), or
    the division is left out (False, as in Dr. GRPO, https://arxiv.org/abs/2503.20783). The scale never re-centers: the
    four baselines stay different.

    Args:
        returns: `[..., K]` returns of one agent and turn, one group per row.
        baseline: What to subtract.
        normalization: What to divide by.
        rms: `[]` result of `batch_rms`, needed for ``"batch"``.
        eps: Added to sigma.

    Returns:
        `[..., K]` advantages.

    Raises:
        ValueError: If the normalization is unknown, or ``"batch"`` without `rms`.
    """
    centered = subtract_baseline(returns, baseline)
    if normalization is False:
        return centered
    if normalization == "group":
        return centered / (returns.std(-1, correction=0, keepdim=True) + eps)
    if normalization != "batch":
        raise ValueError(f"normalization={normalization!r} is unknown. Use 'group', 'batch' or False.")
    if rms is None:
        raise ValueError("normalization='batch' has no scale. Pass rms=batch_rms(moments).")
    # Without any spread there is no scale: raw returns must not be divided by almost nothing.
    return centered / torch.where(rms == 0, 1.0, rms + eps)


def subtract_kl(advantages: Tensor, kappa: Tensor, coefficient: float, baseline: Baseline) -> Tensor:
    """`[..., K]` normalized advantages minus ``coefficient * (kappa - its baseline)``.

    The penalty of a completion acts on that completion only, not on earlier turns, and enters no scale. kappa is
    centered as the returns are, on the group mean where their baseline is the maximum. It stays as it is without a
    baseline and in groups of one.

    Args:
        advantages: `[..., K]` advantages of one agent.
        kappa: `[..., K]` result of `sequence_kl` for the same completions.
        coefficient: Weight of the penalty.
        baseline: Baseline of the advantages.

    Returns:
        `[..., K]` advantages.
    """
    if kappa.shape[-1] <= 1:
        baseline = "none"
    elif baseline == "group_max":
        baseline = "group_mean"
    return advantages - coefficient * subtract_baseline(kappa, baseline)
