"""What a rollout leaves behind, as frozen records of plain values.

Shapes use the notation of `comlrl_lightning.functional`: N agents, K completions per agent and node, J joint
completions per node, C completion tokens.

Example: two agents, aligned, K=2, T=2, one task item. Turn 1 gives one node with completions
``((a1, a2), (b1, b2))``, ``joint == ((0, 0), (1, 1))`` and two rewards. Each joint completion spawns a child: the nodes
``path == (0,)`` and ``path == (1,)`` with ``parent == (0, 0)`` and ``parent == (0, 1)``. `Rollouts.nodes` holds the
three of them in this order; their J=2 rewards each make 6 scored joint completions.

As independent trajectories the same task gives two nodes of one joint completion per turn: ``path == (0,)`` and
``(1,)`` at turn 1, ``(0, 0)`` and ``(1, 0)`` at turn 2. The last index of a path is then the sample itself.

Where one model writes the answers of all agents ("centralized" collaboration), it is the only one with completions,
``((x, y),)`` with ``joint == ((0,), (1,))``, and `Node.sections` holds what each of them says for each agent. A node's
`prompts` stay those of the agents; the one that the model read is the `prompt` of its completions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Prompt = str | list[dict[str, str]]
"""What a formatter returns: a text, or chat messages with ``role`` and ``content``."""


def prompt_text(prompt: Prompt) -> str:
    """A prompt as one text: chat messages become lines of role and content."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer of one agent."""

    agent: int
    """Index of the agent, from 0."""
    prompt: Prompt
    """The prompt as its formatter returned it."""
    prompt_ids: tuple[int, ...]
    """`[P]` token ids of the prompt, special tokens included."""
    token_ids: tuple[int, ...]
    """`[C]` sampled token ids, a sampled end-of-sequence token included."""
    log_probs: tuple[float, ...]
    """`[C]` log-probabilities under the behavior policy at the sampling temperature, as the sampler saw them."""
    text: str
    """The decoded answer, without special tokens and without the stop string that ended it."""
    truncated: bool
    """True when the token limit ended it, not an end-of-sequence token or a stop string."""


@dataclass(frozen=True, slots=True)
class Node:
    """One turn of one task: a prompt per agent, K completions per agent, J scored joint completions."""

    task: int
    """Position of the task item in `Rollouts.items`."""
    turn: int
    """Turn, from 1."""
    path: tuple[int, ...]
    """Joint completions chosen on the way here, one index per former turn; in a trajectory this turn's too. They count
    those that are left out of their group for want of a reward."""
    parent: tuple[int, int] | None
    """Position in `Rollouts.nodes` of the parent and the index of its joint completion; None at turn 1."""
    prompts: tuple[Prompt, ...]
    """`[N]` prompts as the formatters or the environment returned them; empty for agents that do not act."""
    completions: tuple[tuple[Completion, ...], ...]
    """`[N][K]` completions; `[1][K]` of a model that answers for all. Where joint completions are left out for want of
    a reward, K may differ between agents; agents that do not act have none."""
    joint: tuple[tuple[int, ...], ...]
    """`[J][N]` index of each agent's completion in each joint completion; `[J][1]` of a model that answers for all."""
    rewards: tuple[float, ...]
    """`[J]` processed rewards; the mean over the agents where each has its own."""
    agent_rewards: tuple[tuple[float, ...], ...] | None = None
    """`[J][N]` processed rewards of each agent; None when they share one, as a model that answers for all does."""
    sections: tuple[tuple[str, ...], ...] | None = None
    """`[K][N]` the agents' answers in each completion of a model that answers for all; None if each agent answers."""

    def joint_completion(self, index: int) -> tuple[Completion, ...]:
        """The completions that form joint completion `index`: one per acting agent, or that of one model for all."""
        return tuple(group[k] for group, k in zip(self.completions, self.joint[index], strict=True) if group)

    def sources(self, index: int) -> list[Completion | None]:
        """`[N]` the completion behind each agent's answer: the only one of a model that answers for all.

        None for agents that do not act.
        """
        chosen = self.joint[index]
        if self.sections is not None:
            return [self.completions[0][chosen[0]]] * len(self.prompts)
        return [group[k] if group else None for group, k in zip(self.completions, chosen, strict=True)]

    def acts(self, agent: int) -> bool:
        """Whether an agent answers at this node."""
        return self.sections is not None or bool(self.completions[agent])

    def answers(self, index: int) -> list[str]:
        """`[N]` the agents' texts in joint completion `index`; empty for agents that do not act."""
        if self.sections is not None:
            return list(self.sections[self.joint[index][0]])
        return [group[k].text if group else "" for group, k in zip(self.completions, self.joint[index], strict=True)]

    def to_state(self) -> dict[str, Any]:
        """Plain values for a checkpoint that loads with ``weights_only=True``."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Node:
        """Inverse of `to_state`."""
        groups = tuple(tuple(Completion(**completion) for completion in group) for group in state["completions"])
        return cls(**{**state, "completions": groups})


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The nodes that one call of `collect` brought, breadth first."""

    items: tuple[Mapping[str, Any], ...]
    """`[B]` original task items."""
    indices: tuple[int, ...]
    """`[B]` positions of the items in their dataset."""
    nodes: tuple[Node, ...]
    """All nodes of all tasks, turn by turn."""
    generation_seconds: float = 0.0
    """Wall time of sampling. With reward workers it includes what they do meanwhile."""
    reward_seconds: float = 0.0
    """Wall time from the end of sampling until all rewards are there: what the reward function adds to a step."""
    num_unparsed: int = 0
    """Completions of a model that answers for all in which no agent's answer was found."""
    num_late: int | None = None
    """Calls of the reward function that ran out of time; None where that is an error."""
    num_left_out: int | None = None
    """Joint completions that were left out because rewards were None; None where that is an error."""
    num_unfinished: int | None = None
    """Episodes that ``num_turns`` ended; None where there is no environment."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Mean of each part of `WeightedRewards` over all joint completions; empty for other rewards."""

    @property
    def are_episodes(self) -> bool:
        """Whether an environment gave prompts and rewards."""
        return self.num_unfinished is not None

    @property
    def num_scored(self) -> int:
        """Number of joint completions that were scored."""
        return sum(len(node.rewards) for node in self.nodes)


