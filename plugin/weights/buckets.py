"""Weights in buckets of bounded size, and as safetensors bytes for Ray's object store.

Tensors have the names of a Hugging Face checkpoint.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

#: Version of an engine that has received no weights yet; the first real one is 0.
NO_WEIGHTS = -1
#: Size of the tensors that are on their way at the same time, unless one alone is larger.
BUCKET_BYTES = 256 << 20

#: How a safetensors header names what trainers export.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def cut_buckets(
    named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Lists of at most `bucket_bytes`, or of one tensor."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        if held and size + tensor.nbytes > bucket_bytes:
            yield held
            held, size = [], 0
        held.append((name, tensor.detach().contiguous()))
        size += tensor.nbytes
    if held:
        yield held


def pack_buckets(
    named_tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[bytes]:
    """Buckets as safetensors files."""
    for bucket in cut_buckets(named_tensors, bucket_bytes):
        # Copies: exported tensors may be views of each other, which safetensors refuses.
        yield safetensors.torch.save({name: t.to("cpu", copy=True) for name, t in bucket})


def bucket_entries(
    bucket: bytes | np.ndarray,
) -> Iterator[tuple[str, dict[str, Any], np.ndarray]]:
    """Name, safetensors header entry and bytes (a view) of every tensor of a packed bucket."""
    raw = np.frombuffer(bucket, np.uint8)
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    for name, entry in json.loads(raw[8:start].tobytes()).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, entry, raw[start + begin : start + end]


def read_bucket(bucket: bytes | np.ndarray) -> dict[str, Tensor]:
    """The tensors of a packed bucket as views of its memory, which may be read-only."""
    tensors = {}
    with warnings.catch_warnings():
        # torch warns of memory that it must not write to.
        warnings.simplefilter("ignore")
        for name, entry, raw in bucket_entries(bucket):
            data = torch.from_numpy(raw)
            tensors[name] = data.view(_DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors
