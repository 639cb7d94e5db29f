"""What the wheel holds, what importing costs, and which part may import which."""

from __future__ import annotations

import ast
import gc
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.imported import imports

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "comlrl_lightning"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules(folder: Path) -> Iterator[Path]:
    """Python files below a folder, without those behind the symlink."""
    return (path for path in folder.rglob("*.py") if "callbacks" not in path.relative_to(folder).parts)


def test_packages_are_listed() -> None:
    found = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in PACKAGE.rglob("__init__.py")}
    others = {"comlrl_lightning.callbacks", "comlrl_lightning.assets.story_model"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found | others


def test_what_is_imported_is_required() -> None:
    files = [*modules(PACKAGE), *(ROOT / "callbacks").glob("*.py")]
    imported = {name.split(".")[0] for path in files for name in imports(path)}
    extras = PROJECT["project"]["optional-dependencies"]["api"]
    required = {re.split(r"[^\w-]", one)[0].lower() for one in PROJECT["project"]["dependencies"] + extras}
    distributions = {name.replace("_", "-") for name in imported - set(sys.stdlib_module_names)}
    assert distributions - {"comlrl-lightning"} <= required
    assert len(distributions) > 12


def test_callbacks_is_a_symlink_to_the_folder_at_the_top() -> None:
    assert (PACKAGE / "callbacks").is_symlink()
    assert (PACKAGE / "callbacks").resolve() == ROOT / "callbacks"


def built(source: Path, kind: str) -> Path:
    """A wheel or an sdist of a folder, without network; no package may be missing in the configuration."""
    out = source.parent / kind
    build = f"from setuptools.build_meta import build_{kind}; build_{kind}({str(out)!r})"
    result = subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, text=True)
    assert "is absent from the" not in result.stdout + result.stderr
    (file,) = out.iterdir()
    return file


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, built from a copy of the sources, unpacked."""
    source = tmp_path_factory.mktemp("checkout") / "source"
    for name in ("comlrl_lightning", "callbacks", "configs", "tests"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built(source, "sdist")) as archive:
        archive.extractall(target, filter="data")
    (unpacked,) = target.iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> list[str]:
    """Names of the files in a wheel, built from the sdist as installers do it."""
    return zipfile.ZipFile(built(sdist, "wheel")).namelist()


def test_sdist_holds_configurations_and_no_tests(sdist: Path) -> None:
    assert {path.name for path in (sdist / "configs").iterdir()} == {path.name for path in (ROOT / "configs").iterdir()}
    assert not (sdist / "tests").exists()
    assert (sdist / "CHANGELOG.md").exists()


def test_wheel_holds_callbacks_and_assets(wheel: list[str]) -> None:
    for path in (ROOT / "callbacks").glob("*.py"):
        assert f"comlrl_lightning/callbacks/{path.name}" in wheel
    for path in (PACKAGE / "assets" / "story_model").iterdir():
        assert f"comlrl_lightning/assets/story_model/{path.name}" in wheel
    assert {f"comlrl_lightning/{path.relative_to(PACKAGE)}" for path in modules(PACKAGE)} <= set(wheel)
    assert "comlrl_lightning/py.typed" in wheel


def test_wheel_holds_nothing_else(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"comlrl_lightning"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_importing_the_package_imports_no_framework() -> None:
    heavy = ["torch", "transformers", "lightning", "peft", "datasets", "wandb"]
    assert run_python(f"import sys, comlrl_lightning; print([m for m in {heavy} if m in sys.modules])") == "[]\n"


def test_tasks_import_neither_torch_nor_lightning() -> None:
    heavy = ["torch", "lightning"]
    code = f"import sys, comlrl_lightning.tasks.length_ratio; print([m for m in {heavy} if m in sys.modules])"
    assert run_python(code) == "[]\n"


IMPORTING = """
import os.path
from a.b import c as d, e
def inside():
    class Deeper:
        from f import g
"""


def test_imports_are_found_while_others_parse(tmp_path: Path) -> None:
    (tmp_path / "importing.py").write_text(IMPORTING + "print()\n" * 3000)
    threshold = gc.get_threshold()

    def parses_too(phase: str, info: dict[str, int]) -> None:
        ast.parse("x = 1")

    gc.callbacks.append(parses_too)
    gc.set_threshold(50)
    try:
        found = imports(tmp_path / "importing.py")
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(parses_too)
    assert found == {"os.path", "a.b", "a.b.c", "a.b.e", "f", "f.g"}


@pytest.mark.parametrize(
    ("folder", "never"),
    [
        ("functional", ("lightning", "transformers", "peft")),
        ("tasks", ("torch", "lightning", "transformers", "peft")),
        ("preferences", ("lightning",)),
        ("callbacks", ("comlrl_lightning.algorithms",)),
    ],
)
def test_libraries_that_a_folder_does_without(folder: str, never: tuple[str, ...]) -> None:
    """Arrows between the folders themselves are held by tests/test_house.py."""
    for path in (PACKAGE / folder).glob("*.py"):
        wrong = {name for name in imports(path) if any(name == bad or name.startswith(f"{bad}.") for bad in never)}
        assert not wrong, f"{path.name} imports {wrong}"
