"""The agents behind one face: prompts to completions, completions to log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from threading import Event
from typing import TypeVar

import torch
from torch import Tensor, nn

from comlrl_lightning.agents.adapter_folders import save_adapters
from comlrl_lightning.agents.arrivals import Arrivals
from comlrl_lightning.agents.decoding.hf_generate import generate_with_transformers
from comlrl_lightning.agents.decoding.native import Finished, GenerationRequest, Row, RowFinished, Sampled, generate
from comlrl_lightning.agents.decoding.tokens import StopStrings
from comlrl_lightning.agents.language_model import LanguageModel, adapter_name
from comlrl_lightning.agents.log_probs import score
from comlrl_lightning.agents.settings import Sampling, Separate, SharedBase
from comlrl_lightning.agents.threads import SharedProgress, run_together
from comlrl_lightning.types import Completion, Prompt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a policy says about sampled tokens, one row per completion, padded on the right."""

    log_probs: Tensor
    """`[R, C]` log-probabilities, 0 at padding."""
    entropy: Tensor
    """`[R, C]` entropies of the distributions that the tokens were drawn from, 0 at padding."""
    completion_mask: Tensor
    """`[R, C]` True = counts."""


class AgentTeam(nn.Module):
    """Language models that answer as a team.

    Args:
        models: One model for all agents, or one per agent.
    """

    concurrent: bool
    """Whether the models work at the same time, as they do when each has a device of its own."""

    def __init__(self, models: Sequence[LanguageModel]) -> None:
        super().__init__()
        self.concurrent = False
        self.models = nn.ModuleList(models)
        self._speakers = {agent: model for model in models for agent in model.agents}
        self.num_agents = len(self._speakers)
        # A callback may freeze some of them for a while: they are an agent's own all the same.
        self._trained = [self._trained_names(agent) for agent in range(self.num_agents)]

    @classmethod
    def build(cls, settings: SharedBase | Separate) -> AgentTeam:
        """Load the weights that the settings describe."""
        from comlrl_lightning.agents.loading import load_models

        return cls(load_models(settings))

    def speaker(self, agent: int) -> LanguageModel:
        """The language model that an agent speaks through."""
        return self._speakers[agent]

    def encode(self, agent: int, prompt: Prompt) -> tuple[int, ...]:
        """`[P]` token ids of a prompt, special tokens included, cut if too long."""
        return self._speakers[agent].prompts.encode(agent, prompt)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        progress: Callable[[int], None] | None = None,
        finished: Finished | None = None,
    ) -> list[tuple[Completion, ...]]:
        """Sample completions, in one batch per language model.

        Args:
            requests: Any mix of agents and prompts.
            sampling: How to draw.
            progress: Called after every token with the number of completions that are still being sampled.
            finished: Called once for every request, with its number and its K completions: as soon as they are there,
                in the thread that samples, or at the end, which transformers' own loop leaves it to.

        Returns:
            The K completions of each request, in order.

        Raises:
            ValueError: A prompt is empty, or too long for what was set.
            FloatingPointError: A model's logits are not finite.
        """
        rows: list[Row] = []
        prompts: list[tuple[int, ...]] = []
        for request in requests:
            speaker = self._speakers[request.agent]
            limit = speaker.prompt_limit(request.agent, sampling.max_new_tokens)
            ids = speaker.prompts.encode(request.agent, request.prompt, limit, request.place)
            prompts.append(ids)
            rows += [Row(request.agent, ids, key, request.prefixes) for key in request.keys]

        def completions(number: int, group: Sequence[Sampled]) -> tuple[Completion, ...]:
            request = requests[number]
            made = tuple(self._completion(request, prompts[number], one, sampling) for one in group)
            if finished is not None:
                finished(number, made)
            return made

        arrivals = Arrivals([len(request.keys) for request in requests], completions)
        with self.rollout_mode():
            sampled = self._sample(rows, sampling, progress, None if finished is None else arrivals.arrive)
        return arrivals.complete([sampled[index] for index in range(len(rows))])

    def _sample(
        self,
        rows: Sequence[Row],
        sampling: Sampling,
        progress: Callable[[int], None] | None,
        arrive: RowFinished | None,
    ) -> dict[int, Sampled]:
        """Completions by the position of their row."""
        work = self._by_model([row.agent for row in rows])

        def of_batch(model: LanguageModel, batch: Sequence[int], report: Callable[[int], None] | None) -> list[Sampled]:
            chosen = [rows[index] for index in batch]
            if sampling.backend != "native":
                # No early news: what begins with them might draw from the global random state, as this loop does.
                return generate_with_transformers(model, chosen, sampling, report)
            told = None if arrive is None else lambda row, one: arrive(batch[row], one)
            return generate(model, chosen, sampling, report, told)

        def of_model(model: LanguageModel, report: Callable[[int], None] | None) -> list[tuple[int, Sampled]]:
            return [pair for batch in work[model] for pair in zip(batch, of_batch(model, batch, report), strict=True)]

        # All models of transformers' own loop draw from the one global random state.
        if self.concurrent and len(work) > 1 and sampling.backend == "native":
            stop = Event()
            shared = SharedProgress(progress, [sum(map(len, batches)) for batches in work.values()], stop)
            tasks = [(model.device, partial(of_model, model, shared.of(worker))) for worker, model in enumerate(work)]
            return dict(chain.from_iterable(run_together(tasks, stop)))
        return dict(chain.from_iterable(of_model(model, progress) for model in work))

    def _by_model(self, agents: Sequence[int]) -> dict[LanguageModel, list[list[int]]]:
        """The batches of each language model."""
        groups = groupby(self._batches(agents), key=lambda entry: entry[0])
        return {model: [batch for _, batch in batches] for model, batches in groups}

    def _batches(self, agents: Sequence[int]) -> Iterator[tuple[LanguageModel, list[int]]]:
        """Language models with the rows that they take in one batch, ordered by agent."""
        by_agent: dict[int, list[int]] = {}
        for index, agent in enumerate(agents):
            by_agent.setdefault(agent, []).append(index)
        for model in self.language_models():
            groups = [by_agent[agent] for agent in model.agents if agent in by_agent]
            if model.mixes_agents and groups:
                groups = [list(chain.from_iterable(groups))]
            yield from ((model, group) for group in groups)

    def language_models(self) -> list[LanguageModel]:
        """The models, ordered by agent."""
        return list(dict.fromkeys(self._speakers.values()))

    def _completion(
        self, request: GenerationRequest, prompt_ids: tuple[int, ...], sampled: Sampled, sampling: Sampling
    ) -> Completion:
        speaker = self._speakers[request.agent]
        stop = StopStrings(sampling.stop, speaker.tokenizer)
        if not all(map(math.isfinite, sampled.log_probs)):
            raise FloatingPointError(
                f"agent_{request.agent} gives logits that are not finite. {speaker.reason_not_finite()}"
            )
        ended = sampled.token_ids[-1] in speaker.end_ids or (bool(sampling.stop) and stop.reached(sampled.token_ids))
        return Completion(
            agent=request.agent,
            prompt=request.prompt,
            prompt_ids=prompt_ids,
            token_ids=sampled.token_ids,
            log_probs=sampled.log_probs,
            text=stop.cut(speaker.tokenizer.decode(sampled.token_ids, skip_special_tokens=True)),
            truncated=not ended,
        )

    def log_probs(
        self, completions: Sequence[Completion], *, temperature: float, reference: bool = False
    ) -> TokenScores:
        """Score completions under the agents' present policies, with gradients where they are enabled.

        Args:
            completions: `[R]`, any mix of agents.
            temperature: Divides the logits.
            reference: Score under the reference policies instead.

        Returns:
            The scores, in the order of the completions.
        """
        lengths = [len(completion.token_ids) for completion in completions]
        device = self.language_models()[0].device
        work = self._by_model([completion.agent for completion in completions])

        def of_model(model: LanguageModel) -> list[tuple[Tensor, Tensor]]:
            return [
                score(model, [completions[index] for index in batch], temperature, reference=reference)
                for batch in work[model]
            ]

        scored = self.each([(model, partial(of_model, model)) for model in work])
        parts = [tuple(values.to(device) for values in scores) for scores in chain.from_iterable(scored)]
        order = [*chain.from_iterable(chain.from_iterable(work.values()))]
        rows = torch.tensor([index for index in order for _ in range(lengths[index])], dtype=torch.long, device=device)
        columns = torch.tensor(
            [column for index in order for column in range(lengths[index])], dtype=torch.long, device=device
        )
        mask = torch.zeros(len(lengths), max(lengths, default=0), dtype=torch.bool, device=device)
        mask[rows, columns] = True
        if not parts:
            return TokenScores(mask.float(), mask.float(), mask)
        log_probs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
        return TokenScores(_placed(log_probs, rows, columns, mask), _placed(entropy, rows, columns, mask), mask)

    def each(self, tasks: Sequence[tuple[LanguageModel, Callable[[], T]]]) -> list[T]:
        """What the tasks return, in their order; at the same time if the models are to work so.

        Args:
            tasks: A different language model each, and what is to be done with it.
        """
        if self.concurrent:
            return run_together([(model.device, task) for model, task in tasks])
        return [task() for _, task in tasks]

    def agent_parameters(self, agent: int) -> dict[str, nn.Parameter]:
        """The parameters that one agent trains, also while they are frozen, by their names in `named_parameters`."""
        model, names = self._speakers[agent], self._trained[agent]
        prefix = self._prefix(model)
        return {prefix + path: one for path, one in model.named_parameters() if prefix + path in names}

    def _trained_names(self, agent: int) -> frozenset[str]:
        """Names of an agent's parameters with `requires_grad`.

        Raises:
            ValueError: There are none.
        """
        model, name = self._speakers[agent], adapter_name(agent)
        names = frozenset(
            self._prefix(model) + path
            for path, parameter in model.named_parameters()
            if parameter.requires_grad and (model.adapters is None or name in path.split("."))
        )
        if not names:
            raise ValueError(
                f"agent_{agent} has no trainable parameters. Check the target modules of its adapter, "
                "and that its weights require gradients."
            )
        return names

    def _prefix(self, model: LanguageModel) -> str:
        return f"models.{self.language_models().index(model)}."

    def trains_adapter(self, agent: int) -> bool:
        """Whether an agent trains an adapter and not all weights of its model."""
        return self._speakers[agent].adapters is not None

    def add_reference(self) -> None:
        """Keep the agents' present policies as the reference policies (nothing to keep if these are the base model)."""
        for model in self.language_models():
            model.add_reference()

    def follow(self, team: AgentTeam) -> None:
        """Work where another team works: each model on the device of the agent with its number, else the first's."""
        for model in self.language_models():
            agent = model.agents[0] if model.agents[0] < team.num_agents else 0
            model.to(team.speaker(agent).device)
        self.concurrent = team.concurrent

    def save(self, folder: str | Path) -> None:
        """Write one standard folder per agent, ``agent_0``, ``agent_1``, ...: a PEFT adapter or a model, and tokenizer.

        Args:
            folder: Where; made if it is missing.
        """
        for model in self.language_models():
            names = [adapter_name(agent) for agent in model.agents]
            if model.adapters is None:
                model.causal.save_pretrained(Path(folder, names[0]))
            else:
                save_adapters(model.adapters.network, names, folder)
            for name in names:
                model.tokenizer.save_pretrained(Path(folder, name))

    @contextmanager
    def rollout_mode(self) -> Iterator[None]:
        """Evaluation mode without gradients; every module's former mode comes back, after exceptions too."""
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode


def _placed(values: Tensor, rows: Tensor, columns: Tensor, mask: Tensor) -> Tensor:
    """`[R, C]` values at their places, 0 elsewhere."""
    return values.new_zeros(mask.shape).index_put((rows, columns), values)
