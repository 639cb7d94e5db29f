"""What `evaluate` refuses."""

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
