"""What users write and what checkpoints hold: names and defaults of all settings, names of all entries."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jsonargparse import ArgumentParser

import comlrl_lightning
from comlrl_lightning import (
    IAC,
    MAAC,
    MADPO,
    MAGRPO,
    MAREINFORCE,
    MARLHF,
    MARLOO,
    CooperativeModule,
    MAReMax,
    callbacks,
    cli,
)
from tests.golden.models import shared
from tests.golden.runs import CASES, reward, run

ALGORITHMS: dict[str, type[CooperativeModule]] = {
    kind.__name__: kind for kind in (MAREINFORCE, MAGRPO, MARLOO, MAReMax, IAC, MAAC, MADPO, MARLHF)
}
BASIC_CASES = {
    "MAREINFORCE": "mareinforce",
    "MAGRPO": "magrpo",
    "MARLOO": "marloo",
    "MAReMax": "maremax",
    "IAC": "iac_v",
    "MAAC": "maac_v",
    "MADPO": "madpo",
    "MARLHF": "marlhf",
}
"""The run of each algorithm whose checkpoint is looked at."""
REQUIRED = "(required)"
GIVEN = ("agents", "reward_func")
"""Settings without a default."""
assert cli.CHOICES, "the command line sets up how settings are read"


def settings() -> dict[str, Any]:
    """Names and defaults of all settings, by algorithm and by other public class."""
    return {
        "algorithms": {name: settings_of(name) for name in ALGORITHMS},
        "classes": {name: signature_of(value) for name, value in public_classes().items()},
    }


def settings_of(algorithm: str) -> dict[str, Any]:
    """Defaults of an algorithm on the command line, and as a checkpoint holds them."""
    return {"command_line": command_line(algorithm), "hparams": hparams(algorithm)}


def command_line(algorithm: str) -> dict[str, str]:
    """What the command line takes, as the parser finds it out, with defaults."""
    parser = ArgumentParser()
    parser.add_class_arguments(ALGORITHMS[algorithm], as_group=False)
    return _texts(parser.get_defaults().as_dict())


def hparams(algorithm: str) -> dict[str, str]:
    """What a checkpoint holds of a module with no settings but those that it needs."""
    return _texts(ALGORITHMS[algorithm](shared(), reward).hparams)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Defaults as texts."""
    return {name: REQUIRED if name in GIVEN else repr(_named(value)) for name, value in sorted(values.items())}


def public_classes() -> dict[str, Any]:
    """Other public classes and functions of the package and of its callbacks."""
    places = ((comlrl_lightning, comlrl_lightning.__all__), (callbacks, callbacks.__all__))
    found = {name: vars(place).get(name) or getattr(place, name) for place, names in places for name in names}
    bases = {*ALGORITHMS, "CooperativeModule"}
    return {name: value for name, value in sorted(found.items()) if callable(value) and name not in bases}


def signature_of(value: Any) -> dict[str, str]:
    """Names and defaults of what a class or function takes."""
    parameters = inspect.signature(value).parameters.values()
    return {
        parameter.name: REQUIRED if parameter.default is parameter.empty else repr(parameter.default)
        for parameter in parameters
    }


def _named(value: Any) -> Any:
    """A setting in which classes have their names without modules, which may move."""
    if isinstance(value, Mapping):
        return {key: entry.rpartition(".")[2] if key == "class_path" else _named(entry) for key, entry in value.items()}
    return list(map(_named, value)) if isinstance(value, list | tuple) else value


def checkpoint_keys() -> dict[str, Any]:
    """Names of what the checkpoint of each algorithm holds."""
    return {name: checkpoint_keys_of(name) for name in ALGORITHMS}


def checkpoint_keys_of(algorithm: str) -> dict[str, Any]:
    """Names of what a checkpoint holds after a short run."""
    _, trainer = run(CASES[BASIC_CASES[algorithm]], seed=1)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.ckpt"
        trainer.save_checkpoint(path)
        checkpoint = torch.load(path, weights_only=True)
    own = checkpoint["comlrl_lightning"]
    parts = {
        "checkpoint": checkpoint,
        "comlrl_lightning": own,
        **{f"comlrl_lightning.{key}": entry for key, entry in sorted(own.items()) if isinstance(entry, Mapping)},
        "comlrl_lightning.ranks[0]": own["ranks"][0],
        "hyper_parameters": checkpoint["hyper_parameters"],
    }
    return {name: sorted(part) for name, part in parts.items()}
