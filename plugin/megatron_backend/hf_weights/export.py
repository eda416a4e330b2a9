"""Weights out of Megatron-Core chunks by their Hugging Face names: all, a rank's part, or as files.

One tensor is gathered at a time, from the tensor parallel ranks, expert ranks and pipeline stages
that hold a part of it, and names are exchanged once for the whole model.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from plugin.errors import WeightError
from plugin.megatron_backend.checkpoint.directory import put_in_place
from plugin.megatron_backend.hf_weights.bridge import (
    GROUPED_EXPERT,
    LAYER,
    canonical_tensors,
    weight_bridge,
)
from plugin.megatron_backend.hf_weights.files import joined_experts
from plugin.megatron_backend.model.builder import (
    experts_per_rank,
    gather_updated_weights,
    unwrap,
)
from plugin.megatron_backend.model.families import FAMILIES
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step.rank_agreement import ErrorCollector


def export_hf_weights(
    chunks: Sequence[torch.nn.Module], groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of every Hugging Face parameter, complete on every rank.

    Collective: all ranks must iterate to the end. One tensor (per expert rank) is gathered at a
    time; where a checkpoint holds all experts of a layer in one tensor, that one is kept until it
    is complete. A tensor may share memory with the model; copy it if it must outlive the next
    update.
    """
    gather_updated_weights(chunks)
    models = [unwrap(chunk) for chunk in chunks]
    exported = _export(models, groups)
    if FAMILIES[models[0].hf_config.model_type].fused_experts:
        exported = joined_experts(exported, models[0].config.num_moe_experts)
    yield from exported


def _export(models: Sequence[Any], groups: ParallelGroups) -> Iterator[tuple[str, Tensor]]:
    bridge = weight_bridge(models[0], groups)
    local = {
        entry_of(name, parameter, groups): parameter
        for name, parameter, _ in canonical_tensors(models, groups, as_first_rank=True)
    }
    stages: dict[int, Any] = {groups.pp_rank: list(local)}
    if groups.pp_size > 1:
        gathered: list[Any] = [None] * groups.pp_size
        dist.all_gather_object(gathered, list(local), group=groups.pp_group)
        stages = dict(enumerate(gathered))
    for stage, entries in stages.items():
        for entry in entries:
            own = local[entry] if stage == groups.pp_rank else None
            whole = whole_tensor(entry, own, bridge, groups)
            if len(stages) > 1:
                whole = on_all_stages(whole, stage, groups)
            parts = {entry.name: whole}
            if GROUPED_EXPERT.search(entry.name):
                parts = _by_expert(entry.name, whole, models[0], groups)
            for name, tensor in parts.items():
                yield from zip(*bridge._weight_to_hf_format(name, tensor), strict=True)


def sends_own_part(groups: ParallelGroups) -> bool:
    """Whether this rank yields anything in `export_own_part`: one of those with the same experts.

    The first rank of a pipeline stage is one of them; it also has what is not an expert.
    """
    return groups.etp_rank == 0 and groups.collection.expt_dp.rank() == 0


def export_own_part(
    chunks: Sequence[torch.nn.Module],
    groups: ParallelGroups,
    *,
    round_bytes: int,
    gathers_experts: bool = False,
    described: bool = False,
) -> Iterator[tuple[str, Tensor] | None]:
    """Yield (name, whole tensor) of what this rank sends of the model; None ends a round.

    Collective: all ranks must iterate to the end. The first rank of a pipeline stage has what the
    stage's ranks share, every expert parallel rank its own experts: nothing is gathered but the
    tensor parallel shards of a tensor, by the ranks that have them. Where a checkpoint holds all
    experts of a layer in one tensor, the stage's first rank has to gather that one.

    round_bytes: with expert parallelism the layers of a stage come in rounds of about this size, so
        that the experts of a layer can be taken from all their ranks before the next layers. What
        the ranks share comes in a round of its own, because all of them gather it
    gathers_experts: for receivers that know one sender of a stage, its first rank gathers them
    described: tensors without memory, by no communication
    """
    if not described:
        gather_updated_weights(chunks)
    models = [unwrap(chunk) for chunk in chunks]
    joining = _Joining(weight_bridge(models[0], groups), groups, described)
    fuses = FAMILIES[models[0].hf_config.model_type].fused_experts
    is_first = groups.dp_rank == 0 and groups.cp_rank == 0
    has_experts = groups.collection.expt_dp.rank() == 0
    for tensors in _rounds(models, groups, round_bytes):
        if is_first:
            for name, parameter in tensors:
                if not GROUPED_EXPERT.search(name):
                    whole = joining.shards(entry_of(name, parameter, groups), parameter)
                    if groups.tp_rank == 0:
                        yield from joining.named(name, whole)
        if groups.ep_size > 1:
            yield None
        if has_experts:
            experts = [entry for entry in tensors if GROUPED_EXPERT.search(entry[0])]
            if fuses or gathers_experts:
                gathered = _gathered_experts(experts, models[0], joining)
                if fuses:
                    gathered = joined_experts(gathered, models[0].config.num_moe_experts)
                if groups.etp_rank == 0 and groups.ep_rank == 0:
                    yield from gathered
                else:
                    for _ in gathered:
                        pass
            else:
                yield from _own_experts(experts, joining)
        yield None


