"""Hugging Face weights in and out of Megatron-Core chunks, on every parallel layout.

What a family's tensors are called and how they are fused (Q, K and V interleaved by group, gate
above up, their cuts over tensor parallel ranks, vocabulary padding) comes from mbridge, which is
kept up with the models; writing these tables by hand would duplicate it. Transport is ours. mbridge
builds and loads whole models with Transformer Engine's layer spec, names parameters after that
spec, asks two object collectives per exported parameter, and edits its class-level tables when
embeddings are tied. So parameters of the local spec are first renamed to their Transformer Engine
names (`canonical_name`), mbridge's tables are used through a private subclass, each rank reads just
the tensors that it holds, and export gathers one tensor at a time with one exchange of names for
the whole model. mbridge is pinned: the methods used here are not its public API, and the round-trip
tests guard them.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from plugin.errors import WeightError
from plugin.megatron_backend.model.builder import padded_vocab_size
from plugin.megatron_backend.model.expert_tensors import (
    ExpertsByNumber,
    joined_experts,
    split_by_expert,
)
from plugin.megatron_backend.model.families import FAMILIES, is_extra_layer
from plugin.megatron_backend.model.mbridge_tables import ParallelStates, load_table
from plugin.megatron_backend.model.weight_files import HfDirectory
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step.rank_agreement import ErrorCollector

_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
#: Norms that Transformer Engine has inside the linear layer that follows them.
_LATENT_NORMS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_HF_LAYER = re.compile(r"^model\.layers\.(\d+)\.")

_PLAIN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: What an exported model takes along from the one it was trained from.
_COMPANIONS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.jinja", "chat_template.json", "generation_config.json"),
)


def gather_updated_weights(chunks: Sequence[Any]) -> None:
    """Complete the weights that the next forward pass would gather; a collective.

    With --overlap-param-gather an optimizer step leaves every rank with its own share updated.
    """
    for chunk in chunks:
        if getattr(chunk, "use_forward_hook", False):
            chunk.start_param_sync(force_sync=True)


def unwrap(chunk: torch.nn.Module) -> Any:
    """The `GPTModel` inside DDP or precision wrappers."""
    inner: Any = chunk
    while hasattr(inner, "module"):
        inner = inner.module
    return inner


def load_hf_weights(
    chunks: Sequence[torch.nn.Module],
    source: str | Path | Mapping[str, Tensor],
    groups: ParallelGroups,
) -> None:
    """Fill this rank's parameters from a Hugging Face directory (safetensors) or state dict.

    No communication: each rank reads what it holds. An optimizer that keeps its own copy of the
    weights must be told afterwards (`optimizer.reload_model_params()`).
    """
    models = [unwrap(chunk) for chunk in chunks]
    hf_config, bridge = models[0].hf_config, _bridge(models[0], groups)
    where = "the given state dict" if isinstance(source, Mapping) else str(source)
    family = FAMILIES[hf_config.model_type]
    weights: Mapping[str, Tensor] = (
        source if isinstance(source, Mapping) else HfDirectory(Path(source))
    )
    if isinstance(source, Mapping) and not family.fused_experts:
        weights = split_by_expert(source)
    names = [name for name in weights if not is_extra_layer(name, hf_config)]
    layers = {int(match.group(1)) for match in map(_HF_LAYER.match, names) if match}
    if layers != set(range(hf_config.num_hidden_layers)):
        raise WeightError(
            f"{where} holds {len(layers)} layers but the model has {hf_config.num_hidden_layers}; "
            "load weights that belong to the config"
        )
    unknown, _ = family.misfits(hf_config, weights)
    if unknown:
        raise WeightError(
            f"{where} holds {unknown[0]}, for which a {hf_config.model_type} model has no place "
            f"({len(unknown)} such tensors); load weights that belong to the config"
        )
    if family.fused_experts:
        weights = ExpertsByNumber(weights)
    for model in models:
        first_expert = groups.ep_rank * _experts_per_rank(model, groups)
        for name, parameter in model_tensors(model):
            canonical = canonical_name(name, model, first_expert)
            hf_names = bridge._weight_name_mapping_mcore_to_hf(canonical)
            if missing := [hf_name for hf_name in hf_names if hf_name not in weights]:
                raise WeightError(
                    f"{where} lacks {', '.join(missing)}, which {canonical} is made of; load "
                    "weights that belong to the config"
                )
            tensors = {hf_name: weights[hf_name] for hf_name in hf_names}
            for hf_name, tensor in tensors.items():
                if tensor.dtype not in _PLAIN_DTYPES:
                    raise WeightError(
                        f"{where}: {hf_name} is {tensor.dtype}, which is not a plain number; "
                        "dequantize the weights before they are loaded"
                    )
                if parameter.dtype is torch.float16:
                    _check_range(tensor, f"{where}: {hf_name}")
            with torch.no_grad():
                parameter.copy_(_local_shard(canonical, parameter, tensors, bridge, groups))


def _check_range(tensor: Tensor, what: str) -> None:
    """Refuse numbers that would become infinite in float16."""
    limit = torch.finfo(torch.float16).max
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    if largest > limit:
        raise WeightError(
            f"{what} holds {largest:.4g}, and the largest number of float16 is {limit:g}; use "
            "--train-dtype bfloat16 or float32"
        )


def model_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a chunk, adapters left out, and its routers' biases, which are not trained."""
    for name, parameter in model.named_parameters():
        if ".lora." not in name:
            yield name, parameter
    for name, tensor in model.named_buffers():
        if name.endswith(".router.expert_bias"):
            yield name, tensor


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
    bridge = _bridge(models[0], groups)
    local: dict[_Entry, Tensor] = {}
    for model in models:
        for name, parameter in model_tensors(model):
            canonical = canonical_name(name, model, first_expert=0)
            if canonical != "output_layer.weight" or not model.hf_config.tie_word_embeddings:
                local[_entry(canonical, parameter, groups)] = parameter
    stages: dict[int, Any] = {groups.pp_rank: list(local)}
    if groups.pp_size > 1:
        gathered: list[Any] = [None] * groups.pp_size
        dist.all_gather_object(gathered, list(local), group=groups.pp_group)
        stages = dict(enumerate(gathered))
    for stage, entries in stages.items():
        for entry in entries:
            own = local[entry] if stage == groups.pp_rank else None
            whole = _whole(entry, own, bridge, groups)
            if len(stages) > 1:
                whole = _on_all_stages(whole, stage, groups)
            parts = {entry.name: whole}
            if _GROUPED_EXPERT.search(entry.name):
                parts = _by_expert(entry.name, whole, models[0], groups)
            for name, tensor in parts.items():
                yield from zip(*bridge._weight_to_hf_format(name, tensor), strict=True)


