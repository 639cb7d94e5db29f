"""What a checkpoint of a cooperative module holds beyond Lightning's own state."""

from __future__ import annotations

import pkgutil
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Protocol

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn import Parameter
from torch.optim.lr_scheduler import LRScheduler

from comlrl_lightning.agents.adapters import REFERENCE
from comlrl_lightning.agents.bases import bases_of, check_bases
from comlrl_lightning.agents.language_model import adapter_name
from comlrl_lightning.agents.settings import Separate, SharedBase
from comlrl_lightning.agents.team import AgentTeam
from comlrl_lightning.algorithms.position import align_loops, check_epoch, position_in
from comlrl_lightning.metrics import MetricTable
from comlrl_lightning.rollouts.collect import RolloutShape
from comlrl_lightning.rollouts.credit import CreditedNode
from comlrl_lightning.utilities.distributed import gather_objects, rank, world_size
from comlrl_lightning.utilities.plain import is_remark, to_plain, with_current_paths

KEY = "comlrl_lightning"
"""Where a checkpoint holds the state of the run."""

FREE_SETTINGS = (
    "agent_learning_rate",
    "clip_epsilon",
    "clip_epsilon_high",
    "critic_learning_rate",
    "dual_clip",
    "entropy_coef",
    "eval_sampling",
    "logging_steps",
    "lr_scheduler",
    "max_grad_norm",
    "max_nodes",
    "micro_batch_tokens",
    "num_inner_epochs",
    "on_nonfinite",
    "optimizer",
    "reward_backend",
    "reward_timeout_seconds",
    "reward_timeout_value",
    "reward_workers",
    "rollout_buffer_size",
    "train_batch_size",
    "value_clip_range",
    "value_loss_coef",
)
"""Settings that may differ when a run goes on; all others are fixed. Optimizer and schedule are compared as such."""

MEANS = ("gradient_checkpointing", "api_key_env", "timeout_seconds", "max_retries", "max_concurrency")
"""Settings of models that cost memory or time, or reach a server, and change no result: a run may go on with others."""

NEWER_SETTINGS = {
    "environment": None,
    "per_agent_rewards": False,
    "reward_none": "error",
    "loss_aggregation": "sum",
    "loss_type": "sigmoid",
    "label_smoothing": 0.0,
    "nll_coef": 0.0,
}
"""Fixed settings of algorithms that older checkpoints lack, and what they meant."""


