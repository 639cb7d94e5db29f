"""Keys and values of the tokens read so far, in memory that is set aside once instead of copied at every token."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOM = 64
"""Tokens that a layer makes room for at a time."""


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A layer's `[R, heads, S, D]` keys and values, views into tensors with room for the tokens to come."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Learn the shapes from the first tokens."""
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self._room = (self.keys, self.values)

    def begin_with(self, keys: Tensor, values: Tensor) -> None:
        """Take over the states of tokens that were read before."""
        self.lazy_initialization(keys, values)
        self.keys, self.values = self._room = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens and return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if end > self._room[0].shape[-2]:
            self._room = (self._enlarged(self.keys, end), self._enlarged(self.values, end))
        keys, values = self._room
        keys[..., start:end, :] = key_states
        values[..., start:end, :] = value_states
        self.keys, self.values = keys[..., :end, :], values[..., :end, :]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, in this order; the next token makes room again."""
        super().reorder_cache(beam_idx)
        self._room = (self.keys, self.values)

    @staticmethod
    def _enlarged(states: Tensor, length: int) -> Tensor:
        *outer, start, width = states.shape
        room = states.new_empty(*outer, (length // ROOM + 1) * ROOM, width)
        room[..., :start, :] = states
        return room


def new_cache(config: Any) -> DynamicCache:
    """An empty cache for a model with this configuration; layers of other kinds (sliding windows) stay as they are."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def sees_everything(config: Any) -> bool:
    """Whether all layers of a model with this configuration see all tokens read so far, wherever they stand."""
    layers = DynamicCache(config=config).layers
    everything = bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
    # Slopes of attention (alibi) count the real tokens of a mask.
    return everything and not vars(config).get("alibi") and not counts_columns(config)


def counts_columns(config: Any) -> bool:
    """Whether padding between two tokens parts them, as in GPT-Neo's windows, which no layer of a cache tells of."""
    return "local" in (vars(config).get("attention_layers") or ())


def rotation_is_fixed(config: Any) -> bool:
    """Whether the keys of a token do not depend on how long its text has become since."""
    kinds = [str(rotation.get("rope_type")) for rotation in _rotations(config)]
    return not any("dynamic" in kind or kind == "longrope" for kind in kinds)


def fixed_rotations(config: Any) -> int | None:
    """Longest text whose rotations are those of all shorter ones, where a model has others for longer ones."""
    long = [rotation for rotation in _rotations(config) if rotation.get("rope_type") == "longrope"]
    return min((int(rotation["original_max_position_embeddings"]) for rotation in long), default=None)


def _rotations(config: Any) -> list[dict[str, Any]]:
    """Settings of the rotary embeddings: some models have one, some one for each kind of layer."""
    rotary: dict[str, Any] = vars(config.get_text_config(decoder=True)).get("rope_parameters") or {}
    return [part for part in (rotary, *rotary.values()) if isinstance(part, dict)]
