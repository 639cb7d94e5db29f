"""What `make setup` says where it cannot install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OLD = """#!/bin/sh
# A Python 3.10, as far as it tells.
[ "$1" = -c ] && exec {python} -c "import sys; sys.version_info = (3, 10, 4, 'final', 0); $2"
echo "it was asked to do more: $*" > asked
"""
UNABLE = """#!/bin/sh
# A Python whose pip finds no versions that go together, and says why as pip does: on its standard output.
[ "$1" = -c ] && exec {python} "$@"
echo "The conflict is caused by: this and that"
echo "ERROR: Cannot install" >&2
exit 1
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def executable(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def setup(checkout: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", "setup", *settings], cwd=checkout, capture_output=True, text=True, check=False, env=environment
    )


def test_an_old_python_is_refused_before_anything_is_loaded(checkout: Path) -> None:
    done = setup(checkout, f"PYTHON={executable(checkout / 'python3.10', OLD)}")
    assert done.returncode != 0
    assert "comlrl_lightning needs Python 3.11 or newer, and " in done.stderr
    assert "is 3.10.4." in done.stderr
    assert "Choose another: make PYTHON=python3.12" in done.stdout
    assert not (checkout / ".venv").exists()
    assert not (checkout / "asked").exists()


def test_so_is_an_environment_of_one(checkout: Path) -> None:
    executable(checkout / ".venv" / "bin" / "python", OLD)
    done = setup(checkout)
    assert done.returncode != 0
    assert "Remove .venv, and choose another: make PYTHON=python3.12" in done.stdout
    assert not (checkout / "asked").exists()


def test_the_reason_of_pip_is_shown(checkout: Path) -> None:
    executable(checkout / ".venv" / "bin" / "python", UNABLE)
    done = setup(checkout)
    assert done.returncode != 0
    assert "The conflict is caused by: this and that" in done.stdout
    assert "pip could not install; all it wrote: .venv/install.log" in done.stdout
    assert "ERROR: Cannot install" in done.stderr
    assert not (checkout / ".venv" / ".installed").exists()
