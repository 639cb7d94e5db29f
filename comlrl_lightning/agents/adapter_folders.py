"""Adapter folders: loaded whole or refused, and written with all that a loader needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from comlrl_lightning.agents.fingerprints import base_parameters, config_hash, may_move, weights_sample
from comlrl_lightning.utilities.quiet import without_noise
from comlrl_lightning.utilities.whole_weights import check_keys, check_values

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""What the `init_lora_weights` of adapters begins with that need a base changed to fit them."""


def load_adapters(base: PreTrainedModel, folders: Mapping[str, str], *, shared: bool) -> PeftModel:
    """A model with adapters from folders.

    Args:
        base: The model, without adapters.
        folders: Folder or hub name of each adapter, by the name that it gets.
        shared: Whether the base must stay what it is, as others stand on it too.

    Raises:
        ValueError: An adapter does not fit, in whole or in part.
    """
    from peft import get_peft_model

    (first, folder), *others = folders.items()
    config, weights = _read(first, folder, base, shared)
    if not shared:
        _resize_vocabulary(base, weights)
    before = weights_sample(base.parameters())
    named, config.base_model_name_or_path = config.base_model_name_or_path, None  # PEFT would comment on another one
    with without_noise(), _naming(first, folder):
        network = get_peft_model(base, config, adapter_name=first)
    config.base_model_name_or_path = base.name_or_path or named
    _fill(network, first, folder, weights, before if shared else None, takes_rows=True)
    for name, path in others:
        load_adapter(network, name, path, shared=shared)
    return network


def load_adapter(network: PeftModel, name: str, folder: str, *, shared: bool = True) -> None:
    """Add an adapter from a folder to a PEFT model.

    Args:
        network: The PEFT model.
        name: The name that the adapter gets.
        folder: Its folder or hub name.
        shared: Whether the base must stay what it is.

    Raises:
        ValueError: The adapter does not fit, in whole or in part.
    """
    base = network.get_base_model()
    config, weights = _read(name, folder, base, shared)
    config.base_model_name_or_path = base.name_or_path or config.base_model_name_or_path
    before = weights_sample(base_parameters(network).values())
    with without_noise(), _naming(name, folder):
        network.add_adapter(name, config)
    _fill(network, name, folder, weights, before if shared else None, takes_rows=not shared)


def save_adapters(network: PeftModel, names: Sequence[str], folder: str | Path) -> None:
    """Write a folder for each adapter, with the embeddings where the base has got another vocabulary.

    Args:
        network: The PEFT model.
        names: The adapters, after which PEFT names the folders.
        folder: Where these go.
    """
    from safetensors.torch import load_file, save_file

    with without_model_card(Path(folder)):
        # Adapters on the head are low-rank factors too: no need to write the whole head.
        network.save_pretrained(str(folder), selected_adapters=[*names], save_embedding_layers=False)
    if not _has_other_vocabulary(network.get_base_model()):
        return
    rows = {name: value.detach().cpu().contiguous() for name, value in _embeddings(network).items()}
    for name in names:
        path = Path(folder, name, "adapter_model.safetensors")
        save_file({**load_file(path), **rows}, path, metadata={"format": "pt"})


@contextmanager
def without_model_card(folder: Path) -> Iterator[None]:
    """Undo that PEFT writes a form about a model that nobody filled in next to the agents' folders."""
    card = folder / "README.md"
    former = card.read_bytes() if card.exists() else None
    yield
    if former is not None:
        card.write_bytes(former)
    else:
        card.unlink(missing_ok=True)


def _owner(name: str, folder: str) -> str:
    return f"The adapter of {name} in {str(folder)!r}"


@contextmanager
def _naming(name: str, folder: str) -> Iterator[None]:
    """Name the adapter and its folder in what PEFT and torch say against them."""
    try:
        yield
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"{_owner(name, folder)} does not fit its base: {error}") from error


def _read(name: str, folder: str, base: PreTrainedModel, shared: bool) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Configuration and weights of an adapter, after every check that needs no model around them."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False
    if config.is_prompt_learning:
        raise ValueError(f"{_owner(name, folder)} learns prompts, which is not supported. Use a LoRA adapter.")
    _check_kind(config, name, folder, shared)
    _check_base(config, name, folder, base)
    weights = _read_weights(name, folder)
    check_values(_owner(name, folder), weights)
    return config, weights


def _check_kind(config: PeftConfig, name: str, folder: str, shared: bool) -> None:
    """Refuse kinds of adapters that come with changes of the base, where others stand on it, too."""
    from peft import LoraConfig

    if not shared or not isinstance(config, LoraConfig):
        return
    kind = str(config.init_lora_weights).lower()
    found = {
        f"init_lora_weights={config.init_lora_weights!r}": kind.startswith(CHANGES_BASE),
        "kasa_config": config.kasa_config is not None,
        f"bias={config.bias!r}": config.bias != "none",
        "layer_replication": bool(config.layer_replication),
    }
    for setting, is_set in found.items():
        if is_set:
            raise ValueError(_changes_base(name, folder, setting))


def _changes_base(name: str, folder: str, setting: str) -> str:
    return (
        f"{_owner(name, folder)} changes its base ({setting}), which it would share with others. Make it a plain LoRA"
        " adapter, by PEFT's save_pretrained(path_initial_model_for_weight_conversion=...) where its kind allows that,"
        " or give each agent a base of its own: Separate(models=[...])."
    )