def _rounds(
    models: Sequence[Any], groups: ParallelGroups, round_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield this rank's tensors by canonical name, whole layers at a time.

    All ranks of a stage have the same rounds.
    """
    held: list[tuple[str, Tensor]] = []
    size, last = 0, None
    for name, parameter, _ in canonical_tensors(models, groups):
        match = LAYER.match(name)
        layer = match and match.group(1)
        if held and layer != last and groups.ep_size > 1 and size >= round_bytes:
            yield held
            held, size = [], 0
        held.append((name, parameter))
        copies = groups.ep_size if GROUPED_EXPERT.search(name) else groups.tp_size
        size, last = size + parameter.nbytes * copies, layer
    if held:
        yield held


@dataclass(frozen=True)
class _Joining:
    """Makes whole tensors of what ranks hold, or tensors without memory that are as large."""

    bridge: Any
    groups: ParallelGroups
    described: bool

    def shards(self, entry: Entry, parameter: Tensor) -> Tensor:
        """A parameter joined over tensor parallel ranks."""
        if not self.described:
            return joined_shards(entry, parameter, self.bridge, self.groups)
        shape = entry.whole_shape[1:] if GROUPED_EXPERT.search(entry.name) else entry.whole_shape
        return torch.empty(shape, dtype=entry.dtype, device="meta")

    def experts(self, entry: Entry, parameter: Tensor) -> Tensor:
        """An expert's parameter, with those of all expert ranks stacked in front."""
        if not self.described:
            return whole_tensor(entry, parameter, self.bridge, self.groups)
        return torch.empty(entry.whole_shape, dtype=entry.dtype, device="meta")

    def named(self, name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A whole tensor by its Hugging Face names."""
        return zip(*self.bridge._weight_to_hf_format(name, whole), strict=True)


def _own_experts(
    experts: Sequence[tuple[str, Tensor]], joining: _Joining
) -> Iterator[tuple[str, Tensor]]:
    """The experts of this rank, on the first of the ranks that share them."""
    for name, parameter in experts:
        whole = joining.shards(entry_of(name, parameter, joining.groups), parameter)
        if joining.groups.etp_rank == 0:
            yield from joining.named(name, whole)


def _gathered_experts(
    experts: Sequence[tuple[str, Tensor]], model: Any, joining: _Joining
) -> Iterator[tuple[str, Tensor]]:
    """The experts of all ranks, one by one."""
    for name, parameter in experts:
        whole = joining.experts(entry_of(name, parameter, joining.groups), parameter)
        for part, tensor in _by_expert(name, whole, model, joining.groups).items():
            yield from joining.named(part, tensor)


def _by_expert(name: str, stacked: Tensor, model: Any, groups: ParallelGroups) -> dict[str, Tensor]:
    """The experts of all expert ranks, stacked in front, by their canonical names."""
    match = GROUPED_EXPERT.search(name)
    assert match is not None
    per_rank = experts_per_rank(model, groups)
    prefix, number = name[: match.start(3)], int(match.group(3)) % per_rank
    return {f"{prefix}{rank * per_rank + number}": own for rank, own in enumerate(stacked)}


@dataclass(frozen=True)
class Entry:
    """What every pipeline stage must know about a parameter to take part in its export.

    name: canonical; experts are numbered as on expert rank 0, so that all expert ranks agree on it
    whole_shape: once merged over tensor parallel ranks; experts have the expert rank in front
    """

    name: str
    whole_shape: tuple[int, ...]
    dtype: torch.dtype
    is_sharded: bool


def entry_of(name: str, parameter: Tensor, groups: ParallelGroups) -> Entry:
    shape = list(parameter.shape)
    if expert := GROUPED_EXPERT.search(name):
        is_sharded = groups.etp_size > 1
        if is_sharded:
            shape[0 if expert.group(1) == "linear_fc1" else 1] *= groups.etp_size
        shape = [groups.ep_size, *shape]
    else:
        is_sharded = bool(getattr(parameter, "tensor_model_parallel", False))
        if is_sharded:
            shape[parameter.partition_dim] *= groups.tp_size  # type: ignore[attr-defined]
    return Entry(name, tuple(shape), parameter.dtype, is_sharded)


def whole_tensor(
    entry: Entry, parameter: Tensor | None, bridge: Any, groups: ParallelGroups
) -> Tensor:
    """A parameter merged over the ranks of its stage; uninitialized memory where it is None.

    For an expert, those of all expert ranks are stacked in front.
    """
    if parameter is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.empty(entry.whole_shape, dtype=entry.dtype, device=device)
    whole = joined_shards(entry, parameter, bridge, groups)
    if GROUPED_EXPERT.search(entry.name):
        whole = torch.stack(all_gathered(whole, groups.ep_group))
    return whole


def joined_shards(entry: Entry, parameter: Tensor, bridge: Any, groups: ParallelGroups) -> Tensor:
    """A parameter joined over the tensor parallel ranks that have a shard of it.

    Adapters are merged into it, unless they are switched off.
    """
    adapters = getattr(parameter, "lora", None)
    whole = parameter.detach() if adapters is None else adapters.merged(parameter)
    if entry.is_sharded:
        is_expert = GROUPED_EXPERT.search(entry.name) is not None
        shards = all_gathered(whole, groups.etp_group if is_expert else groups.tp_group)
        if len(shards) > 1:
            whole = bridge._weight_merge_across_tp(entry.name, shards, parameter)
    return whole


def on_all_stages(whole: Tensor, stage: int, groups: ParallelGroups) -> Tensor:
    """Return pipeline stage `stage`'s `whole` on every stage."""
    whole = whole.contiguous()
    source = dist.get_global_rank(groups.pp_group, stage)
    dist.broadcast(whole, src=source, group=groups.pp_group)
    return whole


def all_gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    tensor = tensor.contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


#: Files that an exported model gets from the one it was trained from.
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
    if writer is not None and errors.error is not None:
        writer.discard()
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

    def discard(self) -> None:
        """Remove what has been written."""
        shutil.rmtree(self._partial, ignore_errors=True)

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
        put_in_place(self._partial, self._directory)
