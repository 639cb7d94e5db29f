"""A task set as one object: items, prompts, reward and metrics that belong together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from comlrl_lightning.keywords import known_keywords
from comlrl_lightning.utilities.checks import check_whole

FUNCTIONS = ("reward_func", "formatters", "external_transition", "environment")
"""Fields that are settings of an algorithm, too: what is given to the algorithm itself wins."""


@known_keywords
@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything that a task set brings: pass it as ``task=`` to an algorithm and to `TaskDataModule`."""

    reward_func: Callable[..., Any] | None = None
    """Reward of joint completions, as an algorithm takes it. None: `environment` gives it."""
    environment: Callable[[], Any] | None = None
    """Makes the environments of episodes, in place of reward, formatters and transition."""
    num_agents: int | None = None
    """N, the number of agents that the functions are made for. None: any."""
    formatters: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    """One prompt formatter for all agents, or one per agent. None: the items' ``prompt``."""
    external_transition: Callable[..., Any] | None = None
    """Next prompts after a turn. None: one turn only."""
    train_items: Any = None
    """Items to train on: a dataset, or a function that returns one."""
    eval_items: Any = None
    """Items to evaluate on. None: none."""
    eval_logger: Callable[..., Any] | None = None
    """With `eval_aggregator`: metrics of an evaluation, for the callback `EvalMetrics`."""
    eval_aggregator: Callable[..., Any] | None = None
    """Aggregates the rows of `eval_logger`."""
    metrics_callback: Callable[..., Any] | None = None
    """Metrics of rollout records, for the callback `RolloutMetrics`."""

    def __post_init__(self) -> None:
        """Check what no algorithm would name.

        Raises:
            ValueError: If the number of agents is none, or the reward is no function.
        """
        if self.num_agents is not None:
            check_whole(1, num_agents=self.num_agents)
        if self.environment is None and not callable(self.reward_func):
            raise ValueError(
                f"Task(reward_func={self.reward_func!r}) is not callable. Give a function, or an environment."
            )


def load_task(task: object) -> Task:
    """A task from itself, from a module that holds it as ``TASK``, or from the import path of either.

    Args:
        task: ``comlrl_lightning.tasks.length_ratio``, ``my_package.my_tasks.HARD``, a module or a `Task`.

    Raises:
        ValueError: If the path leads nowhere, or to something else.
    """
    found = task
    if isinstance(task, str):
        try:
            found = resolve_name(task)
        except (ImportError, AttributeError, ValueError) as error:
            if isinstance(error, ModuleNotFoundError) and not f"{task}.".startswith(f"{error.name}."):
                raise
            raise ValueError(
                f"task={task!r} cannot be imported ({error}). Give the path of a task or its module."
            ) from error
    if isinstance(found, ModuleType):
        found = vars(found).get("TASK")
    if not isinstance(found, Task):
        raise ValueError(f"task={task!r} is no task. Give a Task(...), or the path of one or of a module with TASK.")
    return found
