"""Run stock Megatron-Core on CPU ranks over gloo.

Megatron-Core assumes one CUDA device per rank. Nothing in it needs one for correctness, so on a
machine without CUDA the few torch entry points that it touches are redirected to the CPU. Where
CUDA is available only what is missing for another reason is put in place: a name that
Megatron-Core takes from Transformer Engine.

Each entry of `SHIMS` says what it stands in for, which upstream code makes it necessary, when it is
missing, and what would allow the entry's removal. The patches are process-wide attributes rather
than a torch function mode: a mode is per thread (Ray runs actor methods on other threads) and slows
down every torch call. Each patch changes only calls that would raise on a machine without CUDA, or
that are slow there (`gloo_device`, `float32_products`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only

_CPU = torch.device("cpu")
_stand_in = _CPU
"""Where tensors go that Megatron-Core puts on its CUDA device."""

# Creation functions that take a `device` keyword; Megatron-Core passes "cuda" to several of them.
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones"),
    *(
        "ones_like",
        "rand",
        "randint",
        "randn",
        "randperm",
        "tensor",
        "tril_indices",
        "triu_indices",
    ),
    *("zeros", "zeros_like"),
)


@dataclass(frozen=True)
class Shim:
    """One redirection, with the reason for it and the condition that makes it superfluous."""

    name: str
    stands_in_for: str
    cause: str
    removed_when: str
    missing: Callable[[], bool]
    install: Callable[[], None]


class _Inert:
    """A CUDA stream or event on a device that runs everything in order: nothing to wait for."""

    device = _CPU

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def _nothing(self, *_: object, **__: object) -> None:
        pass

    record = wait = wait_event = wait_stream = synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: object) -> float:
        return 0.0

    def record_event(self, event: _Inert | None = None) -> _Inert:
        return event or _Inert()


def _lacks_cuda() -> bool:
    return not torch.cuda.is_available()


def _names_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    # A bare integer is a CUDA index in torch's device grammar.
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _stand_in
        # Pinned memory is what a GPU copies from; without one, torch refuses to allocate it.
        kwargs.pop("pin_memory", None)
        if _stand_in.type == "meta" and factory.__name__ == "tensor":
            # `torch.tensor` reads the numbers in a list below any mode; a meta tensor has none.
            args = tree_map_only(torch.Tensor, lambda t: 1.0 if t.is_meta else t, args)
        return factory(*args, **kwargs)

    return create


def _redirect_factories() -> None:
    # `with torch.device(...)` knows the factories by identity and remembers them when first asked:
    # asked later, it would know ours and ignore torch's own, which ours call.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _redirect_current_device() -> None:
    torch.cuda.current_device = lambda: _stand_in  # type: ignore[assignment,return-value]


def _keep_tensors_where_they_are() -> None:
    def stay(self: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return self

    torch.Tensor.cuda = stay  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]


def _make_streams_inert() -> None:
    def nothing(*_: object, **__: object) -> None:
        return None

    cuda, stream = cast(Any, torch.cuda), _Inert()
    cuda.Stream = cuda.Event = _Inert
    cuda.stream = contextlib.nullcontext
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.synchronize = cuda.empty_cache = cuda.set_stream = nothing
    cuda.nvtx.range_push = cuda.nvtx.range_pop = nothing


def _answer_tensor_type() -> None:
    original = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if args or kwargs:
            return answer
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("megatron.core.optimizer") and not answer.startswith("torch.cuda."):
            return answer.replace("torch.meta.", "torch.").replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = tensor_type  # type: ignore[method-assign,assignment]


def _share_cpu_generator() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(*_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    cuda: Any = torch.cuda
    cuda.get_rng_state = cuda.random.get_rng_state = get_state
    cuda.set_rng_state = cuda.random.set_rng_state = set_state
    cuda.manual_seed = cuda.random.manual_seed = manual_seed
    patched: Any = megatron_random
    patched._get_cuda_rng_state, patched._set_cuda_rng_state = get_state, set_state
    # Megatron warns when the CPU generator moves inside a fork; here it is the one that is forked.
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _lacks_gemm() -> bool:
    from megatron.core.transformer.moe import moe_utils

    return not hasattr(moe_utils, "te_general_gemm")


def _define_missing_gemm() -> None:
    from megatron.core.transformer.moe import moe_utils

    # Every router reads the name; None makes it multiply with torch.
    moe_utils.te_general_gemm = None


def _lacks_fp8() -> bool:
    from megatron.core.tensor_parallel import random as megatron_random

    return not hasattr(megatron_random, "FP8GlobalStateManager")


class _NoFp8:
    """Transformer Engine's answers where it is not in use."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _define_missing_fp8() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    patched: Any = megatron_random
    patched.FP8GlobalStateManager = _NoFp8
    for name in ("activation_recompute_forward", "fp8_autocast"):
        setattr(patched, name, lambda *_, **__: contextlib.nullcontext())


