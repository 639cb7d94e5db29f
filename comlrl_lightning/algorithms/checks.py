"""Checks of arguments that every algorithm shares, made before any weight is loaded."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.compile import to_uncompiled
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from comlrl_lightning.agents.settings import Sampling
from comlrl_lightning.data.datamodule import TaskBatch, TaskLoader
from comlrl_lightning.rollouts.collect import RolloutShape
from comlrl_lightning.strategies.sharded_parallel import ShardedParallel
from comlrl_lightning.strategies.sharding import is_sharded
from comlrl_lightning.utilities.calls import short
from comlrl_lightning.utilities.checks import check_at_least
from comlrl_lightning.utilities.plain import to_plain

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
"""Makes an optimizer from parameter groups."""
SchedulerFactory = Callable[[Optimizer], LRScheduler]
"""Makes a learning-rate schedule, stepped once per optimizer step."""


def check_checkpoints(callbacks: Iterable[Callback]) -> None:
    """Refuse `ModelCheckpoint(train_time_interval=...)`, which saves nothing where a module steps its optimizer itself.

    Raises:
        ValueError: If there is one.
    """
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            raise ValueError(
                f"ModelCheckpoint(train_time_interval={callback._train_time_interval!r}) would save nothing: Lightning"
                " looks at it under automatic optimization only. Use BatchCheckpoint(every_n_batches=...) or"
                " ModelCheckpoint(every_n_train_steps=...)."
            )


def learning_rates(value: float | Sequence[float] | None, num_agents: int) -> list[float | None]:
    """`[N]` learning rate of each agent.

    Args:
        value: One for all agents, one per agent, or None, which stays None.
        num_agents: N.
    """
    several = isinstance(value, Sequence) and not isinstance(value, str)
    rates: list[float | None] = [*value] if several else [value]  # type: ignore[misc, list-item]
    if len(rates) not in (1, num_agents):
        raise ValueError(
            f"agent_learning_rate={value!r} has {len(rates)} entries for {num_agents} agents."
            " Give one, or one per agent."
        )
    for rate in rates:
        if rate is not None:
            check_at_least(0.0, agent_learning_rate=rate)
    plain = [None if rate is None else float(rate) for rate in rates]
    return plain * num_agents if len(plain) == 1 else plain


def check_optimizer(optimizer: OptimizerFactory, lr_scheduler: SchedulerFactory | None) -> dict[str, Any]:
    """Try both factories on a parameter of no consequence.

    Returns:
        The optimizer's class and options, and the schedule's class and arguments, as plain values.

    Raises:
        ValueError: If a factory makes something else, the optimizer or the schedule brings its own learning rate, or
            the schedule waits for a metric.
    """
    for name, factory in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
        if factory is not None and not callable(factory):
            raise ValueError(f"{name}={factory!r} is not callable. Give a class or a function.")
    # A matrix, which optimizers for matrices take, too.
    trial = optimizer([{"params": [torch.nn.Parameter(torch.zeros(1, 1))]}])
    if not isinstance(trial, Optimizer):
        raise ValueError(f"optimizer={optimizer!r} returns {type(trial).__name__}. Return a torch.optim.Optimizer.")
    parameter = inspect.signature(type(trial)).parameters.get("lr")
    is_set = parameter is not None and parameter.default not in (parameter.empty, trial.defaults.get("lr"))
    # The command line spells out every default; only a partial of a class shows that somebody wrote the default down.
    if is_set or (isinstance(optimizer, partial) and isinstance(optimizer.func, type) and "lr" in optimizer.keywords):
        raise ValueError(
            f"optimizer sets lr={trial.defaults['lr']!r}. Leave the learning rate out of it and use"
            " agent_learning_rate."
        )
    (group,) = trial.param_groups
    options = {key: to_plain(value) for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
    return {
        "optimizer": to_plain(type(trial)),
        "optimizer_options": options,
        "lr_scheduler": None if lr_scheduler is None else _checked_schedule(lr_scheduler, trial),
    }


def _checked_schedule(lr_scheduler: SchedulerFactory, trial: Optimizer) -> dict[str, Any]:
    """Class and arguments of a schedule."""
    probe = 0.0123456789  # a learning rate that no schedule has by chance
    trial.param_groups[0]["lr"] = probe
    schedule: object = lr_scheduler(trial)
    if isinstance(schedule, ReduceLROnPlateau):
        raise ValueError(
            "lr_scheduler is ReduceLROnPlateau, which waits for a metric, while schedules step once per optimizer step."
            " Use another schedule, for example torch.optim.lr_scheduler.LinearLR."
        )
    if not isinstance(schedule, LRScheduler):
        raise ValueError(
            f"lr_scheduler={lr_scheduler!r} returns {type(schedule).__name__}. Return a schedule of torch.optim."
        )
    if trial.param_groups[0]["initial_lr"] != probe:
        raise ValueError(
            f"lr_scheduler makes {type(schedule).__name__}, which brings learning rates of its own and would ignore"
            " agent_learning_rate. Use a schedule of factors, for example torch.optim.lr_scheduler.LambdaLR."
        )
    return {"class": to_plain(type(schedule)), **_arguments(schedule.state_dict())}


def _arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of a schedule's state does not change while it steps."""
    kept = {
        key: value
        for key, value in state.items()
        if key not in ("base_lrs", "last_epoch", "verbose") and (not key.startswith("_") or key == "_milestones")
    }
    schedules = state.get("_schedulers", ())
    return {**to_plain(kept), **({"schedules": [_arguments(one) for one in schedules]} if schedules else {})}


