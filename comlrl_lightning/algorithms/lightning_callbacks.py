"""Lightning's callbacks that copy, freeze or change a whole module, beside one whose base is frozen and loaded late."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.call import _call_configure_model
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from typing_extensions import override

C = TypeVar("C", bound=Callback)


@runtime_checkable
class TrainedNames(Protocol):
    """A module that remembers what it trains, also while a callback freezes some of it."""

    trained_names: frozenset[str]
    """Names of the weights that were trained when the models had loaded."""


def trained_names(module: LightningModule) -> frozenset[str]:
    """Names of the weights that a module trains."""
    assert isinstance(module, TrainedNames), "the models have loaded"
    return module.trained_names


EPOCHS = "comlrl_lightning_epochs"
EPOCH_HOOKS = ("on_train_epoch_start", "on_train_epoch_end")

REFUSED: dict[type[Callback], str] = {
    BackboneFinetuning: (
        "freezes a part called 'backbone', and agents have none: with LoRA their base is frozen already. Leave it out,"
        " or freeze agents in a BaseFinetuning of your own"
    ),
    ModelPruning: (
        "puts masks over the weights of whole models, which rollouts, updates and saved agents do not have. Leave it"
        " out, and prune a base before it is given to agents="
    ),
    GradientAccumulationScheduler: (
        "does not know of buffers. Leave it out and use rollout_buffer_size and train_batch_size"
    ),
    SpikeDetection: (
        "compares the losses of training steps, of which a policy has none that means the same twice. Leave it out and"
        " use max_grad_norm and on_nonfinite, or EarlyStopping on an evaluation metric"
    ),
    LearningRateFinder: (
        "raises the learning rate with every batch and looks at a loss, which a policy gradient does not have. Leave it"
        " out and compare runs with other agent_learning_rate"
    ),
    BatchSizeFinder: (
        "changes the number of task items per step, and the results with it. Leave it out and use micro_batch_tokens,"
        " which changes memory alone"
    ),
}
"""What does not go together with the agents, and what to do instead."""


def prepare_callbacks(trainer: Trainer) -> None:
    """Let Lightning's callbacks find what they act on: loaded models, and the trained weights alone for averages.

    Raises:
        ValueError: One of them cannot work here.
    """
    found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in found:
        for kind, reason in REFUSED.items():
            if isinstance(callback, kind):
                raise ValueError(f"Trainer(callbacks=[{type(callback).__name__}(...)]): {kind.__name__} {reason}.")
    others = [one for one in found if not isinstance(one, LoadModels | OverTrained | AfterOthers)]
    averages = [one for one in found if isinstance(one, OverTrained)]
    averages += [AveragedWeights(one) for one in others if isinstance(one, WeightAveraging)]
    averages += [AveragedEpochs(one) for one in others if isinstance(one, StochasticWeightAveraging)]
    others = [one for one in others if not isinstance(one, WeightAveraging | StochasticWeightAveraging)]
    # Averages come first, so that all others see them at the end of a fit.
    trainer.callbacks = [LoadModels(), *averages, *others, AfterOthers([*averages, *others])]  # type: ignore[attr-defined]


class LoadModels(Callback):
    """Loads the models before other callbacks are set up: Lightning does it after, and they would find no weights."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _call_configure_model(trainer)


class TrainedWeights(LightningModule):
    """The trained weights of a module as a module of their own: the same parameters under the same names.

    Args:
        module: Its models are loaded.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self._trainer = module._trainer
        self._device = module.device
        for name, parameter in module.named_parameters():
            if name in trained_names(module):
                *path, last = name.split(".")
                _container(self, path).register_parameter(last, parameter)


def _container(root: nn.Module, path: list[str]) -> nn.Module:
    for part in path:
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root


class OverTrained(Callback, Generic[C]):
    """Lets a callback that walks through all weights of the module find the trained ones alone.

    A frozen base would be copied, rounded and saved otherwise.

    Args:
        inner: The callback.
    """

    def __init__(self, inner: C) -> None:
        self.inner = inner
        self._epochs = [-1, -1]
        """The last epoch that has begun, and the last one that has ended."""

    @property
    @override
    def state_key(self) -> str:
        return self.inner.state_key

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), EPOCHS: list(self._epochs)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epochs = list(state_dict[EPOCHS])
        self.inner.load_state_dict({name: value for name, value in state_dict.items() if name != EPOCHS})

    def catch_up(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the epoch whose last batch a run goes on from, in front of the next one."""
        begun, ended = self._epochs
        if ended < begun < trainer.current_epoch:
            self.end_epoch(begun, TrainedWeights(pl_module))

    def end_epoch(self, epoch: int, weights: TrainedWeights) -> None:
        """Do what the callback does at the end of an epoch."""


