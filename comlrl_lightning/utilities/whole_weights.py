"""Checks that weights were loaded whole: nothing missing, nothing left over, every value a number."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

SHOWN = 3
"""Names of weights that a message lists."""


def check_keys(owner: str, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Refuse weights that are there in part, or that nothing takes up.

    Args:
        owner: What they are and where they come from.
        missing: Names of the weights that would stay at their first values.
        unexpected: Names of the weights that are left over.

    Raises:
        ValueError: There are such.
    """
    parts = [
        f"{len(names)} {what}: {listed(names)}"
        for names, what in ((missing, "missing"), (unexpected, "without a place"))
        if names
    ]
    if parts:
        raise ValueError(f"{owner} does not fit in whole. Weights {'; '.join(parts)}. Give one of this kind of model.")


def check_values(owner: str, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights with values that are not finite.

    Args:
        owner: What they are and where they come from.
        weights: The weights by name.

    Raises:
        ValueError: There are such.
    """
    if broken := not_finite(weights.items()):
        raise ValueError(f"{owner} holds values that are not finite, in {listed(broken)}. Give an intact one.")


def check_report(owner: str, model: nn.Module, report: Mapping[str, Any], without: Collection[str] = ()) -> None:
    """Refuse a model that `from_pretrained` of transformers has filled in part.

    Weights of parts that the model does not have at all, such as another head, are warned of only.

    Args:
        owner: What the model is and where it comes from.
        model: The model.
        report: The loading information.
        without: Names of weights that may be missing.

    Raises:
        ValueError: Weights are missing, or are left over from parts that the model has.
    """
    # One that does not fit in size comes with both shapes.
    mismatched = {key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]}
    missing = {*report["missing_keys"], *mismatched} - {*without}
    parts = {name for name, _ in [*model.named_children(), *model.named_parameters(recurse=False)]}
    left_over = {key for key in report["unexpected_keys"] if key.partition(".")[0] in parts}
    check_keys(owner, sorted(missing), sorted(left_over))
    if others := sorted({*report["unexpected_keys"]} - left_over):
        warnings.warn(
            f"{owner} has weights of parts that {type(model).__name__} lacks: {listed(others)}.", stacklevel=3
        )


@torch.no_grad()
def not_finite(weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the weights that hold NaN or infinity."""
    return [name for name, value in weights if not bool(torch.isfinite(value).all())]


def listed(names: Collection[str]) -> str:
    """The first few names."""
    return ", ".join([*names][:SHOWN]) + (" ..." if len(names) > SHOWN else "")
