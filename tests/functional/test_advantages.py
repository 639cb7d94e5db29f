"""Baselines, scales and the reference penalty of the critic-free methods."""

from __future__ import annotations

from itertools import product
from typing import cast

import pytest
import torch

from comlrl_lightning.functional import (
    Baseline,
    Normalization,
    batch_moments,
    batch_rms,
    group_advantages,
    subtract_baseline,
    subtract_kl,
)

CENTERED: tuple[Baseline, ...] = ("group_mean", "leave_one_out", "group_max")

# R = (0, 1, 2, 4): mean 1.75, squares of the differences 3.0625, .5625, .0625, 5.0625.
# sigma = sqrt(8.75 / 4) = 1.47902; divided by 1.47912 = sigma + 1e-4.
# Leave-one-out is 4/3 of the mean's row, e.g. 0 - 7/3; the maximum is 4.
ROWS: dict[Baseline, list[float]] = {
    "none": [0.0, 0.67608, 1.35216, 2.70431],
    "group_mean": [-1.18314, -0.50706, 0.16902, 1.52117],
    "leave_one_out": [-1.57751, -0.67608, 0.22536, 2.02823],
    "group_max": [-2.70431, -2.02823, -1.35216, 0.0],
}
DIFFERENCES: dict[Baseline, list[float]] = {
    "none": [0.0, 1.0, 2.0, 4.0],
    "group_mean": [-1.75, -0.75, 0.25, 2.25],
    "leave_one_out": [-7 / 3, -1.0, 1 / 3, 3.0],
    "group_max": [-4.0, -3.0, -2.0, 0.0],
}


@pytest.mark.parametrize("baseline", ROWS)
def test_group_normalization_divides_by_the_deviation_of_the_returns(baseline: Baseline) -> None:
    returns = torch.tensor([[0.0, 1.0, 2.0, 4.0]])
    advantages = group_advantages(returns, baseline, "group")
    torch.testing.assert_close(advantages, torch.tensor([ROWS[baseline]]), atol=5e-6, rtol=0)


@pytest.mark.parametrize("baseline", DIFFERENCES)
def test_each_group_has_its_own_baseline(baseline: Baseline) -> None:
    # A constant added to a group changes nothing but with no baseline.
    shift = 10.0 if baseline == "none" else 0.0
    row = torch.tensor(DIFFERENCES[baseline])
    returns = torch.tensor([[0.0, 1.0, 2.0, 4.0], [10.0, 11.0, 12.0, 14.0]])
    torch.testing.assert_close(subtract_baseline(returns, baseline), torch.stack((row, row + shift)))
    torch.testing.assert_close(group_advantages(returns, baseline, False), torch.stack((row, row + shift)))


@pytest.mark.parametrize("normalization", ["group", False])
def test_any_number_of_dimensions_may_lead(normalization: Normalization) -> None:
    returns = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    kappa = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    together = subtract_kl(group_advantages(returns, "group_mean", normalization), kappa, 0.5, "group_mean")
    alone = subtract_kl(group_advantages(returns[1, 2], "group_mean", normalization), kappa[1, 2], 0.5, "group_mean")
    torch.testing.assert_close(together[1, 2], alone)
    torch.testing.assert_close(batch_moments(returns), sum(batch_moments(group) for group in returns))


def test_leave_one_out_of_a_pair_is_the_difference() -> None:
    torch.testing.assert_close(subtract_baseline(torch.tensor([0.0, 1.0]), "leave_one_out"), torch.tensor([-1.0, 1.0]))


def test_leave_one_out_is_a_multiple_of_the_group_mean() -> None:
    returns = torch.tensor([0.3, -1.2, 7.0, 2.5, 2.5])
    expected = subtract_baseline(returns, "group_mean") * 5 / 4
    torch.testing.assert_close(subtract_baseline(returns, "leave_one_out"), expected)


def test_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^baseline='greedy' is unknown\. Use 'none', 'group_mean', .*'group_max'\.$"):
        subtract_baseline(torch.tensor([0.0, 1.0]), cast(Baseline, "greedy"))


@pytest.mark.parametrize("baseline", CENTERED)
@pytest.mark.parametrize("normalization", ["group", False])
def test_equal_returns_give_exact_zeros(baseline: Baseline, normalization: Normalization) -> None:
    # The mean of seven .35 in float32 is not .35: without a branch something of 4e-8 is left over.
    returns = torch.full((2, 7), 0.35)
    assert (returns - returns.mean(-1, keepdim=True)).abs().max() > 0
    assert group_advantages(returns, baseline, normalization).eq(0).all()


