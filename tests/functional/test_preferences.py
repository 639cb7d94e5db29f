"""Losses of preference pairs: joint DPO, its margins, Bradley-Terry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from comlrl_lightning.functional import bradley_terry_loss, joint_preference_loss, sequence_margins


def doubles(values: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def joint_loss(
    margins: Sequence[float], beta: float = 0.1, reference: Sequence[float] | None = None, **settings: Any
) -> tuple[float, list[float]]:
    """Loss of one pair, and its gradient with respect to each agent's margin."""
    leaf = doubles([margins]).requires_grad_()
    (loss,) = joint_preference_loss(leaf, beta, None if reference is None else doubles([reference]), **settings)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient[0].tolist()


def test_margins_add_and_each_gets_the_same_weight() -> None:
    # beta .1, sum 2 - 1 = 1: log(1 + exp(-.1)) = log 1.904837 = .644397; -.1 * sigmoid(-.1) = -.1 * .475021.
    loss, gradient = joint_loss([2.0, -1.0])
    assert loss == pytest.approx(0.644397, abs=1e-6)
    assert gradient == pytest.approx([-0.0475021, -0.0475021], abs=1e-7)


def test_the_update_is_simultaneous() -> None:
    # Agent 0 updated first, to a margin of 3, would leave agent 1 the weight -.1 * sigmoid(-.2) = -.0450166.
    _, gradient = joint_loss([3.0, -1.0])
    assert gradient[1] == pytest.approx(-0.0450166, abs=1e-7)
    _, simultaneous = joint_loss([2.0, -1.0])
    assert simultaneous[1] == pytest.approx(-0.0475021, abs=1e-7)


def test_reference_margins_are_subtracted() -> None:
    # (2 - 1.5) + (-1 + .5) = 0: log 2 = .693147, weight -.1 / 2.
    loss, gradient = joint_loss([2.0, -1.0], reference=[1.5, -0.5])
    assert loss == pytest.approx(0.693147, abs=1e-6)
    assert gradient == pytest.approx([-0.05, -0.05])


@pytest.mark.parametrize("margins", [[0.7], [2.0, -1.0], [0.3, -4.0, 1.5]])
@pytest.mark.parametrize("with_reference", [False, True])
def test_closed_form_of_the_gradient(margins: list[float], with_reference: bool) -> None:
    # The others' margins are constants to each agent: d/dm_i = -beta * sigmoid(-beta * sum).
    reference = [0.25 * agent - 0.4 for agent in range(len(margins))] if with_reference else None
    total = sum(margins) - (sum(reference) if reference else 0.0)
    loss, gradient = joint_loss(margins, 0.5, reference)
    assert loss == pytest.approx(-math.log(sigmoid(0.5 * total)))
    assert gradient == pytest.approx([-0.5 * sigmoid(-0.5 * total)] * len(margins))


def test_label_smoothing() -> None:
    # h = .1 * 1: .9 * .644397 + .1 * .744397 = .654397; -.1 * (.9 * .475021 - .1 * .524979) = -.0375021.
    loss, gradient = joint_loss([2.0, -1.0], label_smoothing=0.1)
    assert loss == pytest.approx(0.654397, abs=1e-6)
    assert gradient == pytest.approx([-0.0375021, -0.0375021], abs=1e-7)


def test_ipo_stops_at_its_target() -> None:
    # beta .1: the target is 5. Sum 1: (1 - 5)^2 = 16, gradient 2 * (1 - 5) = -8. Sum 7 - 1 = 6, back again: 1, 2.
    loss, gradient = joint_loss([2.0, -1.0], loss_type="ipo")
    assert [loss, *gradient] == pytest.approx([16.0, -8.0, -8.0])
    loss, gradient = joint_loss([9.0, -2.0], reference=[1.5, -0.5], loss_type="ipo")
    assert [loss, *gradient] == pytest.approx([1.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "hinge"}, r"^loss_type='hinge' is unknown. Use 'sigmoid' or 'ipo'.$"),
        ({"label_smoothing": 0.5}, r"^label_smoothing=0.5 is out of range. Use a number from 0 to below 0.5.$"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, r"^label_smoothing=0.1 has no meaning with loss_type='ipo'."),
    ],
)
def test_forms_that_do_not_exist_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        joint_loss([2.0, -1.0], **settings)


def test_the_reference_gets_no_gradient() -> None:
    margins = doubles([[1.0, 2.0]]).requires_grad_()
    (gradient,) = torch.autograd.grad(joint_preference_loss(margins, 1.0, margins).sum(), margins)
    # margins - margins = 0: sigmoid(0) = .5, whatever the margins; with a gradient it would cancel to 0.
    assert gradient.tolist() == [[-0.5, -0.5]]


def test_each_pair_has_its_own_loss() -> None:
    # sums 1 and -2 at beta 1: log(1 + exp(-1)) = .313262, log(1 + exp(2)) = 2.126928.
    losses = joint_preference_loss(doubles([[2.0, -1.0], [-2.0, 0.0]]), 1.0)
    torch.testing.assert_close(losses, doubles([0.313262, 2.126928]), atol=1e-6, rtol=0)