@runtime_checkable
class RolloutSource(Protocol):
    """What callbacks may ask of the module that they serve."""

    env_step: int
    """Joint completions scored in training so far, over all ranks."""
    rollouts: Rollouts | None
    """What the last training step collected on this rank."""
    num_agents: int
    """N, agents of the task, whoever writes their answers."""
    num_turns: int

    def evaluation_rollouts(self) -> Rollouts:
        """Gather the running evaluation over all ranks, in item order. Call it on every rank."""
        ...

    def log_now(self, metrics: Mapping[str, float]) -> None:
        """Write metrics to every logger at the current `env_step`."""
        ...

    def save_agents(self, folder: str | Path) -> None:
        """Write one folder per agent."""
        ...


@runtime_checkable
class RolloutListener(Protocol):
    """A callback that wants to know how far a rollout has come; the module tells every listener among its callbacks."""

    def on_rollout_progress(self, turn: int, rows_running: int) -> None:
        """Hear, after each sampled token, the turn (from 1) and how many of its rows still sample."""
        ...


def merge_rollouts(parts: Iterable[Rollouts]) -> Rollouts:
    """One record of several collections, tasks ordered by their index and nodes breadth first."""
    parts = list(parts)
    tasks = sorted(
        ((index, part, task) for part, rollouts in enumerate(parts) for task, index in enumerate(rollouts.indices)),
    )
    slot = {(part, task): position for position, (_, part, task) in enumerate(tasks)}
    located = sorted(
        (node.turn, slot[part, node.task], node.path, part, position)
        for part, rollouts in enumerate(parts)
        for position, node in enumerate(rollouts.nodes)
    )
    moved = {(part, position): target for target, (*_, part, position) in enumerate(located)}
    nodes = []
    for *_, part, position in located:
        node = parts[part].nodes[position]
        parent = None if node.parent is None else (moved[part, node.parent[0]], node.parent[1])
        nodes.append(replace(node, task=slot[part, node.task], parent=parent))
    late = [part.num_late for part in parts if part.num_late is not None]
    left_out = [part.num_left_out for part in parts if part.num_left_out is not None]
    unfinished = [part.num_unfinished for part in parts if part.num_unfinished is not None]
    return Rollouts(
        tuple(parts[part].items[task] for _, part, task in tasks),
        tuple(index for index, _, _ in tasks),
        tuple(nodes),
        sum(part.generation_seconds for part in parts),
        sum(part.reward_seconds for part in parts),
        sum(part.num_unparsed for part in parts),
        sum(late) if late else None,
        sum(left_out) if left_out else None,
        sum(unfinished) if unfinished else None,
        _merged_parts(parts),
    )


def _merged_parts(parts: Sequence[Rollouts]) -> dict[str, float]:
    """Means of reward parts over several collections."""
    counted = [part for part in parts if part.reward_parts]
    total = sum(part.num_scored for part in counted)
    names = counted[0].reward_parts if counted else ()
    return {name: sum(part.reward_parts[name] * part.num_scored for part in counted) / total for name in names}


def joint_indices(num_agents: int, num_generations: int, joint_mode: str) -> tuple[tuple[int, ...], ...]:
    """`[J][N]` completion indices of each joint completion: aligned pairs the k-th ones, cross takes the product."""
    if joint_mode == "aligned":
        return tuple((k,) * num_agents for k in range(num_generations))
    return tuple(product(range(num_generations), repeat=num_agents))


def texts(node: Node) -> list[list[str]]:
    """`[N][J]` texts of a node's agents, as a reward function takes them."""
    return [list(of_agent) for of_agent in zip(*map(node.answers, range(len(node.joint))), strict=True)]
