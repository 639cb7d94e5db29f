"""From measurements to a Markdown page and a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks._job import Measurement
from benchmarks._results import Row, machine
from benchmarks._works import MEMORY_GOALS, OVER_AGENTS, SPEED_GOALS, Goal, Kind

WHAT: dict[Kind, str] = {
    "magrpo": "MAGRPO end to end",
    "generate": "Sampling alone, after a short warm-up",
    "update": "Loss, backward pass and optimizer step on the same recorded completions, after a short warm-up",
    "iac": "IAC end to end",
    "maac": "MAAC end to end",
    "madpo": "MADPO end to end: one round, two pairs per item",
}


@dataclass(frozen=True)
class Comparison:
    """One side of comlrl against one of this package on the same work."""

    theirs: Row
    ours: Row

    @property
    def speedups(self) -> list[float]:
        """How many times as fast this package is, repeat by repeat."""
        return self.theirs.ratios(self.ours, wall)

    @property
    def memory_shares(self) -> list[float]:
        """Share of comlrl's peak memory, repeat by repeat."""
        return self.ours.ratios(self.theirs, peak)


def wall(repeat: Measurement) -> float:
    """Seconds of one repeat."""
    return repeat.wall_seconds


def peak(repeat: Measurement) -> float:
    """Largest memory of one repeat."""
    return repeat.peak_bytes


def compare(rows: Sequence[Row], theirs: str | None = None, ours: str | None = None) -> Comparison | None:
    """One side of comlrl and one of this package; None if one is missing.

    Args:
        rows: Those of one work.
        theirs: Name of comlrl's side; None: its fastest.
        ours: Name of this package's side; None: its fastest.
    """
    chosen = []
    for is_comlrl, name in ((True, theirs), (False, ours)):
        found = [row for row in rows if row.side.is_comlrl == is_comlrl and name in (None, row.name)]
        if not found:
            return None
        chosen.append(min(found, key=lambda row: row.median(wall)))
    comparison = Comparison(*chosen)
    return comparison if comparison.speedups else None


