"""How far the policy has gone from its reference: the penalty of the gradient and the estimate to log.

The estimators are k1 and k3 of http://joschu.net/blog/kl-approx.html, which gives them as estimates of the *value* of
KL(policy || reference). As a weight of ``grad log pi`` only k1 has the gradient of that KL in expectation: k3 gives
``grad KL(policy || reference) - grad KL(reference || policy)``, whose first order cancels and whose sign can flip.
"""

from __future__ import annotations

from torch import Tensor

from comlrl_lightning.functional.log_probs import masked_sum

MAX_LOG_RATIO = 20.0
"""Largest ``log pi_ref - log pi`` of a token in `kl_estimate`: one odd token must not turn the logged mean into inf."""


def sequence_kl(log_probs: Tensor, reference_log_probs: Tensor, completion_mask: Tensor) -> Tensor:
    """`[R]` kappa, the sum over tokens of ``log pi - log pi_ref`` (k1), without gradient: a weight for `subtract_kl`.

    Args:
        log_probs: `[R, C]` log-probabilities under the policy, at the sampling temperature.
        reference_log_probs: `[R, C]` the same under the reference policy.
        completion_mask: `[R, C]` True = a sampled token that counts.

    Returns:
        `[R]` kappa of each completion, of either sign.
    """
    return masked_sum((log_probs - reference_log_probs).detach(), completion_mask)


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, completion_mask: Tensor) -> Tensor:
    """`[R]` estimate of the KL to the reference, ``sum(x - 1 - log x)`` with ``x = pi_ref / pi`` (k3), for logs only.

    Args:
        log_probs: `[R, C]` log-probabilities under the policy, at the sampling temperature.
        reference_log_probs: `[R, C]` the same under the reference policy.
        completion_mask: `[R, C]` True = a sampled token that counts.

    Returns:
        `[R]` estimate of each completion, at least 0, without gradient.
    """
    log_ratio = (reference_log_probs - log_probs).detach().clamp(max=MAX_LOG_RATIO)
    return masked_sum(log_ratio.expm1() - log_ratio, completion_mask)