def test_only_the_constant_group_is_zero() -> None:
    centered = subtract_baseline(torch.tensor([[0.35] * 7, [0.35] * 6 + [0.36]]), "group_mean")
    assert centered[0].eq(0).all()
    assert centered[1].ne(0).all()


@pytest.mark.parametrize("baseline", CENTERED)
def test_a_group_of_one_has_no_advantage(baseline: Baseline) -> None:
    assert subtract_baseline(torch.tensor([[5.0]]), baseline).eq(0).all()


def test_one_scale_for_the_buffer_leaves_a_noise_group_small() -> None:
    # Centered: (-.25, -.25, -.25, .75) with squares .75, and (-.00025, ..., .00075) with 7.5e-7.
    # sqrt(.75000075 / 8) = .30619; the last entries .75 / .30629 = 2.449 and .00075 / .30629 = .00245.
    returns = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.501]], dtype=torch.float64)
    rms = batch_rms(batch_moments(returns))
    assert rms.item() == pytest.approx(0.30619, abs=5e-6)
    advantages = group_advantages(returns, "group_mean", "batch", rms=rms)
    assert advantages[0, -1].item() == pytest.approx(2.449, abs=5e-4)
    assert advantages[1, -1].item() == pytest.approx(0.00245, abs=5e-6)
    # By its own deviation, 4.33e-4, the noise group gets full size: .00075 / 5.33e-4 = 1.407.
    assert group_advantages(returns, "group_mean", "group")[1, -1].item() == pytest.approx(1.407, abs=5e-4)


def test_moments_of_two_ranks_add() -> None:
    # Centered squares: (-1, 1): 2 on one rank; (-3, 0, 3): 18 on the other, which has a larger group.
    # Moments (2, 2) + (18, 3) = (20, 5), rms sqrt(4) = 2.
    one = batch_moments(torch.tensor([[4.0, 6.0]]))
    other = batch_moments(torch.tensor([[1.0, 4.0, 7.0]]))
    torch.testing.assert_close(one, torch.tensor([2.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(other, torch.tensor([18.0, 3.0], dtype=torch.float64))
    torch.testing.assert_close(batch_rms(one + other), torch.tensor(2.0, dtype=torch.float64))


def test_moments_of_halves_are_those_of_the_whole() -> None:
    returns = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.501]])
    torch.testing.assert_close(batch_moments(returns[:1]) + batch_moments(returns[1:]), batch_moments(returns))


def test_moments_are_taken_in_double_precision() -> None:
    # The mean of (16777216, 16777218, 16777220) is 16777218: squares 4 + 0 + 4. Single precision cannot add them up.
    returns = torch.tensor([[16777216.0, 16777218.0, 16777220.0]])
    torch.testing.assert_close(batch_moments(returns), torch.tensor([8.0, 3.0], dtype=torch.float64))
    # 1 + 1 + 2^-30 + 2^-30: single precision would drop the small ones.
    small = torch.tensor([[-1.0, 1.0], [-(2.0**-15), 2.0**-15]])
    assert batch_moments(small)[0].item() == 2 + 2.0**-29


def test_a_rank_without_groups_adds_nothing_and_no_groups_have_no_scale() -> None:
    empty = batch_moments(torch.zeros(0, 4))
    torch.testing.assert_close(empty, torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(batch_rms(empty), torch.tensor(0.0, dtype=torch.float64))


def test_a_buffer_of_constant_groups_has_scale_zero_and_zero_advantages() -> None:
    returns = torch.full((3, 7), 0.35)
    rms = batch_rms(batch_moments(returns))
    assert rms.item() == 0
    assert group_advantages(returns, "group_mean", "batch", rms=rms).eq(0).all()


def test_the_scale_keeps_the_type_of_the_returns() -> None:
    returns = torch.tensor([[0.0, 1.0]])
    rms = batch_rms(batch_moments(returns))
    assert group_advantages(returns, "none", "batch", rms=rms).dtype == torch.float32
    # No baseline: 1 / (.5 + 1e-4) although the scale is that of the centered returns.
    assert group_advantages(returns, "none", "batch", rms=rms)[0, 1].item() == pytest.approx(1 / 0.5001)


def test_eps_is_added_to_the_deviation() -> None:
    # R = (0, 2): sigma 1; -1 / (1 + 3) and 1 / (1 + 3).
    returns = torch.tensor([[0.0, 2.0]])
    expected = torch.tensor([[-0.25, 0.25]])
    torch.testing.assert_close(group_advantages(returns, "group_mean", "group", eps=3.0), expected)
    rms = torch.tensor(1.0, dtype=torch.float64)
    torch.testing.assert_close(group_advantages(returns, "group_mean", "batch", rms=rms, eps=3.0), expected)


def test_batch_normalization_without_a_scale_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^normalization='batch' has no scale\. Pass rms=batch_rms\(moments\)\.$"):
        group_advantages(torch.tensor([[0.0, 1.0]]), "group_mean", "batch")


def test_an_unknown_normalization_is_refused() -> None:
    message = r"^normalization=True is unknown\. Use 'group', 'batch' or False\.$"
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.tensor([[0.0, 1.0]]), "group_mean", cast(Normalization, True), rms=torch.tensor(1.0))


