"""Loaders, datasets and other data modules in place of a `TaskDataModule`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from comlrl_lightning import evaluate
from comlrl_lightning.algorithms import MAGRPO, CooperativeModule
from comlrl_lightning.data.datamodule import TaskDataModule
from tests.algorithms.preferences import direct
from tests.algorithms.support import ITEMS, make_module, make_trainer

WAYS = ("fit", "validate", "test", "predict")


class OwnData(LightningDataModule):
    """The items through loaders of torch."""

    def train_dataloader(self) -> Any:
        return DataLoader(ITEMS)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def given(
    how: str, data: Any, make: Callable[[], CooperativeModule] = lambda: make_module(MAGRPO)
) -> CooperativeModule:
    module = make()
    trainer = make_trainer()
    getattr(trainer, how)(module, data)
    return module


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("data", [DataLoader(ITEMS), Dataset.from_list(ITEMS), ITEMS], ids=["loader", "set", "list"])  # type: ignore[arg-type]
def test_they_are_refused_before_anything_loads(how: str, data: Any) -> None:
    module = make_module(MAGRPO)
    with pytest.raises(ValueError, match=r"(?s)The trainer was given .* Give it TaskDataModule\(train_dataset="):
        given(how, data, lambda: module)
    assert "team" not in module._modules


def test_those_of_the_evaluation_inside_a_fit_too() -> None:
    loader: Any = TaskDataModule(ITEMS).train_dataloader()
    with pytest.raises(ValueError, match=r"The trainer was given <torch.utils.data"):
        make_trainer().fit(make_module(MAGRPO), loader, DataLoader(ITEMS))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", WAYS)
def test_batches_of_other_data_modules_too(how: str) -> None:
    with pytest.raises(ValueError, match=r"A batch is dict, not task items\. Give the trainer a TaskDataModule"):
        given(how, OwnData())


@pytest.mark.filterwarnings("ignore:Trainer.* ends inside a round")
def test_rounds_of_preferences_too() -> None:
    with pytest.raises(ValueError, match="A batch is dict, not task items"):
        given("fit", OwnData(), direct)


@pytest.mark.parametrize("data", [DataLoader(ITEMS), Dataset.from_list(ITEMS), ITEMS], ids=["loader", "set", "list"])  # type: ignore[arg-type]
def test_evaluate_too(data: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)data=.* is no TaskDataModule. Use TaskDataModule\(\.\.\., eval_dataset"):
        evaluate(make_module(MAGRPO), data)


def test_our_own_loaders_are_as_good() -> None:
    data: Any = TaskDataModule(ITEMS[:1], ITEMS[:1])
    module = make_module(MAGRPO)
    make_trainer().fit(module, data.train_dataloader(), data.val_dataloader())
    assert module.env_step == 2
