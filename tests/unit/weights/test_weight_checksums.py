"""Checksums: equal for equal weights on both sides, different for anything else."""

from __future__ import annotations

import pytest
import torch

from plugin.weights import checksums as weight_checksums
from plugin.weights.checksums import (
    checksum,
    differing,
    joined,
    partial_checksum,
    with_checksums,
)
from tests.parallel.tiny_models import FAMILIES, hf_state_dict
from tests.unit.engines.tiny_engines import load, loaded_engine


def test_a_checksum_is_the_sum_of_bit_patterns_times_odd_numbers() -> None:
    # float32: 1.0 is 0x3F800000, 2.0 is 0x40000000; factors 1, 3, 5
    expected = 0x3F800000 * 1 + 0x40000000 * 3 + 0x3F800000 * 5
    assert checksum(torch.tensor([1.0, 2.0, 1.0]), torch.float32) == expected
    # bfloat16: 0x3F80 and 0x4000
    assert checksum(torch.tensor([1.0, 2.0]), torch.bfloat16) == 0x3F80 + 0x4000 * 3


def test_it_does_not_depend_on_chunks_or_memory_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(7, 11)
    whole = checksum(tensor, torch.float32)
    monkeypatch.setattr(weight_checksums, "_CHUNK", 10)
    assert checksum(tensor, torch.float32) == whole
    assert checksum(tensor.t().contiguous().t(), torch.float32) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_change_is_seen(dtype: torch.dtype) -> None:
    tensor = torch.randn(8, 8).to(dtype)
    sums = {checksum(tensor, dtype), checksum(tensor.t(), dtype), checksum(tensor.flip(0), dtype)}
    swapped = tensor[[1, 0, *range(2, 8)]]
    one = tensor.clone()
    one[3, 3] = torch.nextafter(one[3, 3], torch.tensor(10.0, dtype=dtype))
    sums |= {checksum(swapped, dtype), checksum(one, dtype), checksum(-tensor, dtype)}
    assert len(sums) == 6


def test_tensors_are_passed_on_with_the_ends_of_rounds() -> None:
    sums: dict[str, int] = {}
    items = [("a", torch.ones(1)), None, ("b", torch.zeros(1))]
    assert list(with_checksums(items, torch.float32, sums)) == items
    assert sums == {"a": 0x3F800000, "b": 0}


def test_a_tied_head_is_compared_with_the_embedding() -> None:
    trainer = {"model.embed_tokens.weight": 5, "x": 1}
    assert differing({"model.embed_tokens.weight": 5, "lm_head.weight": 5, "x": 1}, trainer) == []
    stale = {"model.embed_tokens.weight": 5, "lm_head.weight": 6, "x": 2}
    assert differing(stale, trainer) == ["lm_head.weight", "x"]
    assert differing({"lm_head.weight": 6}, {**trainer, "lm_head.weight": 6}) == []


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_has_the_checksums_of_what_it_was_sent(family: str, dtype: str) -> None:
    engine = loaded_engine(family, dtype=dtype)
    sent: dict[str, int] = {}
    state = hf_state_dict(FAMILIES[family](), 0)
    list(with_checksums(state.items(), getattr(torch, dtype), sent))
    own = engine.weight_checksums()
    assert own is not None and differing(own, sent) == []
    assert set(sent) <= set(own)
    load(engine, hf_state_dict(FAMILIES[family](), 1), version=1)
    other = engine.weight_checksums()
    assert other is not None and len(differing(other, sent)) > len(sent) / 2  # norms stay


def test_an_int8_engine_has_none() -> None:
    assert loaded_engine(quantization="int8").weight_checksums() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shares_of_workers_add_up_to_the_checksum_of_the_tensor(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_checksums, "_CHUNK", 20)
    tensor = torch.randn(12, 10).to(dtype)
    whole = checksum(tensor, dtype)

    def share(rows: slice, columns: slice) -> int:
        return partial_checksum(
            tensor[rows, columns], dtype, row=rows.start, column=columns.start, columns=10
        )

    upper, lower = share(slice(0, 7), slice(0, 10)), share(slice(7, 12), slice(0, 10))
    left, right = share(slice(0, 12), slice(0, 4)), share(slice(0, 12), slice(4, 10))
    assert joined([{"a": {0: upper}}, {"a": {1: lower}}]) == {"a": whole}
    assert joined([{"a": {0: left}, "b": {0: 5}}, {"a": {1: right}, "b": {0: 5}}]) == {
        "a": whole,
        "b": 5,
    }
    assert joined([{"a": {0: upper}}, {"a": {0: lower, 1: lower}}])["a"] != whole
    assert joined([{"b": {0: 5}}, {"b": {0: 6}}])["b"] not in (5, 6)


def test_zeros_of_both_signs_are_equal() -> None:
    zeros, signed = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
    assert checksum(zeros, torch.float32) == checksum(signed, torch.float32) == 0
