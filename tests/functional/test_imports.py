"""The mathematics depends on torch alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import comlrl_lightning.functional

FOLDER = Path(comlrl_lightning.functional.__file__).parent
HEAVY = ("lightning", "transformers", "peft", "datasets", "wandb", "torchmetrics", "matplotlib")


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names.add(node.module or "")
    return names


def test_every_file_imports_only_torch_the_standard_library_and_its_neighbors() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert len(files) >= 6
    for path in files:
        for name in imported_modules(path):
            root = name.split(".")[0]
            allowed = root == "torch" or root in sys.stdlib_module_names
            assert allowed or name.startswith("comlrl_lightning.functional"), f"{path.name} imports {name}"


def test_importing_it_loads_no_other_heavy_library() -> None:
    code = f"import sys, comlrl_lightning.functional; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
