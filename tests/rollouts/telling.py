"""A team that tells of its completions while it still samples, for the tests of early rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from comlrl_lightning.agents.engine import Finished, GenerationRequest
from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.environment.reward_workers import RewardWorkers
from comlrl_lightning.rollouts.collect import Collector
from comlrl_lightning.types import Completion, Rollouts
from tests.rollouts.fakes import CentralTeam, FakeTeam, make_collector
from tests.waiting import eventually


class Telling:
    """Tells of the requests of another team one by one, the last one first.

    Args:
        team: Answers.
        meanwhile: Called after each request that is told of, with its number: the rest of the sampling.
        skipped: Requests that it does not tell of.
    """

    def __init__(
        self, team: FakeTeam, meanwhile: Callable[[int], None] | None = None, skipped: Sequence[int] = ()
    ) -> None:
        self.team, self.meanwhile, self.skipped = team, meanwhile, skipped
        self.num_agents = team.num_agents
        self.is_sampling = self.is_heard = False

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        progress: Callable[[int], None] | None = None,
        finished: Finished | None = None,
    ) -> list[tuple[Completion, ...]]:
        groups = self.team.generate(requests, sampling, progress)
        self.is_sampling, self.is_heard = True, finished is not None
        for number in reversed(range(len(groups))):
            if finished is not None and number not in self.skipped:
                finished(number, groups[number])
            if self.meanwhile is not None:
                self.meanwhile(number)
        self.is_sampling = False
        return groups


def fake_team(num_agents: int, central: bool) -> FakeTeam:
    """So many agents, or one model that answers for them; its second sample of the first turn has no section."""
    return CentralTeam(num_agents, silent=("a2",)) if central else FakeTeam(num_agents)


def items(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"p{number}", "number": number, **more} for number in range(count)]


def collector_of(team: Telling, reward: Callable[..., Any], workers: RewardWorkers, **settings: Any) -> Collector:
    collector = make_collector(team.team, reward, workers=workers, **settings)
    collector.team = team
    return collector


def rewards_of(rollouts: Rollouts) -> list[float]:
    return [node.rewards[0] for node in rollouts.nodes]


def appears(file: Path) -> bool:
    return eventually(lambda: file.exists() and file.stat().st_size > 0)
