"""Exact checksums of weights by their Hugging Face names, equal on both sides of a weight sync."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

#: Elements that are summed at once: a large tensor needs no second copy of itself.
_CHUNK = 1 << 20
_INTEGERS = {2: torch.int16, 4: torch.int32}

Checksums = Mapping[str, int]


def checksum(tensor: Tensor, dtype: torch.dtype) -> int:
    """Sum modulo 2^64 of the bit patterns in `dtype`, each times the odd number 2 * position + 1.

    An odd factor is invertible, so any one changed element changes the sum; the positions tell a
    transposed tensor or swapped rows from the right one.
    """
    flat = tensor.detach().reshape(-1)
    factors = 2 * torch.arange(min(_CHUNK, flat.numel()), device=flat.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(dtype)
        bits = part.view(_INTEGERS[dtype.itemsize]).to(torch.int64)
        total += (bits * factors[: len(bits)]).sum() + 2 * start * bits.sum()
    return int(total)


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
