"""Log-probabilities of sampled tokens and the entropy of the distributions that they came from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
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
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_probs = scaled.log_softmax(-1)
    probs = log_probs.exp()
    # A token of probability 0 adds nothing, but 0 * -inf would be NaN.
    entropy = -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(-1)
    return log_probs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1), entropy


def chunked_log_probs(
    hidden: Tensor, head: Callable[[Tensor], Tensor], token_ids: Tensor, temperature: float, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """`[M]` `token_log_probs` of the head's logits, never more than `chunk_size` x V logits at a time.

    With gradients on, the logits of each chunk are computed again in the backward pass instead of being kept.

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

    def run(*chunk: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False)
        return result

    # Splitting nothing gives one empty chunk, so M = 0 needs no case of its own.
    chunks = zip(torch.split(hidden, chunk_size), torch.split(token_ids, chunk_size), strict=True)
    log_probs, entropy = zip(*(run(*chunk) for chunk in chunks), strict=True)
    return torch.cat(log_probs), torch.cat(entropy)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """`[...]` sum over the positions that count; the others may hold anything, NaN included.

    Args:
        values: `[..., C]` numbers.
        mask: `[..., C]` True = counts.

    Returns:
        `[...]` sums.
    """
    return values.masked_fill(~mask, 0.0).sum(-1)
