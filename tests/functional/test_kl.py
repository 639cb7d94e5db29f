"""The penalty weight k1 and the logged estimate k3."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from comlrl_lightning.functional import kl_estimate, policy_loss, sequence_kl

LOG_PROBS = torch.tensor([[-1.0, -2.0, -5.0], [-0.5, math.nan, math.nan]])
REFERENCE = torch.tensor([[-1.5, -1.0, -5.0], [-0.25, math.nan, 3.0]])
MASK = torch.tensor([[True, True, True], [True, False, False]])


def test_kappa_sums_the_log_ratios_of_the_tokens_that_count() -> None:
    # .5 - 1 + 0 = -.5, and -.25.
    torch.testing.assert_close(sequence_kl(LOG_PROBS, REFERENCE, MASK), torch.tensor([-0.5, -0.25]))


def test_the_estimate_sums_k3_over_the_tokens_that_count() -> None:
    # x = pi_ref / pi: e^-.5 - 1 + .5 = .106531, e - 1 - 1 = .718282, 0; e^.25 - 1 - .25 = .034025.
    expected = torch.tensor([0.824813, 0.034025])
    torch.testing.assert_close(kl_estimate(LOG_PROBS, REFERENCE, MASK), expected, atol=1e-6, rtol=0)


def test_neither_has_a_gradient() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    reference = REFERENCE.clone().requires_grad_()
    assert not sequence_kl(log_probs, reference, MASK).requires_grad
    assert not kl_estimate(log_probs, reference, MASK).requires_grad


def test_the_estimate_of_an_odd_token_stays_finite() -> None:
    # log x = 1000 counts as 20: e^20 - 21. At log x = -1000, x is 0: 1000 - 1, nothing to hold back.
    mask = torch.ones(2, 1, dtype=torch.bool)
    log_probs = torch.tensor([[-1000.0], [0.0]], dtype=torch.float64)
    estimate = kl_estimate(log_probs, -1000 - log_probs, mask)
    torch.testing.assert_close(estimate, torch.tensor([math.exp(20) - 21, 999.0], dtype=torch.float64))
    below = kl_estimate(torch.tensor([[-19.5]], dtype=torch.float64), torch.zeros(1, 1), mask[:1])
    assert below.item() == pytest.approx(math.exp(19.5) - 20.5)


def test_the_estimate_keeps_small_differences() -> None:
    # d = 1e-4: e^d - 1 - d = 5.00017e-9, below what 1 + d can hold in single precision.
    estimate = kl_estimate(torch.tensor([[0.0]]), torch.tensor([[1e-4]]), torch.ones(1, 1, dtype=torch.bool))
    assert estimate.item() == pytest.approx(5.0e-9, rel=0.01)


def bernoulli(success: float) -> tuple[Tensor, Tensor]:
    """The logit as a leaf and `[2, 1]` log-probs of failure and success."""
    logit = torch.tensor(math.log(success / (1 - success)), dtype=torch.float64, requires_grad=True)
    return logit, torch.stack(((-logit).sigmoid().log(), logit.sigmoid().log())).unsqueeze(-1)


def divergence(log_probs: Tensor, other: Tensor) -> Tensor:
    return (log_probs.exp() * (log_probs - other)).sum()


def expected_gradient(weights: Tensor, log_probs: Tensor, logit: Tensor) -> float:
    """Exact expectation of ``weight * grad log pi`` over both outcomes."""
    loss = policy_loss(log_probs, weights, torch.ones(2, 1, dtype=torch.bool)).loss
    return -torch.autograd.grad((log_probs.detach().squeeze(-1).exp() * loss).sum(), logit, retain_graph=True)[0].item()


@pytest.mark.parametrize(("success", "expected"), [(0.6, 0.097312), (0.9, 0.197750)])
def test_k1_as_a_weight_has_the_gradient_of_the_divergence(success: float, expected: float) -> None:
    # p(1 - p) (logit p - logit .5): .24 * .405465 and .09 * 2.197225.
    logit, log_probs = bernoulli(success)
    reference = bernoulli(0.5)[1].detach()
    mask = torch.ones(2, 1, dtype=torch.bool)
    gradient = expected_gradient(sequence_kl(log_probs, reference, mask), log_probs, logit)
    assert gradient == pytest.approx(expected, abs=5e-7)
    (true,) = torch.autograd.grad(divergence(log_probs, reference), logit)
    assert gradient == pytest.approx(true.item(), rel=1e-12)


@pytest.mark.parametrize(("success", "expected"), [(0.6, -0.002688), (0.9, -0.202250)])
def test_k3_as_a_weight_would_have_the_wrong_sign(success: float, expected: float) -> None:
    # The gradient of KL(ref || pi), p - .5, is taken away: .097312 - .1 and .197750 - .4.
    logit, log_probs = bernoulli(success)
    reference = bernoulli(0.5)[1].detach()
    mask = torch.ones(2, 1, dtype=torch.bool)
    gradient = expected_gradient(kl_estimate(log_probs, reference, mask), log_probs, logit)
    assert gradient == pytest.approx(expected, abs=5e-7)
    difference = divergence(log_probs, reference) - divergence(reference, log_probs)
    assert gradient == pytest.approx(torch.autograd.grad(difference, logit)[0].item(), rel=1e-9)


def test_both_estimate_the_divergence() -> None:
    # KL = .6 ln 1.2 + .4 ln .8 = .020136.
    _, log_probs = bernoulli(0.6)
    reference = bernoulli(0.5)[1]
    probabilities, mask = log_probs.detach().squeeze(-1).exp(), torch.ones(2, 1, dtype=torch.bool)
    for estimate in (sequence_kl, kl_estimate):
        value = (probabilities * estimate(log_probs, reference, mask)).sum().item()
        assert value == pytest.approx(0.020136, abs=5e-7)
