"""What `evaluate` refuses, and where and on what it runs."""

from __future__ import annotations

from typing import Any

import pytest
from lightning import Callback, LightningModule, Trainer

from comlrl_lightning import MAGRPO, TaskDataModule, evaluate
from comlrl_lightning.algorithms import CooperativeModule
from tests.algorithms.support import ITEMS, make_module, make_trainer

DATA = TaskDataModule(ITEMS, eval_dataset=ITEMS[:1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": ITEMS}, r"data=.* is no TaskDataModule"),
        ({"callbacks": Callback()}, r"callbacks=.* is no list"),
        ({"seed": "a"}, r"seed='a' is not a seed"),
        ({"seed": -1}, r"seed=-1 is not a seed"),
    ],
)
def test_arguments_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(make_module(MAGRPO), **{"data": DATA, **settings})


def test_not_inside_a_fit() -> None:
    class Impatient(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            assert isinstance(pl_module, CooperativeModule)
            evaluate(pl_module, DATA)

    with pytest.raises(ValueError, match=r"cannot run inside a fit. Use the callback EvalInterval"):
        make_trainer([Impatient()]).fit(make_module(MAGRPO), DATA)


def test_trainer_that_evaluates_nothing_is_named() -> None:
    module = make_module(MAGRPO)
    make_trainer(limit_val_batches=0).fit(module, DATA)
    with pytest.raises(ValueError, match=r"Trainer\(limit_val_batches=0\), which barebones=True implies"):
        evaluate(module, DATA)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 1),
        ({**TORCHRUN, "WORLD_SIZE": "1"}, 1),
        ({**TORCHRUN, "WORLD_SIZE": "2"}, 2),
        ({**SLURM, "SLURM_NTASKS": "2"}, 2),
        ({**SLURM, "SLURM_NTASKS": "2", "SLURM_JOB_NAME": "interactive"}, 1),
    ],
    ids=["script", "torchrun-1", "torchrun-2", "slurm-2", "slurm-interactive"],
)
def test_devices_before_a_fit(environment: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[int] = []

    def validate(trainer: Trainer, *args: Any, **settings: Any) -> list[dict[str, float]]:
        devices.append(trainer.num_devices)
        return [{}]

    for name in ("MPSAccelerator", "CUDAAccelerator"):
        monkeypatch.setattr(f"lightning.pytorch.accelerators.{name}.is_available", lambda: False)
    monkeypatch.setattr("lightning.pytorch.accelerators.CPUAccelerator.auto_device_count", lambda *_: 2)
    monkeypatch.setattr(Trainer, "validate", validate)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    evaluate(make_module(MAGRPO), DATA)
    assert devices == [expected]
