"""Log-probabilities of completions: one forward pass, the head on completion positions only, chunked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from comlrl_lightning.agents.language_model import LanguageModel
from comlrl_lightning.functional.log_probs import chunked_log_probs
from comlrl_lightning.rollouts.types import Completion

MAX_LOGITS = 2**24
"""Most logits that exist at a time."""
MAX_LOGITS_ON_CPU = 2**22
"""The same where a larger block of memory is asked of the system each time anew, page by page."""


def score(
    model: LanguageModel, completions: Sequence[Completion], temperature: float, *, reference: bool = False
) -> tuple[Tensor, Tensor]:
    """`[M]` log-probabilities and `[M]` entropies of all M completion tokens, row after row.

    Rows are padded on the right: a causal model's real tokens never see what follows them.

    Args:
        model: The language model of the completions' agents.
        completions: Ordered by agent; of one agent only unless the model mixes agents.
        temperature: Divides the logits.
        reference: Score under the agents' reference policies.
    """
    assert model.has_reference or not reference, "add_reference() comes first"
    if reference and model.frozen is not None:
        return score(model.frozen, completions, temperature)
    groups = [(agent, list(group)) for agent, group in groupby(completions, key=lambda completion: completion.agent)]
    agents = [agent for agent, _ in groups]
    ids, positions, rows, columns, tokens = _layout(completions, model.device)
    with model.acting_as(agents, [len(group) for _, group in groups], reference=reference):
        features, head = model.predictors(ids, positions, rows, columns)
    lengths, heads = [len(tokens)], [head]
    if model.own_head and model.head_is_adapted:
        lengths = [sum(len(completion.token_ids) for completion in group) for _, group in groups]
        heads = [partial(model.head_as, agent, reference=reference) for agent in agents]
    most = MAX_LOGITS_ON_CPU if features.device.type == "cpu" else MAX_LOGITS
    chunk_size = max(32, most // model.vocabulary_size)
    scores = [
        chunked_log_probs(hidden, head, targets, temperature, chunk_size)
        for hidden, head, targets in zip(
            torch.split(features, lengths), heads, torch.split(tokens, lengths), strict=True
        )
    ]
    log_probs, entropy = zip(*scores, strict=True)
    return torch.cat(log_probs), torch.cat(entropy)


def _layout(completions: Sequence[Completion], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`[R, S]` tokens to read and their positions; `[M]` row, column and target of every prediction."""
    # The last token predicts nothing that is scored.
    read = [(*completion.prompt_ids, *completion.token_ids)[:-1] for completion in completions]
    longest = max(map(len, read))
    ids = torch.tensor([row + row[:1] * (longest - len(row)) for row in map(list, read)], device=device)
    positions = torch.arange(longest, device=device).expand(len(read), -1)
    lengths = [len(completion.token_ids) for completion in completions]
    rows = torch.arange(len(read)).repeat_interleave(torch.tensor(lengths))
    columns = torch.cat(
        [
            torch.arange(len(completion.prompt_ids) - 1, len(completion.prompt_ids) - 1 + length)
            for completion, length in zip(completions, lengths, strict=True)
        ]
    )
    tokens = torch.tensor([token for completion in completions for token in completion.token_ids])
    return ids, positions, rows.to(device), columns.to(device), tokens.to(device)
