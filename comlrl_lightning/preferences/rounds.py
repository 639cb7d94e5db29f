"""Rounds of preference learning: what each epoch is for, and what a round has brought so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from comlrl_lightning.preferences.pairs import PreferencePair, Round
from comlrl_lightning.preferences.replay import Replay
from comlrl_lightning.utilities.distributed import all_reduce_sum, gather_objects, rank, world_size

PhaseKind = Literal["collect", "reward", "learn"]


@dataclass(frozen=True, slots=True)
class Phase:
    """What an epoch is for."""

    round: int
    """Number of its round, from 0."""
    kind: PhaseKind
    """Collect pairs, fit the reward model, or learn the policies."""
    index: int
    """Epochs of this kind before it in the round."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The epochs of a round: one that collects, those that fit a reward model, those that learn."""

    reward_epochs: int
    learning_epochs: int

    @property
    def epochs_per_round(self) -> int:
        """Epochs from one collection to the next."""
        return 1 + self.reward_epochs + self.learning_epochs

    def phase(self, epoch: int) -> Phase:
        """What epoch number `epoch`, from 0, is for."""
        number, place = divmod(epoch, self.epochs_per_round)
        if place == 0:
            return Phase(number, "collect", 0)
        if place <= self.reward_epochs:
            return Phase(number, "reward", place - 1)
        return Phase(number, "learn", place - 1 - self.reward_epochs)


def share(items: range, num_items: int, num_pairs: int, batch_size: int | None, is_last: bool) -> range:
    """Which pairs a training step learns from: as many as it has items, cut so that mini-batches stay whole.

    Args:
        items: Positions of the step's items in the epoch, over all ranks.
        num_items: Items of such an epoch.
        num_pairs: Pairs of the epoch.
        batch_size: Pairs per mini-batch; None: a share is one mini-batch.
        is_last: Whether the epoch ends with this step, which then takes what is left.

    Returns:
        Positions of the pairs in the order of the epoch.
    """

    def reached(position: int) -> int:
        available = num_pairs * min(position, num_items) // max(num_items, 1)
        return available - available % (batch_size or 1)

    return range(reached(items.start), num_pairs if is_last else reached(items.stop))


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """How far the rounds have come on this rank. Never changed, always replaced."""

    number: int = -1
    """The running round; -1 before the first."""
    num_items: int = 0
    """Task items of its collection so far, over all ranks."""
    collected: tuple[PreferencePair, ...] = ()
    """Pairs of its collection so far, of this rank."""
    reward_sum: float = 0.0
    """Sum of the rewards of its candidates, of this rank."""
    num_rewards: int = 0
    """Number of those rewards."""
    kept: tuple[Round, ...] = ()
    """Rounds that were collected and that a replay may still need, oldest first; the same on every rank."""
    pairs: tuple[PreferencePair, ...] = ()
    """What this round learns from; the same on every rank."""
    task_reward_scores: int = 0
    """Joint completions that the task's reward has scored in training so far, over all ranks."""
    is_fitted: bool = False
    """Whether the reward model has seen any pair."""
    offset: float = 0.0
    """Score of the reward model that counts as reward 0 in this round."""
    scale: float = 1.0
    """Difference of scores that counts as 1."""

    def without_collection(self) -> RoundProgress:
        """The same without what an unfinished collection has brought: its items come again."""
        return replace(self, num_items=0, collected=(), reward_sum=0.0, num_rewards=0)

    def at_round(self, number: int) -> RoundProgress:
        """The same in the collection of a round, which begins unless it runs already."""
        if number == self.number:
            return self
        return replace(self.without_collection(), number=number, pairs=())

    def with_step(
        self, num_items: int, pairs: Sequence[PreferencePair], rewards: Sequence[float], num_scores: int
    ) -> RoundProgress:
        """The same after another step of the collection.

        Args:
            num_items: Task items of the collection so far, over all ranks.
            pairs: Its pairs, of this rank.
            rewards: Rewards of its candidates, of this rank.
            num_scores: Joint completions that the task's reward has scored in it, over all ranks.
        """
        return replace(
            self,
            num_items=num_items,
            collected=(*self.collected, *pairs),
            reward_sum=self.reward_sum + sum(rewards),
            num_rewards=self.num_rewards + len(rewards),
            task_reward_scores=self.task_reward_scores + num_scores,
        )

    def at_end(self, replay: Replay, key: tuple[int, ...]) -> RoundProgress:
        """The same when the collection is over. Call it on every rank.

        Args:
            replay: Chooses what the round learns from.
            key: Integers that seed its choice, together with the number of the round.
        """
        # The order of the items, whatever rank had them.
        pairs = sorted(gather_objects(self.collected), key=lambda pair: pair.item_index)
        total, count = all_reduce_sum(torch.tensor([self.reward_sum, self.num_rewards], dtype=torch.float64)).tolist()
        kept = needed((*self.kept, Round(self.number, tuple(pairs), total / max(count, 1))), replay.num_kept)
        chosen = replay.sample(kept, (*key, self.number))
        return replace(self, collected=(), kept=kept, pairs=tuple(chosen))

    def to_state(self) -> dict[str, Any]:
        """Plain values for a checkpoint that loads with ``weights_only=True``. Call it on every rank."""
        own = {
            "collected": [pair.to_state() for pair in self.collected],
            "reward_sum": self.reward_sum,
            "num_rewards": self.num_rewards,
        }
        return {
            "number": self.number,
            "num_items": self.num_items,
            "task_reward_scores": self.task_reward_scores,
            "is_fitted": self.is_fitted,
            "offset": self.offset,
            "scale": self.scale,
            "ranks": gather_objects([own]),
            "kept": [one.to_state() for one in self.kept],
            "pairs": [pair.to_state() for pair in self.pairs],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RoundProgress:
        """Inverse of `to_state`; with another number of ranks, the first takes all that was collected."""
        values = {name: value for name, value in state.items() if name not in ("ranks", "kept", "pairs")}
        ranks = state["ranks"]
        # Dealt out anew, the pairs of one item would come back in another order.
        everything = ranks if rank() == 0 else []
        owns = [ranks[rank()]] if len(ranks) == world_size() else everything
        return cls(
            **values,
            reward_sum=sum((own["reward_sum"] for own in owns), 0.0),
            num_rewards=sum(own["num_rewards"] for own in owns),
            collected=tuple(PreferencePair.from_state(pair) for own in owns for pair in own["collected"]),
            kept=tuple(map(Round.from_state, state["kept"])),
            pairs=tuple(map(PreferencePair.from_state, state["pairs"])),
        )


def needed(rounds: Sequence[Round], num_kept: int | None) -> tuple[Round, ...]:
    """The rounds that a replay may still ask for: the last one, and the newest `num_kept` with pairs (None: all)."""
    filled = [one for one in rounds[:-1] if one.pairs]
    if num_kept is not None:
        wanted = num_kept - bool(rounds[-1].pairs)
        filled = filled[max(len(filled) - wanted, 0) :]
    return (*filled, *rounds[-1:])
