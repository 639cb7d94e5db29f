"""Sampling through `generate` of transformers, with every setting said and none taken from the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from comlrl_lightning.agents.decoding.native import Row, left_pad
from comlrl_lightning.agents.decoding.tokens import StopStrings
from comlrl_lightning.agents.engine import GenerationProgress, Sampled
from comlrl_lightning.agents.language_model import LanguageModel
from comlrl_lightning.agents.log_probs import score
from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.types import Completion
from comlrl_lightning.utilities.rng import key_digest, seeded


def generate_with_transformers(
    model: LanguageModel, rows: Sequence[Row], sampling: Sampling, progress: GenerationProgress | None = None
) -> list[Sampled]:
    """Like `generation.generate`, by transformers' own loop.

    All rows draw from one random stream, seeded by their keys together: a row's tokens depend on its batch. The global
    random state comes back afterwards. Log-probabilities are scored after sampling.
    """
    from transformers import StoppingCriteriaList

    agents = sorted({row.agent for row in rows})
    ids, _, mask = left_pad([row.prompt_ids for row in rows], model.device)
    watch = _Watch(StopStrings(sampling.stop, model.tokenizer), ids.shape[1], model.end_ids, len(rows), progress)
    with (
        seeded(key_digest([key_digest(row.key) for row in rows]) % 2**63, model.device),
        _own_settings(model, sampling),
        model.acting_as(agents, [sum(row.agent == agent for row in rows) for agent in agents]),
    ):
        sequences = model.causal.generate(
            input_ids=ids, attention_mask=mask.long(), stopping_criteria=StoppingCriteriaList([watch])
        )
    tails = sequences[:, ids.shape[1] :].tolist()
    answers = [tokens[: watch.length(tokens, index)] for index, tokens in enumerate(tails)]
    return _scored(model, rows, answers, sampling.temperature or 1.0)


def _scored(
    model: LanguageModel, rows: Sequence[Row], answers: Sequence[list[int]], temperature: float
) -> list[Sampled]:
    completions = [
        Completion(row.agent, "", row.prompt_ids, tuple(answer), (), "", False)
        for row, answer in zip(rows, answers, strict=True)
    ]
    log_probs, _ = score(model, completions, temperature)
    parts = torch.split(log_probs, [len(answer) for answer in answers])
    return [
        Sampled(completion.token_ids, tuple(part.tolist())) for completion, part in zip(completions, parts, strict=True)
    ]


@contextmanager
def _own_settings(model: LanguageModel, sampling: Sampling) -> Iterator[None]:
    """Put our settings in the place of the model's, which would otherwise fill in what is not said."""
    from transformers import GenerationConfig

    former = model.causal.generation_config
    pad = model.tokenizer.pad_token_id
    model.causal.generation_config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
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


class _Watch:
    """Stopping criterion: stop strings, and who is still running."""

    def __init__(
        self, stop: StopStrings, start: int, ends: Sequence[int], num_rows: int, progress: GenerationProgress | None
    ) -> None:
        self.stop, self.start, self.ends, self.progress = stop, start, frozenset(ends), progress
        self.lengths: dict[int, int] = {}
        self.num_rows = num_rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """`[R]` True for rows that are finished."""
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
