"""Weights as safetensors buckets of bounded size, by the names of a Hugging Face checkpoint."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

#: Version of an engine that has received no weights yet; the first real one is 0.
NO_WEIGHTS = -1

#: How a safetensors header names what trainers export.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def pack_buckets(
    named_tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int = 256 << 20
) -> Iterator[bytes]:
    """Serialized buckets of at least one tensor and, if possible, at most `bucket_bytes` each."""
    held: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        if held and size + tensor.nbytes > bucket_bytes:
            yield safetensors.torch.save(held)
            held, size = {}, 0
        # A copy: exported tensors may be views of parameters, or of each other.
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if held:
        yield safetensors.torch.save(held)


def read_bucket(bucket: bytes | np.ndarray) -> dict[str, Tensor]:
    """The tensors of a bucket as views of its memory, which may be read-only."""
    raw = np.frombuffer(bucket, np.uint8)
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    header = json.loads(raw[8:start].tobytes())
    with warnings.catch_warnings():
        # torch warns of memory that it must not write to.
        warnings.simplefilter("ignore")
        data = torch.from_numpy(raw[start:])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = data[begin:end].view(_DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors
