"""Hyperparameters as plain values, so that every checkpoint loads with ``weights_only=True``, and back again."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

RENAMED = {
    "comlrl_lightning.agents.critic_settings.": "comlrl_lightning.critics.settings.",
    "comlrl_lightning.agents.reward_settings.": "comlrl_lightning.critics.reward_settings.",
    "comlrl_lightning.agents.settings.Sampling": "comlrl_lightning.agents.sampling.Sampling",
    "comlrl_lightning.collaboration.": "comlrl_lightning.environment.joint_format.",
}
"""Former import paths of classes that checkpoints name, and where they are now."""


def to_plain(value: Any) -> Any:
    """Plain form of a setting.

    Dataclass objects and partials become ``{"class_path": ..., "init_args": ...}``, functions and classes their
    qualified name; any other object becomes a remark ``<module.Class object>`` that `from_plain` refuses.
    """
    if value is None or isinstance(value, bool):
        return value
    for builtin in (int, float, str):
        if isinstance(value, builtin):
            return builtin(value)  # numpy's numbers and texts derive from them, and do not load again
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    if isinstance(value, functools.partial) and not value.args:
        return {"class_path": "functools.partial", "func": to_plain(value.func), "init_args": to_plain(value.keywords)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return {"class_path": _name(type(value)), "init_args": fields}
    if callable(value) and "<" not in (name := _name(value)):
        return name
    return f"<{_name(type(value))} object>"


def from_plain(argument: str, value: Any) -> Any:
    """Inverse of `to_plain` for settings that are objects or functions; anything else stays what it is.

    Args:
        argument: Name of the setting, for messages.
        value: What the user or a checkpoint gave.

    Raises:
        ValueError: If the checkpoint could only hold a remark about the object.
    """
    if isinstance(value, list):
        return [from_plain(argument, entry) for entry in value]
    if isinstance(value, Mapping) and "class_path" in value:
        arguments = {key: from_plain(argument, entry) for key, entry in value.get("init_args", {}).items()}
        if value["class_path"] == "functools.partial":
            return functools.partial(_load(argument, value["func"]), **arguments)
        return _load(argument, value["class_path"])(**arguments)
    if is_remark(value):
        raise ValueError(f"{argument} was {value} when the checkpoint was saved. Pass {argument}= to load it.")
    return value


def is_remark(value: Any) -> bool:
    """Whether a value only says which object a checkpoint could not hold."""
    return isinstance(value, str) and value.startswith("<") and value.endswith(" object>")


def callable_from_plain(argument: str, value: Any) -> Any:
    """A function, or one per agent, from itself or from its import path.

    Raises:
        ValueError: If an import path leads nowhere.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [callable_from_plain(argument, entry) for entry in value]
    value = from_plain(argument, value)
    return _load(argument, value) if isinstance(value, str) else value


def _name(value: Any) -> str:
    if isinstance(value, functools.partial) or not hasattr(value, "__qualname__"):
        value = type(value)
        return f"<{value.__module__}.{value.__qualname__}>"
    return f"{value.__module__}.{value.__qualname__}"


def with_current_paths(value: Any) -> Any:
    """A plain setting whose former import paths (`RENAMED`) are the present ones."""
    if isinstance(value, str):
        for former, present in RENAMED.items():
            if value.startswith(former):
                return present + value.removeprefix(former)
        return value
    if isinstance(value, Mapping):
        return {key: with_current_paths(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [with_current_paths(entry) for entry in value]
    return value


def _load(argument: str, path: str) -> Any:
    parts = str(with_current_paths(path)).split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name is not None and ".".join(parts[:cut]).startswith(error.name):
                continue
            raise
        for name in parts[cut:]:
            if name not in vars(value):
                raise ValueError(f"{argument}={path!r} is not there: {value!r} has no {name!r}. Correct the path.")
            value = vars(value)[name]
        return value
    raise ValueError(f"{argument}={path!r} cannot be imported. Give the import path of a module-level function.")
