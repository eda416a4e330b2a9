"""Memory that a model has only while it is used."""

from __future__ import annotations

import pytest
import torch

from plugin.megatron_backend.offloading import TrainerMemory
from tests.held_bytes import bytes_held


def test_weights_have_memory_only_while_they_are_used() -> None:
    model = torch.nn.Linear(3, 2)
    want = model(torch.ones(3)).detach()
    memory = TrainerMemory([model], None)
    memory.offload(("weights",))
    for _ in range(2):
        assert bytes_held(memory.weights()) == 0
        with memory.used("weights"):
            assert bytes_held(memory.weights()) == (3 * 2 + 2) * 4
            assert torch.equal(model(torch.ones(3)), want)
    with pytest.raises(ZeroDivisionError), memory.used("weights"):
        _ = 1 / 0
    assert bytes_held(memory.weights()) == 0