def test_large_margins_stay_finite() -> None:
    # sigmoid(-1e4) underflows to 0, whose logarithm would be infinite; the loss is the sum itself.
    loss, gradient = joint_loss([-6e3, -4e3], beta=1.0)
    assert loss == pytest.approx(1e4)
    assert gradient == pytest.approx([-1.0, -1.0])
    assert joint_loss([6e3, 4e3], beta=1.0) == (0.0, [0.0, 0.0])


@pytest.mark.parametrize("beta", [0.0, -0.1, math.nan, math.inf])
def test_beta_out_of_range_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match=rf"^beta={beta} is out of range\. Use a number above 0\.$"):
        joint_preference_loss(doubles([[1.0]]), beta)


WINNER = [[-0.5, -0.25, -1.0], [-2.0, math.nan, math.nan]]
LOSER = [[-1.0, -1.5], [-0.5, -0.5]]


def masks() -> tuple[Tensor, Tensor]:
    """The second winner has one token, the first loser one."""
    return torch.tensor([[True] * 3, [True, False, False]]), torch.tensor([[True, False], [True, True]])


def margins_of(length_normalized: bool) -> tuple[Tensor, Tensor]:
    """Margins, and the gradient of their sum with respect to the winners' log-probabilities."""
    winner_mask, loser_mask = masks()
    leaf = doubles(WINNER).requires_grad_()
    margins = sequence_margins(leaf, winner_mask, doubles(LOSER), loser_mask, length_normalized=length_normalized)
    (gradient,) = torch.autograd.grad(margins.sum(), leaf)
    return margins, gradient


def test_margins_are_sums_over_tokens() -> None:
    # -1.75 - (-1) = -.75; -2 - (-1) = -1. The last token counts, padding does not.
    margins, gradient = margins_of(length_normalized=False)
    torch.testing.assert_close(margins, doubles([-0.75, -1.0]))
    assert gradient.tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]


def test_margins_of_means() -> None:
    # -1.75 / 3 + 1 = .416667; -2 + 1 / 2 = -1.5.
    margins, gradient = margins_of(length_normalized=True)
    torch.testing.assert_close(margins, doubles([0.416667, -1.5]), atol=1e-6, rtol=0)
    torch.testing.assert_close(gradient, doubles([[1 / 3, 1 / 3, 1 / 3], [1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("length_normalized", [False, True])
def test_a_completion_without_tokens_counts_as_zero(length_normalized: bool) -> None:
    empty = torch.zeros(1, 2, dtype=torch.bool)
    margins = sequence_margins(
        doubles([[-1.0, -3.0]]), ~empty, doubles([[-9.0, -9.0]]), empty, length_normalized=length_normalized
    )
    assert margins.item() == (-2.0 if length_normalized else -4.0)


def reward_model_loss(winner: float, loser: float, centering_coef: float = 0.0) -> tuple[float, tuple[float, float]]:
    scores = doubles([winner]).requires_grad_(), doubles([loser]).requires_grad_()
    loss = bradley_terry_loss(*scores, centering_coef)
    of_winner, of_loser = torch.autograd.grad(loss.sum(), scores)
    return loss.item(), (of_winner.item(), of_loser.item())


def test_bradley_terry() -> None:
    # 1.2 - .4 = .8: log(1 + exp(-.8)) = .371101; sigmoid(-.8) = .310026.
    loss, gradient = reward_model_loss(1.2, 0.4)
    assert loss == pytest.approx(0.371101, abs=1e-6)
    assert gradient == pytest.approx((-0.310026, 0.310026), abs=1e-6)


def test_scores_are_fixed_up_to_a_constant() -> None:
    assert reward_model_loss(101.2, 100.4)[0] == pytest.approx(0.371101, abs=1e-6)


def test_score_centering() -> None:
    # .01 * (1.2 + .4)^2 = .0256 more; its gradient 2 * .01 * 1.6 = .032 is the same for both.
    loss, gradient = reward_model_loss(1.2, 0.4, 0.01)
    assert loss == pytest.approx(0.371101 + 0.0256, abs=1e-6)
    assert gradient == pytest.approx((-0.310026 + 0.032, 0.310026 + 0.032), abs=1e-6)


def test_a_badly_wrong_reward_model_stays_finite() -> None:
    loss, gradient = reward_model_loss(-1e4, 1e4)
    assert loss == pytest.approx(2e4)
    assert gradient == (-1.0, 1.0)


@pytest.mark.parametrize("coef", [-0.01, math.nan, math.inf])
def test_centering_out_of_range_is_refused(coef: float) -> None:
    with pytest.raises(ValueError, match=rf"^centering_coef={coef} is out of range\. Use a number of at least 0\.$"):
        bradley_terry_loss(doubles([1.0]), doubles([0.0]), coef)
