"""Log-probabilities and entropy, at once and chunk by chunk."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from comlrl_lightning.functional import chunked_log_probs, masked_sum, token_log_probs

POSITIONS, HIDDEN, VOCABULARY, RANK = 7, 5, 11, 2


class LoraHead(torch.nn.Module):
    """A frozen linear head with a low-rank update, as PEFT puts it on ``lm_head``; records how often it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64), requires_grad=False)
        self.down = torch.nn.Parameter(torch.randn(RANK, HIDDEN, dtype=torch.float64))
        self.up = torch.nn.Parameter(torch.randn(VOCABULARY, RANK, dtype=torch.float64))
        self.rows: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.rows.append(hidden.shape[0])
        return hidden @ self.weight.T + (hidden @ self.down.T) @ self.up.T


@pytest.fixture
def head() -> LoraHead:
    torch.manual_seed(0)
    return LoraHead()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(POSITIONS, HIDDEN, dtype=torch.float64, generator=generator)
    return hidden.requires_grad_(), torch.randint(VOCABULARY, (POSITIONS,), generator=generator)


def test_log_probs_are_taken_at_the_sampling_temperature() -> None:
    # Logits (1, 0) at T = .5 are (2, 0): -log(1 + e^-2) = -.126928, and 2 less for the other token.
    log_probs, _ = token_log_probs(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]), 0.5)
    torch.testing.assert_close(log_probs, torch.tensor([-0.126928, -2.126928]), atol=5e-7, rtol=0)


def test_entropy_is_that_of_the_sampled_distribution() -> None:
    # p = 1 / (1 + e^-2) = .880797: .880797 * .126928 + .119203 * 2.126928 = .365334. A uniform row has log V.
    _, entropy = token_log_probs(torch.tensor([[1.0, 0.0], [3.0, 3.0]]), torch.tensor([0, 1]), 0.5)
    torch.testing.assert_close(entropy, torch.tensor([0.365334, math.log(2)]), atol=5e-7, rtol=0)


def test_leading_dimensions_are_kept() -> None:
    logits = torch.randn(2, 3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    token_ids = torch.tensor([[0, 1, 2], [10, 9, 8]])
    log_probs, entropy = token_log_probs(logits, token_ids, 1.0)
    assert log_probs.shape == entropy.shape == (2, 3)
    torch.testing.assert_close(log_probs[1, 0], logits[1, 0].log_softmax(-1)[10])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_scored_in_single_precision(dtype: torch.dtype) -> None:
    logits = torch.tensor([[8.0, 0.125, -3.0]], dtype=dtype)
    log_probs, entropy = token_log_probs(logits, torch.tensor([1]), 0.7)
    expected, expected_entropy = token_log_probs(logits.float(), torch.tensor([1]), 0.7)
    torch.testing.assert_close(log_probs, expected, atol=0, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=0, rtol=0)
    assert log_probs.dtype == entropy.dtype == torch.float32


def test_double_precision_stays() -> None:
    log_probs, entropy = token_log_probs(torch.zeros(1, 3, dtype=torch.float64), torch.tensor([1]), 1.0)
    assert log_probs.dtype == entropy.dtype == torch.float64
    torch.testing.assert_close(log_probs.item(), -math.log(3), atol=1e-15, rtol=0)


def test_a_forbidden_token_leaves_entropy_and_gradients_finite() -> None:
    # Two tokens of probability 1/2 and one of 0: entropy log 2. Gradient of log p_0: (1/2, -1/2, 0); of entropy: 0.
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([0]), 1.0)
    torch.testing.assert_close(entropy, torch.tensor([math.log(2)]))
    (log_probs + entropy).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5, 0.0]]))


def test_gradients_of_log_probs_and_entropy() -> None:
    logits = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    token_ids = torch.tensor([0, 3, 1])
    assert torch.autograd.gradcheck(lambda scores: token_log_probs(scores, token_ids, 0.7), (logits,))


