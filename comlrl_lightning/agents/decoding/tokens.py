"""From logits to tokens: inverse-CDF sampling from every row's own random numbers, greedy choice, stop strings.

The numbers of a row come from a counter-based generator with a key of its own, so that what a row draws depends neither
on the other rows of its batch nor on anything that was drawn before, and the global random state is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.utilities.rng import generator_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK = 256
"""Tokens whose probabilities are summed up before the search looks into one such block."""
NUCLEUS = 512
"""Most likely tokens among which a nucleus is first looked for; a sort of the whole vocabulary is slow."""
BELOW_ONE = 1 - 2**-50


def uniforms(keys: Sequence[Sequence[int]], count: int) -> Tensor:
    """`[R, count]` numbers in [0, 1), row r from its own Philox generator with key `keys[r]`."""
    rows = [generator_of(key).random(count) for key in keys]
    return torch.from_numpy(np.stack(rows))


def pick(logits: Tensor, draws: Tensor, sampling: Sampling, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`[R]` tokens and `[R]` their log-probabilities in the full distribution at the temperature (1 when greedy).

    Args:
        logits: `[R, V]`.
        draws: `[R]` numbers in [0, 1).
        sampling: Temperature, nucleus, number of candidates.
        banned: Token ids that may not come.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    temperature = sampling.temperature or 1.0
    # In place from here on: at every token this is a good part of the work outside the model.
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).div_(temperature).exp_()
    normalizer = weights.sum(-1).log()
    if banned is not None:
        weights.index_fill_(1, banned, 0.0)
    if sampling.temperature == 0:
        tokens = weights.argmax(-1)
    elif sampling.top_p < 1 or sampling.top_k is not None:
        tokens = _pick_truncated(weights, draws, sampling)
    else:
        tokens = search(weights, draws)
    chosen = logits.gather(1, tokens.unsqueeze(1)) - top
    return tokens, chosen.squeeze(1) / temperature - normalizer


def search(weights: Tensor, draws: Tensor) -> Tensor:
    """`[R]` index i with probability weights[i] / sum(weights), never one of weight 0.

    Two levels, so that no running sum over the whole vocabulary is needed: first the block, then the token in it.

    Args:
        weights: `[R, n]` numbers of at least 0, not all 0.
        draws: `[R]` numbers in [0, 1).
    """
    if weights.shape[1] <= 2 * BLOCK:
        return _locate(weights, draws)[0]
    missing = -weights.shape[1] % BLOCK
    blocks = (F.pad(weights, (0, missing)) if missing else weights).view(len(weights), -1, BLOCK)
    block, rest = _locate(blocks.sum(-1), draws)
    rows = torch.arange(len(weights), device=weights.device)
    return block * BLOCK + _locate(blocks[rows, block], rest)[0]


def _locate(weights: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """`[R]` index of the weight in which the draw falls, and `[R]` how far into it, in [0, 1)."""
    wide = weights.to(draws.dtype)
    ends = wide.cumsum(-1)
    target = draws.clamp(max=BELOW_ONE).unsqueeze(1) * ends[:, -1:]
    index = torch.searchsorted(ends, target, right=True).clamp(max=weights.shape[1] - 1)
    weight = wide.gather(1, index)
    into = (target - (ends.gather(1, index) - weight)) / weight
    return index.squeeze(1), into.squeeze(1).clamp(0, BELOW_ONE)


def _pick_truncated(weights: Tensor, draws: Tensor, sampling: Sampling) -> Tensor:
    """`[R]` tokens from the `top_k` most likely and, of these, from the smallest set that holds `top_p`."""
    count = sampling.top_k or (NUCLEUS if sampling.top_p < 1 else weights.shape[1])
    best, ids = weights.topk(min(count, weights.shape[1]))
    total = (weights if sampling.top_k is None else best).sum(-1, keepdim=True)
    wanted = sampling.top_p * total
    if sampling.top_k is None and bool((best.sum(-1, keepdim=True) < wanted).any()):
        best, ids = weights.sort(descending=True)
    best = best.masked_fill(best.cumsum(-1) - best >= wanted, 0.0)
    return ids.gather(1, _locate(best, draws)[0].unsqueeze(1)).squeeze(1)


class StopStrings:
    """The texts that end a completion.

    Args:
        stop: The texts.
        tokenizer: Decodes the tokens.
    """

    def __init__(self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.stop = tuple(stop)
        self.tokenizer = tokenizer
        # A byte-level token may hold one byte, and a character up to four of them.
        self._window = 4 * max(map(len, self.stop), default=0) + 8

    def reached(self, token_ids: Sequence[int]) -> bool:
        """Whether one of the texts stands at the end of a completion that grows token by token."""
        tail = self.tokenizer.decode(token_ids[-self._window :], skip_special_tokens=False)
        return any(text in tail for text in self.stop)

    def cut(self, text: str) -> str:
        """The text up to the first of them."""
        places = [place for place in map(text.find, self.stop) if place >= 0]
        return text[: min(places)] if places else text
