"""Things that arrive in any order, and what is made of each group of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from threading import Lock
from typing import Generic, TypeVar

P = TypeVar("P")
M = TypeVar("M")


class Arrivals(Generic[P, M]):
    """Makes something of each group of parts: early where all its parts arrive early, else in the order of the groups.

    Args:
        sizes: `[groups]` parts of each group, at least 1; the groups follow each other.
        make: Makes something of a group, by its number and its parts in order. One call at a time.
    """

    def __init__(self, sizes: Sequence[int], make: Callable[[int, list[P]], M]) -> None:
        self._make = make
        self._starts = [0, *accumulate(sizes)]
        self._group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
        self._arrived: list[dict[int, P]] = [{} for _ in sizes]
        self._made: dict[int, M] = {}
        self._failed: dict[int, Exception] = {}
        self._lock = Lock()

    def arrive(self, position: int, part: P) -> None:
        """Take a part that is there early, in any thread.

        What goes wrong is raised by `complete`, in the order of the groups.
        """
        group = self._group_of[position]
        arrived = self._arrived[group]
        with self._lock:
            arrived[position] = part
            if self._failed or len(arrived) < self._starts[group + 1] - self._starts[group]:
                return
            try:
                self._made[group] = self._make(group, [arrived[place] for place in sorted(arrived)])
            except Exception as error:  # the exception of an earlier group may still come
                self._failed[group] = error

    def complete(self, parts: Sequence[P]) -> list[M]:
        """What was made of all groups, in order; the rest is made now.

        Args:
            parts: All parts, those that arrived early included.
        """
        for group, (start, end) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            if group in self._failed:
                raise self._failed[group]
            if group not in self._made:
                self._made[group] = self._make(group, [*parts[start:end]])
        return [self._made[group] for group in range(len(self._arrived))]
