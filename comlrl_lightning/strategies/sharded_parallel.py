"""Several processes of which each holds a part of the frozen weights, and how a module follows such a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.optim import Optimizer
from typing_extensions import override

from comlrl_lightning.algorithms.updating import BufferedUpdates
from comlrl_lightning.keywords import KnownKeywords
from comlrl_lightning.strategies.sharding import shard_frozen
from comlrl_lightning.utilities.checks import check_number
from comlrl_lightning.utilities.distributed import meet_by


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
        super().setup(trainer)

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


def follow_strategy(module: BufferedUpdates) -> None:
    """Shard the frozen weights under `ShardedParallel`, once; call it whenever a trainer begins.

    Args:
        module: Its models are loaded.

    Raises:
        ValueError: The strategy shards in another way, or cannot go on with weights in shards.
    """
    trainer = module._trainer
    if trainer is None:
        return
    strategy = trainer.strategy
    if isinstance(strategy, ShardedParallel):
        if module.lockstep is None:
            module.lockstep = shard_frozen(module, strategy.device_mesh["data_parallel"])
        meet_by(module.lockstep.meet)
        return
    if isinstance(strategy, ModelParallelStrategy):
        raise ValueError(
            f"Trainer(strategy={type(strategy).__name__}(...)) leaves it to the module what is sharded, and its"
            " checkpoints would gather the frozen weights. Use strategy=ShardedParallel(), which shards these alone."
        )
    if module.lockstep is not None:
        raise ValueError(
            f"Trainer(strategy={type(strategy).__name__}) cannot go on with this module, whose frozen weights are in"
            " shards. Use strategy=ShardedParallel(), or load a checkpoint into a new module."
        )
    meet_by(None)
