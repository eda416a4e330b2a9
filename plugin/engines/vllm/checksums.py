"""Checksums of what one of vLLM's workers computes with, by the names of a Hugging Face checkpoint.

vLLM fuses tensors (queries, keys and values; gate and up), gives each worker a share of their rows
or columns, and on CPU packs them for its kernels and drops the original. Here every share is summed
with the positions that its elements have in the whole tensor, so that the shares of all workers add
up to the checksum of the tensor. What was packed is read through its kernel: products with unit
vectors are exact.

Experts, and everything that vLLM's classes hold in another form, are not reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from plugin.weights.checksums import Shares, partial_checksum

#: Unit vectors in one product.
_ROWS = 256

#: Name, number of the share among those of all workers, its first row and column, and the values;
#: and how many columns the whole tensor has.
_Share = tuple[str, int, int, int, Tensor, int]


def worker_checksums(model: nn.Module, dtype: torch.dtype) -> Shares:
    """Of every tensor that this worker has a known share of."""
    found: dict[str, dict[int, int]] = {}
    for name, number, row, column, values, columns in _shares(model):
        total = partial_checksum(values, dtype, row=row, column=column, columns=columns)
        found.setdefault(name, {})[number] = total
    return found


def _shares(model: Any) -> Iterator[_Share]:
    packed = getattr(model, "packed_modules_mapping", {})
    head = getattr(model, "lm_head", None)
    for name, module in model.named_modules():
        prefix, _, last = name.rpartition(".")
        if module is head and last != "embed_tokens":
            continue
        if isinstance(module, VocabParallelEmbedding):
            yield _rows_of_vocabulary(f"{name}.weight", module, module.weight)
        elif isinstance(module, (QKVParallelLinear, MergedColumnParallelLinear)):
            parts = packed.get(last, ())
            if last in ("qkv_proj", "gate_up_proj") and _is_plain(module):
                yield from _fused([f"{prefix}.{part}" for part in parts], module)
        elif isinstance(module, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)):
            if last in ("o_proj", "down_proj") and _is_plain(module):
                yield from _single(name, module)
        elif last.endswith("norm") and isinstance(getattr(module, "weight", None), Tensor):
            yield f"{name}.weight", 0, 0, 0, module.weight.view(-1, 1), 1
    if isinstance(head, VocabParallelEmbedding):
        yield _rows_of_vocabulary("lm_head.weight", head, weight_in_use(head))


def _is_plain(module: Any) -> bool:
    return isinstance(module.quant_method, UnquantizedLinearMethod)


def _rows_of_vocabulary(name: str, module: Any, weight: Tensor) -> _Share:
    first = module.shard_indices.org_vocab_start_index
    rows = module.shard_indices.org_vocab_end_index - first
    return (
        name,
        module.tp_rank if module.tp_size > 1 else 0,
        first,
        0,
        weight[:rows],
        weight.shape[1],
    )


def _fused(names: Iterable[str], module: Any) -> Iterator[_Share]:
    """Shares of tensors that are above each other in one: some rows of each."""
    sizes = [size // module.tp_size for size in module.output_sizes]
    numbers = [module.tp_rank] * len(sizes)
    if isinstance(module, QKVParallelLinear):
        # Workers share the heads of keys and values if there are more workers.
        numbers[1:] = [module.tp_rank // module.num_kv_head_replicas] * 2
    held = [("weight", weight_in_use(module))]
    if module.bias is not None:
        held.append(("bias", module.bias.view(-1, 1)))
    for kind, tensor in held:
        for name, number, part in zip(names, numbers, tensor.split(sizes), strict=True):
            yield f"{name}.{kind}", number, number * len(part), 0, part, part.shape[1]


def _single(name: str, module: Any) -> Iterator[_Share]:
    weight = weight_in_use(module)
    rank, size = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    rows, columns = weight.shape
    if isinstance(module, RowParallelLinear):
        yield f"{name}.weight", rank, 0, rank * columns, weight, columns * size
    elif isinstance(module, ReplicatedLinear):
        yield f"{name}.weight", 0, 0, 0, weight, columns
    else:
        yield f"{name}.weight", rank, rank * rows, 0, weight, columns


def weight_in_use(module: Any) -> Tensor:
    """[rows, columns] that a layer multiplies with; read through the kernel where it was packed."""
    kernel = getattr(module, "cpu_linear", None)
    if kernel is None or kernel is torch.nn.functional.linear:
        return module.weight
    weight: Tensor = module.weight
    columns = getattr(module, "input_size_per_partition", None) or module.embedding_dim
    products = []
    for first in range(0, columns, _ROWS):
        count = min(_ROWS, columns - first)
        unit = torch.zeros(count, columns, dtype=weight.dtype)
        unit[torch.arange(count), first + torch.arange(count)] = 1
        products.append(kernel(unit, weight, None))
    return torch.cat(products).t()
