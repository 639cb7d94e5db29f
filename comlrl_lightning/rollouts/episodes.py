"""Collection of episodes in environments, in lockstep: one generation per step for all items, episodes and agents."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from comlrl_lightning.agents.engine import GenerationRequest
from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.environment.text_environment import Environments, Episode
from comlrl_lightning.environment.torch_modes import user_code
from comlrl_lightning.rollouts.collect import RolloutShape, Sampler, TurnProgress
from comlrl_lightning.types import Completion, Node, Prompt, Rollouts
from comlrl_lightning.utilities.calls import Place
from comlrl_lightning.utilities.rng import key_digest

MAX_SEED = 2**63
"""Seeds of environments lie below it."""


@dataclass
class _Running:
    """An episode that is not over."""

    task: int
    path: tuple[int, ...]
    """That of its next node."""
    episode: Episode
    parent: tuple[int, int] | None = None


@dataclass(frozen=True)
class EpisodeCollector:
    """Plays episodes of task items with a team."""

    team: Sampler
    """Source of the completions."""
    environments: Environments
    """Makes the environments."""
    shape: RolloutShape
    """K episodes per item of at most T steps."""
    sampling: Sampling
    """How completions are sampled."""
    key: tuple[int, ...]
    """Integers that, with item, episode, step and agent, seed each completion; with the item, the environments."""
    progress: TurnProgress | None = None
    """Called while completions are sampled."""

    def collect(self, items: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> Rollouts:
        """Play K episodes of each item together, step by step.

        Args:
            items: `[B]` task items.
            indices: `[B]` positions of the items in their dataset.

        Returns:
            The nodes, one per step of each episode, breadth first.
        """
        nodes: list[Node] = []
        seconds = [0.0, 0.0]
        started = time.perf_counter()
        running = [
            _Running(task, (sample,), self._begin(item, indices[task]))
            for task, item in enumerate(items)
            for sample in range(self.shape.num_generations)
        ]
        seconds[1] += time.perf_counter() - started
        for turn in range(1, self.shape.num_turns + 1):
            if not running:
                break
            started = time.perf_counter()
            answers = self._sample(running, items, indices, turn)
            generated = time.perf_counter()
            going_on = []
            for one, completions in zip(running, answers, strict=True):
                node, is_over = self._step(one, completions, turn)
                if not is_over:
                    going_on.append(_Running(one.task, (*one.path, 0), one.episode, (len(nodes), 0)))
                nodes.append(node)
            running = going_on
            seconds[0] += generated - started
            seconds[1] += time.perf_counter() - generated
        return Rollouts(
            tuple(items),
            tuple(indices),
            tuple(nodes),
            generation_seconds=seconds[0],
            reward_seconds=seconds[1],
            num_unfinished=len(running),
        )

    def _begin(self, item: Mapping[str, Any], index: int) -> Episode:
        with user_code():
            return self.environments.episode(item, index, key_digest((*self.key, index)) % MAX_SEED)

    def _sample(
        self, running: Sequence[_Running], items: Sequence[Mapping[str, Any]], indices: Sequence[int], turn: int
    ) -> list[dict[int, Completion]]:
        """The completions of the acting agents of each episode, by one call of the team."""
        requests = [
            GenerationRequest(
                agent,
                prompt,
                ((*self.key, indices[one.task], *one.path[:-1], agent, one.path[-1]),),
                None,
                Place(items[one.task], indices[one.task], turn),
            )
            for one in running
            for agent, prompt in one.episode.prompts.items()
        ]
        progress = self.progress
        report = None if progress is None else lambda rows: progress(turn, rows)
        sampled = iter(self.team.generate(requests, self.sampling, report))
        return [{agent: next(sampled)[0] for agent in one.episode.prompts} for one in running]

    def _step(self, one: _Running, completions: dict[int, Completion], turn: int) -> tuple[Node, bool]:
        """The node of an episode's step, and whether the episode is over."""
        agents = range(self.environments.num_agents)
        silent: Prompt = ""
        prompts = tuple(one.episode.prompts.get(agent, silent) for agent in agents)
        with user_code():
            step = one.episode.step({agent: completion.text for agent, completion in completions.items()}, turn)
        node = Node(
            one.task,
            turn,
            one.path,
            one.parent,
            prompts,
            tuple((completions[agent],) if agent in completions else () for agent in agents),
            ((0,) * len(agents),),
            (fmean(step.rewards),),
            (step.rewards,) if self.environments.per_agent else None,
        )
        return node, step.is_over
