"""Collection of rollouts, breadth first: one generation per turn for all tasks, nodes, agents and samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from statistics import fmean
from typing import Any, Protocol

from comlrl_lightning.agents.arrivals import Arrivals
from comlrl_lightning.agents.decoding.prefixes import Prefixes
from comlrl_lightning.agents.engine import Finished, GenerationRequest
from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.environment.functions import TaskFunctions
from comlrl_lightning.environment.joint_format import merged_prompt, split_or_empty
from comlrl_lightning.environment.reward import RewardCall
from comlrl_lightning.environment.reward_workers import Scores, Scoring
from comlrl_lightning.environment.torch_modes import user_code
from comlrl_lightning.rewards import PartSums, part_means
from comlrl_lightning.rollouts.unscored import is_known, without_unscored
from comlrl_lightning.types import Completion, Node, Prompt, Rollouts, joint_indices, texts
from comlrl_lightning.utilities.calls import Place
from comlrl_lightning.utilities.checks import check_choice, check_whole

TurnProgress = Callable[[int, int], None]
"""Called with the turn and the number of completions that are still being sampled."""


class Sampler(Protocol):
    """The part of a team that rollouts need."""

    num_agents: int

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        progress: Callable[[int], None] | None = None,
        finished: Finished | None = None,
    ) -> list[tuple[Completion, ...]]:
        """K completions per request, in the order of the requests.

        It may call `finished` with the number of a request and its completions, at most once each and in any thread,
        as soon as they are there.
        """
        ...


@dataclass(frozen=True, slots=True)
class RolloutShape:
    """How wide and how deep a rollout grows."""

    num_generations: int = 4
    """K, completions per agent and node."""
    num_turns: int = 1
    """T, the largest number of turns."""
    joint_mode: str = "aligned"
    """``"aligned"`` pairs the k-th completions, ``"cross"`` takes all K^N combinations."""
    early_termination_threshold: float | None = None
    """A joint completion whose processed reward exceeds it is not followed."""
    early_termination: str = "completion"
    """``"completion"``, or ``"group"``: a node's mean processed reward decides over all its joint completions."""
    trajectories: bool = False
    """Follow K independent trajectories, in nodes of one joint completion, instead of growing a tree."""

    def __post_init__(self) -> None:
        check_whole(1, num_generations=self.num_generations, num_turns=self.num_turns)
        check_choice(("aligned", "cross"), joint_mode=self.joint_mode)
        check_choice(("completion", "group"), early_termination=self.early_termination)

    def followed(self, rewards: Sequence[float]) -> list[int]:
        """Which joint completions are followed, if turns remain.

        Args:
            rewards: `[J]` processed rewards, NaN where unknown.
        """
        threshold, known = self.early_termination_threshold, [reward for reward in rewards if is_known(reward)]
        if threshold is not None and self.early_termination == "group":
            rewards = rewards if known and sum(known) / len(known) <= threshold else ()
            threshold = None
        return [
            index
            for index, reward in enumerate(rewards)
            if is_known(reward) and (threshold is None or reward <= threshold)
        ]

    def num_nodes(self, num_agents: int) -> int:
        """Largest number of nodes that one task item can grow to, if so many agents are sampled."""
        if self.trajectories:
            return self.num_generations * self.num_turns
        branches = self.num_generations ** (num_agents if self.joint_mode == "cross" else 1)
        return sum(branches**turn for turn in range(self.num_turns))


@dataclass(frozen=True, slots=True)
class _Branch:
    """A node before its completions are sampled."""

    task: int
    path: tuple[int, ...]
    parent: tuple[int, int] | None
    prompts: tuple[Prompt, ...]
    prompt_history: tuple[tuple[Prompt, ...], ...]
    response_history: tuple[tuple[str, ...], ...]


_Arrivals = Arrivals[tuple[Completion, ...], list[tuple[_Branch, Node]]]


