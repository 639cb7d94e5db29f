"""Credit with a critic, against hand-computed numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from comlrl_lightning.functional import (
    advantage_moments,
    center_and_scale,
    explained_variance,
    explained_variance_moments,
    gae,
    leave_one_out_weights,
    value_loss,
)

REWARDS = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
VALUES = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64)


def wide(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_advantages_between_td_and_returns() -> None:
    # delta = (1 + .9*1 - .5, 0 + .9*1.5 - 1, 2 - 1.5) = (1.4, .35, .5); the factor per turn is .9 * .5 = .45:
    # A3 = .5, A2 = .35 + .45*.5 = .575, A1 = 1.4 + .45*.575 = 1.65875.
    credit = gae(REWARDS, VALUES, discount=0.9, gae_lambda=0.5)
    torch.testing.assert_close(credit.advantages, wide(1.65875, 0.575, 0.5))
    torch.testing.assert_close(credit.targets, wide(2.15875, 1.575, 2.0))


def test_lambda_zero_is_one_step_td() -> None:
    # Targets: 1 + .9*1, 0 + .9*1.5, 2.
    torch.testing.assert_close(gae(REWARDS, VALUES, 0.9, 0.0).targets, wide(1.9, 1.35, 2.0))


def test_lambda_one_targets_the_returns() -> None:
    # 1 + .9*(0 + .9*2), .9*2, 2: whatever the values are.
    torch.testing.assert_close(gae(REWARDS, VALUES, 0.9, 1.0).targets, wide(2.62, 1.8, 2.0))
    torch.testing.assert_close(gae(REWARDS, 5 * VALUES, 0.9, 1.0).targets, wide(2.62, 1.8, 2.0))


def test_nothing_is_expected_after_an_early_end() -> None:
    # delta = (1.4, 0 - 1): A = (1.4 - .45, -1).
    credit = gae(REWARDS[:2], VALUES[:2], 0.9, 0.5)
    torch.testing.assert_close(credit.advantages, wide(0.95, -1.0))
    torch.testing.assert_close(credit.targets, wide(1.45, 0.0))


def test_one_turn_and_no_turn() -> None:
    assert gae(wide(2.0), wide(0.5), 0.9, 0.5).advantages.tolist() == [1.5]
    assert gae(wide(), wide(), 0.9, 0.5).targets.tolist() == []


def test_several_agents_at_once_and_arguments_kept() -> None:
    rewards, values = torch.stack((REWARDS, 2 * REWARDS)), torch.stack((VALUES, VALUES))
    credit = gae(rewards, values, 0.9, 0.5)
    torch.testing.assert_close(credit.advantages[0], wide(1.65875, 0.575, 0.5))
    torch.testing.assert_close(credit.targets[1], gae(2 * REWARDS, VALUES, 0.9, 0.5).targets)
    assert torch.equal(rewards[0], REWARDS)
    assert torch.equal(values[0], VALUES)


def test_centering() -> None:
    # Mean 3, population deviation sqrt(3.5) = 1.870829 (+ 1e-4).
    advantages = wide(1.0, 2.0, 3.0, 6.0)
    expected = wide(-1.06899, -0.53449, 0.0, 1.60348)
    torch.testing.assert_close(center_and_scale(advantages, advantage_moments(advantages)), expected, atol=1e-5, rtol=0)


def test_moments_add_over_ranks() -> None:
    # Together mean 6 and deviation sqrt(26) = 5.09902; each rank alone would give -1 and 1 twice.
    ranks = wide(0.0, 2.0), wide(10.0, 12.0)
    moments = advantage_moments(ranks[0]) + advantage_moments(ranks[1])
    expected = wide(-1.17667, -0.78445), wide(0.78445, 1.17667)
    for rank, values in zip(ranks, expected, strict=True):
        torch.testing.assert_close(center_and_scale(rank, moments), values, atol=1e-5, rtol=0)


def test_a_few_advantages_stay() -> None:
    # Scaled, a gap of .001 would be as large as one of 1: -1 and 1.
    for few in (wide(), wide(3.0), wide(0.5, 0.501), wide(0.0, 1.0), wide(1.0, 2.0, 6.0)):
        assert center_and_scale(few, advantage_moments(few)).tolist() == few.tolist()
    # One on this rank, but four over all: -1/(1 + 1e-4).
    moments = advantage_moments(wide(3.0)) + advantage_moments(wide(3.0, 5.0, 5.0))
    torch.testing.assert_close(center_and_scale(wide(3.0), moments), wide(-1.0 / 1.0001))


@pytest.mark.parametrize(("number", "count"), [(0.35, 7), (0.7, 1000), (-123.456, 13), (0.0, 4)])
def test_equal_advantages_give_exact_zeros(number: float, count: int) -> None:
    advantages = torch.full((count,), number, dtype=torch.float64)
    assert not center_and_scale(advantages, advantage_moments(advantages)).any()


def test_a_small_spread_around_a_large_mean_is_no_rounding() -> None:
    # Deviation 1e-3 around 100, a relative spread of 1e-5: (-1e-3, 1e-3) / 1.1e-3.
    advantages = wide(99.999, 100.001, 99.999, 100.001)
    scaled = center_and_scale(advantages, advantage_moments(advantages))
    torch.testing.assert_close(scaled, wide(-1 / 1.1, 1 / 1.1, -1 / 1.1, 1 / 1.1), atol=1e-4, rtol=0)


def test_centering_keeps_the_number_format() -> None:
    advantages = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert center_and_scale(advantages, advantage_moments(advantages)).dtype == torch.float32


def test_value_loss_is_the_squared_error() -> None:
    assert value_loss(wide(1.5, 1.0), wide(2.0, -1.0)).tolist() == [0.25, 4.0]


def test_clipped_value_loss() -> None:
    # The old value 1 holds 1.5 down to 1.2. Target 2: (2 - 1.2)^2 = .64 is the larger error and has no gradient.
    # Target 1: .5^2 = .25 is larger than .2^2 and pulls with 2 * .5.
    values = wide(1.5, 1.5).requires_grad_()
    loss = value_loss(values, wide(2.0, 1.0), wide(1.0, 1.0), 0.2)
    torch.testing.assert_close(loss.detach(), wide(0.64, 0.25))
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    torch.testing.assert_close(values.grad, wide(0.0, 1.0))


def test_the_range_does_nothing_inside() -> None:
    # 1.1 is within .2 of 1 on either side of its targets: (1.1 - t)^2 and 2 * (1.1 - t).
    values = wide(1.1, 1.1).requires_grad_()
    loss = value_loss(values, wide(2.0, 0.0), wide(1.0, 1.0), 0.2)
    torch.testing.assert_close(loss.detach(), wide(0.81, 1.21))
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    torch.testing.assert_close(values.grad, wide(-1.8, 2.2))


def test_wrong_value_clips() -> None:
    with pytest.raises(ValueError, match=r"clip_range=0.2 has nothing to measure the change from"):
        value_loss(wide(1.0), wide(1.0), clip_range=0.2)
    with pytest.raises(ValueError, match=r"clip_range=0.0 is out of range"):
        value_loss(wide(1.0), wide(1.0), wide(1.0), 0.0)
    with pytest.raises(ValueError, match=r"clip_range=nan is out of range"):
        value_loss(wide(1.0), wide(1.0), wide(1.0), math.nan)


def _expected_gradient(values: Tensor) -> float:
    """Gradient in the logit of a Bernoulli policy at p = .5 with reward = action, exact over both siblings' draws."""
    total = 0.0
    for actions in ([0, 0], [0, 1], [1, 0], [1, 1]):
        weights = leave_one_out_weights(wide(*map(float, actions)), values[actions])
        # Each draw has probability 1/4; grad log pi is a - p; the loss is a mean over the two siblings.
        total += sum(float(weight) * (action - 0.5) for weight, action in zip(weights, actions, strict=True)) / 2 / 4
    return total