class ResumableModule(Protocol):
    """The part of an algorithm that a checkpoint holds or compares."""

    agents: SharedBase | Separate
    team: AgentTeam
    team_size: int
    trained_names: frozenset[str]
    optimization: dict[str, Any]
    learning_rates: list[float]
    training_metrics: MetricTable
    env_step: int
    update_step: int
    last_log: tuple[int, int]
    buffer: list[CreditedNode]
    shape: RolloutShape
    step_start: StepStart | None

    @property
    def hparams(self) -> Any:
        """Settings as plain values."""
        ...

    @property
    def is_resuming(self) -> bool:
        """Whether the state of a checkpoint waits for the start of training."""
        ...

    @property
    def trainer(self) -> Trainer:
        """The trainer of the fit."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """All weights."""
        ...

    def optimizers(self) -> Any:
        """Lightning's optimizer."""
        ...

    def lr_schedulers(self) -> Any:
        """Lightning's schedule."""
        ...

    def round_state(self) -> Any:
        """What else a training step changes."""
        ...

    def round_state_to_plain(self, state: Any) -> dict[str, Any]:
        """That as plain values."""
        ...

    def restore_round_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `round_state_to_plain`."""
        ...


RngStates = dict[str, Any]
"""Global random states as values that load with ``weights_only=True``."""


def global_rng_states() -> RngStates:
    """The global random states of this process, which only the user's functions consume."""
    name, keys, *position = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *position),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_global_rng_states(states: RngStates) -> None:
    """Inverse of `global_rng_states`."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *position = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))
    torch.set_rng_state(states["torch"].cpu())
    # A run may go on with fewer devices, or more.
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state.cpu(), device)


@dataclass(frozen=True)
class StepStart:
    """What a training step changes before its items count as trained."""

    epoch: int
    items: int
    """Position of the step in its epoch, over all ranks."""
    env_step: int
    update_step: int
    buffer: list[CreditedNode]
    metrics: dict[str, Any]
    rng: RngStates
    own: Any
    """What the algorithm adds."""

    @classmethod
    def of(cls, module: ResumableModule, epoch: int, items: int) -> StepStart:
        """The present state of a module."""
        metrics = {name: value.clone() for name, value in module.training_metrics.state_dict().items()}
        steps = module.env_step, module.update_step
        return cls(epoch, items, *steps, list(module.buffer), metrics, global_rng_states(), module.round_state())


def save_run(module: ResumableModule, checkpoint: dict[str, Any]) -> None:
    """Reduce a checkpoint to the weights that it holds, and add the state of the run. Call it on every rank.

    What is saved while a training step runs or has failed goes on from the start of that step. Once an optimizer step
    of its update was taken, its weights belong to no place of a run, and no fit goes on from there.
    """
    checkpoint["state_dict"] = {name: checkpoint["state_dict"][name] for name in kept_names(module)}
    position = position_in(checkpoint) or {"epoch": 0, "position": 0}
    start = module.step_start
    if start is None or (start.epoch, start.items) != (position["epoch"], position["position"]):
        start = StepStart.of(module, position["epoch"], position["position"])
    this_rank = {
        "rng": start.rng,
        "buffer": [entry.to_state() for entry in start.buffer],
        "metrics": start.metrics,
    }
    checkpoint[KEY] = {
        "algorithm": type(module).__name__,
        "settings": _fixed_settings(module),
        "bases": bases_of(module.agents, module.team),
        "optimization": module.optimization,
        "learning_rates": module.learning_rates,
        "no_resume": _no_resume(module, start),
        "env_step": start.env_step,
        "update_step": module.update_step,
        "last_log": module.last_log,
        "own": module.round_state_to_plain(start.own),
        "ranks": gather_objects([this_rank]),
    }


def _no_resume(module: ResumableModule, start: StepStart) -> str | None:
    """Why no run can go on exactly from what is saved now; None if one can."""
    if module.is_resuming:
        return "before the run that it is of had gone on from its own checkpoint. Resume from that one"
    if module.update_step > start.update_step:
        return (
            "inside an update, after one of its optimizer steps: its weights belong to no place of a run. Resume from a"
            " checkpoint saved before, such as those of BatchCheckpoint, or load its weights with load_from_checkpoint"
            " for a new run"
        )
    return None


def load_run(module: ResumableModule, checkpoint: Mapping[str, Any], *, fitting: bool) -> dict[str, Any]:
    """Read the counters of a run, after checking that the module can go on with it.

    Args:
        module: The module.
        checkpoint: What `save_run` completed.
        fitting: Whether the run goes on; otherwise its weights are used.

    Returns:
        The state of the run, for `restore_run`.

    Raises:
        ValueError: If the checkpoint is of another run, of other language models, lacks weights, or a setting would
            change the meaning of the run that goes on.
    """
    if KEY not in checkpoint:
        raise ValueError("The checkpoint was not saved by comlrl_lightning. Load its weights with agents= instead.")
    state: dict[str, Any] = checkpoint[KEY]
    if fitting:
        current = {"algorithm": type(module).__name__, **_fixed_settings(module), **_fixed(module.optimization)}
        saved = with_current_paths(
            {"algorithm": state["algorithm"], **state["settings"], **_fixed(state["optimization"])}
        )
        # Older trees stopped by the mean of a group; where none stops, the rule says nothing.
        stops = saved.get("early_termination_threshold") is not None and not module.shape.trajectories
        saved.setdefault("early_termination", "group" if stops else current.get("early_termination"))
        check_settings(with_newer_settings(saved, current), current)
        if module.trainer.strategy.lightning_restore_optimizer and "optimizer_states" not in checkpoint:
            raise ValueError(
                "The checkpoint holds weights alone, as save_weights_only=True makes them, and no run goes on from it."
                " Save without that, or load its weights with load_from_checkpoint for a new run."
            )
        if no_resume := state.get("no_resume"):
            raise ValueError(f"The checkpoint was saved {no_resume}.")
        align_loops(checkpoint)
    check_bases(state["bases"], bases_of(module.agents, module.team))
    missing = sorted(set(kept_names(module)) - set(checkpoint["state_dict"]))
    if missing:
        raise ValueError(
            f"The checkpoint lacks {len(missing)} of the weights that this module needs, the first is {missing[0]!r}."
            " Use the agents= settings that it was saved with."
        )
    _check_places(module, checkpoint["state_dict"])
    module.env_step, module.update_step = state["env_step"], state["update_step"]
    module.last_log = tuple(state["last_log"])
    return {**state, "position": position_in(checkpoint)}


def _check_places(module: ResumableModule, saved: Iterable[str]) -> None:
    """Refuse a checkpoint with weights of agents' adapters that this module does not have."""
    own = {name for name, _ in module.named_parameters()}
    adapters = {adapter_name(agent) for agent in range(module.team_size)}
    left_over = [name for name in saved if name not in own and not adapters.isdisjoint(name.split("."))]
    if left_over:
        raise ValueError(
            f"The checkpoint holds {len(left_over)} weights of agents that have no place here, the first is"
            f" {left_over[0]!r}. Use the agents= settings that it was saved with."
        )


