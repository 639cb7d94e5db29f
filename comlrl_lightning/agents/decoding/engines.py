"""The sampling loops of this package as generation engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from threading import Event

from typing_extensions import override

from comlrl_lightning.agents.arrivals import Arrivals
from comlrl_lightning.agents.decoding.hf_generate import generate_with_transformers
from comlrl_lightning.agents.decoding.native import Row, RowFinished, generate
from comlrl_lightning.agents.engine import Finished, GenerationEngine, GenerationProgress, GenerationRequest, Sampled
from comlrl_lightning.agents.language_model import LanguageModel
from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.agents.threads import SharedProgress, run_together
from comlrl_lightning.types import Completion


class LoopEngine(GenerationEngine):
    """Samples with the agents' own models, in one batch per language model."""

    draws_globally: bool
    """Whether the loop draws from torch's global random numbers, which models cannot do at the same time."""

    @override
    def generate(
        self,
        team: AgentTeam,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        progress: GenerationProgress | None = None,
        finished: Finished | None = None,
    ) -> list[tuple[Completion, ...]]:
        rows: list[Row] = []
        prompts: list[tuple[int, ...]] = []
        for request in requests:
            ids = team.encode_request(request, sampling)
            prompts.append(ids)
            rows += [Row(request.agent, ids, key, request.prefixes) for key in request.keys]

        def completions(number: int, group: Sequence[Sampled]) -> tuple[Completion, ...]:
            request = requests[number]
            made = tuple(team.completion(request, prompts[number], one, sampling) for one in group)
            if finished is not None:
                finished(number, made)
            return made

        arrivals = Arrivals([len(request.keys) for request in requests], completions)
        with team.rollout_mode():
            sampled = self._sample(team, rows, sampling, progress, None if finished is None else arrivals.arrive)
        return arrivals.complete([sampled[index] for index in range(len(rows))])

    def _sample(
        self,
        team: AgentTeam,
        rows: Sequence[Row],
        sampling: Sampling,
        progress: Callable[[int], None] | None,
        arrive: RowFinished | None,
    ) -> dict[int, Sampled]:
        """Completions by the position of their row."""
        work = team.rows_by_model([row.agent for row in rows])

        def of_batch(model: LanguageModel, batch: Sequence[int], report: Callable[[int], None] | None) -> list[Sampled]:
            chosen = [rows[index] for index in batch]
            arrived = None if arrive is None else lambda row, one: arrive(batch[row], one)
            return self.run_loop(model, chosen, sampling, report, arrived)

        def of_model(model: LanguageModel, report: Callable[[int], None] | None) -> list[tuple[int, Sampled]]:
            return [pair for batch in work[model] for pair in zip(batch, of_batch(model, batch, report), strict=True)]

        if team.concurrent and len(work) > 1 and not self.draws_globally:
            stop = Event()
            shared = SharedProgress(progress, [sum(map(len, batches)) for batches in work.values()], stop)
            tasks = [(model.device, partial(of_model, model, shared.of(worker))) for worker, model in enumerate(work)]
            return dict(chain.from_iterable(run_together(tasks, stop)))
        return dict(chain.from_iterable(of_model(model, progress) for model in work))

    def run_loop(
        self,
        model: LanguageModel,
        rows: Sequence[Row],
        sampling: Sampling,
        progress: GenerationProgress | None,
        arrive: RowFinished | None,
    ) -> list[Sampled]:
        """Sample one batch of one language model, in the order of its rows."""
        raise NotImplementedError


class NativeEngine(LoopEngine):
    """The decoding loop of this package: rows of all agents in one batch, each with random numbers of its own."""

    draws_globally = False

    @override
    def run_loop(
        self,
        model: LanguageModel,
        rows: Sequence[Row],
        sampling: Sampling,
        progress: GenerationProgress | None,
        arrive: RowFinished | None,
    ) -> list[Sampled]:
        return generate(model, rows, sampling, progress, arrive)


class TransformersEngine(LoopEngine):
    """`generate` of transformers: slower, and seeded per call."""

    draws_globally = True

    @override
    def run_loop(
        self,
        model: LanguageModel,
        rows: Sequence[Row],
        sampling: Sampling,
        progress: GenerationProgress | None,
        arrive: RowFinished | None,
    ) -> list[Sampled]:
        # No early news: what begins with them might draw from the global random state, as this loop does.
        return generate_with_transformers(model, rows, sampling, progress)


LOOPS: dict[str, GenerationEngine] = {"native": NativeEngine(), "transformers": TransformersEngine()}
"""By their name in ``Sampling(backend=...)``."""
