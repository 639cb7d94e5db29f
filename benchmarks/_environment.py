"""The environment of comlrl, and processes that measure one job."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from dataclasses import asdict
from pathlib import Path

from benchmarks._job import Job, Measurement

ROOT = Path(__file__).resolve().parents[1]
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
    variables = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
    }
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
        raise RuntimeError(
            f"benchmarks.{module} failed with code {done.returncode} on {job.work.name}:\n{done.stderr[-4000:]}"
        )
    return Measurement.from_json(json.loads(done.stdout.splitlines()[-1]))
