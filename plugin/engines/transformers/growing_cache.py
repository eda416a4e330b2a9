"""A KV cache with room to grow: a decode step writes one position and copies nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from plugin.engines.transformers.decode_batch import Rows

#: Positions that a buffer has to spare when it is made, or a share of those it holds if that is
#: more: a copy then costs as much as few of the steps until the next one, at any length.
_LEAST_ROOM, _SHARE_OF_ROOM = 64, 1 / 8


class GrowingLayer(DynamicLayer):
    """`keys` and `values` [B, heads, length, D] are views of longer buffers.

    The layer it replaces joins old and new positions into fresh memory in every step, which costs
    more than the rest of a step on CPU.
    """

    keys: Tensor
    values: Tensor
    _keys: Tensor
    _values: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [B, heads, new, D] each; return all positions."""
        past = self.get_seq_length()
        length = past + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if past == 0 or length > self._keys.shape[-2]:
            capacity = _capacity(length)
            self._keys = _longer(self.keys if past else None, key_states, capacity)
            self._values = _longer(self.values if past else None, value_states, capacity)
        self._keys[..., past:length, :] = key_states
        self._values[..., past:length, :] = value_states
        self.keys, self.values = self._keys[..., :length, :], self._values[..., :length, :]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only keep the rows `indices` [n] of the batch, in that order."""
        length = self.get_seq_length()
        if length == 0:
            return
        self._keys, self._values = (
            _longer(states[indices], states, self._keys.shape[-2])
            for states in (self.keys, self.values)
        )
        self.keys, self.values = self._keys[..., :length, :], self._values[..., :length, :]

    def fill(self, parts: Sequence[Rows]) -> None:
        """Hold these rows, which all end at the last position; shorter ones begin with zeros."""
        first, length = parts[0].keys, max(part.keys.shape[-2] for part in parts)
        self.dtype, self.device, self.is_initialized = first.dtype, first.device, True
        keys = [(part.keys, part.places) for part in parts]
        values = [(part.values, part.places) for part in parts]
        self._keys, self._values = (_aligned(states, length) for states in (keys, values))
        self.keys, self.values = self._keys[..., :length, :], self._values[..., :length, :]


def _capacity(length: int) -> int:
    return length + max(_LEAST_ROOM, int(length * _SHARE_OF_ROOM))


def _aligned(parts: Sequence[tuple[Tensor, Tensor]], length: int) -> Tensor:
    """A buffer [rows, heads, capacity, D] with states [n, heads, positions, D] at places [n]."""
    first = parts[0][0]
    rows = sum(len(places) for _, places in parts)
    buffer = first.new_empty(rows, first.shape[1], _capacity(length), first.shape[-1])
    for states, places in parts:
        begin = length - states.shape[-2]
        # A masked position counts for nothing only if it is finite.
        buffer[places, :, :begin] = 0
        buffer[places, :, begin:length] = states
    return buffer


def _longer(held: Tensor | None, like: Tensor, capacity: int) -> Tensor:
    """A buffer [B, heads, capacity, D] that begins with what is held."""
    batch = like.shape[0] if held is None else held.shape[0]
    buffer = like.new_empty(batch, like.shape[1], capacity, like.shape[-1])
    if held is not None:
        buffer[..., : held.shape[-2], :] = held
    return buffer


def growing_cache(config: Any) -> DynamicCache:
    """transformers' own cache for a model; layers that keep every position get room to grow."""
    cache = DynamicCache(config=config)
    cache.layers = [
        GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def grows(cache: DynamicCache) -> bool:
    """Whether every layer of a `growing_cache` keeps every position."""
    return all(isinstance(layer, GrowingLayer) for layer in cache.layers)
