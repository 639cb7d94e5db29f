"""Run comlrl 1.4.3 and this package side by side: time and memory of sampling, updates and whole algorithms.

    make bench                          # everything, three times: one to two hours on two cores
    make bench ARGS="--quick"           # four works, once: some minutes
    make bench ARGS="--works tree iac --repeats 1 --out runs/bench"

writes `results.json` after every measurement, `RESULTS.md` and `speedup.png`. comlrl gets an environment of its own in
``build/comlrl_env``, made on the first run with the versions of ``constraints.txt`` (pip's own variables, such as
PIP_EXTRA_INDEX_URL, choose another torch build), unless ``--comlrl-python`` names an interpreter that has it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # started as a file, not with -m
    sys.path.insert(0, str(ROOT))

from benchmarks import _results  # noqa: E402
from benchmarks._environment import COMLRL_VERSION, comlrl_interpreter, measure  # noqa: E402
from benchmarks._job import Job  # noqa: E402
from benchmarks._model import DEFAULT_MODEL, model_folder  # noqa: E402
from benchmarks._report import draw, page  # noqa: E402
from benchmarks._results import Run, check_equal_work, finished, rows  # noqa: E402
from benchmarks._works import MICRO_BATCH_TOKENS, QUICK, SIDES, WORKS, sides_of  # noqa: E402


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}, once, on two sides")
    parser.add_argument("--works", nargs="+", choices=WORKS, help="what to measure; all of it unless said")
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="on which sides; the usual ones unless said")
    parser.add_argument("--repeats", type=int, help="3, or 1 with --quick")
    parser.add_argument("--tokens", type=int, default=64, help="for a try: of completions of 64 tokens, in proportion")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or folder")
    parser.add_argument(
        "--comlrl-python", type=Path, help=f"interpreter of an environment with comlrl {COMLRL_VERSION}"
    )
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt", help="versions for pip")
    parser.add_argument("--out", type=Path, help="folder of the results; benchmarks/, or build/quick/ with --quick")
    parser.add_argument(
        "--resume", action="store_true", help="keep what --out already holds of the same jobs; not after a change"
    )
    options = parser.parse_args(arguments)
    options.repeats = options.repeats or (1 if options.quick else 3)
    options.works = options.works or list(QUICK if options.quick else WORKS)
    # A quick look does not take the place of the full measurement.
    options.out = options.out or ROOT / ("build/quick" if options.quick else "benchmarks")
    return options


def plan(options: argparse.Namespace) -> list[tuple[str, Job]]:
    """Side and job of every run in their order: repeat by repeat, work by work, the sides of a work one by one.

    Args:
        options: The command line.
    """
    planned = []
    for repeat in range(options.repeats):
        for name in options.works:
            work = WORKS[name].shortened(options.tokens)
            for chosen in sides_of(work, options.sides, options.quick):
                side = SIDES[chosen]
                micro_batch_tokens = None if side.is_comlrl else MICRO_BATCH_TOKENS
                job = Job(Path(options.model).name, work, side.dtype, side.full, repeat, micro_batch_tokens)
                planned.append((chosen, job))
    return planned


def run(options: argparse.Namespace) -> None:
    """Run what is planned and write the results as they come.

    Args:
        options: The command line.
    """
    planned = plan(options)
    runs = finished(options.out, planned) if options.resume else []
    if runs:
        print(f"{len(runs)} of {len(planned)} runs are there already", flush=True)
    done = {(run.side, run.job) for run in runs}
    model = model_folder(options.model)
    interpreters = {False: Path(sys.executable)}
    if any(SIDES[name].is_comlrl for name, _ in planned):
        interpreters[True] = comlrl_interpreter(options.comlrl_python, options.constraints)
    for name, job in planned:
        if (name, job) in done:
            continue
        is_comlrl = SIDES[name].is_comlrl
        module = "_comlrl_side" if is_comlrl else "_our_side"
        runs.append(Run(name, job, measure(interpreters[is_comlrl], module, replace(job, model=str(model)))))
        print(describe(runs[-1]), flush=True)
        check_equal_work(runs)
        _results.save(options.out, command(options), runs)
        text = page(command(options), Path(options.model).name, rows(runs))
        (options.out / "RESULTS.md").write_text(text, encoding="utf-8")
    draw(rows(runs), options.out / "speedup.png")


def describe(run: Run) -> str:
    """Return one line about a run."""
    taken = run.measurement
    parts = {"generation": taken.generation_seconds, "update": taken.update_seconds}
    split = " and ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds is not None)
    seconds = f"{taken.wall_seconds:6.1f} s, of it {split}"
    return f"{run.job.work.name:12} {run.side:14} {seconds}; {taken.peak_bytes / 1e9:.2f} GB"


def command(options: argparse.Namespace) -> str:
    """Return what makes the same measurement elsewhere: no paths of this machine."""
    parts = ["python benchmarks/bench_comlrl.py", f"--model {Path(options.model).name}"]
    if options.quick:
        parts.append("--quick")
    if options.works != list(QUICK if options.quick else WORKS):
        parts.append(f"--works {' '.join(options.works)}")
    if options.sides:
        parts.append(f"--sides {' '.join(options.sides)}")
    parts.append(f"--repeats {options.repeats}")
    if options.tokens != 64:
        parts.append(f"--tokens {options.tokens}")
    return " ".join(parts)


if __name__ == "__main__":
    run(parse())
