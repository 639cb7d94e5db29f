"""Weights & Biases from one dictionary, with `env_step` as the x-axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

if TYPE_CHECKING:
    from wandb import Run

KEYS = ("project", "entity", "name", "run_name", "tags", "dir", "config_sections")


class TaskWandbLogger(WandbLogger):
    """A `WandbLogger` made from a dictionary, with every metric over `env_step`.

    What is logged without a key `env_step`, as Lightning's `LearningRateMonitor` does, stands at the last one.

    Log in beforehand (``wandb login`` or the variable ``WANDB_API_KEY``); ``WANDB_MODE=offline`` works as well.

    Args:
        wandb_config: `project`, `entity`, `name` (or `run_name`), `tags`, `dir` of the run, and `config_sections`, a
            dictionary that becomes part of the run's config. ``config_sections["output"]["verbose"] = False`` turns
            our reports on screen off.
        offline: Write the run to disk only.

    Raises:
        ValueError: If `wandb_config` has another key, or both names, or a section that is not a dictionary.

    Example::

        trainer = Trainer(logger=TaskWandbLogger({"project": "comlrl", "name": "length-ratio"}))
    """

    def __init__(self, wandb_config: Mapping[str, Any], offline: bool = False) -> None:
        _check(wandb_config)
        self._sections = dict(wandb_config.get("config_sections") or {})
        arguments = {key: wandb_config[key] for key in ("project", "entity", "tags") if key in wandb_config}
        super().__init__(
            name=wandb_config.get("name", wandb_config.get("run_name")),
            save_dir=wandb_config.get("dir") or ".",
            offline=offline,
            config=self._sections,
            **arguments,
        )

    @property
    def verbose(self) -> bool:
        """Whether the library's reports on screen are wanted."""
        return bool(self._sections.get("output", {}).get("verbose", True))

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Run:
        """The run of wandb, made at first use."""
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


def _check(wandb_config: Mapping[str, Any]) -> None:
    unknown = sorted(set(wandb_config) - set(KEYS))
    if unknown:
        raise ValueError(f"wandb_config has unknown keys {unknown}. Allowed: {', '.join(KEYS)}.")
    if "name" in wandb_config and "run_name" in wandb_config:
        raise ValueError("wandb_config has both name and run_name. Keep one of them.")
    sections = wandb_config.get("config_sections") or {}
    if not isinstance(sections, Mapping) or not all(isinstance(section, Mapping) for section in sections.values()):
        raise ValueError(
            f"wandb_config['config_sections']={sections!r} is not a dictionary of dictionaries. "
            "Write it as {'dataset': {...}, 'output': {'verbose': True}}."
        )
