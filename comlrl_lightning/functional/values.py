"""Credit with a critic: advantages over the turns of a trajectory, targets of the critic, and its loss.

A trajectory is one joint completion per turn; its T turns may be fewer than those of others. Nothing is expected after
its last turn, whether it was the last one allowed or the trajectory ended early. Sums that end in ``moments`` add over
ranks before they are used.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 1e-13
"""Largest share of a sum of squares that rounding alone can leave between equal numbers."""
MIN_SAMPLES = 4
"""Fewest advantages whose spread is a scale. Two give +1 and -1, be the gap a difference in quality or noise. For n
normal samples the weight of a buffer, ``1 / deviation``, has a finite variance from n = 4 on: its standard deviation
over its mean is .76, .32 and .20 for n = 4, 8 and 16."""


class Credit(NamedTuple):
    """What a critic's values make of the rewards of a trajectory."""

    advantages: Tensor
    """`[..., T]` generalized advantages."""
    targets: Tensor
    """`[..., T]` what the values should have been: advantages plus values."""


def gae(rewards: Tensor, values: Tensor, discount: float | Tensor, gae_lambda: float) -> Credit:
    """`[..., T]` generalized advantages and value targets of trajectories (https://arxiv.org/abs/1506.02438, eq. 16).

    ``A_t = delta_t + discount * gae_lambda * A_{t+1}`` with ``delta_t = r_t + discount * V_{t+1} - V_t``, and nothing
    after the last turn. A lambda of 0 gives the TD error, a lambda of 1 the return minus the value.

    Args:
        rewards: `[..., T]` reward of each turn.
        values: `[..., T]` value of each turn as the critic saw it when the trajectory was sampled.
        discount: Factor per turn; `[..., T]` factors from each turn to the next if they differ.
        gae_lambda: From 0 (the critic is trusted) to 1 (the rewards alone).
    """
    discount = torch.as_tensor(discount, dtype=values.dtype).expand_as(values)
    following = torch.cat([values[..., 1:], torch.zeros_like(values[..., :1])], dim=-1)
    advantages = rewards + discount * following - values
    for turn in reversed(range(advantages.shape[-1] - 1)):
        advantages[..., turn] += discount[..., turn] * gae_lambda * advantages[..., turn + 1]
    return Credit(advantages, advantages + values)


def rewards_between_acts(rewards: Tensor, acts: Tensor, discount: float) -> tuple[Tensor, Tensor]:
    """Rewards and discounts of a trajectory as an agent sees it that acts at some of its steps only.

    The reward of an act at step t is ``sum_{s=t}^{u-1} discount^(s-t) r_s`` up to its next act at step u, to which the
    factor ``discount^(u-t)`` leads: a semi-Markov decision process (Sutton, Precup and Singh, 1999). Rewards before the
    first act belong to no act.

    Example: rewards (1, 2, 4), acts at steps 1 and 3, discount 1/2: rewards (2, 4), discounts (1/4, 1/2).

    Args:
        rewards: `[T]` reward of each step.
        acts: `[T]` True = the agent acts.
        discount: Factor per step.

    Returns:
        `[A]` rewards and `[A]` discounts of its A acts.
    """
    steps = torch.nonzero(acts).flatten().tolist()
    ends = [*steps[1:], len(rewards)]
    summed = [
        sum(discount ** (step - start) * float(rewards[step]) for step in range(start, end))
        for start, end in zip(steps, ends, strict=False)
    ]
    factors = [discount ** (end - start) for start, end in zip(steps, ends, strict=False)]
    return rewards.new_tensor(summed), rewards.new_tensor(factors)


