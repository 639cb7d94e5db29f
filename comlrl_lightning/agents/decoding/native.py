"""Batched sampling of completions: every prompt read once, one row per sample, finished rows leave the batch.

Of a prompt that begins as the agent's rows of the turn before do, only the rest is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from comlrl_lightning.agents.adapters import Grouping
from comlrl_lightning.agents.decoding.prefixes import Leavers, Prefixes, is_plain
from comlrl_lightning.agents.decoding.tokens import StopStrings, pick, uniforms
from comlrl_lightning.agents.engine import GenerationProgress, Sampled
from comlrl_lightning.agents.kv_cache import new_cache
from comlrl_lightning.agents.language_model import LanguageModel
from comlrl_lightning.agents.settings import Sampling

RowFinished = Callable[[int, "Sampled"], None]
"""Called with the position of a row and its completion, which is over."""


@dataclass(frozen=True, slots=True)
class Row:
    """One completion to sample."""

    agent: int
    prompt_ids: tuple[int, ...]
    key: tuple[int, ...]
    prefixes: Prefixes | None = None


def left_pad(
    prompts: Sequence[Sequence[int]], device: torch.device, starts: Sequence[int] = (0,)
) -> tuple[Tensor, Tensor, Tensor]:
    """`[R, P]` tokens, `[R, P]` positions and `[R, past + P]` mask (True at real tokens) of prompts padded on the left.

    Args:
        prompts: `[R]` token ids.
        device: Where the results go.
        starts: `[R or 1]` tokens before them that were read already; `past` of them in the longest row.
    """
    before = torch.tensor(starts).unsqueeze(1).expand(len(prompts), 1)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    # The filler is a token of the row itself: masked, and no warning about padding.
    ids = torch.tensor([[prompt[0]] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    positions = torch.arange(longest) - (longest - lengths).unsqueeze(1)
    past = int(before.max())
    mask = torch.cat([torch.arange(past) >= past - before, positions >= 0], dim=1)
    return ids.to(device), (positions.clamp(min=0) + before).to(device), mask.to(device)


def generate(
    model: LanguageModel,
    rows: Sequence[Row],
    sampling: Sampling,
    progress: GenerationProgress | None = None,
    finished: RowFinished | None = None,
) -> list[Sampled]:
    """Sample a completion for every row, all in one batch, the model in evaluation mode and without gradients.

    Args:
        model: The language model of all the rows' agents.
        rows: Ordered by agent; of one agent only unless the model mixes agents.
        sampling: How to draw.
        progress: Called after every token with the number of unfinished rows.
        finished: Called once for every row, as soon as it has its last token.

    Returns:
        The completions, in the order of the rows.
    """
    prompts = sorted({(row.agent, row.prompt_ids) for row in rows})
    agents = sorted({row.agent for row in rows})
    prompts_per_agent = [sum(owner == agent for owner, _ in prompts) for agent in agents]
    with model.acting_as(agents, prompts_per_agent) as grouping:
        batch = _Batch(model, rows, sampling, grouping)
        logits = batch.read(prompts)
        for step in range(sampling.max_new_tokens):
            tokens = batch.record(step, logits)
            if finished is not None:
                batch.tell_finished(finished, is_last=step + 1 == sampling.max_new_tokens)
            if progress is not None:
                progress(batch.num_running)
            if batch.num_running == 0 or step + 1 == sampling.max_new_tokens:
                break
            logits = batch.advance(tokens)
    results = batch.results()
    batch.keep(results)
    return results


class _Batch:
    """The rows being decoded: `[G * W]`, W for each of G agents, unfinished rows and fillers that even the groups out.

    `owner` says which result a row writes to; finished rows and fillers write to one more, which nobody reads.
    """

    def __init__(
        self, model: LanguageModel, rows: Sequence[Row], sampling: Sampling, grouping: Grouping | None
    ) -> None:
        self.model, self.rows, self.sampling, self.grouping = model, rows, sampling, grouping
        device, count, length = model.device, len(rows), sampling.max_new_tokens
        self.num_running = count
        self.untold = list(range(count))
        self.cache = new_cache(model.causal.config)
        self.ends = torch.tensor(model.end_ids, dtype=torch.long, device=device)
        draws = F.pad(uniforms([row.key for row in rows], length), (0, 0, 0, 1))
        self.draws = draws.to(device, torch.float32 if device.type == "mps" else torch.float64)
        self.tokens = torch.zeros(count + 1, length, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(count + 1, length, dtype=torch.float32, device=device)
        self.lengths = torch.zeros(count + 1, dtype=torch.long, device=device)
        self.stop = StopStrings(sampling.stop, model.tokenizer)
        self.written: list[list[int]] = [[] for _ in rows]
        self.prefixes = rows[0].prefixes
        self.leavers: Leavers | None = None

    def read(self, prompts: Sequence[tuple[int, tuple[int, ...]]]) -> Tensor:
        """`[G * W, V]` logits of the first token of every row, each prompt read once."""
        starts = [0] * len(prompts) if self.prefixes is None else self.prefixes.load(prompts, self.cache)
        unread = [prompt[start:] for (_, prompt), start in zip(prompts, starts, strict=True)]
        ids, positions, mask = left_pad(unread, self.model.device, starts)
        self.mask = None if bool(mask.all()) else mask
        logits = self.model.next_logits(ids, positions, self.mask, self.cache)
        place = {prompt: index for index, prompt in enumerate(prompts)}
        by_agent: dict[int, list[int]] = {}
        for index, row in enumerate(self.rows):
            by_agent.setdefault(row.agent, []).append(index)
        self.width = max(map(len, by_agent.values()))
        nobody = len(self.rows)
        owner = [index for group in by_agent.values() for index in group + [nobody] * (self.width - len(group))]
        source = [
            place[self.rows[index].agent, self.rows[index].prompt_ids]
            for group in by_agent.values()
            for index in group + group[:1] * (self.width - len(group))
        ]
        self.owner = torch.tensor(owner, device=self.model.device)
        if self.prefixes is not None and self.prefixes.keeps and is_plain(self.model, self.cache):
            self.leavers = Leavers([None if index == nobody else index for index in owner])
        self.positions = positions[:, -1]
        rows = torch.tensor(source, device=self.model.device)
        self._select(rows)
        if self.grouping is not None:
            self.grouping.keep(range(len(by_agent)), self.width)
        return logits[rows]

    def record(self, step: int, logits: Tensor) -> Tensor:
        """`[G * W]` tokens drawn from the logits and written down; finished rows lose their owner."""
        banned = self.ends if step < self.sampling.min_new_tokens else None
        tokens, log_probs = pick(logits, self.draws[self.owner, step], self.sampling, banned)
        self.tokens[self.owner, step] = tokens
        self.log_probs[self.owner, step] = log_probs.float()
        self.lengths[self.owner] = step + 1
        ended = torch.isin(tokens, self.ends)
        if self.sampling.stop:
            ended |= self._stopped(tokens)
        self.owner = self.owner.masked_fill(ended, len(self.rows))
        self.running = (self.owner < len(self.rows)).view(-1, self.width).sum(1).tolist()
        self.num_running = sum(self.running)
        return tokens

    def _stopped(self, tokens: Tensor) -> Tensor:
        stopped = []
        for owner, token in zip(self.owner.tolist(), tokens.tolist(), strict=True):
            running = owner < len(self.rows)
            if running:
                self.written[owner].append(token)
            stopped.append(running and self.stop.reached(self.written[owner]))
        return torch.tensor(stopped, device=tokens.device)

    def advance(self, tokens: Tensor) -> Tensor:
        """`[G * W, V]` logits of the next token, after finished rows and agents have left."""
        width = max(self.running)
        if width < self.width or 0 in self.running:
            tokens = tokens[self._compact(width)]
        self.positions = self.positions + 1
        if self.mask is not None:
            self.mask = F.pad(self.mask, (0, 1), value=True)
        return self.model.next_logits(tokens.unsqueeze(1), self.positions.unsqueeze(1), self.mask, self.cache)

    def _compact(self, width: int) -> Tensor:
        groups = [group for group, running in enumerate(self.running) if running]
        idle = (self.owner == len(self.rows)).view(-1, self.width)[groups]
        order = idle.to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        rows = (order + torch.tensor(groups, device=order.device).unsqueeze(1) * self.width).flatten()
        self.owner = self.owner[rows]
        if self.leavers is not None:
            self.leavers.part(self.cache, self.mask, rows.tolist())
        self._select(rows)
        if self.grouping is not None:
            self.grouping.keep(groups, width)
        self.width = width
        return rows

    def _select(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows)
        self.positions = self.positions[rows]
        if self.mask is not None:
            self.mask = self.mask[rows]

    def tell_finished(self, finished: RowFinished, *, is_last: bool) -> None:
        """Tell of the rows that have ended since the last time; of all that are left after the last token."""
        if self.num_running == len(self.untold) and not is_last:
            return
        running = set() if is_last else set(self.owner.tolist())
        ended = [row for row in self.untold if row not in running]
        self.untold = [row for row in self.untold if row in running]
        for row, sampled in zip(ended, self.results(ended), strict=True):
            finished(row, sampled)

    def results(self, rows: Sequence[int] | None = None) -> list[Sampled]:
        """What was written down, of these rows or of all."""
        chosen = torch.tensor(
            range(len(self.rows)) if rows is None else rows, dtype=torch.long, device=self.ends.device
        )
        parts = zip(*(part[chosen].tolist() for part in (self.tokens, self.log_probs, self.lengths)), strict=True)
        return [Sampled(tuple(tokens[:length]), tuple(scores[:length])) for tokens, scores, length in parts]

    def keep(self, results: Sequence[Sampled]) -> None:
        """Leave keys and values to the next turn, if it can use them. The last token of a completion was never read."""
        if self.prefixes is not None and self.leavers is not None:
            self.leavers.end(self.cache, self.mask)
            pairs = zip(self.rows, results, strict=True)
            self.prefixes.keep(self.leavers, [(row.agent, row.prompt_ids + own.token_ids[:-1]) for row, own in pairs])
