"""Sampling through `generate` of transformers, with every setting said and none taken from the model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from comlrl_lightning.agents.decoding.native import Row, left_pad
from comlrl_lightning.agents.decoding.tokens import StopStrings
from comlrl_lightning.agents.engine import GenerationProgress, Sampled
from comlrl_lightning.agents.language_model import LanguageModel
from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.utilities.rng import key_digest, seeded


def generate_with_transformers(
    model: LanguageModel, rows: Sequence[Row], sampling: Sampling, progress: GenerationProgress | None = None
) -> list[Sampled]:
    """Like `generation.generate`, by transformers' own loop.

    All rows draw from one random stream, seeded by their keys together: a row's tokens depend on its batch. The global
    random state comes back afterwards. Log-probabilities are those of the passes that sampled.
    """
    from transformers import LogitsProcessorList, StoppingCriteriaList

    agents = sorted({row.agent for row in rows})
    ids, _, mask = left_pad([row.prompt_ids for row in rows], model.device)
    drawn = _Drawn(sampling, model.end_ids)
    watch = _Watch(StopStrings(sampling.stop, model.tokenizer), ids.shape[1], model.end_ids, len(rows), drawn, progress)
    with (
        seeded(key_digest([key_digest(row.key) for row in rows]) % 2**63, model.device),
        _own_settings(model, sampling),
        model.acting_as(agents, [sum(row.agent == agent for row in rows) for agent in agents]),
    ):
        sequences = model.causal.generate(
            input_ids=ids,
            attention_mask=mask.long(),
            logits_processor=LogitsProcessorList([drawn]),
            stopping_criteria=StoppingCriteriaList([watch]),
        )
    tails = sequences[:, ids.shape[1] :].tolist()
    log_probs = torch.stack(drawn.log_probs, dim=1).tolist()
    lengths = [watch.length(tokens, index) for index, tokens in enumerate(tails)]
    return [
        Sampled(tuple(tokens[:length]), tuple(values[:length]))
        for tokens, values, length in zip(tails, log_probs, lengths, strict=True)
    ]


@contextmanager
def _own_settings(model: LanguageModel, sampling: Sampling) -> Iterator[None]:
    """Put our settings in the place of the model's, which would otherwise fill in what is not said."""
    from transformers import GenerationConfig

    former = model.causal.generation_config
    pad = model.tokenizer.pad_token_id
    model.causal.generation_config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=sampling.temperature > 0,
        temperature=sampling.temperature or 1.0,
        top_p=sampling.top_p,
        # Without a number transformers would take 50.
        top_k=(sampling.top_k or 0) if sampling.temperature > 0 else None,
        repetition_penalty=1.0,
        num_beams=1,
        use_cache=True,
        eos_token_id=list(model.end_ids) or None,
        pad_token_id=0 if pad is None else pad,
    )
    try:
        yield
    finally:
        model.causal.generation_config = former


class _Drawn:
    """Processor of logits that keeps what the tokens are worth in the full distribution, and bans an early end."""

    def __init__(self, sampling: Sampling, ends: Collection[int]) -> None:
        self.temperature = sampling.temperature or 1.0
        self.min_new_tokens, self.ends = sampling.min_new_tokens, list(ends)
        self.log_probs: list[Tensor] = []
        """Per step, `[R]` log-probabilities of the drawn tokens."""
        self._all = torch.empty(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`[R, V]` logits to draw from."""
        self._all = (scores / self.temperature).log_softmax(-1)
        if len(self.log_probs) < self.min_new_tokens:
            scores = scores.index_fill(1, torch.tensor(self.ends, dtype=torch.long, device=scores.device), -math.inf)
        return scores

    def keep(self, tokens: Tensor) -> None:
        """Note the `[R]` tokens that were drawn."""
        self.log_probs.append(self._all.gather(1, tokens.unsqueeze(1)).squeeze(1))


class _Watch:
    """Stopping criterion: stop strings, and who is still running."""

    def __init__(
        self,
        stop: StopStrings,
        start: int,
        ends: Collection[int],
        num_rows: int,
        drawn: _Drawn,
        progress: GenerationProgress | None,
    ) -> None:
        self.stop, self.start, self.ends, self.progress = stop, start, frozenset(ends), progress
        self.drawn = drawn
        self.lengths: dict[int, int] = {}
        self.num_rows = num_rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """`[R]` True for rows that are finished."""
        self.drawn.keep(input_ids[:, -1])
        for index, tokens in enumerate(input_ids[:, self.start :].tolist()):
            if index not in self.lengths and (tokens[-1] in self.ends or self._stopped(tokens)):
                self.lengths[index] = len(tokens)
        if self.progress is not None:
            self.progress(self.num_rows - len(self.lengths))
        return torch.tensor([index in self.lengths for index in range(self.num_rows)], device=input_ids.device)

    def _stopped(self, tokens: list[int]) -> bool:
        return bool(self.stop.stop) and self.stop.reached(tokens)

    def length(self, tokens: list[int], index: int) -> int:
        """Tokens of a row up to the one that finished it."""
        return self.lengths.get(index, len(tokens))
