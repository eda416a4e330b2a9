"""Run real code on meta tensors: floats have a shape only, integers and masks are real.

Layouts, routes, split sizes and row indices decide which shapes exist, so they are computed; what
is multiplied with weights is not. An operation on a meta tensor gives a meta tensor, and its real
operands count by their shapes. The mode also tracks live memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from plugin.logprobs.lm_head_tiles import Tiles
from plugin.logprobs.separable_lm_head import separable_lm_head

_aten = torch.ops.aten
_META, _CPU = torch.device("meta"), torch.device("cpu")


class LiveMemory:
    """Bytes of storages that exist at the moment, by label, and at the peak."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.label = "activations"
        self.logits_width: int | None = None
        self._total = self._peak_total = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def track(self, tensor: Tensor) -> None:
        """Count the tensor's storage until it is freed, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or storage.nbytes() == 0:
            return
        size, label = storage.nbytes(), self._label_of(tensor)

        def freed(_: Any) -> None:
            del self._known[key]
            self.live[label] -= size
            self._total -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live[label] = self.live.get(label, 0) + size
        self._total += size
        if self._total > self._peak_total:
            self._peak_total, self.peak = self._total, dict(self.live)

    def _label_of(self, tensor: Tensor) -> str:
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == self.logits_width
        return "logits" if is_logits or _inside_lm_head() else self.label

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Label what is created in the body."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    def reset(self) -> dict[str, int]:
        """Return the peak since the last call, and start a new one from what is live now."""
        peak, self.peak, self._peak_total = self.peak, dict(self.live), self._total
        return peak


#: What the fused LM heads allocate here is tiles of logits, and their gradients.
_LM_HEAD = {
    function.__code__ for function in (Tiles.statistics, Tiles.gradients, separable_lm_head)
}


def _inside_lm_head() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _LM_HEAD:
        frame = frame.f_back
    return frame is not None


class MetaMode(TorchDispatchMode):
    """A mode in which floats on `meta` and real integers work together.

    matmul_flops: of matrix products; attention_flops: over all pairs of tokens of a row
    """

    active: MetaMode | None = None

    def __init__(self, memory: LiveMemory) -> None:
        super().__init__()
        self.memory = memory
        self.building = False
        self.matmul_flops = self.attention_flops = 0
        self._known_shapes: dict[Any, Any] = {}

    def __enter__(self) -> Self:
        MetaMode.active = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        MetaMode.active = None
        super().__exit__(*error)

    @contextmanager
    def meta_parameters(self) -> Iterator[None]:
        """In the body, floats created without a device are on `meta` too."""
        self.building = True
        try:
            yield
        finally:
            self.building = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors(args)
        if kwargs:
            tensors += _tensors(kwargs.values())
        if any(tensor.is_meta for tensor in tensors):
            result = self._without_data(func, args, kwargs, tensors)
        else:
            if func in _FACTORIES:
                whole = _makes_integers(func, args, kwargs)
                if whole or self.building or kwargs.get("device") == _META:
                    kwargs = {**kwargs, "device": _CPU if whole else _META}
            result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self.memory.track(result)
        elif isinstance(result, (tuple, list)):
            for leaf in result:
                if isinstance(leaf, Tensor):
                    self.memory.track(leaf)
        return result

    def _without_data(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        if func is _aten._local_scalar_dense.default:
            dtype = tensors[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is _aten._to_copy.default and kwargs.get("device") == _CPU:
            return torch.ones(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        if func in _NEW and _is_integer(kwargs.get("dtype")):
            return _NEW[func](*args[1:], dtype=kwargs["dtype"])
        if func in _LIKE and _is_integer(kwargs.get("dtype")):
            return _LIKE[func](args[0].shape, *args[1:], dtype=kwargs["dtype"])
        if func is _aten.masked_select.default and not args[1].is_meta:
            chosen = int(args[1].expand(torch.broadcast_shapes(*[a.shape for a in args])).sum())
            return args[0].new_empty(chosen)
        if func in _INDEXING:
            args = (args[0], [_as_indices(index) for index in args[1]], *args[2:])
        if func in _PRODUCTS:
            left, right = tensors[-2:] if func is _aten.addmm.default else tensors[:2]
            self.matmul_flops += 2 * left.numel() * right.shape[-1]
        if func._schema.is_mutable and func not in _RESHAPING:
            # Nothing is written: a real tensor cannot take values from a meta tensor.
            written = _written(func, args, kwargs)
            return written[0] if len(written) == 1 else tuple(written)
        return self._shaped(func, args, kwargs)

    def _shaped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of an operation, cached by the shapes of its arguments."""
        key = None
        if not _makes_views(func):
            key = (func, _key(args), _key(tuple(kwargs.items())))
            known = self._known_shapes.get(key)
            if known is not None:
                made = [
                    None if k is None else torch.empty_strided(*k[:2], dtype=k[2], device=_META)
                    for k in known[1]
                ]
                return made[0] if known[0] is None else known[0](made)
        if not all(tensor.is_meta for tensor in _tensors((*args, *kwargs.values()))):
            args, kwargs = tree_map_only(Tensor, _shape_of, (args, kwargs))
        result = func(*args, **kwargs)
        if key is not None:
            kind = type(result) if isinstance(result, (tuple, list)) else None
            leaves = [result] if kind is None else result
            if all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves):
                shapes = [
                    None if leaf is None else (leaf.shape, leaf.stride(), leaf.dtype)
                    for leaf in leaves
                ]
                self._known_shapes[key] = (kind, shapes)
        return result


