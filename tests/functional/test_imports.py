"""The mathematics depends on torch alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import comlrl_lightning.functional
from tests.imported import imports

FOLDER = Path(comlrl_lightning.functional.__file__).parent
HEAVY = ("lightning", "transformers", "peft", "datasets", "wandb", "torchmetrics", "matplotlib")


def test_every_file_imports_only_torch_the_standard_library_and_its_neighbors() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert len(files) >= 6
    for path in files:
        for name in imports(path):
            root = name.split(".")[0]
            allowed = root == "torch" or root in sys.stdlib_module_names
            assert allowed or name.startswith("comlrl_lightning.functional"), f"{path.name} imports {name}"


def test_importing_it_loads_no_other_heavy_library() -> None:
    code = f"import sys, comlrl_lightning.functional; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