def test_an_unlikely_token_beside_an_impossible_one() -> None:
    # exp(-200) is 0 in single precision, yet the token can come; only the last one cannot.
    logits = torch.tensor([[0.0, -200.0, -math.inf]])
    log_probs, entropy = token_log_probs(logits, torch.tensor([1]), 1.0)
    assert log_probs.tolist() == [-200.0]
    assert entropy.tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_an_impossible_token_has_no_finite_log_probability(dtype: torch.dtype) -> None:
    # The first row says that its token cannot come; in the second, (0, 0), it has 1/2, and nothing else changes.
    logits = torch.tensor([[0.0, 0.0, -math.inf], [0.0, 0.0, -math.inf]], dtype=dtype, requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([2, 0]), 0.7)
    assert log_probs[0].item() == -math.inf
    torch.testing.assert_close(log_probs[1].item(), -math.log(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), torch.full((2,), math.log(2), dtype=torch.float64))
    (log_probs[1] + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(logits.grad, torch.tensor([[0, 0, 0], [0.5, -0.5, 0]], dtype=dtype) / 0.7)


def test_an_impossible_token_behind_a_frozen_head() -> None:
    # Hidden states (1) with weights (0, 0, -inf) as in the test before; what cannot come stays apart from the others.
    head = torch.nn.Linear(1, 3, bias=False).requires_grad_(False)
    head.weight.copy_(torch.tensor([[0.0], [0.0], [-math.inf]]))
    log_probs, entropy = chunked_log_probs(torch.ones(2, 1), head, torch.tensor([2, 1]), 1.0, 1)
    torch.testing.assert_close(log_probs, torch.tensor([-math.inf, -math.log(2)]))
    torch.testing.assert_close(entropy, torch.full((2,), math.log(2)))


def gradients(head: LoraHead, hidden: Tensor, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
    """Of a loss that gives each position another weight, with respect to the hidden states and the head's factors."""
    weights = torch.arange(1.0, POSITIONS + 1, dtype=torch.float64)
    loss = (weights * log_probs).sum() + (weights.flip(0) * entropy).sum()
    return torch.autograd.grad(loss, (hidden, head.down, head.up))


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 6, 7, 8, 1000])
def test_chunks_change_neither_values_nor_gradients(head: LoraHead, chunk_size: int) -> None:
    hidden, token_ids = inputs()
    expected = token_log_probs(head(hidden), token_ids, 0.7)
    actual = chunked_log_probs(hidden, head, token_ids, 0.7, chunk_size)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(head, hidden, *actual), gradients(head, hidden, *expected))


@pytest.mark.parametrize(("chunk_size", "rows"), [(1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (50, [7])])
def test_the_head_sees_a_chunk_at_a_time_and_once_more_in_the_backward_pass(
    head: LoraHead, chunk_size: int, rows: list[int]
) -> None:
    hidden, token_ids = inputs()
    scores = chunked_log_probs(hidden, head, token_ids, 1.0, chunk_size)
    assert head.rows == rows
    gradients(head, hidden, *scores)
    assert sorted(head.rows) == sorted(rows * 2)


def test_nothing_is_computed_again_without_gradients(head: LoraHead) -> None:
    hidden, token_ids = inputs()
    with torch.no_grad():
        log_probs, entropy = chunked_log_probs(hidden, head, token_ids, 0.7, 3)
    assert head.rows == [3, 3, 1]
    assert not log_probs.requires_grad
    torch.testing.assert_close((log_probs, entropy), token_log_probs(head(hidden), token_ids, 0.7))


def test_no_logits_are_kept_for_the_backward_pass(head: LoraHead) -> None:
    hidden, token_ids = inputs()
    kept: list[int] = []

    def note(saved: Tensor) -> Tensor:
        kept.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        chunked_log_probs(hidden, head, token_ids, 1.0, 3)
        assert max(kept, default=0) <= 3 * HIDDEN
        token_log_probs(head(hidden), token_ids, 1.0)
    assert max(kept) == POSITIONS * VOCABULARY


class FrozenHead:
    """A frozen linear layer as a head, and the same as a plain product."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, bias: bool = True) -> None:
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype).requires_grad_(False)
        self.rows: list[int] = []
        self.layer.register_forward_hook(lambda _, args, output: self.rows.append(len(output)))

    def product(self, hidden: Tensor) -> Tensor:
        scores = hidden @ self.layer.weight.T
        return scores if self.layer.bias is None else scores + self.layer.bias


def plain_scores(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies as one would write them down."""
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 50])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)], ids=["log-probs", "entropy", "both"])
def test_gradients_behind_a_frozen_head(chunk_size: int, weights: tuple[float, float]) -> None:
    head, (hidden, token_ids) = FrozenHead(), inputs()
    scale = torch.arange(1.0, POSITIONS + 1, dtype=torch.float64)
    found = []
    for scores in (
        chunked_log_probs(hidden, head.layer, token_ids, 0.7, chunk_size),
        plain_scores(head.product(hidden), token_ids, 0.7),
    ):
        loss = sum(weight * (scale * part).sum() for weight, part in zip(weights, scores, strict=True) if weight)
        found.append((*scores, *torch.autograd.grad(loss, hidden)))  # type: ignore[arg-type]
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_a_frozen_head_is_asked_once_unless_the_entropy_is_learned_from() -> None:
    head, (hidden, token_ids) = FrozenHead(), inputs()
    log_probs, entropy = chunked_log_probs(hidden, head.layer, token_ids, 1.0, 3)
    torch.autograd.backward(log_probs.sum(), retain_graph=True)
    assert head.rows == [3, 3, 1]
    first = hidden.grad
    assert first is not None
    first = first.clone()
    torch.autograd.backward(log_probs.sum(), retain_graph=True)  # what was kept serves again
    torch.testing.assert_close(hidden.grad, 2 * first)
    torch.autograd.backward(entropy.sum())
    assert sorted(head.rows) == sorted([3, 3, 1] * 2)