def sends_own_part(groups: ParallelGroups) -> bool:
    """Whether this rank has a part of `export_own_part`: one of those with the same experts does.

    The first rank of a pipeline stage is one of them; it also has what is not an expert.
    """
    return groups.etp_rank == 0 and groups.collection.expt_dp.rank() == 0


def export_own_part(
    chunks: Sequence[torch.nn.Module], groups: ParallelGroups, *, round_bytes: int
) -> Iterator[tuple[str, Tensor] | None]:
    """Yield (name, whole tensor) of what this rank sends of the model; None ends a round.

    Collective: all ranks must iterate to the end. The first rank of a pipeline stage has what the
    stage's ranks share, every expert parallel rank its own experts: nothing is gathered but the
    tensor parallel shards of a tensor, by the ranks that have them. Where a checkpoint holds all
    experts of a layer in one tensor, the stage's first rank has to gather that one.

    round_bytes: with expert parallelism the layers of a stage come in rounds of about this size, so
        that the experts of a layer can be taken from all their ranks before the next layers
    """
    gather_updated_weights(chunks)
    models = [unwrap(chunk) for chunk in chunks]
    bridge = _bridge(models[0], groups)
    fuses = FAMILIES[models[0].hf_config.model_type].fused_experts
    is_first = groups.dp_rank == 0 and groups.cp_rank == 0
    has_experts = groups.collection.expt_dp.rank() == 0
    for tensors in _rounds(models, groups, round_bytes):
        if is_first:
            for name, parameter in tensors:
                if not _GROUPED_EXPERT.search(name):
                    entry = _entry(name, parameter, groups)
                    whole = _joined(entry, parameter, bridge, groups)
                    if groups.tp_rank == 0:
                        yield from zip(*bridge._weight_to_hf_format(name, whole), strict=True)
        if has_experts:
            experts = [entry for entry in tensors if _GROUPED_EXPERT.search(entry[0])]
            gather = _fused_experts if fuses else _own_experts
            yield from gather(experts, models[0], bridge, groups)
        yield None


