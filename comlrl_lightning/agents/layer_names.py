"""Names of layers in the settings of adapters, each of which must be the name of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from torch import nn

from comlrl_lightning.agents.settings import LoraSettings

ALL_LINEAR = "all-linear"
"""What PEFT takes for every linear layer but the head."""
INSIDE_ADAPTERS = ("base_layer", "original_module", "modules_to_save")
"""Names of modules that PEFT puts into layers; those of factors begin with ``lora_``."""


def check_layer_names(owner: str, lora: LoraSettings, models: Sequence[nn.Module]) -> None:
    """Refuse names of layers that no model has: PEFT leaves out those that do not fit, as long as others do.

    Args:
        owner: Where the settings stand, as it is written up to their bracket.
        lora: The settings.
        models: The models that they are for, with or without adapters.

    Raises:
        ValueError: A name, or a pattern, fits no layer.
    """
    layers = sorted({name for model in models for name, _ in model.named_modules() if _is_layer(name)})
    targets = None if lora.target_modules == ALL_LINEAR else lora.target_modules
    settings = {"target_modules": targets, "exclude_modules": lora.exclude_modules}
    for setting, given in settings.items():
        _check(owner, setting, given, layers, _ends_with)
    _check(owner, "modules_to_save", lora.modules_to_save, layers, str.endswith)


def _check(
    owner: str,
    setting: str,
    given: str | Sequence[str] | None,
    layers: Sequence[str],
    fits: Callable[[str, str], bool],
) -> None:
    if isinstance(given, str):
        if not any(re.fullmatch(given, layer) for layer in layers):
            raise ValueError(
                f"{owner}({setting}={given!r})) fits no layer. A text is a regular expression for whole names such as"
                f" {layers[-1]!r}; give a list for names of layers."
            )
        return
    for name in given or ():
        if not any(fits(layer, name) for layer in layers):
            raise ValueError(
                f"{owner}({setting}={given!r})) names {name!r}, but no layer has that name.{_advice(name, layers)}"
            )


def _ends_with(layer: str, name: str) -> bool:
    """Whether a name is that of a layer, or the last parts of it."""
    return f".{layer}".endswith(f".{name}")


def _is_layer(name: str) -> bool:
    parts = name.split(".")
    return bool(name) and not any(part in INSIDE_ADAPTERS or part.startswith("lora_") for part in parts)


def _advice(name: str, layers: Sequence[str]) -> str:
    if re.search(r"[*+?^$|\\()\[\]]", name):
        return " A list holds names; give a text, and no list, for a regular expression."
    last = sorted({layer.rpartition(".")[2] for layer in layers if not layer.rpartition(".")[2].isdecimal()})
    close = get_close_matches(name.rpartition(".")[2], last, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Use some of {', '.join(last)}."