def _check_base(config: PeftConfig, name: str, folder: str, base: PreTrainedModel) -> None:
    """Refuse an adapter of another base model, as far as names and configurations tell."""
    named, present = str(config.base_model_name_or_path or ""), str(base.name_or_path or "")
    if not named or not present or named == present or _is_same_folder(named, present):
        return
    other = _config_of(named, base.config)
    differs = other is not None and _kind(other) != _kind(base.config)
    if differs or not (may_move(named) or may_move(present)):
        raise ValueError(
            f"{_owner(name, folder)} belongs to the base {named!r}, but here it would stand on {present!r}. Give its"
            " own base, or correct base_model_name_or_path in its adapter_config.json if they are the same."
        )


def _is_same_folder(one: str, other: str) -> bool:
    return Path(one).is_dir() and Path(other).is_dir() and Path(one).samefile(other)


def _config_of(name: str, like: PreTrainedConfig) -> PreTrainedConfig | None:
    """The configuration of a model, read as one of the same kind as another; None: it is not on this machine."""
    try:
        entries, _ = type(like).get_config_dict(name, local_files_only=True)
    except OSError:
        return None
    return type(like).from_dict(entries)


def _kind(config: PreTrainedConfig) -> tuple[str, str]:
    """What two models have in common that an adapter may stand on, new tokens or not."""
    return config.model_type, config_hash(config, but=["vocab_size"])


def _read_weights(name: str, folder: str) -> dict[str, Tensor]:
    from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME, load_peft_weights
    from safetensors import SafetensorError

    files = [Path(folder, file) for file in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)]
    if Path(folder).is_dir() and not any(file.is_file() for file in files):
        raise ValueError(f"{_owner(name, folder)} has no weights: there is no {SAFETENSORS_WEIGHTS_NAME}.")
    try:
        weights: dict[str, Tensor] = load_peft_weights(str(folder), device="cpu")
    except (SafetensorError, UnpicklingError, EOFError) as error:
        raise ValueError(f"{_owner(name, folder)} cannot be read: {error}. Give an intact one.") from error
    return weights


def _fill(
    network: PeftModel,
    name: str,
    folder: str,
    weights: dict[str, Tensor],
    before: list[float] | None,
    *,
    takes_rows: bool,
) -> None:
    """Give an adapter its weights.

    Args:
        network: The PEFT model, the adapter in it.
        name: The adapter.
        folder: Where it comes from.
        weights: What the folder holds: the adapter's weights, and perhaps some of the base.
        before: A sample of the base's weights before the adapter came; None: they may change.
        takes_rows: Whether the base takes over its own weights that come along; otherwise it must have them.
    """
    from peft import set_peft_model_state_dict

    own = base_parameters(network, repeated=True)
    brought = {key: weights.pop(key) for key in [*weights] if key in own}
    with _naming(name, folder):
        result = set_peft_model_state_dict(network, weights, adapter_name=name)
    missing = [key for key in result.missing_keys if name in key.split(".")]
    check_keys(_owner(name, folder), missing, result.unexpected_keys)
    if before is not None and weights_sample(base_parameters(network).values()) != before:
        raise ValueError(_changes_base(name, folder, f"peft_type={network.peft_config[name].peft_type}"))
    with torch.no_grad():
        for key, value in brought.items():
            _take_over(
                own[key], value, f"{_owner(name, folder)} brings the weights {key} of its base along", takes_rows
            )


@torch.no_grad()
def _take_over(weight: Tensor, value: Tensor, what: str, may_change: bool) -> None:
    """Give the base a weight that an adapter folder brings along, or see that it has it."""
    if weight.shape != value.shape:
        raise ValueError(
            f"{what} with shape {tuple(value.shape)}, but here it is {tuple(weight.shape)}. Give the model that it was"
            " trained on: after adding tokens, load the base, call model.resize_token_embeddings(...), and pass the"
            " model with its tokenizer."
        )
    if may_change:
        weight.copy_(value)
    elif not torch.allclose(weight.float(), value.to(weight.device, torch.float32), rtol=0.01, atol=1e-4):
        raise ValueError(
            f"{what}, and they are not those of the base that it would share with others. Give adapters of one base."
        )


def _resize_vocabulary(base: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Make room for the rows of new tokens that an adapter folder brings along, as PEFT does."""
    layer = base.get_input_embeddings()
    paths = [path for path, module in base.named_modules() if module is layer]
    names = [f"base_model.model.{path}.{end}" for path in paths for end in ("weight", "base_layer.weight")]
    sizes = [len(weights[name]) for name in names if name in weights]
    if sizes and sizes[0] != len(layer.weight):
        base.resize_token_embeddings(sizes[0], mean_resizing=False)


def _has_other_vocabulary(base: PreTrainedModel) -> bool:
    """Whether tokens were added to a model, or taken away, since it was loaded by its name."""
    name = str(base.name_or_path or "")
    if not name:
        return False  # whoever loads the adapters brings the model along
    config = _config_of(name, base.config)
    if config is None:
        return True
    return bool(config.get_text_config().vocab_size != base.config.get_text_config().vocab_size)


def _embeddings(network: PeftModel) -> dict[str, Tensor]:
    """The base's own weights in the embeddings and the head, by their names in the PEFT model."""
    base = network.get_base_model()
    layers = [layer for layer in (base.get_input_embeddings(), base.get_output_embeddings()) if layer is not None]
    wanted = {parameter for layer in layers for parameter in layer.parameters()}
    return {name: parameter for name, parameter in base_parameters(network).items() if parameter in wanted}