def restore_run(module: ResumableModule, state: Mapping[str, Any]) -> None:
    """Go on with a run: its buffer, its random states, learning rates and options where the settings changed them."""
    if len(state["ranks"]) == world_size():
        this_rank = state["ranks"][rank()]
        module.buffer = [CreditedNode.from_state(entry) for entry in this_rank["buffer"]]
        module.training_metrics.load_state_dict(this_rank["metrics"], strict=False)  # newer metrics start empty
        restore_global_rng_states(this_rank["rng"])
    else:
        rank_zero_warn(
            f"The checkpoint was saved by {len(state['ranks'])} processes and {world_size()} go on: buffers are dealt"
            " out anew and global random states start from their seeds."
        )
        entries = [entry for saved in state["ranks"] for entry in saved["buffer"]]
        module.buffer = [CreditedNode.from_state(entry) for entry in entries[rank() :: world_size()]]
        if rank() == 0:  # sums over all ranks, to which the others add nothing
            parts = [saved["metrics"] for saved in state["ranks"]]
            sums = {name: sum(part[name] for part in parts) for name in parts[0]}
            module.training_metrics.load_state_dict(sums, strict=False)
    module.restore_round_state(state["own"])
    check_epoch(module.trainer, state["position"])
    change_learning_rates(module, state["learning_rates"])
    change_options(module, state["optimization"]["optimizer_options"])


def change_learning_rates(module: ResumableModule, saved: Sequence[float]) -> None:
    """Let the module's learning rates win over those that came with the optimizer's state."""
    optimizer, scheduler = module.optimizers(), module.lr_schedulers()
    assert isinstance(optimizer, LightningOptimizer)
    for position, (group, old, new) in enumerate(
        zip(optimizer.param_groups, saved, module.learning_rates, strict=True)
    ):
        if old == new:
            continue
        group["lr"] = new if not old else group["lr"] * new / old
        if isinstance(scheduler, LRScheduler):
            group["initial_lr"] = scheduler.base_lrs[position] = new


def change_options(module: ResumableModule, saved: Mapping[str, Any]) -> None:
    """Let changed options of the optimizer, such as its weight decay, win over those that came with its state."""
    optimizer = module.optimizers()
    assert isinstance(optimizer, LightningOptimizer)
    for name, value in module.optimization["optimizer_options"].items():
        if saved.get(name) != value:
            for group in optimizer.param_groups:
                group[name] = tuple(value) if isinstance(value, list) else value


def with_newer_settings(saved: Any, current: Any, owner: type | None = None) -> Any:
    """A plain setting of an older checkpoint, completed with the defaults of settings that did not exist yet.

    Args:
        saved: Of the checkpoint.
        current: The same setting of this module.
        owner: Class whose arguments the entries are; None: settings of an algorithm.
    """
    if not isinstance(saved, Mapping) or not isinstance(current, Mapping):
        return saved
    if "init_args" in current and saved.get("class_path") == current.get("class_path"):
        kind = pkgutil.resolve_name(current["class_path"])
        arguments = with_newer_settings(saved["init_args"], current["init_args"], kind)
        return {**saved, "init_args": arguments}
    defaults = NEWER_SETTINGS if owner is None else {}
    if owner is not None and is_dataclass(owner):
        defaults = {one.name: to_plain(one.default) for one in fields(owner) if one.default is not MISSING}
    completed = {name: with_newer_settings(value, current.get(name)) for name, value in saved.items()}
    return {**{name: defaults[name] for name in current if name in defaults}, **completed}


