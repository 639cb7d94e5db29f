"""Log-probabilities of completions: each prompt read once, the head on completion positions only, chunked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from comlrl_lightning.agents.decoding.native import left_pad
from comlrl_lightning.agents.language_model import LanguageModel
from comlrl_lightning.functional.log_probs import chunked_log_probs
from comlrl_lightning.types import Completion

Head = Callable[[Tensor], Tensor]
WORTH_A_PASS = 0.75
"""Largest share of the tokens for which reading prompts once is the quicker way, as measured on a CPU."""
MAX_LOGITS = 2**24
"""Most logits that exist at a time."""
MAX_LOGITS_ON_CPU = 2**22
"""The same where a larger block of memory is asked of the system each time anew, page by page."""


def score(
    model: LanguageModel, completions: Sequence[Completion], temperature: float, *, reference: bool = False
) -> tuple[Tensor, Tensor]:
    """`[M]` log-probabilities and `[M]` entropies of all M completion tokens, row after row.

    Rows are padded on the right: a causal model's real tokens never see what follows them. Completions of the same
    prompt share its reading, where the model allows it.

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
    if PaddedTokens(completions, reads_prompts_once=model.reads_prompts_once).sharing_pays:
        features, head = _read_prompts_once(model, completions, agents, reference)
    else:
        ids, positions, rows, columns = _layout(completions, model.device)
        with model.acting_as(agents, [len(group) for _, group in groups], reference=reference):
            features, head = model.predictors(ids, positions, rows, columns)
    tokens = torch.tensor([token for one in completions for token in one.token_ids], device=model.device)
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


def _read_prompts_once(
    model: LanguageModel, completions: Sequence[Completion], agents: Sequence[int], reference: bool
) -> tuple[Tensor, Head]:
    """`predictors` of all M completion tokens in two forward passes: the prompts, then what follows each of them.

    Args:
        model: The language model.
        completions: Ordered by agent.
        agents: Those of the completions, in their order.
        reference: Read as the agents' reference policies.
    """
    prompts = _prompts(completions)
    place = {prompt: position for position, prompt in enumerate(prompts)}
    owners = torch.tensor([place[one.agent, one.prompt_ids] for one in completions], device=model.device)
    ids, positions, mask = left_pad([prompt for _, prompt in prompts], model.device)
    cache = DynamicCache(config=model.causal.config)
    with model.acting_as(agents, _counts(agents, [agent for agent, _ in prompts]), reference=reference):
        states = model.hidden_states(ids, positions, None if bool(mask.all()) else mask, cache)[:, -1:][owners]
    read = [list(one.token_ids[:-1]) for one in completions]  # the last token predicts nothing that is scored
    longest = max(map(len, read))
    if longest:
        cache.batch_select_indices(owners)
        # What stands on the right of a row changes nothing in it.
        padded = [
            [*row, *one.prompt_ids[:1] * (longest - len(row))] for row, one in zip(read, completions, strict=True)
        ]
        following = torch.tensor(padded, device=model.device)
        places = positions[:, -1:][owners] + 1 + torch.arange(longest, device=model.device)
        seen = torch.cat([mask[owners], torch.ones_like(following, dtype=torch.bool)], dim=1)
        with model.acting_as(agents, _counts(agents, [one.agent for one in completions]), reference=reference):
            later = model.hidden_states(following, places, seen, cache)
        states = torch.cat([states, later], dim=1)
    scored = torch.tensor([len(one.token_ids) for one in completions], device=model.device)
    columns = torch.arange(longest + 1, device=model.device)
    return states[columns < scored.unsqueeze(1)], model.causal.get_output_embeddings()


class PaddedTokens:
    """Padded tokens that one call of `score` reads, counted row by row.

    Args:
        completions: What is scored.
        reads_prompts_once: Of the language model.
    """

    def __init__(self, completions: Iterable[Completion] = (), *, reads_prompts_once: bool) -> None:
        self.reads_prompts_once = reads_prompts_once
        self.num_rows = 0
        self.longest_row = self.longest_prompt = self.longest_completion = 0
        self.prompts: set[tuple[int, tuple[int, ...]]] = set()
        for one in completions:
            self.add(one)

    def add(self, one: Completion) -> PaddedTokens:
        """Count one more completion."""
        prompt, answer = len(one.prompt_ids), len(one.token_ids)
        self.num_rows += 1
        self.longest_row = max(self.longest_row, prompt + answer)
        self.longest_prompt = max(self.longest_prompt, prompt)
        self.longest_completion = max(self.longest_completion, answer)
        self.prompts.add((one.agent, one.prompt_ids))
        return self

    @property
    def total(self) -> int:
        """Padded tokens, each prompt once where that pays."""
        return self._shared if self.sharing_pays else self._apart

    @property
    def sharing_pays(self) -> bool:
        """Whether to read each prompt once, in a pass of its own: fewer tokens must make up for one pass more."""
        return self.reads_prompts_once and self._shared <= WORTH_A_PASS * self._apart

    @property
    def _apart(self) -> int:
        return self.num_rows * self.longest_row

    @property
    def _shared(self) -> int:
        return len(self.prompts) * self.longest_prompt + self.num_rows * self.longest_completion


def _prompts(completions: Sequence[Completion]) -> list[tuple[int, tuple[int, ...]]]:
    """Agents with their different prompts, in order."""
    return list(dict.fromkeys((one.agent, one.prompt_ids) for one in completions))


def _counts(agents: Sequence[int], owners: Sequence[int]) -> list[int]:
    """How many rows each agent has."""
    return [owners.count(agent) for agent in agents]


def _layout(completions: Sequence[Completion], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`[R, S]` tokens to read and their positions; `[M]` row and column of every prediction."""
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
    return ids, positions, rows.to(device), columns.to(device)
