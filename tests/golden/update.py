"""Write the golden numbers anew: ``python -m tests.golden.update [NAME ...]``.

Without names all numbers and snapshots are written; ``settings`` and ``checkpoint_keys`` name the snapshots. A run
keeps its seed unless a draw of it lies close to the border between two tokens. With ``--checkpoints`` the named runs
that keep a checkpoint write it anew, too: only when old checkpoints are not to be supported any more.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.golden import files, snapshots
from tests.golden.runs import CASES, Case, checkpoint_of, run

MARGIN = 1e-4
"""Smallest distance of a draw from the border between two tokens, as a probability: kernels differ by far less."""
SNAPSHOTS = {"settings": snapshots.settings, "checkpoint_keys": snapshots.checkpoint_keys}


@contextmanager
def measured_margins() -> Iterator[list[float]]:
    """Distances of all draws from the nearest border, in the search of the token in which a draw falls."""
    search, margins = torch.searchsorted, []

    def measured(ends: Tensor, target: Tensor, **how: Any) -> Tensor:
        distance = (ends[:, :-1] - target).abs().amin(-1) / ends[:, -1]
        # Rows that fill a batch up have no draw.
        margins.extend(distance[target.squeeze(-1) > 0].tolist())
        return search(ends, target, **how)

    with mock.patch.object(torch, "searchsorted", measured):
        yield margins


def num_rows(record: dict[str, Any]) -> int:
    """Joint completions that a record shows."""
    return sum(map(len, record["steps"])) + len(record["evaluations"])


def written(case: Case, seed: int, checkpoints: Path | None = None) -> dict[str, Any] | None:
    """The record of a run; None where a draw lies close to a border.

    Raises:
        ValueError: If the search for tokens was not seen, or a group of weights did not move.
    """
    with measured_margins() as margins:
        record, _ = run(case, seed, checkpoints=checkpoints)
    if len(margins) < num_rows(record):
        raise ValueError(f"{len(margins)} draws were seen. Measure the margins where tokens are drawn now.")
    if still := [name for name, sums in record["weights"].items() if not sums["moved"][1]]:
        raise ValueError(f"Nothing was learned by {still}. Choose another run.")
    return {"smallest_margin": min(margins), **record} if min(margins) >= MARGIN else None


def update_case(name: str, with_checkpoint: bool) -> None:
    """Write the record of a run, and perhaps its checkpoint."""
    case = CASES[name]
    first = files.read(name)["seed"] if files.path_of(name).exists() else 1
    for seed in itertools.count(first):
        with TemporaryDirectory() as folder, chdir(folder):  # checkpoints hold their own relative paths
            checkpoints = Path("checkpoints") if with_checkpoint and case.stop is not None else None
            record = written(case, seed, checkpoints)
            if record is None:
                continue
            files.write(name, record)
            if checkpoints is not None:
                checkpoint_of(name).parent.mkdir(exist_ok=True)
                shutil.copyfile(checkpoints / f"batch-{case.stop:06d}.ckpt", checkpoint_of(name))
            print(f"{name}: seed {seed}, margin {record['smallest_margin']:.1e}")
            return


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join([*CASES, *SNAPSHOTS])}")
    parser.add_argument("--checkpoints", action="store_true", help="write checkpoints of the named runs, too")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {*CASES, *SNAPSHOTS}:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    if arguments.checkpoints and not arguments.names:
        parser.error("--checkpoints needs the names of the runs")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for name in arguments.names or [*CASES, *SNAPSHOTS]:
        if name in CASES:
            update_case(name, arguments.checkpoints)
        else:
            files.write(name, SNAPSHOTS[name]())
            print(name)


if __name__ == "__main__":
    main()
