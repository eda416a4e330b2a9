"""Programs say what a function does to each token, and refuse functions that mix tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from plugin.loss.token_program import OPERATIONS, NotSeparableError, TokenProgram, record_program

X = torch.tensor([0.5, -1.5, 2.0, 0.25, -0.75])
Y = torch.tensor([1.0, 2.0, -0.5, 0.0, 3.0])


def recorded(function: Callable[[Tensor, Tensor], Tensor]) -> TokenProgram:
    return record_program(lambda v: [function(v["x"], v["y"])], {"x": X.clone(), "y": Y.clone()})


def test_a_program_is_the_shortest_list_of_what_its_result_needs() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        (y * 3).exp()  # nothing depends on it
        return x.clamp(min=2.0)

    program = recorded(function)
    assert program.inputs == ("x",) and program.constants == (2.0,)
    assert [(s.operation, s.out, s.operands[:2]) for s in program.instructions] == [
        ("maximum", 2, (0, 1))
    ]
    # max(0.5, 2) = 2, max(7, 2) = 7
    assert program.run({"x": torch.tensor([0.5, 7.0])})[0].tolist() == [2.0, 7.0]


def in_place(x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    view = total.view(-1)
    view.add_(x, alpha=2.0)  # a write through a view is seen through the tensor
    total[:] = total.masked_fill_(y > 0, 4.0)
    return total + view


def with_gradient(x: Tensor, y: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    value = torch.sigmoid(leaf) * leaf.abs() + torch.tanh(leaf) * y + torch.maximum(leaf, y)
    value = value + leaf.clamp(-1, 1).exp() - leaf.square() / (1 + y.square())
    return torch.autograd.grad(value, leaf, torch.ones_like(value))[0]


def types(x: Tensor, y: Tensor) -> Tensor:
    keep = ((x > 0) & ~(y == 0)).long()
    return torch.where(keep.bool() | (x < -1), x.double(), 1.0 - y).float() * (1 - keep)


def functions(x: Tensor, y: Tensor) -> Tensor:
    positive = x.abs() + 1
    logs = positive.log() + positive.log1p() + x.expm1() + positive.sqrt() + positive.pow(1.5)
    return logs + torch.sign(x) * torch.minimum(x, y) - positive.reciprocal() + (x >= y).float()


@pytest.mark.parametrize("function", [in_place, with_gradient, types, functions])
def test_a_program_computes_what_the_function_computes_on_other_tokens_too(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    program = recorded(function)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 40, generator=generator).unbind()
    y[::7] = 0.0
    torch.testing.assert_close(program.run({"x": x, "y": y})[0], function(x, y).float())


MIXING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, y: x - x.sum(),
    "mean": lambda x, y: x * y.mean(),
    "cumsum": lambda x, y: x.cumsum(0),
    "shift": lambda x, y: torch.cat([x[1:], x[:1]]),
    "first token": lambda x, y: x - x[0],
    "flip": lambda x, y: x.flip(0),
    "sort": lambda x, y: x.sort().values,
    "outer product": lambda x, y: (x[:, None] * y[None, :]).diagonal(),
    "read back": lambda x, y: x * float(y[1]),
    "branch": lambda x, y: x if bool((y > 0).any()) else y,
    "index": lambda x, y: x[torch.tensor([1, 0, 2, 3, 4])],
    "position": lambda x, y: x * torch.arange(len(x)),
    "integers": lambda x, y: x.to(torch.int64).float(),
    "half precision": lambda x, y: x.to(torch.bfloat16).float(),
    "max": lambda x, y: x - x.max(),
    "matrix product": lambda x, y: torch.eye(len(x)) @ x,
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_or_leaves_the_tensors_is_refused(name: str) -> None:
    with pytest.raises(NotSeparableError):
        recorded(MIXING[name])


def test_the_kernel_knows_the_instructions_by_the_same_numbers() -> None:
    # The order of the enumeration in the C++ source is the order of the table.
    from plugin.logprobs.kernels.cpu_extension import SOURCE

    text = SOURCE.read_text().split("enum Operation : int32_t {")[1].split("}")[0]
    names = [name.strip().removeprefix("k").lower() for name in text.split(",")]
    assert names == list(OPERATIONS)
