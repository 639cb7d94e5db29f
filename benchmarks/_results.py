"""Measurements as they are kept in `results.json`, and what may be compared with what."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._job import Job, Measurement
from benchmarks._works import NOT_COMPARED, SIDES, Side, Work

RESULTS = "results.json"


@dataclass(frozen=True)
class Run:
    """One finished measurement."""

    side: str
    job: Job
    """Its seed is the number of the repeat, its model the name without folders."""
    measurement: Measurement


@dataclass(frozen=True)
class Row:
    """All repeats of one side on one work."""

    work: Work
    name: str
    """Of the side."""
    repeats: dict[int, Measurement]

    @property
    def side(self) -> Side:
        """The side."""
        return SIDES[self.name]

    def median(self, value: Callable[[Measurement], float]) -> float:
        """Median of a value over the repeats."""
        return median(map(value, self.repeats.values()))

    def ratios(self, other: Row, value: Callable[[Measurement], float]) -> list[float]:
        """Value of this row over that of another, repeat by repeat, which ran one after the other."""
        return [value(mine) / value(other.repeats[n]) for n, mine in self.repeats.items() if n in other.repeats]


def rows(runs: Sequence[Run]) -> list[Row]:
    """The runs by work and side, in the order in which these first came."""
    found: dict[tuple[str, str], Row] = {}
    for run in runs:
        row = found.setdefault((run.job.work.name, run.side), Row(run.job.work, run.side, {}))
        row.repeats[run.job.seed] = run.measurement
    return list(found.values())


def check_equal_work(runs: Sequence[Run]) -> None:
    """Refuse a comparison of runs that did not do the same.

    Args:
        runs: The measurements so far.

    Raises:
        RuntimeError: If they differ.
    """
    first: dict[str, Run] = {}
    for run in runs:
        name = run.job.work.name
        other = first.setdefault(name, run)
        mine, its = asdict(run.measurement.done), asdict(other.measurement.done)
        for count in mine:
            if count not in NOT_COMPARED.get(name, ()) and mine[count] != its[count]:
                raise RuntimeError(
                    f"{name}: {run.side} did {count}={mine[count]}, {other.side} did {its[count]}. They cannot be "
                    "compared."
                )


def machine() -> dict[str, Any]:
    """Processor, cores and system."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return {"processor": name, "num_cores": os.cpu_count(), "system": platform.system(), "num_threads_per_side": 1}


def save(folder: Path, command: str, runs: Sequence[Run]) -> None:
    """Write `results.json`, whole or not at all.

    Args:
        folder: Where it goes.
        command: What was typed.
        runs: The measurements so far.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {"command": command, "machine": machine(), "runs": [asdict(run) for run in runs]}
    unfinished = folder / f"{RESULTS}.part"
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(folder / RESULTS)


def finished(folder: Path, planned: Collection[tuple[str, Job]]) -> list[Run]:
    """Runs of a former start that need not be repeated: of this machine and of the very same jobs.

    Args:
        folder: Where `results.json` may be.
        planned: Side and job of all runs.
    """
    path = folder / RESULTS
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["machine"] != machine():
        return []
    # A file of an older form has no runs.
    former = [
        Run(run["side"], Job.from_json(run["job"]), Measurement.from_json(run["measurement"]))
        for run in content.get("runs", [])
    ]
    return [run for run in former if (run.side, run.job) in planned]
