"""Weights & Biases from one dictionary, with `env_step` as the x-axis."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast
from uuid import uuid4

from lightning import Callback, LightningModule, Trainer
from lightning.fabric.loggers.logger import _DummyExperiment, rank_zero_experiment
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

if TYPE_CHECKING:
    from wandb import Run

OWN_KEYS = ("name", "run_name", "dir", "config_sections", "config")
"""Keys with a meaning of their own here."""
INIT_KEYS = (
    *("project", "entity", "tags", "group", "job_type", "notes", "id", "resume", "mode", "save_code", "settings"),
    *("force", "reinit", "fork_from", "resume_from", "config_include_keys", "config_exclude_keys", "allow_val_change"),
)
"""Keys that `wandb.init` gets as they are."""
LOGGER_KEYS = ("log_model", "checkpoint_name")
"""Keys of Lightning's `WandbLogger`."""
KEYS = (*OWN_KEYS, *INIT_KEYS, *LOGGER_KEYS)
RUN_IDS = "wandb_run_ids"
"""Where a checkpoint holds the ids of the W&B runs, in the order of the loggers."""


class TaskWandbLogger(WandbLogger):
    """A `WandbLogger` made from a dictionary, with every metric over `env_step`.

    What is logged without a key `env_step`, as Lightning's `LearningRateMonitor` does, stands at the last one.

    Checkpoints hold the id of the W&B run, and a fit that resumes one goes on with that run, as long as
    `wandb_config` has no `id` and not ``resume="never"``.

    Log in beforehand (``wandb login`` or the variable ``WANDB_API_KEY``); ``WANDB_MODE=offline`` works as well.

    Args:
        wandb_config: Arguments of `wandb.init`: `project`, `entity`, `name` (or `run_name`), `tags`, `dir`, `group`,
            `job_type`, `notes`, `id`, `resume`, `mode`, `settings` and so on; `log_model` and `checkpoint_name` of
            Lightning's logger; and `config_sections`, a dictionary that becomes part of the run's `config`.
            ``config_sections["output"]["verbose"] = False`` turns our reports on screen off.
        offline: Write the run to disk only, as ``mode="offline"`` does.

    Raises:
        ValueError: If `wandb_config` has another key, or both names, or a section that is not a dictionary, or if a
            run that stays on disk is to send checkpoints (`log_model`).

    Example::

        trainer = Trainer(logger=TaskWandbLogger({"project": "comlrl", "name": "length-ratio"}))
    """

    def __init__(self, wandb_config: Mapping[str, Any], offline: bool = False) -> None:
        _check(wandb_config, offline)
        self._sections = dict(wandb_config.get("config_sections") or {})
        keys = (*INIT_KEYS, *LOGGER_KEYS)
        arguments: dict[str, Any] = {key: wandb_config[key] for key in keys if key in wandb_config}
        if offline:  # Lightning's `offline` would switch a variable of the whole process
            arguments["mode"] = "offline"
        super().__init__(
            name=wandb_config.get("name", wandb_config.get("run_name")),
            save_dir=wandb_config.get("dir") or ".",
            config={**(wandb_config.get("config") or {}), **self._sections},
            **arguments,
        )
        named = {"id", "resume_from", "fork_from"} & set(wandb_config)
        self._takes_up = not named and wandb_config.get("resume") != "never"
        self._is_held = False

    @property
    def verbose(self) -> bool:
        """Whether the library's reports on screen are wanted."""
        return bool(self._sections.get("output", {}).get("verbose", True))

    def hold(self) -> None:
        """Let the run begin after the trainer's first looks at it, when a checkpoint may have named it."""
        if self._experiment is not None or not self._takes_up:
            return
        # Folders are named after it before the run begins.
        self._id = self._wandb_init["id"] = self._id or os.environ.get("WANDB_RUN_ID") or uuid4().hex[:8]
        self._is_held = True

    def release(self) -> None:
        """Let the run begin when it is needed."""
        self._is_held = False

    def take_up(self, run_id: str) -> None:
        """Go on with a run, unless the configuration names one or the run of this logger has begun."""
        if self._takes_up and self._experiment is None:
            self._id = self._wandb_init["id"] = run_id

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Run:
        """The run of wandb, made at first use."""
        if self._is_held:  # the trainer looks at it before it loads the checkpoint
            return cast("Run", _DummyExperiment())
        is_new = self._experiment is None
        run = super().experiment
        if is_new:
            run.define_metric("env_step")
            # `step_sync` completes rows of other callbacks, whose steps are Lightning's count of batches.
            run.define_metric("*", step_metric="env_step", step_sync=True)
        return run


def wandb_logger(wandb_config: Mapping[str, Any] | None, offline: bool = False) -> WandbLogger | Literal[False]:
    """What `Trainer(logger=...)` takes for a run with this configuration: a `TaskWandbLogger`, or False for None."""
    return False if wandb_config is None else TaskWandbLogger(wandb_config, offline=offline)


class KeepRunIds(Callback):
    """Keep the ids of the W&B runs in checkpoints, and go on with these runs where a fit resumes."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for logger in _ours(trainer):
            logger.release()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[RUN_IDS] = [logger.version for logger in _ours(trainer)]

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            for logger, run_id in zip(_ours(trainer), checkpoint.get(RUN_IDS, []), strict=False):
                logger.take_up(run_id)


def keep_run_ids(trainer: Trainer) -> list[Callback]:
    """The callback that a trainer with our W&B loggers needs; a fit holds their runs back until it has resumed."""
    loggers = _ours(trainer)
    if trainer.state.fn == "fit":
        for logger in loggers:
            logger.hold()
    return [KeepRunIds()] if loggers else []


def _ours(trainer: Trainer) -> list[TaskWandbLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TaskWandbLogger)]


def _check(wandb_config: Mapping[str, Any], offline: bool) -> None:
    unknown = sorted(set(wandb_config) - set(KEYS))
    if unknown:
        raise ValueError(f"wandb_config has unknown keys {unknown}. Allowed: {', '.join(KEYS)}.")
    if "name" in wandb_config and "run_name" in wandb_config:
        raise ValueError("wandb_config has both name and run_name. Keep one of them.")
    if wandb_config.get("log_model") and (offline or wandb_config.get("mode") == "offline"):
        raise ValueError(
            f"wandb_config['log_model']={wandb_config['log_model']!r} sends checkpoints, which a run that stays on "
            "disk cannot. Leave it out, or log online."
        )
    sections = wandb_config.get("config_sections") or {}
    if not isinstance(sections, Mapping) or not all(isinstance(section, Mapping) for section in sections.values()):
        raise ValueError(
            f"wandb_config['config_sections']={sections!r} is not a dictionary of dictionaries. "
            "Write it as {'dataset': {...}, 'output': {'verbose': True}}."
        )