def test_a_frozen_head_in_half_precision() -> None:
    head, (hidden, token_ids) = FrozenHead(torch.bfloat16, bias=False), inputs()
    halves = hidden.detach().bfloat16().requires_grad_()
    log_probs, entropy = chunked_log_probs(halves, head.layer, token_ids, 1.0, 3)
    assert log_probs.dtype == entropy.dtype == torch.float32
    (gradient,) = torch.autograd.grad(log_probs.sum(), halves)
    wide = halves.detach().float().requires_grad_()
    expected, _ = plain_scores(wide @ head.layer.weight.float().T, token_ids, 1.0)
    torch.testing.assert_close(log_probs, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(gradient.float(), torch.autograd.grad(expected.sum(), wide)[0], rtol=0.05, atol=0.02)


def test_a_trained_linear_head_gets_its_gradient() -> None:
    head, (hidden, token_ids) = FrozenHead(), inputs()
    head.layer.requires_grad_(True)
    found = torch.autograd.grad(chunked_log_probs(hidden, head.layer, token_ids, 0.7, 3)[0].sum(), head.layer.weight)
    expected = torch.autograd.grad(plain_scores(head.product(hidden), token_ids, 0.7)[0].sum(), head.layer.weight)
    torch.testing.assert_close(found, expected)


def test_no_positions_give_no_scores(head: LoraHead) -> None:
    hidden, token_ids = inputs()
    log_probs, entropy = chunked_log_probs(hidden[:0], head, token_ids[:0], 1.0, 4)
    assert log_probs.shape == entropy.shape == (0,)
    assert log_probs.dtype == torch.float64


def test_random_numbers_are_left_alone(head: LoraHead, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a random state was saved")

    monkeypatch.setattr(torch, "get_rng_state", refuse)
    hidden, token_ids = inputs()
    gradients(head, hidden, *chunked_log_probs(hidden, head, token_ids, 1.0, 3))


def test_more_tokens_than_positions_are_refused(head: LoraHead) -> None:
    hidden, token_ids = inputs()
    with pytest.raises(ValueError, match="zip"):
        chunked_log_probs(hidden[:3], head, token_ids, 1.0, 3)


def test_masked_sum_ignores_what_does_not_count() -> None:
    # 1 + 4 in the first row; 0 where nothing counts. The NaN of the padding reaches neither value nor gradient.
    values = torch.tensor([[1.0, math.nan, 4.0], [math.inf, math.nan, 2.0]], requires_grad=True)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    sums = masked_sum(values, mask)
    torch.testing.assert_close(sums, torch.tensor([5.0, 0.0]))
    torch.testing.assert_close(masked_sum(values[0], mask[0]), torch.tensor(5.0))
    sums.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(values.grad, torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]))
