"""Exact checksums of weights by their Hugging Face names, equal on both sides of a weight sync."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

#: Elements that are summed at once: a large tensor needs no second copy of itself.
_CHUNK = 1 << 20
_INTEGERS = {2: torch.int16, 4: torch.int32}

#: Makes the sum of a share on which two workers do not agree a wrong one.
_DIFFER = 0x5DEECE66D

Checksums = Mapping[str, int]
#: Sums of what one process holds of tensors, by the numbers of the shares.
Shares = Mapping[str, Mapping[int, int]]


def checksum(tensor: Tensor, dtype: torch.dtype) -> int:
    """Sum modulo 2^64 of the bit patterns in `dtype`, each times the odd number 2 * position + 1.

    An odd factor is invertible, so any one changed element changes the sum; the positions tell a
    transposed tensor or swapped rows from the right one.
    """
    flat = tensor.detach().reshape(-1)
    factors = 2 * torch.arange(min(_CHUNK, flat.numel()), device=flat.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = _bits(flat[start : start + _CHUNK], dtype)
        total += (bits * factors[: len(bits)]).sum() + 2 * start * bits.sum()
    return int(total)


def _bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Bit patterns in `dtype`; zeros have no sign, and what kernels take for 0 is 0."""
    values = values.to(dtype)
    is_zero = values.to(torch.float32).abs() < torch.finfo(torch.float32).tiny
    return values.masked_fill(is_zero, 0.0).view(_INTEGERS[dtype.itemsize]).to(torch.int64)


def bit_checksum(tensor: Tensor) -> int:
    """As `checksum`, of a tensor's bytes in words of 8, in whatever dtype: of every bit."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    factors = 2 * torch.arange(min(_CHUNK, -(-raw.numel() // 8)), device=raw.device) + 1
    for start in range(0, raw.numel(), 8 * _CHUNK):
        part = raw[start : start + 8 * _CHUNK]
        if part.numel() % 8 or part.storage_offset() % 8:
            part = torch.cat([part, part.new_zeros(-part.numel() % 8)])
        words = part.view(torch.int64)
        total += (words * factors[: len(words)]).sum() + 2 * (start // 8) * words.sum()
    return int(total)


def partial_checksum(
    values: Tensor, dtype: torch.dtype, *, row: int, column: int, columns: int
) -> int:
    """What a share [rows, columns] of a tensor adds to its checksum.

    row, column: of its first element in the tensor; columns: of the tensor
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    inner = 2 * (column + torch.arange(values.shape[1], device=values.device)) + 1
    step = max(1, _CHUNK // max(1, values.shape[1]))
    for start in range(0, values.shape[0], step):
        bits = _bits(values[start : start + step].contiguous(), dtype)
        rows = row + start + torch.arange(len(bits), device=values.device)
        total += (bits.sum(1) * (2 * columns * rows)).sum() + (bits.sum(0) * inner).sum()
    return int(total)


def joined(workers: Iterable[Shares]) -> dict[str, int]:
    """Checksums of the tensors whose shares the workers of an engine hold.

    Where two workers hold the same share and differ, the sum is not that of either.
    """
    shares: dict[str, dict[int, int]] = {}
    for worker in workers:
        for name, held in worker.items():
            known = shares.setdefault(name, {})
            for number, value in held.items():
                known[number] = value if known.get(number, value) == value else value + _DIFFER
    sums = {name: sum(held.values()) for name, held in shares.items()}
    return {name: (total + 2**63) % 2**64 - 2**63 for name, total in sums.items()}


def with_checksums(
    named_tensors: Iterable[tuple[str, Tensor] | None], dtype: torch.dtype, sums: dict[str, int]
) -> Iterator[tuple[str, Tensor] | None]:
    """Pass tensors on, with the checksum of each written to `sums`; None ends a round."""
    for item in named_tensors:
        if item is not None:
            sums[item[0]] = checksum(item[1], dtype)
        yield item


def differing(engine: Checksums, trainer: Checksums) -> list[str]:
    """Names of the tensors that both have and that differ.

    A tied LM head, which the trainer does not send, is compared with the trainer's embedding.
    """
    expected = dict(trainer)
    for name, value in trainer.items():
        if name.endswith("embed_tokens.weight"):
            expected.setdefault("lm_head.weight", value)
    common = engine.keys() & expected.keys()
    return sorted(name for name in common if engine[name] != expected[name])