def leave_one_out_weights(targets: Tensor, values: Tensor) -> Tensor:
    """`[..., K]` what weighs each completion under a q-critic: its target minus the mean value of its siblings.

    The TD error cannot do that: it vanishes when the critic is right, good completions and bad ones alike. The siblings
    are other samples of the same prompts, so that their values are a baseline independent of the own completion.

    Args:
        targets: `[..., K]` targets of K completions of the same prompts.
        values: `[..., K]` values ``Q(prompts, completion)`` as the critic saw them.

    Returns:
        `[..., K]` weights; the targets where there are no siblings.
    """
    num_siblings = targets.shape[-1] - 1
    if num_siblings < 1:
        return targets
    return targets - (values.sum(-1, keepdim=True) - values) / num_siblings


def advantage_moments(advantages: Tensor) -> Tensor:
    """`[3]` number, sum and sum of squares of the advantages of one agent and turn, in float64.

    Args:
        advantages: Any shape.
    """
    wide = advantages.double()
    return torch.stack((wide.new_tensor(float(wide.numel())), wide.sum(), wide.square().sum()))


def center_and_scale(advantages: Tensor, moments: Tensor, eps: float = 1e-4) -> Tensor:
    """Advantages minus their mean, divided by their standard deviation, with the shape of `advantages`.

    Equal advantages give zeros. Fewer than `MIN_SAMPLES` stay as they are, in units of reward: a critic has been
    subtracted from them already, and centered, n of them would lose 1/n of their gradient.

    Args:
        advantages: Any shape, of one agent and turn.
        moments: `[3]` added results of `advantage_moments`.
        eps: Added to the standard deviation.
    """
    count, total, squares = moments.to(advantages.device).unbind()
    if count < MIN_SAMPLES:
        return advantages
    mean = total / count
    variance = squares / count - mean.square()
    if variance <= ROUNDING * squares / count:
        return torch.zeros_like(advantages)
    return ((advantages - mean) / (variance.sqrt() + eps)).to(advantages.dtype)


def value_loss(
    values: Tensor, targets: Tensor, old_values: Tensor | None = None, clip_range: float | None = None
) -> Tensor:
    """Squared error of each value, with the shape of `values`.

    With a range, the larger of the errors of the value and of the value held within the range of the old one: a value
    that has moved so far toward its target gets no more gradient.

    Args:
        values: Values of the critic, any shape.
        targets: Their targets, of the same shape.
        old_values: The values before the first update, of the same shape; needed with a range.
        clip_range: Largest change, in the unit of rewards; None: no limit.

    Raises:
        ValueError: If the range is not positive, or lacks old values.
    """
    errors = (values - targets).square()
    if clip_range is None:
        return errors
    if not clip_range > 0:
        raise ValueError(f"clip_range={clip_range} is out of range. Use a number above 0, or None.")
    if old_values is None:
        raise ValueError(f"clip_range={clip_range} has nothing to measure the change from. Pass old_values.")
    held = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return torch.maximum(errors, (held - targets).square())


def explained_variance_moments(values: Tensor, returns: Tensor) -> Tensor:
    """`[5]` number, and sums and sums of squares of the returns and of the errors of the values, in float64.

    Args:
        values: Values of the critic, any shape.
        returns: Monte-Carlo returns of the same shape: targets that hold the critic's own values would flatter it.
    """
    wide, errors = returns.double(), (returns - values).double()
    count = wide.new_tensor(float(wide.numel()))
    return torch.stack((count, wide.sum(), wide.square().sum(), errors.sum(), errors.square().sum()))


def explained_variance(moments: Tensor) -> float:
    """Share of the returns' variance that the values explain: 1 is perfect, 0 no better than a constant.

    Args:
        moments: `[5]` added results of `explained_variance_moments`.

    Returns:
        The share, of either sign; NaN where the returns do not differ.
    """
    count, total, squares, error_total, error_squares = map(float, moments.tolist())
    if not count:
        return math.nan
    variance = squares / count - (total / count) ** 2
    if variance <= ROUNDING * squares / count:
        return math.nan
    return 1.0 - (error_squares / count - (error_total / count) ** 2) / variance
