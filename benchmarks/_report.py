"""From measurements to `results.json` and a Markdown table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._job import Measurement


@dataclass(frozen=True)
class Side:
    """One way to run the work."""

    module: str
    """Python module that runs it."""
    dtype: str
    full: bool

    @property
    def is_comlrl(self) -> bool:
        """Whether it runs in the environment of comlrl."""
        return self.module == "_comlrl_side"

    @property
    def label(self) -> str:
        """Its name in the table."""
        trained = "all weights, a model per agent" if self.full else "LoRA rank 16, one frozen base"
        return f"{'comlrl 1.4.3' if self.is_comlrl else 'comlrl_lightning'} | {self.dtype} | {trained}"


SIDES = {
    "comlrl-fp32": Side("_comlrl_side", "float32", True),
    "comlrl-bf16": Side("_comlrl_side", "bfloat16", True),
    "ours-fp32": Side("_our_side", "float32", False),
    "ours-bf16": Side("_our_side", "bfloat16", False),
    "ours-full-fp32": Side("_our_side", "float32", True),
}


@dataclass(frozen=True)
class Row:
    """All repeats of one side on one work."""

    benchmark: str
    items_per_update: int
    side: str
    repeats: list[Measurement]

    def spread(self, value: Callable[[Measurement], float], digits: int = 1) -> str:
        """Median of a value, and its range in brackets."""
        return _spread([value(repeat) for repeat in self.repeats], digits)

    def ratio(self, other: Row, value: Callable[[Measurement], float]) -> list[float]:
        """Value of this row over that of another, repeat by repeat, which ran one after the other."""
        return [value(mine) / value(its) for mine, its in zip(self.repeats, other.repeats, strict=False)]


def machine() -> dict[str, Any]:
    """Processor, cores and system."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return {"processor": name, "num_cores": os.cpu_count(), "system": platform.system(), "num_threads_per_side": 1}


def write(folder: Path, command: str, settings: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write `results.json` and `RESULTS.md`.

    Args:
        folder: Where they go.
        command: What was typed.
        settings: What all rows have in common.
        rows: The measurements.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {"command": command, "machine": machine(), "settings": settings}
    plain = [{**asdict(row), **asdict(SIDES[row.side])} for row in rows]
    (folder / "results.json").write_text(json.dumps({**content, "rows": plain}, indent=1) + "\n", encoding="utf-8")
    (folder / "RESULTS.md").write_text(markdown(command, settings, rows), encoding="utf-8")


def markdown(command: str, settings: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the page with the table of every work."""
    where = machine()
    parts = [
        "# comlrl_lightning and comlrl 1.4.3, side by side",
        f"`{command}`",
        f"MAGRPO end to end: {settings['model']}, {settings['num_agents']} agents, K={settings['num_generations']},"
        f" {settings['num_items']} items of the length-ratio task, every completion exactly"
        f" {settings['num_tokens']} tokens, sampled at temperature 1 from the whole vocabulary. Same prompts and same"
        f" number of sampled tokens, joint completions and updates, checked. {where['processor']}, one thread per side"
        " (`OMP_NUM_THREADS=1`), each run in a process of its own, sides interleaved, median of"
        f" {settings['repeats']} repeats with the range in brackets. Loading is not timed. Peak memory is the largest"
        " resident size of the process. comlrl trains all weights of one model per agent; in bfloat16 so do its"
        " optimizer states, at a loss of precision. comlrl_lightning keeps adapters in float32. Times differ from"
        " machine to machine: look at the ratios.",
    ]
    for items_per_update in sorted({row.items_per_update for row in rows}, reverse=True):
        parts += [
            f"## Items per update: {items_per_update}",
            _table([row for row in rows if row.items_per_update == items_per_update]),
        ]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Row]) -> str:
    baselines = [row for row in rows if SIDES[row.side].is_comlrl]
    columns = ["library", "weights", "trained", "wall s", "generation s", "update s", "joint completions/s", "peak GB"]
    columns += [f"{what} {SIDES[row.side].dtype} comlrl" for row in baselines for what in ("speed over", "memory of")]
    return "\n".join([_line(columns), "|---" * len(columns) + "|", *(_line(_cells(row, baselines)) for row in rows)])


def _cells(row: Row, baselines: Sequence[Row]) -> list[str]:
    cells = [
        SIDES[row.side].label,
        row.spread(_wall),
        row.spread(lambda repeat: repeat.generation_seconds),
        row.spread(lambda repeat: repeat.update_seconds),
        row.spread(lambda repeat: repeat.work.num_joint / repeat.wall_seconds, 3),
        row.spread(lambda repeat: repeat.peak_bytes / 1e9, 2),
    ]
    for baseline in baselines:
        cells.append(_spread(baseline.ratio(row, _wall), 2, "x"))
        cells.append(f"{100 * median(row.ratio(baseline, lambda repeat: repeat.peak_bytes)):.0f}%")
    return cells


def _wall(repeat: Measurement) -> float:
    return repeat.wall_seconds


def _spread(values: Sequence[float], digits: int, unit: str = "") -> str:
    middle, least, most = (f"{value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle}{unit} ({least}-{most})" if len(values) > 1 else f"{middle}{unit}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