def by_work(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each work."""
    return {name: [row for row in rows if row.work.name == name] for name in dict.fromkeys(r.work.name for r in rows)}


def page(command: str, model: str, rows: Sequence[Row]) -> str:
    """Return the page.

    Args:
        command: What makes the same measurement elsewhere.
        model: Name of the model.
        rows: The measurements.
    """
    works = by_work(rows)
    where = machine()
    parts = [
        "# comlrl_lightning and comlrl 1.4.3, side by side",
        f"`{command}`",
        f"{model}, length-ratio task, K=4, completions of exactly the given number of tokens, sampled at temperature 1"
        " from the whole vocabulary. Same prompts and same number of sampled tokens, joint completions and updates,"
        f" checked. {where['processor']}, {where['num_cores']} cores, one thread per side (`OMP_NUM_THREADS=1`), each"
        " run in a process of its own, sides interleaved. Ratios are taken repeat by repeat; the median stands first,"
        " the range in brackets. Loading is not timed. Peak memory is the largest resident size of the process. comlrl"
        " trains all weights of one model per agent; in bfloat16 so do its optimizer states, at a loss of precision."
        " comlrl_lightning keeps adapters in float32. Times differ from machine to machine: look at the ratios.",
        "![Times as fast as comlrl](speedup.png)",
        "## Goals",
        "The fastest side of comlrl_lightning against comlrl with weights in float32, as it loads them, and in"
        ' bfloat16, in which it is faster and learns too; and both in float32. Of the goals "must",'
        f" {reached(works)}.",
        goals_table(works),
    ]
    agents = agents_table(works)
    if agents:
        parts += ["## Cost as agents are added", "Of whole training steps, two items per update.", agents]
    for name, own in works.items():
        work = own[0].work
        shape = f"{work.num_agents} agents, {_items(work.num_items)}, {work.num_tokens} tokens"
        turns = f", {work.num_turns} turns" if work.num_turns > 1 else ""
        learned = "" if work.kind == "generate" else f", {_items(work.items_per_update)} per update"
        parts += [f"## {name}", f"{WHAT[work.kind]}: {shape}{turns}{learned}.", details_table(own)]
    return "\n\n".join(parts) + "\n"


COMPARISONS = {
    "over float32 comlrl": ("comlrl-fp32", None),
    "over bfloat16 comlrl": ("comlrl-bf16", None),
    "both float32": ("comlrl-fp32", "ours-fp32"),
}
"""Columns of the table of goals."""


def goals_table(works: dict[str, list[Row]]) -> str:
    """What is to be reached and what was measured."""
    lines = []
    for name, rows in works.items():
        found = [compare(rows, *sides) for sides in COMPARISONS.values()]
        speeds = ["" if one is None else spread(one.speedups, 2, "x") for one in found]
        lines.append([name, *_goal(SPEED_GOALS.get(name), "x"), *speeds])
        if name in MEMORY_GOALS:
            shares = ["" if one is None else percent(one.memory_shares) for one in found]
            lines.append([f"{name}, peak memory", *_goal(MEMORY_GOALS[name], "%"), *shares])
    return table(["work", 'goal "must"', 'goal "aim"', *COMPARISONS], lines)


def reached(works: dict[str, list[Row]]) -> str:
    """How many of the goals "must" were reached against each format of comlrl, in words."""
    counts = []
    for words, sides in list(COMPARISONS.items())[:2]:
        found = {name: one for name, rows in works.items() if (one := compare(rows, *sides)) is not None}
        speeds = [median(found[name].speedups) >= goal.must for name, goal in SPEED_GOALS.items() if name in found]
        shares = [
            median(found[name].memory_shares) <= goal.must for name, goal in MEMORY_GOALS.items() if name in found
        ]
        kinds = [*speeds, *shares]
        counts.append(f"{sum(kinds)} of {len(kinds)} are reached {words}")
    return ", ".join(counts)


def agents_table(works: dict[str, list[Row]]) -> str:
    """What a joint completion and a token of it cost with more agents; empty unless there are several works to compare.

    Args:
        works: Rows by work.
    """
    rows = [row for name in OVER_AGENTS for row in works.get(name, [])]
    lines = []
    for side in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == side]
        first = own[0]
        for row in own if len(own) > 1 else ():
            against = row.ratios(first, _seconds_per_token)
            lines.append(
                [
                    f"{row.side.library}, {row.side.dtype}",
                    str(row.work.num_agents),
                    _number(row.median(lambda repeat: repeat.wall_seconds / repeat.done.num_joint), 2),
                    _number(1000 * row.median(_seconds_per_token), 2),
                    spread(against, 2, "x") if against else "",
                ]
            )
    columns = ["library", "agents", "s per joint completion", "ms per completion token", "per token against the first"]
    return table(columns, lines) if lines else ""


def details_table(rows: Sequence[Row]) -> str:
    """All that was measured of one work."""
    baselines = [row for row in rows if row.side.is_comlrl]
    columns = ["library", "weights", "trained", "wall s", "generation s", "update s", "joint completions/s"]
    columns += ["tokens/s", "peak GB"]
    columns += [f"{what} {row.side.dtype} comlrl" for row in baselines for what in ("speed over", "memory of")]
    return table(columns, [_cells(row, baselines) for row in rows])


def _cells(row: Row, baselines: Sequence[Row]) -> list[str]:
    def cell(value: Callable[[Measurement], float | None], digits: int) -> str:
        values = [number for number in map(value, row.repeats.values()) if number is not None]
        return spread(values, digits) if values else ""

    cells = [
        row.side.library,
        row.side.dtype,
        row.side.trained(row.work.kind),
        cell(wall, 1),
        cell(lambda repeat: repeat.generation_seconds, 1),
        cell(lambda repeat: repeat.update_seconds, 1),
        cell(lambda repeat: repeat.done.num_joint / repeat.wall_seconds, 3),
        cell(lambda repeat: repeat.done.num_completion_tokens / repeat.wall_seconds, 1),
        cell(lambda repeat: repeat.peak_bytes / 1e9, 2),
    ]
    for baseline in baselines:
        speeds, shares = baseline.ratios(row, wall), row.ratios(baseline, peak)
        cells += [spread(speeds, 2, "x"), percent(shares)] if speeds else ["", ""]
    return cells


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw how many times as fast each work is.

    Args:
        rows: The measurements.
        path: Of the picture.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    works = by_work(rows)
    formats = {"comlrl-fp32": ("tab:blue", "comlrl in float32"), "comlrl-bf16": ("tab:cyan", "comlrl in bfloat16")}
    bars = {
        (name, theirs): comparison.speedups
        for name, own in works.items()
        for theirs in formats
        if (comparison := compare(own, theirs)) is not None
    }
    if not bars:
        return
    names = list(dict.fromkeys(name for name, _ in bars))
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.5 * len(names)), layout="constrained")
    for (name, theirs), speedups in bars.items():
        place = names.index(name) + (-0.2 if theirs == "comlrl-fp32" else 0.2)
        middle = median(speedups)
        reach = [[middle - min(speedups)], [max(speedups) - middle]]
        color, _ = formats[theirs]
        axes.barh(place, middle, 0.4, xerr=reach, color=color, error_kw={"ecolor": "0.3", "capsize": 2})
    for color, label in formats.values():
        axes.plot([], [], color=color, linewidth=6, label=label)
    axes.axvline(1, color="0.5", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="times as fast as comlrl 1.4.3", xlim=(0, None))
    figure.legend(loc="outside upper right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def spread(values: Sequence[float], digits: int, unit: str = "") -> str:
    """Median and, of several values, the range in brackets."""
    middle, least, most = (_number(value, digits) for value in (median(values), min(values), max(values)))
    return f"{middle}{unit} ({least}-{most})" if len(values) > 1 else f"{middle}{unit}"


def percent(shares: Sequence[float]) -> str:
    """Shares in percent."""
    return spread([100 * share for share in shares], 0, "%")


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join([_line(columns), "|---" * len(columns) + "|", *map(_line, lines)])


def _goal(goal: Goal | None, unit: str) -> list[str]:
    if goal is None:
        return ["", ""]
    factor = 100 if unit == "%" else 1
    return [f"{factor * goal.must:g}{unit}", f"{factor * goal.aim:g}{unit}"]


def _items(count: int) -> str:
    return f"{count} item{'' if count == 1 else 's'}"


def _seconds_per_token(repeat: Measurement) -> float:
    return repeat.wall_seconds / repeat.done.num_completion_tokens


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
