"""Float32 matrix products of Megatron's linear layers with oneDNN, on CPUs where it is faster.

torch multiplies float32 matrices with MKL, which only uses AVX-512 on Intel CPUs. On one core of an
AMD EPYC with AVX-512 it reaches 100 GFLOP/s forward and backward, oneDNN 170 to 230. Both sum in
float32, in a different order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: With smaller weights a call of oneDNN costs more than it saves.
_FEWEST_NUMBERS = 100_000


def has_slow_products() -> bool:
    """Whether torch's own float32 products use only half of this CPU."""
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.6 has none
    return bool(
        found.get("avx512_f")
        and str(found.get("cpu_name", "")).startswith("AMD")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def use_onednn_products() -> None:
    """Have Megatron's linear layers multiply large float32 weights with `CpuProduct`."""
    from megatron.core.tensor_parallel import layers

    for name in (
        "linear_with_grad_accumulation_and_async_allreduce",
        "linear_with_frozen_weight",
    ):
        setattr(layers, name, _faster(getattr(layers, name)))


def _faster(stock: Any) -> Any:
    @functools.wraps(stock)
    def linear(input: Tensor, weight: Tensor, *arguments: Any, **options: Any) -> Tensor:
        # Layers pass everything by name. Products that communicate stay Megatron's.
        communicates = arguments or options["sequence_parallel"] or options["allreduce_dgrad"]
        defers = not communicates and options.get("grad_output_buffer") is not None
        if communicates or defers or not (_is_large(weight) and input.dtype == weight.dtype):
            return stock(input, weight, *arguments, **options)
        output: Tensor = CpuProduct.apply(input, weight)
        return output if options["bias"] is None else output + options["bias"]

    return linear


def _is_large(weight: Tensor) -> bool:
    is_float32 = weight.device.type == "cpu" and weight.dtype == torch.float32
    return is_float32 and weight.numel() >= _FEWEST_NUMBERS


class CpuProduct(torch.autograd.Function):
    """`inputs @ weight.t()` of inputs [..., K] and weight [M, K], with its gradients."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        # A frozen weight has no gradient that would need the inputs.
        ctx.save_for_backward(inputs if ctx.needs_input_grad[1] else None, weight)
        return _times_transposed(inputs, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            of_inputs = _times_transposed(grads[0], weight.t())
        if ctx.needs_input_grad[1]:
            rows, past = (x.reshape(-1, x.shape[-1]) for x in (grads[0], inputs))
            of_weight = _times_transposed(rows.t(), past.t())
        return of_inputs, of_weight


def _times_transposed(left: Tensor, right: Tensor) -> Tensor:
    """[..., K] times the transpose of [M, K]; both may be views with any strides."""
    if not (left.numel() and right.numel()):  # an expert without tokens; oneDNN refuses these
        return left @ right.t()
    return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
