"""A model as a Hugging Face directory: config, tokenizer and sharded safetensors."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from plugin.errors import WeightError
from plugin.megatron_backend.hf_weights.export import export_hf_weights
from plugin.megatron_backend.model.builder import unwrap
from plugin.megatron_backend.model.families import FAMILIES
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step.rank_agreement import ErrorCollector

#: What an exported model takes along from the one it was trained from.
_COMPANIONS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.jinja", "chat_template.json", "generation_config.json"),
)


def save_hf_checkpoint(
    directory: str | Path,
    chunks: Sequence[torch.nn.Module],
    groups: ParallelGroups,
    *,
    tokenizer_from: str | Path | None = None,
    shard_bytes: int = 4 * 1024**3,
    replace: bool = False,
) -> None:
    """Write config and sharded safetensors that `transformers` loads; collective, rank 0 writes.

    The directory must not exist yet, or be empty, unless `replace`; it appears complete or not at
    all. A failure to write is raised on every rank.

    tokenizer_from: model directory whose tokenizer and generation settings are copied
    """
    errors, writer = ErrorCollector(), None
    with errors.collecting():
        writer = _Writer(Path(directory), shard_bytes, replace) if groups.rank == 0 else None
    # Rank 0 keeps iterating after a failed write, so that nobody waits for it in a collective.
    for name, tensor in export_hf_weights(chunks, groups):
        with errors.collecting():
            if writer is not None and errors.error is None:
                writer.add(name, tensor)
    with errors.collecting():
        if writer is not None and errors.error is None:
            writer.finish(unwrap(chunks[0]).hf_config, tokenizer_from)
    failure = [errors.error and f"{type(errors.error).__name__}: {errors.error}"]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise WeightError(f"saving the model to {directory} failed on rank 0: {failure[0]}")


class _Writer:
    """Collects tensors into shards and makes the finished directory appear at once."""

    def __init__(self, directory: Path, shard_bytes: int, replace: bool) -> None:
        if not replace and directory.exists() and any(directory.iterdir()):
            raise WeightError(f"{directory} exists and is not empty; choose a new directory")
        self._directory, self._shard_bytes = directory, shard_bytes
        self._partial = directory.with_name(directory.name + ".partial")
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._shard: dict[str, Tensor] = {}
        self._names_by_shard: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a copy of one tensor; write a shard whenever one is full."""
        # Exported tensors may be views of the model, which safetensors refuses when they overlap.
        self._shard[name] = tensor.to("cpu", copy=True).contiguous()
        self._total_bytes += tensor.nbytes
        if sum(held.nbytes for held in self._shard.values()) >= self._shard_bytes:
            self._flush()

    def _flush(self) -> None:
        number = len(self._names_by_shard)
        save_file(self._shard, self._partial / f"shard-{number}", metadata={"format": "pt"})
        self._names_by_shard.append(sorted(self._shard))
        self._shard = {}

    def finish(self, hf_config: Any, tokenizer_from: str | Path | None) -> None:
        """Name the shards the way transformers expects; add index, config and tokenizer."""
        if self._shard:
            self._flush()
        count = len(self._names_by_shard)
        file_of: dict[str, str] = {}
        for number, names in enumerate(self._names_by_shard):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._partial / f"shard-{number}").rename(self._partial / file)
            file_of |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": file_of}
        (self._partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        # Inference engines need the model class, which a config made by hand may not name.
        named = copy.deepcopy(hf_config)
        named.architectures = hf_config.architectures or [
            FAMILIES[hf_config.model_type].architecture
        ]
        named.save_pretrained(self._partial)
        for pattern in _COMPANIONS if tokenizer_from else ():
            for companion in Path(str(tokenizer_from)).glob(pattern):
                shutil.copy(companion, self._partial)
        if self._directory.exists():
            replaced = self._directory.with_name(self._directory.name + ".replaced")
            self._directory.rename(replaced)
            self._partial.rename(self._directory)
            shutil.rmtree(replaced)
        else:
            self._partial.rename(self._directory)