def test_a_converged_q_critic_still_teaches() -> None:
    # The expected reward p has the gradient p(1 - p) = .25. A right critic (Q = action), a blind one and a wrong one
    # all leave it as it is.
    for values in (wide(0.0, 1.0), wide(0.0, 0.0), wide(3.0, -7.0)):
        assert _expected_gradient(values) == pytest.approx(0.25)
    # The TD error of a right critic is 0 for every action.
    assert not gae(wide(0.0, 1.0)[:, None], wide(0.0, 1.0)[:, None], 1.0, 0.0).advantages.any()


def test_leave_one_out_weights() -> None:
    # Targets 3, 5, 1; values 1, 2, 6: 3 - (2 + 6)/2, 5 - (1 + 6)/2, 1 - (1 + 2)/2.
    assert leave_one_out_weights(wide(3, 5, 1), wide(1, 2, 6)).tolist() == [-1.0, 1.5, -0.5]


def test_without_siblings_the_target_stays() -> None:
    assert leave_one_out_weights(wide(3.0), wide(1.0)).tolist() == [3.0]


def test_explained_variance() -> None:
    # Returns 0, 2, 4: variance 8/3. Errors -1, 0, 1: variance 2/3.
    returns = wide(0.0, 2.0, 4.0)
    assert explained_variance(explained_variance_moments(wide(1, 2, 3), returns)) == pytest.approx(0.75)
    assert explained_variance(explained_variance_moments(returns, returns)) == 1.0
    # A constant explains nothing, a constant error costs nothing, and an opposite guess is worse than a constant.
    assert explained_variance(explained_variance_moments(wide(7, 7, 7), returns)) == pytest.approx(0.0)
    assert explained_variance(explained_variance_moments(returns + 9, returns)) == pytest.approx(1.0)
    assert explained_variance(explained_variance_moments(wide(4, 2, 0), returns)) == pytest.approx(-3.0)


def test_explained_variance_over_ranks() -> None:
    moments = explained_variance_moments(wide(1), wide(0)) + explained_variance_moments(wide(2, 3), wide(2, 4))
    assert explained_variance(moments) == pytest.approx(0.75)


def test_no_variance_is_not_explained() -> None:
    assert math.isnan(explained_variance(torch.zeros(5)))
    assert math.isnan(explained_variance(explained_variance_moments(wide(1, 2, 3), wide(0.1, 0.1, 0.1))))
