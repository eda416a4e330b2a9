"""Deltas lead to the bits of a full version, or are known not to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from plugin.errors import DeltaError, WeightError
from plugin.weights.buckets import NO_WEIGHTS
from plugin.weights.checksums import bit_checksum
from plugin.weights.delta import DeltaBase, DeltaReader, SentCopy, by_kind, in_engine_dtype
from plugin.weights.tensor_layout import TensorSpec

State = dict[str, Tensor]


class Engine:
    """Takes versions into tensors of its own, in place."""

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self.held = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        self.version = NO_WEIGHTS

    def place_of(self, spec: TensorSpec) -> Tensor | None:
        return self.held.get(spec.name)

    def take(self, version: int, bucket: list[tuple[str, Tensor]]) -> None:
        def write(full: list[tuple[str, Tensor]]) -> None:
            for name, tensor in full:
                self.held[name].copy_(tensor)

        reader = DeltaReader(self.place_of, self.version)
        by_kind(write, reader)(bucket)
        reader.require_exact()
        self.version = version

    def equals(self, state: Mapping[str, Tensor]) -> bool:
        return all(
            bits_equal(self.held[name], t.to(self.held[name].dtype)) for name, t in state.items()
        )


def bits_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def sent(copy: SentCopy, version: int, state: State) -> list[tuple[str, Tensor]]:
    return [item for item in copy.remembered(version, state.items()) if item is not None]


def chunk_of(old: Tensor, new: Tensor) -> Tensor:
    """The chunk that leads from `old` to `new`."""
    copy = SentCopy(new.dtype)
    sent(copy, 0, {"w": old})
    [(_, chunk)] = copy.delta(1, 0, {"w": new}.items())
    return chunk


def test_positions_take_two_bytes_or_a_bit_or_nothing_whichever_is_least() -> None:
    old = torch.zeros(80_000, dtype=torch.bfloat16)

    def payload(changed: int) -> int:
        new = old.clone()
        new[:changed] = 1.0
        chunk = chunk_of(old, new)
        size = int(chunk[8:16].view(torch.int64))
        return chunk.numel() - 16 - -(-size // 8) * 8

    # 80,000 elements are 2 blocks of 65,536, whose counts take 4 bytes each; a bitmap is 10,000
    # bytes, and the tensor 160,000.
    assert payload(0) == 0
    assert payload(1_000) == 8 + 2 * 1_000 + 2 * 1_000
    assert payload(6_000) == 10_000 + 2 * 6_000
    assert payload(80_000) == 160_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.01, 0.3, 1.0])
def test_a_delta_leads_to_the_same_bits(dtype: torch.dtype, share: float) -> None:
    draw = torch.Generator().manual_seed(3)
    old = {
        "large": torch.randn(300, 701, generator=draw).to(dtype),
        "odd": torch.randn(3, 5, generator=draw).to(dtype),
        "vector": torch.randn(7, generator=draw).to(dtype),
        "none": torch.zeros(0, 4, dtype=dtype),
        "one": torch.zeros((), dtype=dtype),
    }
    changes = {n: torch.rand(t.shape, generator=draw) < share for n, t in old.items()}
    new = {n: torch.where(changes[n], -t - 1000, t) for n, t in old.items()}
    copy, engine = SentCopy(dtype), Engine(old)
    engine.take(4, sent(copy, 4, old))
    engine.take(5, copy.delta(5, 4, new.items()))
    assert engine.equals(new) and engine.version == copy.version == 5
    assert copy.changes.changed == sum(int(c.sum()) for c in changes.values())
    assert copy.changes.elements == 300 * 701 + 15 + 7 + 1


def test_signs_of_zeros_and_nans_count_as_bits() -> None:
    old = torch.tensor([0.0, 1.0, float("nan"), -0.0], dtype=torch.bfloat16)
    new = torch.tensor([-0.0, 1.0, float("nan"), -0.0], dtype=torch.bfloat16)
    copy, engine = SentCopy(torch.bfloat16), Engine({"w": old})
    engine.take(0, sent(copy, 0, {"w": old}))
    engine.take(1, copy.delta(1, 0, {"w": new}.items()))
    assert copy.changes.changed == 1 and engine.equals({"w": new})


def test_only_what_changes_in_the_dtype_of_the_engine_is_sent() -> None:
    # bfloat16 has 8 bits of significand: 1 + 2^-9 is 1, and 1 + 2^-7 is not.
    old = {"w": torch.ones(2, 2), "gate.weight": torch.ones(2, 2), "v": torch.ones(2)}
    new = {"w": torch.tensor([[1 + 2**-9, 1 + 2**-7], [1.0, 1.0]])}
    new |= {"gate.weight": torch.full((2, 2), 1 + 2**-9), "v": torch.full((2,), 1 + 2**-9)}
    copy = SentCopy(torch.bfloat16)
    engine = Engine({n: torch.ones(t.shape, dtype=torch.bfloat16) for n, t in old.items()})
    # An engine that computes routers in float32 gets all their bits, and so do vectors.
    engine.held["gate.weight"] = torch.ones(2, 2)
    engine.take(0, sent(copy, 0, old))
    engine.take(1, copy.delta(1, 0, new.items()))
    assert engine.equals(new)
    assert copy.changes.changed == 1 + 4 + 2
    assert torch.equal(engine.held["gate.weight"], new["gate.weight"])


@pytest.mark.parametrize("trainer", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_trainer_and_engine_may_have_different_dtypes(
    trainer: torch.dtype, engine_dtype: torch.dtype
) -> None:
    states = list(versions(3, trainer))
    copy = SentCopy(engine_dtype)
    engine = Engine({n: torch.zeros(t.shape, dtype=engine_dtype) for n, t in states[0].items()})
    engine.take(0, sent(copy, 0, states[0]))
    for version in (1, 2):
        engine.take(version, copy.delta(version, version - 1, states[version].items()))
        assert engine.equals(states[version])


def versions(count: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[State]:
    """Weights of a MoE layer and an embedding, of which a step changes some."""
    draw = torch.Generator().manual_seed(1)
    shapes = {"embed": (512, 24), "norm": (24,), "mlp.gate.weight": (8, 24)}
    shapes |= {f"experts.{e}.{p}": (32, 24) for e in range(8) for p in ("up", "down")}
    state = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    for number in range(count):
        yield {name: tensor.clone() for name, tensor in state.items()}
        for tensor in state.values():
            hit = torch.rand(tensor.shape, generator=draw) < (0.0, 0.003, 0.05, 0.9)[number % 4]
            tensor[hit] += torch.randn(int(hit.sum()), generator=draw).to(dtype)


def test_twenty_versions_are_equal_to_the_bit_also_through_a_copy() -> None:
    copy, engine = SentCopy(torch.bfloat16), None
    base = DeltaBase(torch.bfloat16)
    for version, state in enumerate(versions(20)):
        engine = engine or Engine(state)
        if version == 0:
            part = sent(copy, version, state)
        else:
            part = copy.delta(version, version - 1, state.items())
        engine.take(version, part)
        loaded: State = {}
        base.beginning(loaded.update)(part)  # type: ignore[arg-type]
        loaded.update(base.completed(version))
        assert engine.equals(state)
        assert loaded.keys() == state.keys()
        assert all(bits_equal(loaded[name], tensor) for name, tensor in state.items())


def test_a_chunk_is_damaged_if_any_bit_of_it_is() -> None:
    old, new = torch.zeros(50, 50), torch.zeros(50, 50)
    new[3, 4:30] = 2.5
    chunk = chunk_of(old, new)
    for place in range(0, chunk.numel(), 7):
        wrong = chunk.clone()
        wrong[place] ^= 1 << place % 8
        engine = Engine({"w": old})
        engine.version = 0
        with pytest.raises(DeltaError, match="damaged on its way"):
            engine.take(1, [("changes since version 0, chunk 0", wrong)])
        assert engine.equals({"w": old}) and engine.version == 0


def test_a_delta_on_other_weights_is_noticed() -> None:
    [first, second] = versions(2)
    copy, engine = SentCopy(torch.bfloat16), Engine(first)
    engine.take(0, sent(copy, 0, first))
    engine.held["experts.3.up"][7, 5] += 1
    with pytest.raises(DeltaError, match=r"1 parts of a delta .*first of them experts\.3\.up"):
        engine.take(1, copy.delta(1, 0, second.items()))


def test_a_delta_since_another_version_is_not_applied() -> None:
    [first, second] = versions(2)
    copy, engine = SentCopy(torch.bfloat16), Engine(first)
    sent(copy, 3, first)
    engine.take(2, list(first.items()))
    with pytest.raises(
        DeltaError, match="since version 3, chunk 0, where the engine has version 2"
    ):
        engine.take(4, copy.delta(4, 3, second.items()))
    assert engine.equals(first)
    with pytest.raises(WeightError, match=r"since weight version 3 .* copy is of 4"):
        copy.delta(5, 3, second.items())


def test_a_copy_that_was_left_half_written_starts_no_delta() -> None:
    [first, second] = versions(2)
    copy = SentCopy(torch.bfloat16)
    sent(copy, 0, first)
    half = copy.remembered(1, second.items())
    next(half)
    half.close()  # type: ignore[attr-defined]
    with pytest.raises(WeightError, match="a full version has to come first"):
        copy.delta(2, 1, second.items())


def test_a_bit_checksum_is_of_every_bit_and_of_its_place() -> None:
    # Words of 8 bytes times 1, 3, 5, ...: 7 * 1 + 2 * 3.
    assert bit_checksum(torch.tensor([7, 2])) == 13
    # The last word is filled up with zeros.
    assert bit_checksum(torch.tensor([7, 0, 2], dtype=torch.int32)) == 13
    assert bit_checksum(torch.tensor([-0.0])) != bit_checksum(torch.tensor([0.0]))
    whole = torch.arange(60, dtype=torch.bfloat16)
    assert bit_checksum(whole[3:20]) == bit_checksum(whole[3:20].clone())
    many = torch.randn(3 << 20)
    assert bit_checksum(many) == bit_checksum(many.clone())
    other = many.clone()
    other[-1], other[-2] = many[-2], many[-1]
    assert bit_checksum(many) != bit_checksum(other)


def test_what_engines_may_keep_in_float32_is_sent_as_it_is() -> None:
    def dtype_of(name: str, tensor: Tensor, engine: torch.dtype) -> torch.dtype:
        return in_engine_dtype(name, tensor, engine).dtype

    matrix, half = torch.zeros(2, 2), torch.float16
    assert dtype_of("model.layers.0.mlp.up_proj.weight", matrix, half) == half
    assert dtype_of("model.layers.0.mlp.gate_proj.weight", matrix, half) == half
    for name in ("mlp.gate.weight", "mlp.router.weight", "mlp.shared_expert_gate.weight"):
        assert dtype_of(name, matrix, half) == torch.float32
    assert dtype_of("norm.weight", torch.zeros(2), half) == torch.float32
    assert dtype_of("up.weight", matrix.bfloat16(), torch.float32) == torch.bfloat16
