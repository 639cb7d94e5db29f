"""Nodes and rounds written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from comlrl_lightning.preferences.pairs import PreferencePair, Round
from comlrl_lightning.types import Completion, Node


def completion(agent: int, text: str, token: int = 0) -> Completion:
    return Completion(agent, f"prompt {agent}", (1, agent), (token, 2), (-0.5, -0.25), text, truncated=False)


def node(rewards: Sequence[float], *, name: str = "p", texts: Sequence[str] | None = None) -> Node:
    """An aligned node of two agents; joint completion j of node ``p`` reads ``p0.j`` and ``p1.j``, with the token j."""
    groups = tuple(
        tuple(
            completion(agent, f"{name}{agent}.{j}" if texts is None else texts[j], token=j) for j in range(len(rewards))
        )
        for agent in range(2)
    )
    joint = tuple((j, j) for j in range(len(rewards)))
    return Node(0, 1, (), None, ("prompt 0", "prompt 1"), groups, joint, tuple(rewards))


def number(completions: Sequence[Completion]) -> int:
    """Which joint completion of its node it is."""
    (token,) = {entry.token_ids[0] for entry in completions}
    return token


def indices(pairs: Sequence[PreferencePair]) -> list[tuple[int, int]]:
    """Winner and loser of each pair, by their numbers in the node."""
    return [(number(pair.winner), number(pair.loser)) for pair in pairs]


def pair(item_index: int, token: int = 0) -> PreferencePair:
    """A pair that its item and token tell from others."""
    winner = tuple(completion(agent, f"w{agent}", token) for agent in range(2))
    loser = tuple(completion(agent, f"l{agent}", token) for agent in range(2))
    return PreferencePair(item_index, winner, loser, 1.0, 0.5)


def rounds_of(*sizes: int) -> list[Round]:
    """Rounds of so many pairs; the item of a pair is 100 times its round plus its place in it."""
    return [
        Round(position, tuple(pair(100 * position + place) for place in range(size)), 0.75)
        for position, size in enumerate(sizes)
    ]
