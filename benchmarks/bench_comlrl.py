"""Run comlrl 1.4.3 and this package side by side: time and memory of MAGRPO, end to end.

    make bench ARGS="--model SmolLM2-135M-Instruct"

writes ``benchmarks/results.json`` and ``benchmarks/RESULTS.md``. comlrl gets an environment of its own in
``build/comlrl_env``, made on the first run with the versions of ``constraints.txt`` (pip's own variables, such as
PIP_EXTRA_INDEX_URL, choose another torch build), unless ``--comlrl-python`` names an interpreter that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # started as a file, not with -m
    sys.path.insert(0, str(ROOT))

from benchmarks._job import NUM_AGENTS, NUM_GENERATIONS, Job, Measurement  # noqa: E402
from benchmarks._report import SIDES, Row, write  # noqa: E402

COMLRL_VERSION = "1.4.3"


def comlrl_interpreter(given: Path | None, constraints: Path) -> Path:
    """Return an interpreter that has comlrl, and install it first if none was given.

    Args:
        given: The interpreter, if there is one.
        constraints: Versions for pip.
    """
    if given is not None:
        return check_version(given.absolute())  # not resolved: a link in a virtual environment is what makes it one
    folder = ROOT / "build" / "comlrl_env"
    python = folder / "bin" / "python"
    finished = folder / ".installed"
    if not finished.exists():
        print(f"Installing comlrl {COMLRL_VERSION} into {folder.relative_to(ROOT)}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "-q", "-c", str(constraints)]
        subprocess.run([*pip, "torch", f"comlrl=={COMLRL_VERSION}"], check=True)  # comlrl does not name torch itself
        finished.touch()
    return check_version(python)


def check_version(python: Path) -> Path:
    """Return the interpreter if it has the right comlrl.

    Args:
        python: Interpreter.

    Raises:
        ValueError: If not.
    """
    query = [str(python), "-c", "import importlib.metadata as m; print(m.version('comlrl'))"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    if found != COMLRL_VERSION:
        raise ValueError(
            f"--comlrl-python={python} has comlrl {found or '(none)'}. Use an environment with comlrl {COMLRL_VERSION}."
        )
    return python


def measure(python: Path, module: str, job: Job) -> Measurement:
    """Run one job in a process of its own.

    Args:
        python: Interpreter.
        module: Module of one side.
        job: What to run.

    Raises:
        RuntimeError: If it fails.
    """
    variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
    done = subprocess.run(
        [python, "-m", f"benchmarks.{module}"],
        input=json.dumps(asdict(job)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **variables},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"benchmarks.{module} failed with code {done.returncode}:\n{done.stderr[-4000:]}")
    return Measurement.from_json(done.stdout.splitlines()[-1])


def check_equal_work(rows: list[Row]) -> None:
    """Refuse a comparison of runs that did not do the same.

    Args:
        rows: The measurements so far.

    Raises:
        RuntimeError: If they differ.
    """
    for row in rows:
        first = next(other for other in rows if other.items_per_update == row.items_per_update)
        for repeat in row.repeats:
            if repeat.work != first.repeats[0].work:
                raise RuntimeError(f"{row.side} did {repeat.work}, {first.side} did {first.repeats[0].work}.")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="name or folder")
    parser.add_argument(
        "--comlrl-python", type=Path, help=f"interpreter of an environment with comlrl {COMLRL_VERSION}"
    )
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt", help="versions for pip")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--items", type=int, default=4, help="task items per run")
    parser.add_argument("--items-per-update", type=int, nargs="+", default=[4], help="one table for each")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of every completion")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=["comlrl-fp32", "comlrl-bf16", "ours-fp32", "ours-bf16"]
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="folder of the results")
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    """Run every side on every work, one after the other, again and again, and write the results after each repeat."""
    model = str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model
    interpreters = {False: Path(sys.executable)}
    if any(SIDES[side].is_comlrl for side in options.sides):
        interpreters[True] = comlrl_interpreter(options.comlrl_python, options.constraints)
    rows = [Row("magrpo", per_update, side, []) for per_update in options.items_per_update for side in options.sides]
    settings = {"model": Path(model).name, "num_items": options.items, "num_tokens": options.tokens}
    settings |= {"num_agents": NUM_AGENTS, "num_generations": NUM_GENERATIONS}
    for repeat in range(options.repeats):
        for row in rows:
            side = SIDES[row.side]
            job = Job(model, side.dtype, side.full, options.items, row.items_per_update, options.tokens, repeat)
            row.repeats.append(measure(interpreters[side.is_comlrl], side.module, job))
            print(describe(row), flush=True)
            check_equal_work([row for row in rows if row.repeats])
        write(options.out, command(options), {**settings, "repeats": repeat + 1}, rows)


def describe(row: Row) -> str:
    """Return one line about the last run of a row."""
    last = row.repeats[-1]
    return (
        f"{row.side:14} {row.items_per_update} items per update: {last.wall_seconds:6.1f} s, of it generation"
        f" {last.generation_seconds:.1f} and update {last.update_seconds:.1f}; {last.peak_bytes / 1e9:.2f} GB"
    )


def command(options: argparse.Namespace) -> str:
    """Return what makes the same measurement elsewhere: no paths of this machine."""
    flags: dict[str, Any] = {"model": Path(options.model).name, "repeats": options.repeats, "items": options.items}
    flags |= {"items-per-update": options.items_per_update, "tokens": options.tokens, "sides": options.sides}
    texts = {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in flags.items()}
    return "python benchmarks/bench_comlrl.py " + " ".join(f"--{name} {text}" for name, text in texts.items())


if __name__ == "__main__":
    run(parse())
