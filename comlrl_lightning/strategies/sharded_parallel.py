"""Several processes of which each holds a part of the frozen weights."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.strategies.sharding import Lockstep, lockstep_of
from comlrl_lightning.utilities.checks import check_number
from comlrl_lightning.utilities.distributed import meet_by

T = TypeVar("T")


class ShardedParallel(ModelParallelStrategy, KnownKeywords):
    """Trains like ``strategy="ddp"``, with the frozen weights of decoder layers divided among the processes (FSDP2).

    A layer's weights come together while it computes, at every token of a rollout, too: slower than ``"ddp"``, and for
    models that no device has room for. Adapters, embeddings, the last norm and heads stay whole, and so do models of
    critics that are trained in full. Agents need adapters. Checkpoints are those of ``"ddp"`` and of one process, and
    each can go on with them.

    Args:
        process_group_backend: How the processes talk. None: ``"nccl"`` on GPUs, ``"gloo"`` on CPUs.
        timeout_seconds: How long one may wait for another, for example for its reward function.
    """

    strategy_name = "sharded_parallel"
    lockstep: Lockstep

    def __init__(self, process_group_backend: str | None = None, timeout_seconds: float = 1800.0) -> None:
        check_number("a number above 0", lambda value: value > 0, "ShardedParallel", timeout_seconds=timeout_seconds)
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_seconds),
        )

    @override
    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        self._data_parallel_size = self.world_size

    @override
    def setup(self, trainer: Trainer) -> None:
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            # FSDP2 goes on to use the memory that it gathers weights in, and training cannot write to what inference
            # mode has made.
            loop.inference_mode = False
        trainer.predict_loop.inference_mode = False
        assert self.lightning_module is not None
        self.lockstep = lockstep_of(self.lightning_module, self.device_mesh["data_parallel"])
        meet_by(self.lockstep.meet)
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        meet_by(None)
        super().teardown()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(self.lockstep.with_idle(closure_loss), optimizer, *args, **kwargs)

    # At the end of a step a rank runs the passes that ranks with more batches still need.

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._finished(super().training_step(*args, **kwargs))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._finished(super().validation_step(*args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._finished(super().test_step(*args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._finished(super().predict_step(*args, **kwargs))

    def _finished(self, output: T) -> T:
        self.lockstep.meet()
        return output

    # What is trained is whole on every rank. Lightning's way through FSDP2's state dicts would step an optimizer that
    # has no state yet, and write and load optimizers of its own kind only.

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super(ModelParallelStrategy, self).load_model_state_dict(checkpoint, strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return super(ModelParallelStrategy, self).optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super(ModelParallelStrategy, self).load_optimizer_state_dict(checkpoint)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return super(ModelParallelStrategy, self).load_checkpoint(checkpoint_path, weights_only)
