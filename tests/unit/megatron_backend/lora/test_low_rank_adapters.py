"""Adapters in one process: what they compute, their gradients, and Transformer Engine's layers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from plugin.errors import WeightError
from plugin.megatron_backend.lora import peft
from plugin.megatron_backend.lora.adapters import Adapters, LowRank, Place, _add_adapters

ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
COLUMN = Place("column", ALONE, ALONE, is_expert=False, sequence_parallel=False)


def low_rank(name: str, weight: Tensor, rows: int) -> LowRank:
    made = LowRank(f"model.layers.0.self_attn.{name}", weight, rows, 2, COLUMN, seed=3)
    with torch.no_grad():
        made.lora_B.copy_(torch.randn(rows, 2, dtype=torch.float64))
    return made


def test_gradients_of_a_and_b_are_those_of_w_plus_ba() -> None:
    torch.manual_seed(0)
    # two groups; heads of 3 channels, two of queries to one of keys and values: rows q q k v, q q k v
    weight = torch.randn(2 * (6 + 3 + 3), 5, dtype=torch.float64)
    q, v = low_rank("q_proj", weight, 12), low_rank("v_proj", weight, 6)
    adapters = Adapters([q, None, v], [6, 3, 3], 2, COLUMN, scale=1.5)
    x, up = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 24, dtype=torch.float64)
    ((F.linear(x, weight) + adapters(x)) * up).sum().backward()
    found = [p.grad for p in adapters.parameters()]
    assert len(found) == 4

    whole = [p.detach().clone().requires_grad_() for p in (q.lora_A, q.lora_B, v.lora_A, v.lora_B)]
    rows_q, rows_v = [*range(6), *range(12, 18)], [*range(9, 12), *range(21, 24)]
    delta = torch.zeros_like(weight)
    delta = delta.index_add(0, torch.tensor(rows_q), 1.5 * whole[1] @ whole[0])
    delta = delta.index_add(0, torch.tensor(rows_v), 1.5 * whole[3] @ whole[2])
    (F.linear(x, weight + delta) * up).sum().backward()
    for mine, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-12, atol=1e-12)
    merged = adapters.merged(weight)
    torch.testing.assert_close(merged, (weight + delta).detach(), rtol=1e-6, atol=1e-6)


def test_a_is_drawn_by_name_between_the_bounds_of_peft_and_b_is_0() -> None:
    weight = torch.empty(8, 400)
    first, again, other = (
        LowRank(name, weight, 8, 16, COLUMN, seed=1)
        for name in ("a.q_proj", "a.q_proj", "b.q_proj")
    )
    assert torch.equal(first.lora_A, again.lora_A)
    assert not torch.equal(first.lora_A, other.lora_A)
    # uniform between -1/sqrt(inputs) and 1/sqrt(inputs) = 0.05, variance bound^2 / 3
    assert 0.049 < first.lora_A.abs().max() <= 0.05
    assert abs(float(first.lora_A.detach().var()) - 0.05**2 / 3) < 5e-5
    assert not first.lora_B.any()


class GroupedLinear(nn.Module):
    """Experts as Transformer Engine's grouped layer has them: weights `weight0`, `weight1`; rows by expert."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, x: Tensor, splits: Any) -> tuple[Tensor, None]:
        parts = zip(x.split([int(n) for n in splits]), self.weights, strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in parts]), None


def test_experts_of_one_grouped_layer_have_an_adapter_each() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(6, 5, dtype=torch.float64) for _ in range(3)]
    grouped: Any = GroupedLinear(weights)
    grouped.lora = nn.ModuleList(
        Adapters([low_rank("down_proj", weight, 6)], [6], 1, COLUMN, scale=2.0)
        for weight in weights
    )
    grouped.register_forward_hook(_add_adapters)
    x = torch.randn(7, 5, dtype=torch.float64)
    found, bias = grouped(x, torch.tensor([4, 0, 3]))  # the second expert has no token
    first, _, last = (
        weight + 2.0 * own.parts[0].lora_B @ own.parts[0].lora_A
        for weight, own in zip(weights, grouped.lora, strict=True)
    )
    expected = torch.cat([F.linear(x[:4], first), F.linear(x[4:], last)])
    torch.testing.assert_close(found, expected)
    assert bias is None


class NormAndLinear(nn.Module):
    """A layer with the norm before it inside, as Transformer Engine has it."""

    def __init__(self, weight: Tensor, gamma: Tensor, *, zero_centered_gamma: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.layer_norm_weight, self.eps = nn.Parameter(gamma), 1e-3
        self.zero_centered_gamma = zero_centered_gamma

    def normalized(self, x: Tensor) -> Tensor:
        gamma = self.layer_norm_weight + (1 if self.zero_centered_gamma else 0)
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * gamma

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(self.normalized(x), self.weight), None


def test_an_adapter_sees_what_a_layer_with_a_norm_inside_multiplies() -> None:
    for is_centered in (False, True):
        torch.manual_seed(0)
        weight, gamma = torch.randn(6, 5), torch.randn(5)
        linear: Any = NormAndLinear(weight, gamma, zero_centered_gamma=is_centered)
        own = LowRank("x.q_proj", weight, 6, 2, COLUMN, seed=3)
        nn.init.normal_(own.lora_B)
        linear.lora = Adapters([own], [6], 1, COLUMN, scale=1.0)
        linear.register_forward_hook(_add_adapters)
        x = torch.randn(3, 5)
        found, _ = linear(x)
        expected = linear.normalized(x) @ (weight + own.lora_B @ own.lora_A).t()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_nothing_of_a_peft_directory_stays_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(tensors: Any, file: Path, **_: Any) -> None:
        file.write_bytes(b"half of it")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(peft, "save_file", no_space)
    monkeypatch.setattr(peft, "export_adapters", lambda *_: [("a", torch.zeros(1))])
    settings: Any = SimpleNamespace(alpha=4.0, rank=2, targets=["q_proj"])
    groups: Any = SimpleNamespace(world_size=1)
    with pytest.raises(WeightError, match=r"adapters to .*/model failed: .*No space left"):
        peft.save_peft_directory(tmp_path / "model", [], settings, groups, None)
    assert list(tmp_path.iterdir()) == []