def _hook_of_inner(name: str) -> Callable[..., None]:
    def hook(self: OverTrained[C], trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if name == "on_train_batch_start" and self._epochs[0] < trainer.current_epoch:
            self.on_train_epoch_start(trainer, pl_module)  # Lightning leaves it out where a run goes on
        if name == "on_train_epoch_start":
            self.catch_up(trainer, pl_module)
        if name in EPOCH_HOOKS:
            self._epochs[EPOCH_HOOKS.index(name)] = trainer.current_epoch
        methodcaller(name, trainer, TrainedWeights(pl_module), *args, **kwargs)(self.inner)

    return hook


for _name in [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]:
    setattr(OverTrained, _name, _hook_of_inner(_name))


class AveragedWeights(OverTrained[WeightAveraging]):
    """`WeightAveraging` of the trained weights: evaluations and all that looks at their results see the average."""

    _is_swapped = False

    @override
    def end_epoch(self, epoch: int, weights: TrainedWeights) -> None:
        assert self.inner._average_model is not None
        if self.inner.should_update(epoch_idx=epoch):
            self.inner._average_model.update_parameters(weights)
            self.inner._latest_update_epoch = epoch

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_epoch_start(trainer, pl_module)
        self._is_swapped = True

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Not yet: other callbacks save what was evaluated."""

    def swap_back(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the weights in training be those of the module again."""
        if self._is_swapped:
            super().on_validation_epoch_end(trainer, pl_module)
            self._is_swapped = False

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.swap_back(trainer, pl_module)
        super().on_exception(trainer, pl_module, exception)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        everything = checkpoint["state_dict"]
        checkpoint["state_dict"] = _trained(pl_module, everything)
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._is_swapped and "current_model_state" in checkpoint:
            swapped = checkpoint["current_model_state"], checkpoint["state_dict"]
            checkpoint["state_dict"], checkpoint["current_model_state"] = swapped
        checkpoint["state_dict"] = {**everything, **checkpoint["state_dict"]}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        of_agents = {**checkpoint, "state_dict": _trained(pl_module, checkpoint["state_dict"])}
        super().on_load_checkpoint(trainer, pl_module, of_agents)


def _trained(module: LightningModule, weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in weights.items() if name in trained_names(module)}


class AfterOthers(Callback):
    """Comes after all callbacks but those that save checkpoints, and looks at what they did to the weights.

    A run that goes on finds frozen what was frozen when it was saved: `BaseFinetuning` freezes as at the beginning.

    Args:
        others: The callbacks before it.
    """

    def __init__(self, others: Sequence[Callback]) -> None:
        self._averages = [one for one in others if isinstance(one, AveragedWeights)]
        self._freezing = [one for one in others if isinstance(one, BaseFinetuning)]
        self._frozen: set[str] | None = None
        self._epoch = -1

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"frozen": sorted(self._frozen or ()), "epoch": self._epoch} if self._freezing else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._frozen, self._epoch = set(state_dict["frozen"]), state_dict["epoch"]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._frozen is not None:
            for name, parameter in _trained(pl_module, dict(pl_module.named_parameters())).items():
                parameter.requires_grad_(name not in self._frozen)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        # A run that goes on from the last batch of an epoch begins the next one without saying so.
        if self._epoch < trainer.current_epoch:
            for callback in self._freezing:
                callback.on_train_epoch_start(trainer, pl_module)
            self.on_train_epoch_start(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for average in self._averages:
            average.swap_back(trainer, pl_module)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch = trainer.current_epoch
        own = _trained(pl_module, dict(pl_module.named_parameters()))
        self._frozen = {name for name, one in own.items() if not one.requires_grad}
        others = [name for name, one in pl_module.named_parameters() if one.requires_grad and name not in own]
        if others:
            raise ValueError(
                f"A callback has set requires_grad=True for {len(others)} weights that belong to no agent, the first"
                f" is {others[0]!r}: neither gradient averages nor checkpoints hold them. Freeze and unfreeze only"
                " weights that are trained from the start, or use lora=None to train whole models."
            )

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING and "averaging_state" in checkpoint and not self._averages:
            raise ValueError(
                "The checkpoint holds averaged weights beside those in training, and the run would go on with the"
                " average. Give Trainer(callbacks=...) the WeightAveraging that it was saved with."
            )


class AveragedEpochs(OverTrained[StochasticWeightAveraging]):
    """`StochasticWeightAveraging` of the trained weights, with the steps of its schedule that Lightning leaves out."""

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        groups, schedule = trainer.optimizers[0].param_groups, self.inner._swa_scheduler
        rates = [group["lr"] for group in groups]
        if schedule is not None:
            schedule.step()
        super().on_train_epoch_start(trainer, pl_module)
        # Of a run that goes on, the schedule was made anew, which set the learning rates to its beginning.
        if schedule is None and self.inner._scheduler_state is not None and self.inner._swa_scheduler is not None:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self.inner._swa_scheduler.step()
