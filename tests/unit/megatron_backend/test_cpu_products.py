"""Float32 products by oneDNN against float64, and which calls of Megatron's linear layers they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plugin.megatron_backend import cpu_products
from plugin.megatron_backend.cpu_products import CpuProduct

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)


def test_a_product_and_its_gradients_are_those_of_float64() -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(7, 3, 96, generator=draw).transpose(0, 1)  # Megatron's need not be dense
    weight, grad = torch.randn(50, 96, generator=draw), torch.randn(3, 7, 50, generator=draw)
    found, exact = [], []
    for results, dtype in ((found, torch.float32), (exact, torch.float64)):
        x, w = (t.detach().to(dtype).requires_grad_() for t in (inputs, weight))
        y = CpuProduct.apply(x, w) if dtype == torch.float32 else x @ w.t()
        y.backward(grad.to(dtype))
        results += [y.detach(), x.grad, w.grad]
    for one, other in zip(found, exact, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < 1e-6 * other.abs().max()


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    x, w = torch.randn(0, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    y = CpuProduct.apply(x, w)
    y.sum().backward()
    assert y.shape == (0, 6) and x.grad.shape == (0, 8)
    assert torch.equal(w.grad, torch.zeros(6, 8))


def test_a_second_derivative_is_refused_instead_of_wrong() -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    (once,) = torch.autograd.grad(CpuProduct.apply(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.square().sum().backward()


def test_a_torch_that_does_not_know_its_cpu_keeps_its_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not cpu_products.has_slow_products()


def test_a_frozen_weight_has_no_gradient_and_keeps_no_inputs() -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8)
    y = CpuProduct.apply(x, w)
    assert y.grad_fn.saved_tensors[0] is None
    y.sum().backward()
    assert torch.allclose(x.grad, w.sum(0).expand(4, 8), atol=1e-5)


def test_small_or_half_precision_weights_and_communication_stay_with_megatron(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def stock(input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        calls.append("stock")
        return input @ weight.t()

    linear = cpu_products._faster(stock)
    settings = {"bias": None, "allreduce_dgrad": False, "sequence_parallel": False}
    x, large, bias = torch.randn(2, 400), torch.randn(300, 400), torch.randn(300)
    assert torch.allclose(linear(x, large, **settings), x @ large.t(), atol=1e-4)
    with_bias = linear(x, large, **settings | {"bias": bias})
    assert torch.allclose(with_bias, x @ large.t() + bias, atol=1e-4)
    assert not calls
    linear(x, large[:200], **settings)  # 80,000 numbers
    linear(x.bfloat16(), large.bfloat16(), **settings)
    linear(x, large, **settings | {"sequence_parallel": True})
    linear(x, large, **settings | {"allreduce_dgrad": True})
    linear(x, large, **settings | {"grad_output_buffer": []})
    linear(x, large, None, False, False, False)
    assert calls == ["stock"] * 6
