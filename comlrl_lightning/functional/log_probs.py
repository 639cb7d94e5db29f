"""Log-probabilities of sampled tokens and the entropy of the distributions that they came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


def token_log_probs(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`[...]` log-probability of each token and `[...]` entropy in nats, both at the sampling temperature.

    Args:
        logits: `[..., V]` scores of the next token; half precision is raised to float32, float64 stays.
        token_ids: `[...]` sampled tokens.
        temperature: Divides the logits, above 0.

    Returns:
        `[...]` log-probabilities and `[...]` entropies.
    """
    scores: tuple[Tensor, Tensor] = _TokenLogProbs.apply(logits, token_ids, temperature)  # type: ignore[no-untyped-call]
    return scores


def chunked_log_probs(
    hidden: Tensor, head: Callable[[Tensor], Tensor], token_ids: Tensor, temperature: float, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """`[M]` `token_log_probs` of the head's logits, never more than `chunk_size` x V logits at a time.

    Behind a frozen `nn.Linear` the gradients of the log-probabilities are worked out at once, while the logits are
    there: `[M, H]` numbers are kept for the backward pass. Of any other head, and for the gradient of the entropy, the
    logits of each chunk are computed again in the backward pass.

    Args:
        hidden: `[M, H]` hidden states of the M positions that predict the tokens.
        head: Maps `[m, H]` hidden states to `[m, V]` logits, each row by itself; it must be deterministic and may hold
            trainable parameters.
        token_ids: `[M]` sampled tokens.
        temperature: Divides the logits, above 0.
        chunk_size: Positions per call of the head.

    Returns:
        `[M]` log-probabilities and `[M]` entropies.
    """

    def score(hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        return token_log_probs(head(hidden), token_ids, temperature)

    def run(hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        if type(head) is nn.Linear and not any(one.requires_grad for one in head.parameters()):
            scores = _FrozenHead.apply(hidden, token_ids, head, temperature)  # type: ignore[no-untyped-call]
        else:
            scores = checkpoint(score, hidden, token_ids, use_reentrant=False, preserve_rng_state=False)
        return scores  # type: ignore[no-any-return]

    # Splitting nothing gives one empty chunk, so M = 0 needs no case of its own.
    chunks = zip(torch.split(hidden, chunk_size), torch.split(token_ids, chunk_size), strict=True)
    log_probs, entropy = zip(*(run(*chunk) for chunk in chunks), strict=True)
    return torch.cat(log_probs), torch.cat(entropy)


class _Distributions(NamedTuple):
    """What logits say of the next tokens, with one exponential per logit."""

    scores: Tensor
    """`[..., V]` logarithms of the probabilities, but for a constant; finite where a probability is 0."""
    chosen: Tensor
    """`[...]` the same of the tokens, -inf where one cannot come."""
    weights: Tensor
    """`[..., V]` probabilities, but for a factor."""
    normalizer: Tensor
    """`[...]` sums of the weights."""
    entropy: Tensor
    """`[...]` in nats."""

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor, temperature: float) -> _Distributions:
        """Distributions of `[..., V]` logits, which stay as they are, and what they say of `[...]` tokens."""
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True).div_(temperature)
        scores -= scores.amax(-1, keepdim=True)
        chosen = scores.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
        weights = scores.exp()
        normalizer = weights.sum(-1)
        weighted = torch.linalg.vecdot(weights, scores)
        if bool(weighted.isnan().any()):  # 0 * -inf: a token of probability 0 adds nothing
            scores.clamp_(min=torch.finfo(scores.dtype).min)
            weighted = torch.linalg.vecdot(weights, scores)
        return cls(scores, chosen, weights, normalizer, normalizer.log() - weighted / normalizer)

    def log_probs(self) -> Tensor:
        """`[...]` log-probabilities of the tokens."""
        return self.chosen - self.normalizer.log()

    def slopes_of_log_probs(self, token_ids: Tensor) -> Tensor:
        """`[..., V]` derivatives of the tokens' log-probabilities by logits over temperature."""
        slopes = self.weights / -self.normalizer.unsqueeze(-1)
        chosen = token_ids.unsqueeze(-1)
        return slopes.scatter_add_(-1, chosen, torch.ones_like(chosen, dtype=slopes.dtype))

    def slopes_of_entropy(self) -> Tensor:
        """`[..., V]` derivatives of the entropies by logits over temperature."""
        surprise = self.scores - (self.normalizer.log() - self.entropy).unsqueeze(-1)
        return surprise.mul_(self.weights).div_(-self.normalizer.unsqueeze(-1))


class _TokenLogProbs(Function):
    """`token_log_probs`, with two tables of the logits' size for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        found = _Distributions.of(logits, token_ids, temperature)
        # Not as attributes: what is saved so is let go by `checkpoint`.
        ctx.save_for_backward(token_ids, *found)
        return found.log_probs(), found.entropy.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, None, None]:
        token_ids, *found = ctx.saved_tensors
        slopes = None
        if of_log_probs is not None:
            slopes = _Distributions(*found).slopes_of_log_probs(token_ids).mul_(of_log_probs.unsqueeze(-1))
        if of_entropy is not None:
            more = _Distributions(*found).slopes_of_entropy().mul_(of_entropy.unsqueeze(-1))
            slopes = more if slopes is None else slopes.add_(more)
        return None if slopes is None else slopes.div_(ctx.temperature).to(ctx.dtype), None, None


class _FrozenHead(Function):
    """`token_log_probs` behind a frozen linear layer, with the derivatives by the hidden states in place of logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, token_ids: Tensor, head: nn.Linear, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.head, ctx.temperature = head, temperature
        logits = head(hidden)
        found = _Distributions.of(logits, token_ids, temperature)
        if ctx.needs_input_grad[0]:
            slopes = found.slopes_of_log_probs(token_ids).div_(temperature).to(logits.dtype)
            ctx.save_for_backward(hidden, slopes @ head.weight.to(logits.dtype))
        return found.log_probs(), found.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_log_probs: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        hidden, slopes = ctx.saved_tensors
        gradient = None
        if of_log_probs is not None:
            gradient = (slopes * of_log_probs.unsqueeze(-1)).to(hidden.dtype)
        if of_entropy is not None:
            with torch.enable_grad():
                again = hidden.detach().requires_grad_()
                _, entropy = token_log_probs(
                    ctx.head(again), torch.zeros_like(hidden[:, 0], dtype=torch.long), ctx.temperature
                )
            (more,) = torch.autograd.grad(entropy, again, of_entropy)
            gradient = more if gradient is None else gradient + more
        return gradient, None, None, None


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """`[...]` sum over the positions that count; the others may hold anything, NaN included.

    Args:
        values: `[..., C]` numbers.
        mask: `[..., C]` True = counts.

    Returns:
        `[...]` sums.
    """
    return values.masked_fill(~mask, 0.0).sum(-1)
