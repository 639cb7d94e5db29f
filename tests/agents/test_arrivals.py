"""Early news: of groups whose parts arrive in any order, and of requests whose completions are over."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Literal

import pytest
import torch

from comlrl_lightning.agents.arrivals import Arrivals
from comlrl_lightning.agents.engine import GenerationRequest
from comlrl_lightning.agents.loading import build_team
from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.types import Completion
from tests.agents.helpers import requests, shared_team
from tests.agents.test_generation import GREEDY, PROMPTS, ending_team
from tests.algorithms.support import tiny_agents


class TestArrivals:
    def test_a_group_is_made_with_its_last_part(self) -> None:
        made: list[tuple[int, list[str]]] = []

        def make(group: int, parts: list[str]) -> str:
            made.append((group, parts))
            return "".join(parts)

        arrivals = Arrivals([2, 1, 2], make)
        arrivals.arrive(4, "e")
        arrivals.arrive(1, "b")
        assert made == []
        arrivals.arrive(3, "d")
        assert made == [(2, ["d", "e"])]
        arrivals.arrive(0, "a")
        assert made == [(2, ["d", "e"]), (0, ["a", "b"])]
        # The group in the middle has had no early news.
        assert arrivals.complete("abcde") == ["ab", "c", "de"]
        assert made[2:] == [(1, ["c"])]

    def test_without_early_news_all_in_order_up_to_the_first_error(self) -> None:
        seen: list[int] = []

        def make(group: int, parts: list[int]) -> int:
            seen.append(group)
            if group == 1:
                raise KeyError(group)
            return group

        with pytest.raises(KeyError, match="1"):
            Arrivals([1, 1, 1], make).complete([5, 6, 7])
        assert seen == [0, 1]

    def test_the_first_error_in_the_order_of_the_groups(self) -> None:
        seen: list[int] = []

        def make(group: int, parts: list[int]) -> int:
            seen.append(group)
            raise KeyError(group)

        arrivals = Arrivals([1, 1, 1], make)
        arrivals.arrive(1, 6)
        arrivals.arrive(2, 7)
        with pytest.raises(KeyError, match="0"):
            arrivals.complete([5, 6, 7])
        # After an error nothing more is made early; the one before it comes first.
        assert seen == [1, 0]

    def test_an_early_error_is_kept(self) -> None:
        failures = [KeyError("once")]

        def make(group: int, parts: list[int]) -> int:
            if group == 1 and failures:
                raise failures.pop()
            return group

        arrivals = Arrivals([1, 1], make)
        arrivals.arrive(1, 6)
        with pytest.raises(KeyError, match="once"):
            arrivals.complete([5, 6])

    def test_an_interrupt_goes_through(self) -> None:
        def make(group: int, parts: list[int]) -> int:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Arrivals([1], make).arrive(0, 5)


class News:
    """What `finished` and `progress` of a generation were called with, in order."""

    def __init__(self) -> None:
        self.log: list[int | tuple[int, tuple[Completion, ...]]] = []
        self.threads: set[str] = set()

    def finished(self, number: int, completions: tuple[Completion, ...]) -> None:
        self.log.append((number, completions))
        self.threads.add(threading.current_thread().name)

    def generate(self, team: AgentTeam, asked: list[GenerationRequest], sampling: Sampling) -> None:
        """Generate with and without news: nothing else may differ, and each request is told of once."""
        groups = team.generate(asked, sampling, self.log.append, self.finished)
        assert groups == team.generate(asked, sampling)
        assert sorted(self.told) == list(range(len(asked)))
        assert [self.told[number] for number in range(len(asked))] == groups

    @property
    def told(self) -> dict[int, tuple[Completion, ...]]:
        news = [entry for entry in self.log if not isinstance(entry, int)]
        assert len(dict(news)) == len(news)
        return dict(news)


class TestFinished:
    @pytest.mark.parametrize("stop", [(), tuple("abcdefghij")])
    def test_with_the_last_token_of_the_longest(self, stop: tuple[str, ...]) -> None:
        news = News()
        asked = requests([prompt + end for prompt in PROMPTS for end in "xyz"], samples=2 if stop else 1)
        news.generate(ending_team(), asked, Sampling(max_new_tokens=150, stop=stop))
        step = 0
        for entry in news.log:
            if isinstance(entry, int):
                step += 1
            else:
                # Told after its longest completion's last token was written down and before that step is reported.
                assert max(len(one.token_ids) for one in entry[1]) == step + 1
        steps = {max(len(one.token_ids) for one in group) for group in news.told.values()}
        assert len(steps) > 2

    @pytest.mark.parametrize("concurrent", [False, True])
    @pytest.mark.parametrize("kind", ["separate", "full"])
    def test_several_models(self, kind: Literal["separate", "full"], concurrent: bool) -> None:
        team = build_team(tiny_agents(kind, dtype=torch.float32))
        team.concurrent = concurrent
        news = News()
        news.generate(team, requests(PROMPTS), Sampling(max_new_tokens=8, min_new_tokens=8))
        names = {name.rsplit("_", 1)[0] for name in news.threads}
        assert names == ({"agent"} if concurrent else {threading.current_thread().name})
        if not concurrent:
            # One model after the other: the last of 8 tokens ends the first one's rows, before the second one begins.
            order = ["step" if isinstance(entry, int) else entry[1][0].agent for entry in news.log]
            told = [[agent] * len(PROMPTS) for agent in (0, 1)]
            assert order == [*["step"] * 7, *told[0], *["step"] * 8, *told[1], "step"]

    def test_transformers_own_loop_tells_at_the_end(self) -> None:
        news = News()
        news.generate(ending_team(), requests(PROMPTS), Sampling(max_new_tokens=20, backend="transformers"))
        number = 2 * len(PROMPTS)
        assert not any(isinstance(entry, int) for entry in news.log[-number:])
        assert all(isinstance(entry, int) for entry in news.log[:-number])

    def test_logits_that_are_not_finite_are_the_error_of_the_first_request(self) -> None:
        team = shared_team()
        with torch.no_grad():
            for agent in (0, 1):
                next(iter(team.agent_parameters(agent).values())).fill_(float("nan"))
        asked = [replace(request, agent=1 - request.agent) for request in requests(PROMPTS)]
        for told in (None, News().finished):
            with pytest.raises(FloatingPointError, match="agent_1 gives logits that are not finite"):
                team.generate(asked, GREEDY, None, told)