def _convert_split_sizes() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    original = moe_utils.maybe_move_tensor_to_cpu

    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = original(tensor, as_numpy=as_numpy, record_stream=record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = move


def _exchange_unequal_slices() -> None:
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = (
        mappings._gather_along_first_dim,
        mappings._reduce_scatter_along_first_dim,
    )

    def summed(whole: torch.Tensor, group: Any) -> torch.Tensor:
        if whole.numel():
            torch.distributed.all_reduce(whole, group=group)
        return whole

    @functools.wraps(gather)
    def gather_slices(
        input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        whole = input_.new_zeros((sum(output_split_sizes), *input_.shape[1:]))
        whole.split(output_split_sizes)[group.rank()].copy_(input_)
        return summed(whole, group)

    @functools.wraps(reduce_scatter)
    def reduce_scatter_slices(
        input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        whole = summed(input_.clone(), group)
        return whole.split(input_split_sizes)[group.rank()].clone()

    mappings._gather_along_first_dim = gather_slices
    mappings._reduce_scatter_along_first_dim = reduce_scatter_slices


class _HostCopies(TorchFunctionMode):
    """Tells copies in host memory from what they were copied from, where all of it is there."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return id(first) not in self._copies
        if func is torch.Tensor.pin_memory:
            return first
        result = args[0].clone() if func is torch.Tensor.cpu else func(*args, **(kwargs or {}))
        if func is torch.Tensor.cpu or (id(first) in self._copies and torch.is_tensor(result)):
            self._copies[id(result)] = result
        return result


def _offload_to_copies() -> None:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    original = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    @functools.wraps(original)
    def groups(self: Any, offload_fraction: float) -> Any:
        with _HostCopies():
            return original(self, offload_fraction)

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = groups


@functools.cache
def _gloo_devices(interfaces: str | None) -> list[Any]:
    """The devices that torch would make for GLOO_SOCKET_IFNAME, made once."""
    gloo: Any = torch.distributed.ProcessGroupGloo
    if not interfaces:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in interfaces.split(",")]


def _share_gloo_device() -> None:
    from torch.distributed import distributed_c10d

    gloo: Any = distributed_c10d.ProcessGroupGloo

    class SharedDeviceGloo(gloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any, **more: Any) -> None:
            options = gloo._Options()
            options._timeout = timeout
            options._devices = _gloo_devices(os.environ.get("GLOO_SOCKET_IFNAME"))
            for name, value in more.items():  # torch 2.14 adds enable_reconfigure, an option too
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo  # type: ignore[misc]


def _multiply_by_onednn() -> None:
    from plugin.megatron_backend.cpu_products import has_slow_products, use_onednn_products

    if has_slow_products():
        use_onednn_products()


SHIMS: tuple[Shim, ...] = (
    Shim(
        name="factories",
        stands_in_for="tensor creation with device='cuda' or in pinned memory",
        cause="schedules, optimizer, gradient clipping and buffers hard-code device='cuda'",
        removed_when="Megatron-Core takes the device from its configuration or from a parameter",
        missing=_lacks_cuda,
        install=_redirect_factories,
    ),
    Shim(
        name="current_device",
        stands_in_for="torch.cuda.current_device()",
        cause="used as the device argument of buffers, p2p receives and gathers",
        removed_when="the same change as for `factories`",
        missing=_lacks_cuda,
        install=_redirect_current_device,
    ),
    Shim(
        name="tensor_cuda",
        stands_in_for="Tensor.cuda() and Module.cuda()",
        cause="optimizer state loading and checkpoint loading move tensors to the GPU by name",
        removed_when="those calls become .to(device)",
        missing=_lacks_cuda,
        install=_keep_tensors_where_they_are,
    ),
    Shim(
        name="streams",
        stands_in_for="CUDA streams, events, synchronize, empty_cache and NVTX ranges",
        cause="p2p communication, DDP and the all-to-all MoE dispatcher order work with them",
        removed_when="Megatron-Core guards them with torch.cuda.is_available()",
        missing=_lacks_cuda,
        install=_make_streams_inert,
    ),
    Shim(
        name="tensor_type",
        stands_in_for="Tensor.type() answering 'torch.cuda.FloatTensor' to megatron.core.optimizer",
        cause="the optimizers sort parameters by that string and reject every other one",
        removed_when="the optimizers compare Tensor.dtype",
        missing=_lacks_cuda,
        install=_answer_tensor_type,
    ),
    Shim(
        name="rng",
        stands_in_for="the CUDA generator in the RNG tracker and in activation recomputation",
        cause="megatron.core.tensor_parallel.random saves and restores the CUDA generator only",
        removed_when="the tracker works on torch.Generator objects of any device",
        missing=_lacks_cuda,
        install=_share_cpu_generator,
    ),
    Shim(
        name="moe_gemm",
        stands_in_for="moe_utils.te_general_gemm",
        cause="megatron-core 0.16.1 defines the name only where Transformer Engine imports",
        removed_when="the oldest supported megatron-core defines it (0.19 does)",
        missing=_lacks_gemm,
        install=_define_missing_gemm,
    ),
    Shim(
        name="fp8_state",
        stands_in_for="FP8GlobalStateManager and two contexts of FP8 in tensor_parallel.random",
        cause="recomputing norms and latent projections asks for FP8, with any layers",
        removed_when="CheckpointWithoutOutput takes fp8=False for what it says",
        missing=_lacks_fp8,
        install=_define_missing_fp8,
    ),
    Shim(
        name="moe_split_sizes",
        stands_in_for="moe_utils.maybe_move_tensor_to_cpu on a tensor that is already there",
        cause="it turns split sizes into numbers, as all_to_all takes them, only from a GPU",
        removed_when="the as_numpy conversion no longer depends on is_cuda",
        missing=_lacks_cuda,
        install=_convert_split_sizes,
    ),
    Shim(
        name="unequal_slices",
        stands_in_for="all_gather and reduce_scatter of slices of different lengths",
        cause="the all-to-all MoE dispatcher with expert tensor parallelism; gloo takes none",
        removed_when="gloo accepts lists of tensors of different sizes",
        missing=_lacks_cuda,
        install=_exchange_unequal_slices,
    ),
    Shim(
        name="offloaded_optimizer",
        stands_in_for="Tensor.is_cuda, where the offloaded optimizer copies weights to the host",
        cause="what is not on a GPU it does not copy, and then it looks for the copies",
        removed_when="HybridDeviceOptimizer compares devices with that of its host copies",
        missing=_lacks_cuda,
        install=_offload_to_copies,
    ),
    Shim(
        name="gloo_device",
        stands_in_for="a gloo device for every process group",
        cause="each has a thread that wakes up 100 times a second, and Megatron makes 21 groups",
        removed_when="torch lets the groups of a process share a device",
        missing=_lacks_cuda,
        install=_share_gloo_device,
    ),
    Shim(
        name="float32_products",
        stands_in_for="torch's float32 matrix products in Megatron's linear layers, on AMD's CPUs",
        cause="torch multiplies with MKL, which uses AVX-512 on Intel's CPUs only",
        removed_when="torch multiplies float32 with oneDNN there, as it does bfloat16",
        missing=_lacks_cuda,
        install=_multiply_by_onednn,
    ),
)

_installed: set[str] = set()


@contextlib.contextmanager
def meta_mode() -> Iterator[None]:
    """In the body, what Megatron-Core puts on its CUDA device is on `meta`, for a plan of a job."""
    global _stand_in
    activate()
    _stand_in = torch.device("meta")
    try:
        yield
    finally:
        _stand_in = _CPU


def import_megatron() -> None:
    """Import Megatron-Core; without CUDA, with `torch.compile` left out of its fused functions.

    It decorates them when it is imported, which loads all of inductor, and on CPU no model uses
    them. Code that has imported Megatron before keeps what it has.
    """
    if torch.cuda.is_available():
        return
    compiler = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compiler


def activate() -> bool:
    """Install what is missing, once per process; return whether it runs on the CPU runtime."""
    for shim in SHIMS:
        if shim.name not in _installed and shim.missing():
            shim.install()
            _installed.add(shim.name)
    return not torch.cuda.is_available()