class Collector:
    """Rolls a team out on task items.

    Args:
        team: Samples the completions; one agent if the functions have a `joint_format`.
        functions: The user's functions.
        shape: Width and depth of the rollouts.
        sampling: How completions are sampled.
        key: Integers that, with the item, the path, the agent and the sample, seed each completion.
        progress: Called while completions are sampled.
    """

    def __init__(
        self,
        team: Sampler,
        functions: TaskFunctions,
        shape: RolloutShape,
        sampling: Sampling,
        key: tuple[int, ...],
        progress: TurnProgress | None = None,
    ) -> None:
        self.team = team
        self.functions = functions
        self.shape = shape
        self.sampling = sampling
        self.key = key
        self.progress = progress
        self.joint = joint_indices(team.num_agents, shape.num_generations, shape.joint_mode)
        self.num_roles = functions.formatters.num_agents
        """N, agents of the task, whoever writes their answers."""
        assert team.num_agents == (self.num_roles if functions.joint_format is None else 1), "the team does not fit"

    def collect(
        self, items: Sequence[Mapping[str, Any]], indices: Sequence[int], *, keep_unscored: bool = False
    ) -> Rollouts:
        """Roll out all items together.

        Args:
            items: `[B]` task items.
            indices: `[B]` positions of the items in their dataset.
            keep_unscored: Joint completions whose reward is None stay, with NaN as reward; see `without_unscored`.

        Returns:
            The scored nodes, breadth first.
        """
        self._items, self._indices = items, indices
        self._num_unparsed = self._num_late = 0
        self._parts: list[PartSums] = []
        prefixes = Prefixes() if self.shape.num_turns > 1 else None
        nodes: list[Node] = []
        generation_seconds = reward_seconds = 0.0
        branches = [self._root(task) for task in range(len(items))]
        for turn in range(1, self.shape.num_turns + 1):
            if not branches:
                break
            started = time.perf_counter()
            if prefixes is not None:
                prefixes.keeps = turn < self.shape.num_turns
            groups = self._groups(branches)
            with self.functions.workers.open(self.functions.reward, len(groups)) as scoring:
                arrivals = self._arrivals(groups, turn, scoring)
                early = None if self.functions.workers.num_workers == 0 else arrivals.arrive
                sampled = self._sample(branches, turn, prefixes, early)
                generated = time.perf_counter()
                unscored = arrivals.complete(sampled)
                scored = self._scored(unscored, scoring.scores())
            reward_seconds += time.perf_counter() - generated
            generation_seconds += generated - started
            branches = [branch for group in unscored for branch, _ in group]
            first = len(nodes)
            nodes += scored
            if turn < self.shape.num_turns:
                branches = [
                    child
                    for position, (branch, node) in enumerate(zip(branches, scored, strict=True), start=first)
                    for child in self._children(branch, node, position)
                ]
        seconds = generation_seconds, reward_seconds
        num_late = None if self.functions.workers.timeout_value is None else self._num_late
        parts = part_means(self._parts)
        counts = self._num_unparsed, num_late
        rollouts = Rollouts(tuple(items), tuple(indices), tuple(nodes), *seconds, *counts, reward_parts=parts)
        leaves_out = self.functions.reward.none_as_nan and not keep_unscored
        return without_unscored(rollouts) if leaves_out else rollouts

    def _root(self, task: int) -> _Branch:
        with user_code():
            prompts = tuple(self._format(task, agent, None, turn=1) for agent in range(self.num_roles))
        empty: tuple[tuple[Any, ...], ...] = ((),) * len(prompts)
        return _Branch(task, (), None, prompts, empty, empty)

    def _sample(
        self, branches: Sequence[_Branch], turn: int, prefixes: Prefixes | None, early: Finished | None
    ) -> list[tuple[Completion, ...]]:
        """`[nodes * N][K]` completions of all branches by one call of the team."""
        samples = range(1 if self.shape.trajectories and turn > 1 else self.shape.num_generations)
        requests = [
            GenerationRequest(
                agent,
                prompt,
                tuple((*self.key, self._indices[branch.task], *branch.path, agent, sample) for sample in samples),
                prefixes,
                Place(self._items[branch.task], self._indices[branch.task], turn),
            )
            for branch in branches
            for agent, prompt in enumerate(self._asked(branch))
        ]
        progress = self.progress
        report = None if progress is None else lambda running: progress(turn, running)
        return self.team.generate(requests, self.sampling, report, early)

    def _asked(self, branch: _Branch) -> tuple[Prompt, ...]:
        """The prompts that the team reads: one per agent, or one for all answers."""
        if self.functions.joint_format is None:
            return branch.prompts
        with user_code():
            return (merged_prompt(self.functions.joint_format, branch.prompts),)

    def _groups(self, branches: Sequence[_Branch]) -> list[list[_Branch]]:
        """The branches whose nodes one call of the reward scores: one of a tree, all trajectories of a task."""
        if not self.shape.trajectories:
            return [[branch] for branch in branches]
        # Branches of a task stand together: they were made task by task, and none moves.
        return [list(group) for _, group in groupby(branches, key=lambda branch: branch.task)]

    def _arrivals(self, groups: Sequence[Sequence[_Branch]], turn: int, scoring: Scoring) -> _Arrivals:
        """What takes the completions of a turn; a group that is complete goes to be scored."""
        num_agents = self.team.num_agents

        def unscored(index: int, sampled: list[tuple[Completion, ...]]) -> list[tuple[_Branch, Node]]:
            blocks = [tuple(sampled[start : start + num_agents]) for start in range(0, len(sampled), num_agents)]
            pairs = [
                pair
                for branch, completions in zip(groups[index], blocks, strict=True)
                for pair in self._unscored(branch, turn, completions)
            ]
            scoring.add(index, self._reward_call([node for _, node in pairs]))
            return pairs

        return Arrivals([len(group) * num_agents for group in groups], unscored)

    def _unscored(
        self, branch: _Branch, turn: int, completions: tuple[tuple[Completion, ...], ...]
    ) -> list[tuple[_Branch, Node]]:
        """A branch and its node without rewards; every sample of a trajectory is a branch and a node of its own."""
        if not self.shape.trajectories:
            return [(branch, self._node(branch, turn, completions, self.joint))]
        singles = [
            (replace(branch, path=(*branch.path, sample)), tuple((group[sample],) for group in completions))
            for sample in range(len(completions[0]))
        ]
        joint = ((0,) * self.team.num_agents,)
        return [(single, self._node(single, turn, answers, joint)) for single, answers in singles]

    def _node(
        self,
        branch: _Branch,
        turn: int,
        completions: tuple[tuple[Completion, ...], ...],
        joint: tuple[tuple[int, ...], ...],
    ) -> Node:
        """A node without rewards, with the agents' answers if one model wrote all of them."""
        node = Node(branch.task, turn, branch.path, branch.parent, branch.prompts, completions, joint, rewards=())
        joint_format = self.functions.joint_format
        if joint_format is None:
            return node
        with user_code():
            split = [split_or_empty(joint_format, one.text, self.num_roles) for one in completions[0]]
        self._num_unparsed += sum(not found for _, found in split)
        return replace(node, sections=tuple(answers for answers, _ in split))

    def _scored(self, unscored: Sequence[Sequence[tuple[_Branch, Node]]], scores: Scores) -> list[Node]:
        """All nodes with their rewards; one model that answers for all agents gets the mean of theirs."""
        self._num_late += scores.num_late
        self._parts += scores.parts
        own = self.functions.reward.per_agent and self.functions.joint_format is None
        nodes = []
        for group, rows in zip(unscored, scores.rows, strict=True):
            rest = map(tuple, rows)
            for _, node in group:
                of_agents = tuple(islice(rest, len(node.joint)))
                means = tuple(map(fmean, of_agents))
                nodes.append(replace(node, rewards=means, agent_rewards=of_agents if own else None))
        return nodes

    def _reward_call(self, nodes: Sequence[Node]) -> RewardCall:
        first = nodes[0]
        per_agent = [[text for part in parts for text in part] for parts in zip(*map(texts, nodes), strict=True)]
        # The trajectories of a task part after the first turn: they have no prompts in common.
        prompts = None if self.shape.trajectories and first.turn > 1 else first.prompts
        sampled = [node.sources(index) for node in nodes for index in range(len(node.joint))]
        by_agent = [[one for one in of_agent if one is not None] for of_agent in zip(*sampled, strict=True)]
        return RewardCall(
            per_agent,
            self._items[first.task],
            prompts,
            first.turn,
            self._indices[first.task],
            [[len(one.token_ids) for one in of_agent] for of_agent in by_agent],
            [[one.truncated for one in of_agent] for of_agent in by_agent],
        )

    def _children(self, branch: _Branch, node: Node, position: int) -> Iterator[_Branch]:
        for index in self.shape.followed(node.rewards):
            answers = node.answers(index)
            prompt_history = _extend(branch.prompt_history, branch.prompts)
            response_history = _extend(branch.response_history, answers)
            yield _Branch(
                branch.task,
                branch.path if self.shape.trajectories else (*branch.path, index),
                (position, index),
                self._next_prompts(node, answers, prompt_history, response_history),
                prompt_history,
                response_history,
            )

    def _next_prompts(
        self,
        node: Node,
        answers: list[str],
        prompt_history: tuple[tuple[Prompt, ...], ...],
        response_history: tuple[tuple[str, ...], ...],
    ) -> tuple[Prompt, ...]:
        transition, item = self.functions.transition, self._items[node.task]
        assert transition is not None, "several turns need an external transition"
        with user_code():
            external = transition(
                item=item,
                agent_completions=answers,
                prompt_history_per_agent=[list(history) for history in prompt_history],
                response_history_per_agent=[list(history) for history in response_history],
                turn=node.turn,
                item_index=self._indices[node.task],
            )
            if self.functions.external_prompt_passthrough:
                return tuple(external)
            return tuple(
                self._format(node.task, agent, prompt, turn=node.turn + 1) for agent, prompt in enumerate(external)
            )

    def _format(self, task: int, agent: int, external_prompt: str | None, turn: int) -> Prompt:
        return self.functions.formatters.format(
            self._items[task], agent, external_prompt, item_index=self._indices[task], turn=turn
        )


def _extend(history: tuple[tuple[Any, ...], ...], values: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """`[N][t]` histories with one more entry each."""
    return tuple((*past, value) for past, value in zip(history, values, strict=True))