def check_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to go on with a run under settings that would change its meaning.

    Args:
        saved: Settings of the checkpoint.
        current: The same settings of this module.

    Raises:
        ValueError: If one differs; it is named with both values.
    """
    for name, value in current.items():
        if not _is_same(saved.get(name), value):
            name, former, value = _difference(name, saved.get(name), value)
            raise ValueError(
                f"{name}={value!r} differs from the checkpoint's {name}={former!r}: going on would mix two runs. Use"
                " the checkpoint's value, or start a new run without ckpt_path."
            )


def _is_same(saved: Any, current: Any) -> bool:
    """Whether two plain settings are equal; what a script defines is ``__main__``'s while it runs as a script."""
    if isinstance(saved, list) and isinstance(current, list):
        return len(saved) == len(current) and all(map(_is_same, saved, current))
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        return saved.keys() == current.keys() and all(_is_same(saved[key], current[key]) for key in saved)
    if isinstance(saved, str) and isinstance(current, str):
        if is_remark(saved) and is_remark(current):
            return _is_same(saved.removeprefix("<"), current.removeprefix("<"))
        for one, other in ((saved, current), (current, saved)):
            if one.startswith("__main__."):
                return other.endswith(one.removeprefix("__main__"))
    return bool(saved == current)


def _difference(name: str, saved: Any, current: Any) -> tuple[str, Any, Any]:
    """The first part in which two plain settings of the same kind differ, by its dotted name."""
    if isinstance(saved, Mapping) and isinstance(current, Mapping) and saved.keys() == current.keys():
        key = next(key for key in current if not _is_same(saved[key], current[key]))
        return _difference(name if key == "init_args" else f"{name}.{key}", saved[key], current[key])
    return name, saved, current


def _fixed_settings(module: ResumableModule) -> dict[str, Any]:
    return {
        name: _without_means(to_plain(value)) for name, value in module.hparams.items() if name not in FREE_SETTINGS
    }


def _without_means(value: Any) -> Any:
    """A plain setting without the `MEANS` of the objects in it."""
    if not isinstance(value, Mapping):
        return value
    left = {name: _without_means(entry) for name, entry in value.items()}
    if "class_path" in value and isinstance(left.get("init_args"), dict):
        left["init_args"] = {name: entry for name, entry in left["init_args"].items() if name not in MEANS}
    return left


def _fixed(optimization: Mapping[str, Any]) -> dict[str, Any]:
    """What must not change about the optimizer: its state fits its own class, and a schedule is in the middle."""
    return {name: value for name, value in optimization.items() if name != "optimizer_options"}


def kept_names(module: ResumableModule) -> list[str]:
    """Names of the weights that a checkpoint holds: all that are trained, and the reference adapters.

    Whole frozen models are not among them. The folder that reference adapters came from may change meanwhile, as when a
    run writes what it has learned to where it began.
    """
    return [
        name
        for name, parameter in module.named_parameters()
        if name in module.trained_names or any(part.endswith(REFERENCE) for part in name.split("."))
    ]


def without_left_out(module: ResumableModule, keys: Any, *, strict: bool) -> Any:
    """What `nn.Module.load_state_dict` returned, without missing weights that no checkpoint holds.

    Args:
        module: The module.
        keys: Names of weights that were missing or not expected.
        strict: Whether any that are left are an error.

    Raises:
        RuntimeError: If they are.
    """
    kept = set(kept_names(module))
    keys.missing_keys[:] = [name for name in keys.missing_keys if name in kept]
    if strict and (keys.missing_keys or keys.unexpected_keys):
        raise RuntimeError(f"Weights do not fit: missing {keys.missing_keys}, unexpected {keys.unexpected_keys}.")
    return keys
