"""Large float32 layers that tensor parallel ranks share, whoever multiplies for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from plugin.megatron_backend.cpu_products import has_slow_products
from plugin.megatron_backend.parallel_groups import ParallelGroups

SIZE, WIDTH = 400, 600


def two_layers_on_rank(groups: ParallelGroups) -> tuple[str, dict[str, Tensor]]:
    """The first operator's gradient function, and this rank's part of outputs and gradients."""
    draw = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(*shape, generator=draw) / 20 for shape in ((WIDTH, SIZE), (SIZE, WIDTH))
    )
    inputs = torch.randn(5, 2, SIZE, generator=draw).requires_grad_()
    config = TransformerConfig(num_layers=1, hidden_size=SIZE, num_attention_heads=1)
    config.tensor_model_parallel_size = groups.tp_size
    options: dict[str, Any] = {
        "config": config,
        "init_method": torch.nn.init.zeros_,
        "bias": False,
        "skip_bias_add": False,
    }
    column = ColumnParallelLinear(SIZE, WIDTH, gather_output=False, **options)
    row = RowParallelLinear(WIDTH, SIZE, input_is_parallel=True, **options)
    with torch.no_grad():
        column.weight.copy_(first.chunk(groups.tp_size)[groups.tp_rank])
        row.weight.copy_(second.chunk(groups.tp_size, dim=1)[groups.tp_rank])
    between = column(inputs)[0]
    name = type(between.grad_fn).__name__
    output = row(between.relu())[0]
    output.square().sum().backward()
    found = {"output": output.detach(), "inputs": inputs.grad}
    found |= {"first": column.weight.grad, "second": row.weight.grad}
    return name, found  # type: ignore[return-value]


@pytest.mark.parametrize("ranks", [1, 2])
def test_outputs_and_gradients_of_split_layers_are_those_of_the_whole(
    run_ranks: Any, ranks: int
) -> None:
    parts = run_ranks(two_layers_on_rank, ranks, tensor_model_parallel_size=ranks)
    if has_slow_products():
        assert {name for name, _ in parts} == {"CpuProductBackward"}
    draw = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(*shape, generator=draw) / 20 for shape in ((WIDTH, SIZE), (SIZE, WIDTH))
    )
    first, second = (x.double().requires_grad_() for x in (first, second))
    inputs = torch.randn(5, 2, SIZE, generator=draw).double().requires_grad_()
    output = (inputs @ first.t()).relu() @ second.t()
    output.square().sum().backward()
    found = [part for _, part in parts]
    for name, want in (("output", output), ("inputs", inputs.grad)):
        for part in found:
            assert want is not None and (part[name] - want).abs().max() < 1e-5 * want.abs().max()
    for name, want, axis in (("first", first.grad, 0), ("second", second.grad, 1)):
        whole = torch.cat([part[name] for part in found], dim=axis)
        assert want is not None and (whole - want).abs().max() < 1e-5 * want.abs().max()