def _rounds(
    models: Sequence[Any], groups: ParallelGroups, round_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors of this rank by canonical name, whole layers at a time; alike within a stage."""
    first_expert = groups.ep_rank * _experts_per_rank(models[0], groups)
    held: list[tuple[str, Tensor]] = []
    size, last = 0, None
    for model in models:
        for name, parameter in model_tensors(model):
            canonical = canonical_name(name, model, first_expert)
            if canonical == "output_layer.weight" and model.hf_config.tie_word_embeddings:
                continue
            match = _LAYER.match(canonical)
            layer = match and match.group(1)
            if held and layer != last and groups.ep_size > 1 and size >= round_bytes:
                yield held
                held, size = [], 0
            held.append((canonical, parameter))
            copies = groups.ep_size if _GROUPED_EXPERT.search(canonical) else groups.tp_size
            size, last = size + parameter.nbytes * copies, layer
    if held:
        yield held


def _own_experts(
    experts: Sequence[tuple[str, Tensor]], model: Any, bridge: Any, groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """The experts of this rank, on the first of the ranks that share them."""
    for name, parameter in experts:
        whole = _joined(_entry(name, parameter, groups), parameter, bridge, groups)
        if groups.etp_rank == 0:
            yield from zip(*bridge._weight_to_hf_format(name, whole), strict=True)


def _fused_experts(
    experts: Sequence[tuple[str, Tensor]], model: Any, bridge: Any, groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """The experts of all ranks in one tensor per layer, on the stage's first rank."""

    def numbered() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in experts:
            whole = _whole(_entry(name, parameter, groups), parameter, bridge, groups)
            for part, tensor in _by_expert(name, whole, model, groups).items():
                yield from zip(*bridge._weight_to_hf_format(part, tensor), strict=True)

    for name, tensor in joined_experts(numbered(), model.config.num_moe_experts):
        if groups.etp_rank == 0 and groups.ep_rank == 0:
            yield name, tensor


def _by_expert(name: str, stacked: Tensor, model: Any, groups: ParallelGroups) -> dict[str, Tensor]:
    """The experts of all expert ranks, stacked in front, by their canonical names."""
    match = _GROUPED_EXPERT.search(name)
    assert match is not None
    per_rank = _experts_per_rank(model, groups)
    prefix, number = name[: match.start(3)], int(match.group(3)) % per_rank
    return {f"{prefix}{rank * per_rank + number}": own for rank, own in enumerate(stacked)}


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


def canonical_name(name: str, model: Any, first_expert: int) -> str:
    """A parameter's name in the whole model, in Transformer Engine's spelling.

    Layer numbers become global, and experts are counted from `first_expert`. The local spec's
    `layers.0.input_layernorm.weight` on the second of two 2-layer stages becomes
    `layers.2.self_attention.linear_qkv.layer_norm_weight`.
    """
    match = _LAYER.match(name)
    if match is None:
        return name
    layer = model.decoder.layers[int(match.group(1))]
    rest, is_latent = name[match.end() :], model.config.multi_latent_attention
    if is_latent and rest in _LATENT_NORMS:
        rest = _LATENT_NORMS[rest]
    elif rest == "input_layernorm.weight" and not is_latent:
        rest = "self_attention.linear_qkv.layer_norm_weight"
    elif rest == "pre_mlp_layernorm.weight" and not hasattr(layer.mlp, "router"):
        rest = "mlp.linear_fc1.layer_norm_weight"
    elif expert := _LOCAL_EXPERT.match(rest):
        number = first_expert + int(expert.group(1))
        rest = f"mlp.experts.{expert.group(2)}.{expert.group(3)}{number}"
    elif expert := _GROUPED_EXPERT.match(rest):
        number = first_expert + int(expert.group(3))
        rest = f"mlp.experts.{expert.group(1)}.{expert.group(2)}{number}"
    return f"decoder.layers.{layer.layer_number - 1}.{rest}"


def _experts_per_rank(model: Any, groups: ParallelGroups) -> int:
    return (model.config.num_moe_experts or 0) // groups.ep_size


def _bridge(model: Any, groups: ParallelGroups) -> Any:
    """mbridge's tables for this model; a subclass, because mbridge edits them when tied."""
    hf_config = model.hf_config
    base = load_table(FAMILIES[hf_config.model_type].weights)
    names = [f"{group}_{what}" for group in ("tp", "pp", "ep", "etp") for what in ("size", "rank")]
    states = ParallelStates(
        vpp_size=groups.vpp_size, **{name: getattr(groups, name) for name in names}
    )
    own_class = type(
        base.__name__,
        (base,),
        {
            "_DIRECT_MAPPING": dict(base._DIRECT_MAPPING),
            # mbridge's own config would be another one, and fails for configs of transformers 5
            "_build_config": lambda _self: model.config,
        },
    )
    # Some configs leave the width of a head to be computed.
    described = copy.copy(hf_config)
    if not model.config.multi_latent_attention:
        described.head_dim = model.config.kv_channels
    bridge = own_class(
        described,
        dtype=model.config.params_dtype,
        parallel_states=states,
        make_vocab_size_divisible_by=groups.tp_size,
    )
    bridge.vocab_size = hf_config.vocab_size
    bridge.padded_vocab_size = padded_vocab_size(hf_config.vocab_size, groups.tp_size)
    shared_name = "model.embed_tokens.weight" if hf_config.tie_word_embeddings else "lm_head.weight"
    bridge._DIRECT_MAPPING["output_layer.weight"] = shared_name
    return bridge


def _local_shard(
    canonical: str,
    parameter: Tensor,
    tensors: Mapping[str, Tensor],
    bridge: Any,
    groups: ParallelGroups,
) -> Tensor:
    """This rank's part of one parameter, cut out of the Hugging Face tensors that it is made of."""
    size, rank = groups.tp_size, groups.tp_rank
    if _GROUPED_EXPERT.search(canonical):
        size, rank = groups.etp_size, groups.etp_rank
    try:
        whole = bridge._weight_to_mcore_format(canonical, list(tensors.values()))
        shard = list(bridge._weight_split_across_tp(canonical, whole, parameter, size))[rank]
        if shard.shape == parameter.shape:
            return shard
        cause = None
    except (AssertionError, RuntimeError) as error:
        cause = error
    found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    raise WeightError(
        f"{found} does not fit {canonical}, of which this rank holds {list(parameter.shape)}; "
        "load weights that belong to the config"
    ) from cause


@dataclass(frozen=True)
class _Entry:
    """What every pipeline stage must know about a parameter to take part in its export.

    name: canonical; experts are numbered as on expert rank 0, so that all expert ranks agree on it
    whole_shape: once merged over tensor parallel ranks; experts have the expert rank in front
    """

    name: str
    whole_shape: tuple[int, ...]
    dtype: torch.dtype
    is_sharded: bool


def _entry(name: str, parameter: Tensor, groups: ParallelGroups) -> _Entry:
    shape = list(parameter.shape)
    if expert := _GROUPED_EXPERT.search(name):
        is_sharded = groups.etp_size > 1
        if is_sharded:
            shape[0 if expert.group(1) == "linear_fc1" else 1] *= groups.etp_size
        shape = [groups.ep_size, *shape]
    else:
        is_sharded = bool(getattr(parameter, "tensor_model_parallel", False))
        if is_sharded:
            shape[parameter.partition_dim] *= groups.tp_size  # type: ignore[attr-defined]
    return _Entry(name, tuple(shape), parameter.dtype, is_sharded)


def _whole(entry: _Entry, parameter: Tensor | None, bridge: Any, groups: ParallelGroups) -> Tensor:
    """A parameter merged over the ranks of its stage; empty memory for it where it is None.

    For an expert, those of all expert ranks are stacked in front.
    """
    if parameter is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.empty(entry.whole_shape, dtype=entry.dtype, device=device)
    whole = _joined(entry, parameter, bridge, groups)
    if _GROUPED_EXPERT.search(entry.name):
        whole = torch.stack(_all_gather(whole, groups.ep_group))
    return whole


def _joined(entry: _Entry, parameter: Tensor, bridge: Any, groups: ParallelGroups) -> Tensor:
    """A parameter joined over the tensor parallel ranks that have a shard of it.

    Adapters (`lora.py`) are added to it, unless they are switched off.
    """
    adapters = getattr(parameter, "lora", None)
    whole = parameter.detach() if adapters is None else adapters.merged(parameter)
    if entry.is_sharded:
        is_expert = _GROUPED_EXPERT.search(entry.name) is not None
        shards = _all_gather(whole, groups.etp_group if is_expert else groups.tp_group)
        if len(shards) > 1:
            whole = bridge._weight_merge_across_tp(entry.name, shards, parameter)
    return whole


def _on_all_stages(whole: Tensor, stage: int, groups: ParallelGroups) -> Tensor:
    """What pipeline stage `stage` has in `whole`, on every stage."""
    whole = whole.contiguous()
    source = dist.get_global_rank(groups.pp_group, stage)
    dist.broadcast(whole, src=source, group=groups.pp_group)
    return whole


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    tensor = tensor.contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


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
