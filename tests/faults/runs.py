"""A run of twelve short steps for processes that do not end well, and processes to end."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from comlrl_lightning import MAGRPO, Sampling, TaskDataModule
from comlrl_lightning.algorithms import CooperativeModule
from comlrl_lightning.callbacks import BatchCheckpoint
from tests.algorithms.support import make_trainer, tiny_agents, uneven_reward
from tests.waiting import PATIENCE_SECONDS

FileOpener: Any = import_module("fsspec.implementations.local").LocalFileOpener
"""What Lightning writes checkpoints with."""
ITEMS = [{"prompt": f"task {index}"} for index in range(6)]
"""Two epochs of them make twelve steps."""


def new_module(**settings: Any) -> MAGRPO:
    """Two agents, whose buffer of two nodes is half full after every other step."""
    defaults: dict[str, Any] = {
        "agents": tiny_agents(dtype=torch.float32),
        "reward_func": uneven_reward,
        "num_generations": 2,
        "sampling": Sampling(max_new_tokens=4),
        "rollout_buffer_size": 2,
        "agent_learning_rate": 1e-2,
    }
    return MAGRPO(**{**defaults, **settings})


def train(
    callbacks: Sequence[Callback], module: CooperativeModule | None = None, ckpt_path: str | Path | None = None
) -> None:
    """Twelve steps over shuffled items."""
    trainer = make_trainer(callbacks, max_epochs=2, enable_checkpointing=True)
    trainer.fit(module or new_module(), TaskDataModule(ITEMS, shuffle=True), ckpt_path=ckpt_path)


def every_step(folder: Path, keep: int | None = 1) -> BatchCheckpoint:
    """Checkpoints of every step, of which the latest stay."""
    return BatchCheckpoint(1, keep=keep, dirpath=folder)


def weights_in(checkpoint: Path) -> dict[str, Tensor]:
    """The trained weights in a checkpoint."""
    weights: dict[str, Tensor] = torch.load(checkpoint, weights_only=True)["state_dict"]
    return weights


def is_loadable(checkpoint: Path) -> bool:
    """Whether a checkpoint is whole."""
    try:
        torch.load(checkpoint, weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError):
        return False
    return True


def latest_loadable(folder: Path) -> Path | None:
    """The checkpoint to go on from."""
    whole = [path for path in folder.glob("[!.]*.ckpt") if is_loadable(path)]
    return max(whole, key=lambda path: path.stat().st_mtime_ns, default=None)


def start(function: Callable[..., object], *args: Any, log: Path) -> BaseProcess:
    """Run `function` in a process of its own, forked from this one, whose output goes to a file."""
    torch.set_num_threads(1)  # a forked child that asks for OpenMP's threads waits for ever: they stayed behind
    process = multiprocessing.get_context("fork").Process(target=_run, args=(log, function, args))
    process.start()
    return process


def exit_code(process: BaseProcess, timeout: float = PATIENCE_SECONDS) -> int:
    """How a process ended; below 0 it is the number of a signal.

    Raises:
        TimeoutError: If it goes on and on; it is then killed.
    """
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"The process did not end in {timeout} seconds.")
    return process.exitcode


def _run(log: Path, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    file = open(log, "a", buffering=1)  # noqa: SIM115  (it stays open as long as the process lives)
    for stream in (1, 2):
        os.dup2(file.fileno(), stream)
    sys.stdout = sys.stderr = file  # pytest has put files of its own there
    torch.set_num_threads(1)
    function(*args)