@cache
def _makes_views(func: Any) -> bool:
    return any(argument.alias_info is not None for argument in func._schema.arguments)


def _key(value: Any) -> Any:
    """The part of an argument that decides the shapes of the results."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_key(item) for item in value])
    return type(value), value


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


_RESHAPING = {_aten.resize_.default, _aten.set_.source_Tensor, _aten.as_strided_.default}
_PRODUCTS = {_aten.mm.default, _aten.mm.out, _aten.addmm.default, _aten.bmm.default}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
_ARANGES = {_aten.arange.default, _aten.arange.start, _aten.arange.start_step}
_FACTORIES = {
    *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.zeros.default),
    *(_aten.ones.default, _aten.full.default, _aten.rand.default, _aten.randn.default),
    *(_aten.eye.default, *_ARANGES),
}
#: Factories that follow a tensor, and what makes real integers in their place.
_NEW: dict[Any, Any] = {
    _aten.new_empty.default: torch.zeros,
    _aten.new_zeros.default: torch.zeros,
    _aten.new_ones.default: torch.ones,
    _aten.new_full.default: torch.full,
}
_LIKE: dict[Any, Any] = {
    _aten.zeros_like.default: torch.zeros,
    _aten.empty_like.default: torch.zeros,
    _aten.ones_like.default: torch.ones,
    _aten.full_like.default: torch.full,
}


def _makes_integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a factory makes integers or a mask; `arange` and `full` by their arguments."""
    dtype = kwargs.get("dtype")
    if dtype is None and (func in _ARANGES or func is _aten.full.default):
        numbers = args if func in _ARANGES else args[1:2]
        return all(isinstance(number, int) for number in numbers)
    return _is_integer(dtype)


def _is_integer(dtype: torch.dtype | None) -> bool:
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def _as_indices(index: Tensor | None) -> Tensor | None:
    """A real mask as indices: their number decides a shape."""
    if index is None or index.is_meta or index.dtype is not torch.bool:
        return index
    return index.nonzero()[:, 0] if index.dim() == 1 else index


def _shape_of(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation changes in place."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = (
            kwargs.get(argument.name)
            if argument.kwarg_only
            else (args[place] if place < len(args) else kwargs.get(argument.name))
        )
        found += _tensors([value])
    return found
