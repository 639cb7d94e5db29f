"""The agents behind one face: prompts to completions, completions to log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, zip_longest
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from comlrl_lightning.agents.adapter_folders import save_adapters
from comlrl_lightning.agents.batches import completion_batches
from comlrl_lightning.agents.decoding.tokens import StopStrings
from comlrl_lightning.agents.engine import Finished, GenerationEngine, GenerationProgress, GenerationRequest, Sampled
from comlrl_lightning.agents.language_model import LanguageModel, adapter_name
from comlrl_lightning.agents.log_probs import score
from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.agents.threads import run_together
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
        loops: Sampling loops of this package by their name in ``Sampling(backend=...)``.
        engine: What samples in their place; None: the loops.
    """

    concurrent: bool
    """Whether the models work at the same time, as they do when each has a device of its own."""

    def __init__(
        self,
        models: Sequence[LanguageModel],
        loops: Mapping[str, GenerationEngine] | None = None,
        engine: GenerationEngine | None = None,
    ) -> None:
        super().__init__()
        self.loops = dict(loops or {})
        self.engine = engine
        self._weights_changed = True
        self.concurrent = False
        self.models = nn.ModuleList(models)
        self._speakers = {agent: model for model in models for agent in model.agents}
        self.num_agents = len(self._speakers)
        # A callback may freeze some of them for a while: they are an agent's own all the same.
        self._trained = [self._trained_names(agent) for agent in range(self.num_agents)]

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
        progress: GenerationProgress | None = None,
        finished: Finished | None = None,
    ) -> list[tuple[Completion, ...]]:
        """Sample completions with the engine of the settings, else with the loop of ``sampling.backend``.

        Args:
            requests: Any mix of agents and prompts.
            sampling: How to draw.
            progress: Called after every token with the number of completions that are still being sampled.
            finished: Called with the number of a request and its K completions, at most once each.

        Returns:
            The K completions of each request, in order.

        Raises:
            ValueError: A prompt is empty, or too long for what was set.
            FloatingPointError: A model's logits are not finite.
        """
        engine = self.engine or self.loops[sampling.backend]
        if self._weights_changed:
            engine.weights_changed(self)
            self._weights_changed = False
        return engine.generate(self, requests, sampling, progress, finished)

    def mark_changed(self) -> None:
        """Note that weights changed, for the engine."""
        self._weights_changed = True

    def encode_request(self, request: GenerationRequest, sampling: Sampling) -> tuple[int, ...]:
        """`[P]` token ids of a request's prompt, cut so that `sampling.max_new_tokens` fit behind it."""
        speaker = self._speakers[request.agent]
        limit = speaker.prompt_limit(request.agent, sampling.max_new_tokens)
        return speaker.prompts.encode(request.agent, request.prompt, limit, request.place)

    def rows_by_model(self, agents: Sequence[int]) -> dict[LanguageModel, list[list[int]]]:
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

    def completion(
        self, request: GenerationRequest, prompt_ids: tuple[int, ...], sampled: Sampled, sampling: Sampling
    ) -> Completion:
        """The record of sampled tokens: decoded text, stop strings cut, whether the token limit ended it.

        Args:
            request: What was asked for.
            prompt_ids: `[P]` tokens of its prompt.
            sampled: Tokens and log-probabilities.
            sampling: How they were drawn.

        Raises:
            FloatingPointError: The model's logits are not finite.
        """
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
        work = self.rows_by_model([completion.agent for completion in completions])

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

    def micro_batches(self, completions: Sequence[Completion], token_budget: int) -> list[list[list[int]]]:
        """Passes over completions, each of them one micro-batch per language model that works at the same time.

        A model's micro-batches do not depend on whether others work at the same time.

        Args:
            completions: Any mix of agents.
            token_budget: Padded tokens per micro-batch.

        Returns:
            `[passes][models]` positions of the completions of a micro-batch.
        """
        of_model: dict[LanguageModel, list[int]] = {}
        for position, one in enumerate(completions):
            of_model.setdefault(self.speaker(one.agent), []).append(position)
        queues = []
        for model, positions in of_model.items():
            batches = completion_batches(
                [completions[position] for position in positions],
                token_budget,
                reads_prompts_once=model.reads_prompts_once,
            )
            queues.append([[positions[row] for row in batch] for batch in batches])
        if not self.concurrent:
            return [[batch] for batch in chain.from_iterable(queues)]
        return [[batch for batch in batches if batch is not None] for batches in zip_longest(*queues)]

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