def check_precision_flag(precision: object) -> None:
    """Refuse number formats that need a gradient scaler.

    Args:
        precision: As the user gave it; on a CPU, Lightning makes another one of "16-mixed".

    Raises:
        ValueError: If it is one of them.
    """
    if str(precision) in ("16", "16-mixed", "16-true"):
        raise ValueError(
            f"Trainer(precision={precision!r}) would need a gradient scaler. Use 'bf16-mixed' or '32-true'."
        )


def check_precision(precision: object, trained: Iterable[torch.nn.Parameter]) -> None:
    """Refuse number formats in which training would fail, or learn nothing.

    Args:
        precision: As the Trainer has it.
        trained: The parameters that are trained, in the format that the Trainer gave them.

    Raises:
        ValueError: If a gradient scaler would be needed, or half-precision weights were to be trained: steps of a usual
            size are too small to change them.
    """
    check_precision_flag(precision)
    half = {str(one.dtype).removeprefix("torch.") for one in trained if one.dtype in (torch.float16, torch.bfloat16)}
    if half:
        raise ValueError(
            f"The trained weights are {' and '.join(sorted(half))}, in which most updates round to nothing."
            ' Load the models with dtype="float32" and use Trainer(precision="bf16-mixed").'
        )


def check_data(trainer: Trainer) -> None:
    """Refuse loaders and datasets in place of a data module, before any weights load.

    Raises:
        ValueError: If the trainer was given one.
    """
    loop = trainer._active_loop
    if loop is None:
        return
    sources = [loop._data_source]
    if isinstance(loop, _FitLoop):
        sources.append(loop.epoch_loop.val_loop._data_source)
    for source in (one.instance for one in sources):
        given = [*source] if isinstance(source, list) else [source]
        if not all(isinstance(one, LightningDataModule | LightningModule | TaskLoader | None) for one in given):
            raise ValueError(
                f"The trainer was given {short(source)} for its data, which does not say which item of which epoch a"
                " task is. Give it TaskDataModule(train_dataset=..., eval_dataset=...) with the items themselves."
            )


def check_batch(batch: object) -> None:
    """Refuse batches of other data modules.

    Raises:
        ValueError: If it does not hold task items.
    """
    if not isinstance(batch, TaskBatch):
        raise ValueError(f"A batch is {type(batch).__name__}, not task items. Give the trainer a TaskDataModule.")


def check_uncompiled(module: LightningModule) -> None:
    """Refuse a compiled module, and undo what Lightning did to the module itself, so that it can be passed next.

    Raises:
        ValueError: If it came as ``torch.compile(module)``.
    """
    if module._compiler_ctx is not None:
        to_uncompiled(module)
        raise ValueError(
            "torch.compile(module) would compile whole rollouts, which are no graph. Pass the module itself."
        )


def check_strategy(strategy: Strategy, models: torch.nn.Module) -> None:
    """Refuse a strategy that shards in another way, or cannot go on with weights in shards.

    Args:
        strategy: The strategy of the trainer.
        models: The loaded models.

    Raises:
        ValueError: If it is one of them.
    """
    if isinstance(strategy, ShardedParallel):
        return
    if isinstance(strategy, ModelParallelStrategy):
        raise ValueError(
            f"Trainer(strategy={type(strategy).__name__}(...)) leaves it to the module what is sharded, and its"
            " checkpoints would gather the frozen weights. Use strategy=ShardedParallel(), which shards these alone."
        )
    if is_sharded(models):
        raise ValueError(
            f"Trainer(strategy={type(strategy).__name__}) cannot go on with this module, whose frozen weights are in"
            " shards. Use strategy=ShardedParallel(), or load a checkpoint into a new module."
        )


