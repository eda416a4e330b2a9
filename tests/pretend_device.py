"""A device that is not the host, for tests on a machine without one.

Tensors on it hold a CPU tensor inside and compute with it, but behave like an accelerator's in the two ways that
matter: an operation that mixes them with tensors of the host raises, and everything that makes the host wait for
their values is counted. It is torch's PrivateUse1 device with a Python backend, named `pretend`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten

#: Operations whose result, or whose shape of a result, the host has to know.
READS = {
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.nonzero,
    aten.masked_select,
    aten.unique_consecutive,
    aten._unique2,
    aten.unique_dim,
    aten.bincount,
}


class PretendTensor(torch.Tensor):
    """A tensor on the pretend device; `held` is the CPU tensor that it computes with."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> PretendTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("pretend", 0),
        )
        tensor.held = held
        return tensor

    def __repr__(self, **_: Any) -> str:
        return f"PretendTensor({list(self.shape)}, {self.dtype})"

    @property  # type: ignore[misc]
    def data(self) -> PretendTensor:  # type: ignore[override]
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: PretendTensor) -> None:
        # Megatron gives a tensor the memory of another one this way.
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, _reads)


_reads: list[str] = []
_registered = False


class PretendDevice(TorchDispatchMode):
    """While active, tensors can be created on `pretend`; `reads` says where the host waited."""

    def __init__(self) -> None:
        _register()
        super().__init__()
        self.device = torch.device("pretend", 0)
        self.reads = _reads
        self.reads.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.reads)

    def __enter__(self) -> PretendDevice:
        # The threads of autograd's engine are counted once, perhaps before this device existed.
        self._one_thread = torch.autograd.set_multithreading_enabled(False)
        self._one_thread.__enter__()
        # `torch.tensor(..., device=...)` then makes a tensor of the host and moves it, which this mode sees.
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._lifted)
        self._one_thread.__exit__(*error)

    @contextmanager
    def no_reads(self) -> Iterator[None]:
        """Fail if the body makes the host wait for the device."""
        before = len(self.reads)
        yield
        assert len(self.reads) == before, "the host waits for the device:\n" + "\n".join(
            self.reads[before:]
        )


def _register() -> None:
    global _registered
    if not _registered:
        _setup_privateuseone_for_python_backend("pretend")
        # What other tests of this process ask every registered device for.
        torch.pretend.get_rng_state = lambda *_: torch.get_rng_state()
        torch.pretend.set_rng_state = lambda *_: None
        torch.pretend.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
        # torch's checkpoints do, once an accelerator is registered.
        stream = SimpleNamespace(synchronize=lambda: None)
        torch.pretend.current_stream = lambda *_: stream
        torch.pretend.stream = lambda *_: nullcontext()
        _registered = True


def _names_pretend(device: Any) -> bool:
    return device is not None and torch.device(device).type == "pretend"


def _run(func: Any, args: Any, kwargs: dict[str, Any], reads: list[str]) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    held = [leaf.held if isinstance(leaf, PretendTensor) else leaf for leaf in leaves]
    mine = [leaf for leaf in leaves if isinstance(leaf, PretendTensor)]
    asked = kwargs.get("device")
    if mine:
        _refuse_host_tensors(func, leaves)
        leaves_home = asked is not None and not _names_pretend(asked)
        if func is aten.copy_.default:
            leaves_home = not isinstance(args[0], PretendTensor)
        if func.overloadpacket in READS or _indexes_by_mask(func, args) or leaves_home:
            reads.append(_place(func))
    if _names_pretend(asked):
        held = ["cpu" if isinstance(leaf, torch.device) else leaf for leaf in held]
    inner_args, inner_kwargs = tree_unflatten(held, spec)
    results, spec = tree_flatten(func(*inner_args, **inner_kwargs))
    on_device = _names_pretend(asked) or (bool(mine) and asked is None)
    if func is aten.copy_.default:
        on_device = isinstance(args[0], PretendTensor)
    known = {id(leaf.held): leaf for leaf in mine}  # in-place operations return their argument

    def on_the_device(result: Any) -> Any:
        if not on_device or not torch.is_tensor(result):
            return result
        return known[id(result)] if id(result) in known else PretendTensor(result)

    return tree_unflatten([on_the_device(result) for result in results], spec)


def _refuse_host_tensors(func: Any, leaves: list[Any]) -> None:
    if func.overloadpacket in (aten._to_copy, aten.copy_):
        return  # the ways from one device to the other
    for leaf in leaves:
        on_host = torch.is_tensor(leaf) and not isinstance(leaf, PretendTensor)
        # A host tensor without dimensions is a number, as on CUDA.
        if on_host and leaf.dim() > 0:
            raise RuntimeError(
                f"{func}: a tensor of the host {list(leaf.shape)} meets tensors of the device"
            )


def _indexes_by_mask(func: Any, args: Any) -> bool:
    """Whether an index is a mask, whose number of hits is the shape of the result."""
    if func.overloadpacket is not aten.index:
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _place(func: Any) -> str:
    """The operation, and the innermost line of the package that caused it."""
    frames = [f for f in traceback.extract_stack() if "/plugin/" in f.filename]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return f"{func}{where}"
