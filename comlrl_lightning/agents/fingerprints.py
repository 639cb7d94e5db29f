"""Fingerprints of base models: what of a configuration has a meaning, and samples of weights to compare."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig

MEANINGLESS = (
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Entries of a model's configuration that change neither its weights nor what they mean."""
VALUES_PER_WEIGHT = 4
"""Values that a sample has of each weight, its first and its last among them."""


def config_hash(config: PreTrainedConfig, but: Sequence[str] = ()) -> str:
    """Twelve hexadecimal digits that differ between models of different shapes or settings.

    Args:
        config: The model's configuration.
        but: More of its entries to leave out.
    """
    entries = _meaningful(config.to_diff_dict(), {*MEANINGLESS, *but})
    return hashlib.sha256(json.dumps(entries, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _meaningful(value: Any, left_out: set[str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    kept = {str(key): entry for key, entry in value.items() if key not in left_out and key[:1] != "_"}
    return {key: _meaningful(entry, left_out) for key, entry in kept.items()}


def may_move(name: str) -> bool:
    """Whether a name is that of a folder, or of nothing; the hub's names stay."""
    return not name or name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def base_parameters(network: PeftModel, *, repeated: bool = False) -> dict[str, nn.Parameter]:
    """The weights of a PEFT model that belong to no adapter, by their names in it.

    Args:
        network: The PEFT model.
        repeated: Name weights that several layers share once for each of them.
    """
    adapters = {*network.peft_config}
    named = network.named_parameters(remove_duplicate=not repeated)
    return {name: parameter for name, parameter in named if adapters.isdisjoint(name.split("."))}


@torch.no_grad()
def weights_sample(weights: Iterable[Tensor]) -> list[float]:
    """A few values of every weight; quantized and distributed ones are left out.

    Args:
        weights: In an order that another model of the same kind repeats.
    """
    plain = [one for one in weights if one.is_floating_point() and type(one.data) is Tensor and not one.is_meta]
    values = [one.flatten()[_places(one.numel()).to(one.device)].float().cpu() for one in plain if one.numel()]
    sample: list[float] = torch.cat(values).tolist() if values else []
    return sample


def _places(size: int) -> Tensor:
    return torch.linspace(0, size - 1, VALUES_PER_WEIGHT, dtype=torch.float64).long()


def is_same_sample(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two samples are of the same weights, perhaps in different number formats."""
    return len(one) == len(other) and all(
        math.isclose(value, counterpart, rel_tol=0.01, abs_tol=1e-4)
        for value, counterpart in zip(one, other, strict=True)
    )
