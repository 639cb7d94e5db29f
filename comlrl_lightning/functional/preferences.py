"""Losses of preference pairs: the policy's own, of a joint completion against another, and the reward model's."""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch import Tensor
from torch.nn import functional as F

from comlrl_lightning.functional.log_probs import masked_sum

PreferenceLossType = Literal["sigmoid", "ipo"]
"""What the sum of a pair's margins is put into: see `joint_preference_loss`."""


def sequence_log_probs(log_probs: Tensor, mask: Tensor, *, length_normalized: bool = False) -> Tensor:
    """`[...]` log-probability of each completion; 0 for one without tokens.

    Args:
        log_probs: `[..., C]` log-probabilities of the tokens, at the sampling temperature.
        mask: `[..., C]` True = a sampled token that counts.
        length_normalized: Mean over the tokens (https://arxiv.org/abs/2405.14734) instead of their sum.
    """
    sums = masked_sum(log_probs, mask)
    return sums / mask.sum(-1).clamp(min=1) if length_normalized else sums


def sequence_margins(
    winner_log_probs: Tensor,
    winner_mask: Tensor,
    loser_log_probs: Tensor,
    loser_mask: Tensor,
    *,
    length_normalized: bool = False,
) -> Tensor:
    """`[...]` how much likelier an agent's winning completion is than its losing one, as log-probabilities.

    Args:
        winner_log_probs: `[..., C]` log-probabilities of the winning completions' tokens, at the sampling temperature.
        winner_mask: `[..., C]` True = a sampled token that counts.
        loser_log_probs: `[..., D]` the same of the losing completions, which may be padded to another length.
        loser_mask: `[..., D]` the same.
        length_normalized: Compare means over the tokens (https://arxiv.org/abs/2405.14734) instead of sums.

    Returns:
        `[...]` margins; a completion without tokens counts as 0.
    """
    sides = (winner_log_probs, winner_mask), (loser_log_probs, loser_mask)
    winner, loser = (sequence_log_probs(*side, length_normalized=length_normalized) for side in sides)
    return winner - loser


def joint_preference_loss(
    margins: Tensor,
    beta: float,
    reference_margins: Tensor | None = None,
    *,
    loss_type: PreferenceLossType = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`[R]` loss of each pair of joint completions: ``-log sigmoid(beta * sum_i (m_i - m_ref_i))``.

    It is DPO (https://arxiv.org/abs/2305.18290, equation 7) of the team, whose joint completion has the product of the
    agents' probabilities. Without a reference its margins count as 0. Each agent's margin gets the same gradient,
    ``-beta * sigmoid(-beta * sum)``: those of the others say how much there is left to learn.

    With `label_smoothing` e the pair is taken for reversed with probability e (https://ericmitchell.ai/cdpo.pdf):
    ``-(1 - e) * log sigmoid(beta * sum) - e * log sigmoid(-beta * sum)``, smallest at a finite sum. The type ``"ipo"``
    is ``(sum - 1 / (2 * beta))^2`` (https://arxiv.org/abs/2310.12036): a target for the sum, so that a pair that always
    comes out the same way does not drive the policy away from its reference without end.

    Args:
        margins: `[R, N]` margin of each agent in each pair, as `sequence_margins` gives it.
        beta: Above 0; the larger, the smaller the margin that satisfies, and the closer the policy stays to the
            reference.
        reference_margins: `[R, N]` margins under the reference policy, which get no gradient; None: no reference.
        loss_type: ``"sigmoid"`` or ``"ipo"``.
        label_smoothing: Share of the pairs whose order is taken for wrong, from 0 to below .5; 0 with ``"ipo"``.

    Returns:
        `[R]` losses.

    Raises:
        ValueError: If `beta` is not a positive number, the type is unknown, or the smoothing does not fit.
    """
    check_loss_type(loss_type, label_smoothing)
    if not 0 < beta < math.inf:
        raise ValueError(f"beta={beta} is out of range. Use a number above 0.")
    if reference_margins is not None:
        margins = margins - reference_margins.detach()
    total = margins.sum(-1)
    if loss_type == "ipo":
        return (total - 1 / (2 * beta)).square()
    losses = -F.logsigmoid(beta * total)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * F.logsigmoid(-beta * total)
    return losses


def check_loss_type(loss_type: str, label_smoothing: float) -> None:
    """Refuse a type of the preference loss that does not exist, or a smoothing that it does not have.

    Raises:
        ValueError: It names the argument, its value and what is allowed.
    """
    if loss_type not in get_args(PreferenceLossType):
        raise ValueError(f"loss_type={loss_type!r} is unknown. Use 'sigmoid' or 'ipo'.")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing!r} is out of range. Use a number from 0 to below 0.5.")
    if loss_type == "ipo" and label_smoothing:
        raise ValueError(
            f"label_smoothing={label_smoothing!r} has no meaning with loss_type='ipo'. Use 0.0 or 'sigmoid'."
        )


def bradley_terry_loss(winner_scores: Tensor, loser_scores: Tensor, centering_coef: float = 0.0) -> Tensor:
    """`[R]` loss of each pair under a reward model: ``-log sigmoid(s_w - s_l) + centering_coef * (s_w + s_l)^2``.

    The first term is the negative log-likelihood of the preference (Bradley and Terry 1952,
    https://doi.org/10.2307/2334029). It leaves the scores of a prompt free up to a constant; the second term fixes that
    constant near 0 (https://arxiv.org/abs/2312.09244, equation 2; .01 is usual).

    Args:
        winner_scores: `[R]` score of each winner.
        loser_scores: `[R]` score of each loser.
        centering_coef: Weight of the second term, at least 0.

    Returns:
        `[R]` losses.

    Raises:
        ValueError: If `centering_coef` is negative or no number.
    """
    if not 0 <= centering_coef < math.inf:
        raise ValueError(f"centering_coef={centering_coef} is out of range. Use a number of at least 0.")
    losses = -F.logsigmoid(winner_scores - loser_scores)
    if centering_coef:
        losses = losses + centering_coef * (winner_scores + loser_scores).square()
    return losses
