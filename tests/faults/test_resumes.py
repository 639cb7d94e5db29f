"""A run that stopped goes on as if it had not: every stop, every checkpoint, once, twice and three times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from tests.distributed.launch import run_ranks
from tests.faults.registry import Fault, faults
from tests.faults.resumes import KINDS, STOPS, Family, Place, Stop, check_chain

FAMILIES: tuple[Family, ...] = get_args(Family)
CHAINS: tuple[tuple[Place, Place, Place], ...] = (
    ("first", "middle", "last"),
    ("middle", "last", "evaluation"),
    ("last", "evaluation", "first"),
    ("evaluation", "first", "middle"),
)
"""Where a run stops in its first three epochs: together every place before every resumption."""
EQUAL = "equal to the unbroken run, bit for bit"
REFUSED = (
    "refused once an optimizer step of the update was taken: `ValueError`: The checkpoint was saved inside an update,"
    " after one of its optimizer steps ... Resume from a checkpoint saved before; otherwise equal"
)


@dataclass(frozen=True)
class Cell(Fault):
    """A stop, and the checkpoint that the run goes on from."""

    stop: Stop
    kind: str
    family: Family
    """The algorithm of the default tests."""
    places: tuple[Place, ...]
    """Its stops."""

    def check(self, family: Family, places: tuple[Place, ...], folder: Path) -> None:
        """Stop three times, and go on as often."""
        came = check_chain(family, self.stop, self.kind, places, folder)
        assert "refused" not in came or self.outcome == REFUSED


def cells() -> list[Cell]:
    """All pairs of a stop and a checkpoint; neighbours differ in algorithm and places, so that all pairs come."""
    return [
        Cell(
            "runs that go on",
            f"{stop.name}, then on from {kind}",
            REFUSED if "after its update" in stop.name and "xception" in kind else EQUAL,
            stop,
            kind,
            FAMILIES[(row + column) % 4],
            CHAINS[(2 * row + column) % 4],
        )
        for row, stop in enumerate(STOPS)
        for column, kind in enumerate(KINDS)
    ]


CELLS = cells()
DEFAULT = {row * len(KINDS) + (row + step) % len(KINDS) for row in range(len(STOPS)) for step in (0, 2, 4)}
"""Three checkpoints of each stop; the others take as long again and more."""


@faults(*CELLS, slow=frozenset(cell for number, cell in enumerate(CELLS) if number not in DEFAULT))
def test_once_twice_and_three_times(fault: Cell, tmp_path: Path) -> None:
    fault.check(fault.family, fault.places, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("places", CHAINS, ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cell", CELLS, ids=[f"{cell.stop.name}-{cell.kind}" for cell in CELLS])
def test_every_algorithm_at_every_place(cell: Cell, family: Family, places: tuple[Place, ...], tmp_path: Path) -> None:
    cell.check(family, places, tmp_path)


def chain_on_rank(family: Family, kind: str, folder: Path) -> list[str]:
    return check_chain(family, STOPS[0], kind, CHAINS[0], folder, ranks=2)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=() if (family, place) == ("MAGRPO", 0) else pytest.mark.slow)
        for place, kind in enumerate(KINDS)
        for family in FAMILIES
    ],
)
def test_two_ranks_that_a_limit_ends(family: Family, kind: str, tmp_path: Path) -> None:
    first, second = run_ranks(chain_on_rank, 2, family, kind, tmp_path, timeout=600)
    assert first == second