def expected_gradient(success: float, baseline: Baseline) -> float:
    """Exact expectation of ``mean(A_k * d log pi / d logit)`` for K=4 Bernoulli actions that return themselves."""
    total = 0.0
    for outcome in product((0.0, 1.0), repeat=4):
        actions = torch.tensor(outcome, dtype=torch.float64)
        probability = success ** sum(outcome) * (1 - success) ** (4 - sum(outcome))
        gradient = (subtract_baseline(actions, baseline) * (actions - success)).mean().item()
        total += probability * gradient
    return total


@pytest.mark.parametrize(
    ("success", "baseline", "expected"),
    [
        # p(1 - p) is the true gradient; the mean baseline has 3/4 of it.
        (0.2, "none", 0.16),
        (0.2, "leave_one_out", 0.16),
        (0.2, "group_mean", 0.12),
        # Minus the maximum only groups with a success count: p(1-p) (1 - (1-p)^3) = .16 * .488.
        (0.2, "group_max", 0.07808),
        (0.05, "none", 0.0475),
        (0.05, "group_max", 0.006775),
    ],
)
def test_which_baselines_are_unbiased(success: float, baseline: Baseline, expected: float) -> None:
    assert expected_gradient(success, baseline) == pytest.approx(expected, abs=5e-7)


KAPPA = torch.tensor([[0.1, 0.2, 0.3, 0.4]])


@pytest.mark.parametrize("baseline", ["group_mean", "group_max"])
def test_the_penalty_is_centered_on_the_group_mean(baseline: Baseline) -> None:
    # R = (1, 1, 1, 1) has advantages 0; .01 * (kappa - .25).
    advantages = group_advantages(torch.ones(1, 4), baseline, "group")
    expected = torch.tensor([[0.0015, 0.0005, -0.0005, -0.0015]])
    torch.testing.assert_close(subtract_kl(advantages, KAPPA, 0.01, baseline), expected)


def test_the_penalty_of_leave_one_out_leaves_the_own_kappa_out() -> None:
    # .1 - (.2 + .3 + .4) / 3 = -.2, .2 - .8 / 3 = -.0666667, and the same with the other sign.
    expected = torch.tensor([[5.002, 5.0 + 0.01 * 0.2 / 3, 5.0 - 0.01 * 0.2 / 3, 4.998]])
    torch.testing.assert_close(subtract_kl(torch.full((1, 4), 5.0), KAPPA, 0.01, "leave_one_out"), expected)


def test_the_penalty_without_a_baseline_is_not_centered() -> None:
    expected = torch.tensor([[1.999, 1.998, 1.997, 1.996]])
    torch.testing.assert_close(subtract_kl(torch.full((1, 4), 2.0), KAPPA, 0.01, "none"), expected)


@pytest.mark.parametrize("baseline", ["none", *CENTERED])
def test_the_penalty_of_a_group_of_one_is_not_centered(baseline: Baseline) -> None:
    # Two groups of one: 0 - .5 * .2 and 1 - .5 * -.4.
    advantages = subtract_kl(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.2], [-0.4]]), 0.5, baseline)
    torch.testing.assert_close(advantages, torch.tensor([[-0.1], [1.2]]))


@pytest.mark.parametrize("baseline", CENTERED)
def test_equal_kappas_leave_a_zero_group_at_exact_zeros(baseline: Baseline) -> None:
    assert subtract_kl(torch.zeros(1, 7), torch.full((1, 7), 0.35), 0.01, baseline).eq(0).all()


@pytest.mark.parametrize("size", [2, 3])
def test_the_penalty_is_centered_in_groups_of_two_and_three(size: int) -> None:
    # kappa (0, 1[, 2]) minus its mean: the advantages still add up to 0.
    kappa = torch.arange(float(size)).unsqueeze(0)
    expected = -(kappa - (size - 1) / 2)
    torch.testing.assert_close(subtract_kl(torch.zeros(1, size), kappa, 1.0, "group_mean"), expected)