def check_shares(train_batch_size: int | None, num_processes: int) -> None:
    """Refuse a batch that the processes cannot share evenly."""
    if (train_batch_size or 0) % num_processes:
        raise ValueError(
            f"train_batch_size={train_batch_size} is not shared evenly by {num_processes} processes. Use a multiple."
        )


def check_temperature(sampling: Sampling) -> None:
    """Refuse greedy sampling in training.

    Raises:
        ValueError: If the temperature is 0.
    """
    if sampling.temperature <= 0:
        raise ValueError(
            f"sampling.temperature={sampling.temperature!r} samples greedily, which leaves nothing to learn from."
            " Use a temperature above 0 in sampling and, if you like, 0 in eval_sampling."
        )


def check_sampling(name: str, sampling: Sampling, refuse: bool) -> None:
    """Say that sampling cuts the distribution that the update scores.

    Args:
        name: The algorithm.
        sampling: How it samples in training.
        refuse: Raise instead of warn.

    Raises:
        ValueError: If it cuts and must not.
    """
    if sampling.top_p == 1 and sampling.top_k is None and sampling.min_new_tokens == 0:
        return
    given = f"sampling with top_p={sampling.top_p}, top_k={sampling.top_k}, min_new_tokens={sampling.min_new_tokens}"
    bias = (
        "cuts the distribution that completions come from, while the update scores the full one: a constant"
        " positive advantage then pushes the kept tokens up and the entropy falls."
    )
    if refuse:
        raise ValueError(f"{name}: {given} {bias} Leave them out, or use an algorithm with a baseline.")
    rank_zero_warn(f"{given} {bias} Leave them out for unbiased gradients.")


def check_nodes(shape: RolloutShape, num_agents: int, max_nodes: int, min_generations: int = 1) -> None:
    """Refuse rollouts that grow too large.

    Args:
        shape: Of the rollouts.
        num_agents: N.
        max_nodes: Largest number of nodes per task item.
        min_generations: Fewest completions that the algorithm can learn from.

    Raises:
        ValueError: If one task item can have more nodes than allowed.
    """
    nodes = shape.num_nodes(num_agents)
    if nodes > max_nodes:
        *helps, last = [*_smaller(shape, num_agents, max_nodes, min_generations), "a larger max_nodes"]
        mode = "" if shape.trajectories else f" and joint_mode={shape.joint_mode!r}"
        raise ValueError(
            f"num_turns={shape.num_turns} with num_generations={shape.num_generations}{mode} grows to"
            f" {nodes if nodes < 10**12 else 'over 10**12'} nodes per task item, above max_nodes={max_nodes}."
            f" Use {', '.join(helps)}{' or ' if helps else ''}{last}."
        )


def _smaller(shape: RolloutShape, num_agents: int, max_nodes: int, min_generations: int) -> list[str]:
    """Single changes after which a rollout would be small enough."""

    def num_nodes(name: str, value: Any) -> int:
        change: dict[str, Any] = {name: value}
        return replace(shape, **change).num_nodes(num_agents)

    def fits(name: str, value: Any) -> bool:
        return num_nodes(name, value) <= max_nodes

    found = ["joint_mode='aligned'"] if shape.joint_mode == "cross" and fits("joint_mode", "aligned") else []
    for name, fewest, given in (
        ("num_turns", 1, shape.num_turns),
        ("num_generations", min_generations, shape.num_generations),
    ):
        num_fitting = bisect_right(range(fewest, given), max_nodes, key=partial(num_nodes, name))
        if num_fitting:
            found.append(f"{name}={fewest + num_fitting - 1}")
    if not shape.trajectories:
        found += ["MAREINFORCE(num_generations=1)"] if min_generations > 1 and fits("num_generations", 1) else []
        found += ["IAC or MAAC (whose nodes are num_generations * num_turns)"] if fits("trajectories", True) else []
    return found


def check_trainer_flags(trainer: Trainer) -> None:
    """Refuse flags of the Trainer that do not know about agents and buffers.

    Args:
        trainer: The Trainer, or its settings as the command line parsed them.

    Raises:
        ValueError: If one is set; it names our argument.
    """
    for name, value in (
        ("gradient_clip_val", trainer.gradient_clip_val),
        ("gradient_clip_algorithm", trainer.gradient_clip_algorithm),
    ):
        if value is not None:
            raise ValueError(
                f"Trainer({name}={value!r}) does not know about agents."
                " Leave it out and use max_grad_norm, which clips each agent by itself."
            )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches!r}) does not know of buffers."
            " Leave it out and use rollout_buffer_size and train_batch_size (nodes per update) or"
            " micro_batch_tokens (memory)."
        )
