"""What `evaluate` refuses, and where and on what it runs."""

from __future__ import annotations

from typing import Any

import pytest
from lightning import Callback, LightningModule, Trainer

from comlrl_lightning import MAGRPO, TaskDataModule, evaluate
from comlrl_lightning.algorithms import CooperativeModule
from comlrl_lightning.data.datamodule import TaskBatch
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


def test_a_trainer_that_logs_nothing_is_named() -> None:
    module = make_module(MAGRPO)
    trainer = Trainer(barebones=True, accelerator="cpu", devices=1, max_epochs=1)
    trainer.fit(module, DATA)
    with pytest.raises(ValueError, match=r"Trainer\(barebones=True\) logs nothing .* Leave it out"):
        evaluate(module, DATA)


class Indices(Callback):
    """Remembers which items were evaluated."""

    def __init__(self, fails: bool = False) -> None:
        self.seen: list[int] = []
        self.fails = fails

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: TaskBatch, *args: Any
    ) -> None:
        self.seen += batch.indices
        if self.fails:
            raise RuntimeError("no more")


LIMITS = [{"limit_val_batches": 2}, {"limit_val_batches": 0}, {"fast_dev_run": True}, {"overfit_batches": 1}]


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_limits_of_the_trainer_are_for_its_fit(limit: dict[str, Any]) -> None:
    module, data = make_module(MAGRPO), TaskDataModule(ITEMS, eval_dataset=ITEMS[:3])
    trainer = make_trainer(**limit)
    trainer.fit(module, data)
    former = trainer.limit_val_batches
    evaluate(module, data, callbacks=[indices := Indices()])
    assert indices.seen == [0, 1, 2]
    evaluate(module, data, num_eval_samples=2, callbacks=[indices := Indices()])
    assert indices.seen == [0, 1]
    with pytest.raises(RuntimeError, match="no more"):
        evaluate(module, data, callbacks=[indices := Indices(fails=True)])
    assert (trainer.limit_val_batches, trainer.callbacks.count(indices)) == (former, 0)  # type: ignore[attr-defined]


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
