"""The policy loss: REINFORCE, importance ratios, clipping, counts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from comlrl_lightning.functional import (
    ImportanceLevel,
    LossAggregation,
    PolicyLoss,
    leave_one_out,
    policy_loss,
    token_divisors,
)

OLD = [[-1.0, -2.0]]
NEW = [[-0.7, -2.1]]  # log ratios .3 and -.1: ratios 1.349859 and .904837


def mask_of(*lengths: int, width: int) -> Tensor:
    return torch.arange(width).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)


def loss_and_gradient(
    log_probs: list[list[float]], advantage: float, old: list[list[float]] | None, **settings: Any
) -> tuple[PolicyLoss, Tensor]:
    new = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    old_log_probs = None if old is None else torch.tensor(old, dtype=torch.float64)
    advantages = torch.full((len(log_probs),), advantage, dtype=torch.float64)
    mask = torch.ones(new.shape, dtype=torch.bool)
    result = policy_loss(new, advantages, mask, old_log_probs=old_log_probs, **settings)
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)
    return result, gradient


def doubles(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_reinforce_sums_over_tokens() -> None:
    # -2 * (-.7 - 2.1) = 5.6; each token has the gradient -2, the last one too.
    result, gradient = loss_and_gradient(NEW, 2.0, None)
    torch.testing.assert_close(result.loss, torch.tensor([5.6], dtype=torch.float64))
    torch.testing.assert_close(gradient, doubles([-2.0, -2.0]))
    assert (result.num_clipped.tolist(), result.num_tokens.tolist()) == ([0], [2])


def test_a_single_token_has_a_gradient() -> None:
    result, gradient = loss_and_gradient([[-0.5]], 3.0, None)
    assert result.loss.item() == pytest.approx(1.5)
    assert gradient.item() == pytest.approx(-3.0)


# eps .2. A = 1: -(min(1.349859, 1.2) + .904837) = -2.104837; the first token stands still.
# A = -1: the first ratio is the smaller product, nothing stops: 1.349859 + .904837 = 2.254696.
# eps .05, A = 1: -(1.05 + .904837) = -1.954837. A = -1: min(-.904837, -.95) = -.95: 1.349859 + .95 = 2.299859.
# eps .2 and .4 above: no bound is reached at A = 1 either: -2.254696. eps .05 and .2 above: as .2, A > 0 needs no
# lower bound; eps .2 and .05 above: -(1.05 + .904837).
CLIPS = [
    (1.0, 0.2, None, -2.104837, (0.0, -0.904837), 1),
    (-1.0, 0.2, None, 2.254696, (1.349859, 0.904837), 0),
    (1.0, 0.05, None, -1.954837, (0.0, -0.904837), 1),
    (-1.0, 0.05, None, 2.299859, (1.349859, 0.0), 1),
    (1.0, 0.2, 0.4, -2.254696, (-1.349859, -0.904837), 0),
    (1.0, 0.05, 0.2, -2.104837, (0.0, -0.904837), 1),
    (1.0, 0.2, 0.05, -1.954837, (0.0, -0.904837), 1),
    (1.0, None, None, -2.254696, (-1.349859, -0.904837), 0),
    (-1.0, None, None, 2.254696, (1.349859, 0.904837), 0),
    (3.0, 0.2, None, -6.314512, (0.0, -2.714512), 1),
    (0.0, 0.05, None, 0.0, (0.0, 0.0), 0),
]


@pytest.mark.parametrize(("advantage", "low", "high", "loss", "gradient", "clipped"), CLIPS)
def test_the_clip_stops_tokens_one_by_one(
    advantage: float, low: float | None, high: float | None, loss: float, gradient: tuple[float, ...], clipped: int
) -> None:
    result, actual = loss_and_gradient(NEW, advantage, OLD, clip_epsilon=low, clip_epsilon_high=high)
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(actual, doubles(list(gradient)), atol=1e-6, rtol=0)
    assert (result.num_clipped.tolist(), result.num_tokens.tolist()) == ([clipped], [2])


# Ratios 1.349859 and .904837 once more. c = 1.2, A = -1: max(-1.349859, -1.2) = -1.2 without gradient, the other as it
# is: 1.2 + .904837 = 2.104837. c = 1.4 is not reached. A = 1 knows no second clip: -(1.2 + .904837) by eps .2. With
# eps .05 the second token stops, too: 1.2 + .95 = 2.15.
DUAL_CLIPS = [
    (-1.0, 0.2, 1.2, 2.104837, (0.0, 0.904837), 1),
    (-1.0, 0.2, 1.4, 2.254696, (1.349859, 0.904837), 0),
    (1.0, 0.2, 1.1, -2.104837, (0.0, -0.904837), 1),
    (-1.0, 0.05, 1.2, 2.15, (0.0, 0.0), 2),
    (-1.0, None, 1.2, 2.104837, (0.0, 0.904837), 1),
]


@pytest.mark.parametrize(("advantage", "epsilon", "dual", "loss", "gradient", "clipped"), DUAL_CLIPS)
def test_the_second_clip_bounds_negative_advantages(
    advantage: float, epsilon: float | None, dual: float, loss: float, gradient: tuple[float, ...], clipped: int
) -> None:
    result, actual = loss_and_gradient(NEW, advantage, OLD, clip_epsilon=epsilon, dual_clip=dual)
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(actual, doubles(list(gradient)), atol=1e-6, rtol=0)
    assert result.num_clipped.tolist() == [clipped]


def test_a_dual_clip_out_of_place_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^dual_clip=1.0 is out of range"):
        loss_and_gradient(NEW, 1.0, OLD, dual_clip=1.0)
    with pytest.raises(ValueError, match=r"^dual_clip=3.0 has no ratio to clip. Pass old_log_probs.$"):
        loss_and_gradient(NEW, 1.0, None, dual_clip=3.0)


# The mean of (.3, -.1) is .1: ratio 1.105171, times two tokens 2.210342; each token's gradient is the ratio.
# eps .05: 2 * 1.05 = 2.1 for A = 1 with both tokens stopped; A = -1 is not stopped from above.
# eps .05 against log ratios (-.3, .1): ratio .904837; A = -1 is stopped at .95, A = 1 is not.
SEQUENCES = [
    (NEW, 1.0, 0.2, -2.210342, -1.105171, 0),
    (NEW, 1.0, None, -2.210342, -1.105171, 0),
    (NEW, 1.0, 0.05, -2.1, 0.0, 2),
    (NEW, -1.0, 0.05, 2.210342, 1.105171, 0),
    ([[-1.3, -1.9]], -1.0, 0.05, 1.9, 0.0, 2),
    ([[-1.3, -1.9]], 1.0, 0.05, -1.809675, -0.904837, 0),
]


@pytest.mark.parametrize(("new", "advantage", "epsilon", "loss", "gradient", "clipped"), SEQUENCES)
def test_the_sequence_level_clips_whole_completions(
    new: list[list[float]], advantage: float, epsilon: float | None, loss: float, gradient: float, clipped: int
) -> None:
    result, actual = loss_and_gradient(new, advantage, OLD, clip_epsilon=epsilon, importance_level="sequence")
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(actual, doubles([gradient, gradient]), atol=1e-6, rtol=0)
    assert (result.num_clipped.tolist(), result.num_tokens.tolist()) == ([clipped], [2])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("advantage", [1.7, -1.7])
def test_a_ratio_of_one_has_the_gradient_of_reinforce(level: ImportanceLevel, advantage: float) -> None:
    # The loss is -A per token. A clip of width 0 stops only what has left the ratio 1.
    _, expected = loss_and_gradient(NEW, advantage, None)
    result, gradient = loss_and_gradient(NEW, advantage, NEW, clip_epsilon=0.0, importance_level=level)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(result.loss, torch.tensor([-2 * advantage], dtype=torch.float64))
    assert result.num_clipped.item() == 0


@pytest.mark.parametrize("old", [None, OLD])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_other_sign_of_the_advantage_turns_the_gradient(
    old: list[list[float]] | None, level: ImportanceLevel
) -> None:
    _, up = loss_and_gradient(NEW, 1.0, old, importance_level=level)
    _, down = loss_and_gradient(NEW, -1.0, old, importance_level=level)
    assert up.abs().min() > 0
    torch.testing.assert_close(up, -down)


def test_the_old_policy_gets_no_gradient() -> None:
    # Built from the same tensor the ratio would be 1 whatever the policy does, with gradient 0.
    log_probs = torch.tensor(NEW, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss = policy_loss(log_probs, torch.tensor([1.0]), mask, old_log_probs=log_probs).loss
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, -1.0]]))


def random_rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """8 completions of 0 to 7 tokens: new and old log-probs, advantages, mask."""
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(8, 7, dtype=torch.float64, generator=generator)
    new = old + torch.randn(8, 7, dtype=torch.float64, generator=generator) / 2
    advantages = torch.randn(8, dtype=torch.float64, generator=generator)
    return new, old, advantages, mask_of(0, 1, 2, 3, 4, 5, 6, 7, width=7)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("padding", [math.nan, -math.inf, 7.0])
def test_padding_counts_for_nothing(level: ImportanceLevel, stale: bool, padding: float) -> None:
    new, old, advantages, mask = random_rows()
    settings: dict[str, Any] = {"clip_epsilon": 0.2, "importance_level": level} if stale else {}
    padded = new.masked_fill(~mask, padding).requires_grad_()
    result = policy_loss(padded, advantages, mask, old_log_probs=old if stale else None, **settings)
    (gradient,) = torch.autograd.grad(result.loss.sum(), padded)
    assert gradient[~mask].eq(0).all()
    assert result.num_tokens.tolist() == list(range(8))
    for row in range(8):  # each completion by itself, without padding
        alone = new[row : row + 1, :row].clone().requires_grad_()
        own = policy_loss(
            alone,
            advantages[row : row + 1],
            mask[row : row + 1, :row],
            old_log_probs=old[row : row + 1, :row] if stale else None,
            **settings,
        )
        torch.testing.assert_close(own.loss[0], result.loss[row])
        assert own.num_clipped[0] == result.num_clipped[row]
        torch.testing.assert_close(torch.autograd.grad(own.loss.sum(), alone)[0][0], gradient[row, :row])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("low", "high"), [(0.2, None), (0.1, 0.28), (0.0, 0.0), (0.5, 3.0)])
def test_it_is_the_minimum_of_the_clipped_and_the_unclipped_product(
    level: ImportanceLevel, low: float, high: float | None
) -> None:
    new, old, advantages, mask = random_rows()
    log_ratio = new - old
    if level == "sequence":
        means = [row[:length].mean() if length else row.new_zeros(()) for length, row in enumerate(log_ratio)]
        log_ratio = torch.stack(means).unsqueeze(-1).expand(8, 7)
    ratio, weights = log_ratio.exp(), advantages.unsqueeze(-1)
    clipped = ratio.clamp(1 - low, 1 + (low if high is None else high))
    expected = -(torch.minimum(ratio * weights, clipped * weights) * mask).sum(-1)
    stopped = ((clipped * weights < ratio * weights) & mask).sum(-1)
    result = policy_loss(
        new,
        advantages,
        mask,
        old_log_probs=old,
        clip_epsilon=low,
        clip_epsilon_high=high,
        importance_level=level,
    )
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(result.num_clipped, stopped)
    assert stopped.sum() > 0


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_cut_into_micro_batches_changes_nothing(size: int) -> None:
    new, old, advantages, mask = random_rows()
    whole = policy_loss(new, advantages, mask, old_log_probs=old, clip_epsilon=0.2)
    parts = [
        policy_loss(
            new[rows], advantages[rows], mask[rows], old_log_probs=old[rows], clip_epsilon=0.2, importance_level="token"
        )
        for rows in torch.split(torch.arange(8), size)
    ]
    for name in ("loss", "num_clipped", "num_tokens"):
        actual = torch.cat([part._asdict()[name] for part in parts])
        torch.testing.assert_close(actual, whole._asdict()[name])


def test_a_stopped_token_of_infinite_ratio_has_gradient_zero() -> None:
    # exp(1000) is inf, and inf * 0 would be NaN: -(1.2 + 1) with the second ratio 1.
    result, gradient = loss_and_gradient([[0.0, -2.0]], 1.0, [[-1000.0, -2.0]], clip_epsilon=0.2)
    assert result.loss.item() == pytest.approx(-2.2)
    torch.testing.assert_close(gradient, doubles([0.0, -1.0]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_epsilon": 1.0}, r"clip_epsilon=1\.0 is out of range\. Use a number from 0 to below 1\."),
        ({"clip_epsilon": -0.1}, r"clip_epsilon=-0\.1 is out of range\. Use a number from 0 to below 1\."),
        (
            {"clip_epsilon": 0.2, "clip_epsilon_high": -0.1},
            r"clip_epsilon_high=-0\.1 is out of range\. Use a number of at least 0\.",
        ),
        ({"clip_epsilon_high": 0.2}, r"clip_epsilon_high=0\.2 needs a lower bound too\. Give clip_epsilon\."),
    ],
)
def test_a_clip_out_of_range_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        loss_and_gradient(NEW, 1.0, OLD, **settings)


def test_a_clip_without_old_log_probs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^clip_epsilon=0\.2 has no ratio to clip\. Pass old_log_probs\.$"):
        loss_and_gradient(NEW, 1.0, None, clip_epsilon=0.2)


@pytest.mark.parametrize("old", [None, OLD])
def test_an_unknown_importance_level_is_refused(old: list[list[float]] | None) -> None:
    message = r"^importance_level='word' is unknown\. Use 'token' or 'sequence'\.$"
    with pytest.raises(ValueError, match=message):
        loss_and_gradient(NEW, 1.0, old, importance_level="word")


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sum", [1.0, 1.0, 1.0]),
        ("constant", [4.0, 4.0, 4.0]),
        ("sequence_mean", [1.0, 3.0, 1.0]),  # a completion without tokens has nothing to divide
        ("token_mean", [2.5, 2.5, 2.5]),
    ],
)
def test_divisors(aggregation: LossAggregation, expected: list[float]) -> None:
    divisors = token_divisors(torch.tensor([1.0, 3.0, 0.0]), aggregation, max_tokens=4, mean_tokens=2.5)
    assert divisors.tolist() == expected


def test_an_unknown_aggregation_is_refused() -> None:
    message = r"^loss_aggregation='mean' is unknown\. Use 'sum', 'constant', 'sequence_mean' or 'token_mean'\.$"
    with pytest.raises(ValueError, match=message):
        token_divisors(torch.ones(1), "mean", max_tokens=1, mean_tokens=1.0)  # type: ignore[arg-type]


# One token ("s", return 1) or three ("l", return 2), the first of them with probability p = .5, the others certain. The
# gradient to the logit of "s" is p (1 - p) (1 - 2) = -.25. One completion, no baseline: "constant" 4 divides by 4;
# "sequence_mean" .25 (1 / 1 - 2 / 3) = .083333; "token_mean" of one completion is the same. Two completions against
# each other (A = 0 for "ss" and "ll", A = -1, 1 for "sl"): mean(-1 * .5, 1 * -.5) = -.5 in half of the cases, so "sum"
# is -.25 again; "token_mean" divides by 2: -.125; "sequence_mean": mean(-.5, -.5 / 3) / 2 = -.166667.
BIASES = [
    (1, "sum", -0.25),
    (1, "constant", -0.0625),
    (1, "sequence_mean", 1 / 12),
    (1, "token_mean", 1 / 12),
    (2, "sum", -0.25),
    (2, "constant", -0.0625),
    (2, "sequence_mean", -1 / 6),
    (2, "token_mean", -0.125),
]


@pytest.mark.parametrize(("num_completions", "aggregation", "expected"), BIASES)
def test_the_bias_of_each_aggregation(num_completions: int, aggregation: LossAggregation, expected: float) -> None:
    logit = torch.zeros((), dtype=torch.float64, requires_grad=True)
    first = {"s": torch.nn.functional.logsigmoid(logit), "l": torch.nn.functional.logsigmoid(-logit)}
    certain = torch.zeros((), dtype=torch.float64)
    rows = {name: torch.stack((log_prob, certain, certain)) for name, log_prob in first.items()}
    lengths, returns = {"s": 1.0, "l": 3.0}, {"s": 1.0, "l": 2.0}
    total = torch.zeros((), dtype=torch.float64)
    for drawn in itertools.product("sl", repeat=num_completions):
        sizes = torch.tensor([lengths[one] for one in drawn], dtype=torch.float64)
        advantages = torch.tensor([returns[one] for one in drawn], dtype=torch.float64)
        if num_completions > 1:
            advantages = advantages - leave_one_out(advantages)
        mask = torch.arange(3) < sizes[:, None]
        losses = policy_loss(torch.stack([rows[one] for one in drawn]), advantages, mask).loss
        divisors = token_divisors(sizes, aggregation, max_tokens=4, mean_tokens=float(sizes.mean()))
        total = total - (losses / divisors).mean() / 2**num_completions
    (gradient,) = torch.autograd.grad(total, logit)
    assert gradient.item() == pytest.approx(expected)
