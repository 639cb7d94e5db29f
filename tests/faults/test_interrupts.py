"""Ctrl-C and SIGTERM inside a rollout, a reward and an update: exit codes, files, and how the run goes on.

Lightning ends a fit at Ctrl-C where it stands, and at SIGTERM once the running step is over.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor

from comlrl_lightning.algorithms import CooperativeModule
from comlrl_lightning.callbacks.support import batches_trained
from tests.algorithms.support import uneven_reward
from tests.faults.registry import Fault, faults
from tests.faults.runs import every_step, exit_code, new_module, start, train, weights_in

Place = Literal["rollout", "reward", "update"]
STEP = 5
"""The interrupted step, from 0: the buffer is half full before it, and it updates."""


@dataclass(frozen=True)
class Interrupt(Fault):
    """A signal at a place, and what it leaves."""

    signal: signal.Signals
    place: Place
    code: int
    files: tuple[str, ...]

    @property
    def told(self) -> str:
        return f"exit code {self.code}, files {' and '.join(self.files)}; {self.outcome}"


def case(number: signal.Signals, place: Place) -> Interrupt:
    """What a signal at this place is expected to do."""
    at_once = number == signal.SIGINT
    how, again = ("stops at once", "repeats the step") if at_once else ("finishes the step", "goes on behind it")
    return Interrupt(
        "interrupts",
        f"{'Ctrl-C' if at_once else 'SIGTERM'} inside {'an' if place == 'update' else 'a'} {place}",
        f"{how}, restores modes and adapters; a resume {again} and ends with the weights of the unbroken run",
        number,
        place,
        1 if at_once else 143,
        (f"batch-00000{STEP if at_once else STEP + 1}.ckpt", "on_exception.ckpt"),
    )


PLACES: tuple[Place, ...] = ("rollout", "reward", "update")
CASES = [case(number, place) for number in (signal.SIGINT, signal.SIGTERM) for place in PLACES]


class Armed(Callback):
    """Sends a signal to its own process at one place of one step."""

    def __init__(self, number: signal.Signals, place: Place) -> None:
        self.number = number
        self.place = place
        self.is_armed = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, CooperativeModule)
        if batches_trained(trainer) == STEP:
            self.is_armed = True
            causal = pl_module.team.language_models()[0].causal
            causal.base_model.register_forward_hook(self.at_forward)

    def at_forward(self, *args: Any) -> None:
        """Rollouts compute without gradients, updates with them."""
        self.reached("update" if torch.is_grad_enabled() else "rollout")

    def reward(self, *completions: list[str]) -> list[float]:
        """A reward in whose middle the signal may come."""
        self.reached("reward")
        return uneven_reward(*completions)

    def reached(self, place: str) -> None:
        """Send the signal if this is the place."""
        if self.is_armed and place == self.place:
            self.is_armed = False
            os.kill(os.getpid(), self.number)


def state_of(module: CooperativeModule) -> dict[str, Any]:
    """What a user could stumble over after a fit: modes of modules, acting adapters, defaults of torch."""
    (model,) = module.team.language_models()
    assert model.adapters is not None
    return {
        "training": [child.training for child in module.modules()],
        "adapters": [[layer._active_adapter, layer._disable_adapters] for layer in model.adapters._switches],
        "grouping": model.adapters._grouping is None,
        "trained": [parameter.requires_grad for parameter in module.parameters()],
        "torch": [
            str(torch.get_default_dtype()),
            str(torch.get_default_device()),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
        ],
    }


class Look(Callback):
    """Keeps the state at the start of training."""

    state: dict[str, Any]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, CooperativeModule)
        self.state = self.state if batches_trained(trainer) else state_of(pl_module)


def interrupted(armed: Armed, folder: Path) -> None:
    """A run that a signal stops; it writes down in which state it leaves the module."""
    look, module = Look(), new_module(reward_func=armed.reward)
    try:
        train([armed, look, every_step(folder), OnExceptionCheckpoint(folder)], module)
    finally:
        report = {"before": look.state, "after": state_of(module), "buffer": len(module.buffer)}
        (folder / "report.json").write_text(json.dumps(report))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("unbroken")
    train([every_step(folder)])
    return weights_in(folder / "batch-000012.ckpt")


def end_of(folder: Path, checkpoint: Path, reward: Callable[..., list[float]]) -> dict[str, Tensor]:
    """The weights at the end of the run that goes on from a checkpoint."""
    train([every_step(folder)], new_module(reward_func=reward), ckpt_path=checkpoint)
    return weights_in(folder / "batch-000012.ckpt")


@faults(*CASES)
def test_six_cases(fault: Interrupt, unbroken: dict[str, Tensor], tmp_path: Path) -> None:
    saved, log = tmp_path / "saved", tmp_path / "log"
    armed = Armed(fault.signal, fault.place)
    process = start(interrupted, armed, saved, log=log)
    assert exit_code(process) == fault.code, log.read_text()
    assert tuple(sorted(path.name for path in saved.glob("*.ckpt"))) == fault.files
    report = json.loads((saved / "report.json").read_text())
    assert report["after"] == report["before"]
    ended = end_of(tmp_path / "end", saved / "on_exception.ckpt", armed.reward)
    torch.testing.assert_close(ended, unbroken, rtol=0, atol=0)
