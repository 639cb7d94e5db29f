"""Hyperparameters as plain values, so that every checkpoint loads with ``weights_only=True``, and back again."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from operator import attrgetter
from pathlib import PurePath
from types import MethodType
from typing import Any, Protocol, runtime_checkable

_SCRIPTS = ("__main__", "__mp_main__")
"""Module names that every script has: what they hold depends on which script runs."""


@runtime_checkable
class _Named(Protocol):
    """A function, a class, or an object that took the name of one."""

    __module__: str
    __qualname__: str


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
    qualified name where it leads to them again. Anything else, as a bound method, a wrapped function or a function
    within a function, becomes a remark ``<module.name object>`` that `from_plain` refuses.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return f"<{_name(type(value))}.{value.name} object>"
    for builtin in (int, float, str):
        if isinstance(value, builtin):
            return builtin(value)  # numpy's numbers and texts derive from them, and do not load again
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    if type(value) is functools.partial:
        arguments = {"args": [_exact(entry) for entry in value.args]} if value.args else {}
        keywords = {key: _exact(entry) for key, entry in value.keywords.items()}
        return {
            "class_path": "functools.partial",
            "func": _plain_function(value.func),
            **arguments,
            "init_args": keywords,
        }
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and _is_made_by_fields(type(value)):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        arguments = {name: argument_to_plain(getattr(value, name)) for name in fields}
        return {"class_path": _name(type(value)), "init_args": arguments}
    return _plain_function(value)


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
    if isinstance(value, Mapping) and "import_path" in value:
        return _load(argument, value["import_path"])
    if isinstance(value, Mapping) and "class_path" in value:
        args = [from_plain(argument, entry) for entry in value.get("args", [])]
        keywords = {key: from_plain(argument, entry) for key, entry in value.get("init_args", {}).items()}
        if value["class_path"] == "functools.partial":
            return functools.partial(_load(argument, value["func"]), *args, **keywords)
        return _load(argument, value["class_path"])(*args, **keywords)
    if is_remark(value):
        check_held(**{argument: value})
    return value


def is_remark(value: Any) -> bool:
    """Whether a value only says which object a checkpoint could not hold."""
    return isinstance(value, str) and value.startswith("<") and value.endswith(" object>")


def not_held(**given: Any) -> dict[str, str]:
    """Settings that must be given again because a checkpoint could not hold them, and what stands there instead.

    Args:
        given: Settings by name, as the user or a checkpoint gave them. A text is not taken for an import path.
    """
    first = {name: next(_remarks(value), None) for name, value in given.items()}
    return {name: remark for name, remark in first.items() if remark is not None}


def functions_not_held(**given: Any) -> dict[str, str]:
    """As `not_held`, for settings that are functions: their names in a script lead to whatever another script has."""
    missing = not_held(**given)
    for name, value in given.items():
        entries = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
        scripts = [entry for entry in entries if isinstance(entry, str) and _is_of_script(entry)]
        missing.update({name: scripts[0]} if scripts and name not in missing else {})
    return {name: missing[name] for name in given if name in missing}


def check_held(**given: Any) -> None:
    """Refuse settings that a checkpoint could not hold.

    Raises:
        ValueError: If there are any; all of them are named.
    """
    refuse(not_held(**given))


def refuse(missing: Mapping[str, str]) -> None:
    """Ask for what a checkpoint could not hold.

    Args:
        missing: What `not_held` found.

    Raises:
        ValueError: If there is anything.
    """
    if not missing:
        return
    were = ", ".join(f"{name} was {remark}" for name, remark in missing.items())
    scripts = "" if all(map(is_remark, missing.values())) else ", whose names in a script lead nowhere in another one"
    again = ", ".join(f"{name}=..." for name in missing)
    raise ValueError(
        f"{were} when the checkpoint was saved{scripts}. Pass {', '.join(f'{name}=' for name in missing)} to load it,"
        f" as in load_from_checkpoint(path, {again})."
    )


def callable_from_plain(argument: str, value: Any) -> Any:
    """A function, or one per agent, from itself or from its import path.

    Raises:
        ValueError: If an import path leads nowhere.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [callable_from_plain(argument, entry) for entry in value]
    value = from_plain(argument, value)
    return _load(argument, value) if isinstance(value, str) else value


def argument_to_plain(value: Any) -> Any:
    """Plain form of an argument of an object: a text must not be taken for a function, nor a number for a text."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {str(key): argument_to_plain(entry) for key, entry in value.items()}
        pairs = [[argument_to_plain(key), argument_to_plain(entry)] for key, entry in value.items()]
        return {"class_path": "builtins.dict", "args": [pairs]}
    if isinstance(value, list | tuple):
        return [argument_to_plain(entry) for entry in value]
    plain = to_plain(value)
    is_function = isinstance(plain, str) and not isinstance(value, str | PurePath) and not is_remark(plain)
    return {"import_path": plain} if is_function else plain


def _exact(value: Any) -> Any:
    """The same for an argument of a function, which no constructor turns into what it should be."""
    if isinstance(value, tuple):
        return {"class_path": "builtins.tuple", "args": [[_exact(entry) for entry in value]]}
    if isinstance(value, PurePath):
        return {"class_path": f"pathlib.{type(value).__name__}", "args": [str(value)]}
    return argument_to_plain(value)


def _plain_function(value: Any) -> str:
    """The name of a function or class if it leads to it; else a remark."""
    if not isinstance(value, _Named):
        return f"<{_name(type(value))} object>"
    name = _name(value)
    return name if _leads_to(value) else f"<{name} object>"


def _name(value: _Named | type) -> str:
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


def _leads_to(value: _Named | type) -> bool:
    """Whether the qualified name of a function or class is a way to that very object."""
    try:
        found = attrgetter(value.__qualname__)(sys.modules[value.__module__])
    except (KeyError, AttributeError):  # a module that only exists by name, functions within functions
        return False
    return found is value or (isinstance(value, MethodType) and bool(found == value))


def _is_made_by_fields(kind: type) -> bool:
    """Whether a dataclass can be imported, and takes its fields, no more and no less."""
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    return _leads_to(kind) and set(inspect.signature(kind).parameters) == names


def _remarks(value: Any) -> Iterator[str]:
    """What in a plain setting cannot be made again."""
    if is_remark(value):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from _remarks(entry)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            is_path = key in ("class_path", "import_path", "func") and isinstance(entry, str)
            yield from [entry] if is_path and _is_of_script(entry) else _remarks(entry)


def _is_of_script(path: str) -> bool:
    return path.partition(".")[0] in _SCRIPTS


def _load(argument: str, path: str) -> Any:
    if is_remark(path) or _is_of_script(path):
        refuse({argument: path})
    parts = str(with_current_paths(path)).split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name is not None and ".".join(parts[:cut]).startswith(error.name):
                continue
            raise
        for name in parts[cut:]:
            try:
                value = attrgetter(name)(value)
            except AttributeError:
                message = f"{argument}={path!r} is not there: {value!r} has no {name!r}. Correct the path."
                raise ValueError(message) from None
        return value
    raise ValueError(f"{argument}={path!r} cannot be imported. Give the import path of a module-level function.")
