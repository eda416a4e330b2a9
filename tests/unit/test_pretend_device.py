"""The pretend device itself: it refuses the host's tensors and counts what waits for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.pretend_device import PretendDevice


def test_it_computes_with_gradients_and_waits_for_nothing() -> None:
    with PretendDevice() as pretend:
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=pretend.device).requires_grad_()
        weight = torch.ones(2, 1, device=pretend.device)
        with pretend.no_reads():
            torch.where(x @ weight > 4.0, x @ weight, 0.0).sum().backward()
        assert x.grad is not None and x.grad.device.type == "pretend"
        assert x.grad.cpu().tolist() == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.cat([x, torch.zeros(1)]),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: torch.where(torch.tensor([True, False, True]), x, 0.0),
    ],
)
def test_a_tensor_of_the_host_is_refused(mix: Callable[[Tensor], Tensor]) -> None:
    with PretendDevice() as pretend, pytest.raises(RuntimeError, match="a tensor of the host"):
        mix(torch.ones(3, device=pretend.device))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: torch.zeros(3).copy_(x),
    ],
)
def test_what_makes_the_host_wait_is_counted_with_its_place(
    read: Callable[[Tensor], object],
) -> None:
    with PretendDevice() as pretend:
        x = torch.ones(3, device=pretend.device)
        with (
            pytest.raises(AssertionError, match="the host waits for the device"),
            pretend.no_reads(),
        ):
            read(x)
