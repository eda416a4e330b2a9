"""Hugging Face weights in and out of Megatron-Core chunks, under tensor, pipeline and expert parallelism.

What a family's tensors are called and how they are fused (Q, K and V interleaved by group, gate above up, their
cuts over tensor parallel ranks, vocabulary padding) comes from mbridge, which is kept up with the models;
writing these tables by hand would duplicate it. Transport is ours. mbridge builds and loads whole models with
Transformer Engine's layer spec, names parameters after that spec, asks two object collectives per exported
parameter, and edits its class-level tables when embeddings are tied. So parameters of the local spec are first
renamed to their Transformer Engine names (`canonical_name`), mbridge's tables are used through a
private subclass, each rank reads just the tensors that it holds, and export gathers one tensor at a
time with one exchange of names for the whole model. mbridge is pinned: the methods used here are not its public
API, and the round-trip tests guard them.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mbridge.core import LLMBridge
from mbridge.core.parallel_states import ParallelStates
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from plugin.errors import WeightError
from plugin.megatron_backend.model.builder import padded_vocab_size
from plugin.megatron_backend.parallel_groups import ParallelGroups

_BRIDGES: dict[str, type[LLMBridge]] = {
    "llama": LLaMABridge,
    "qwen3": Qwen3Bridge,
    "qwen3_moe": Qwen3MoEBridge,
}

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_HF_LAYER = re.compile(r"^model\.layers\.(\d+)\.")

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.jinja")


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
    """Fills this rank's parameters from a Hugging Face directory (safetensors) or state dict.

    No communication: each rank reads what it holds. An optimizer that keeps its own copy of the weights
    must be told afterwards (`optimizer.reload_model_params()`).
    """
    models = [unwrap(chunk) for chunk in chunks]
    bridge = _bridge(models[0], groups)
    weights: _Weights = (
        _StateDict(source) if isinstance(source, Mapping) else _Safetensors(Path(source))
    )
    _check_layer_count(weights, models[0].hf_config)
    with torch.no_grad():
        for model in models:
            for name, parameter in model.named_parameters():
                canonical = canonical_name(name, model, groups)
                parameter.copy_(_local_shard(canonical, parameter, weights, bridge, groups))


def export_hf_weights(
    chunks: Sequence[torch.nn.Module], groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, full tensor) of every Hugging Face parameter, complete on every rank.

    Collective: all ranks must iterate to the end. One tensor (per expert rank) is gathered at a time. A
    tensor may share memory with the model; copy it if it must outlive the next optimizer step.
    """
    models = [unwrap(chunk) for chunk in chunks]
    bridge = _bridge(models[0], groups)
    local = _local_parameters(models, groups)
    for stage, entries in enumerate(_gather_entries(list(local), groups)):
        for entry in entries:
            parameter = local[entry] if stage == groups.pp_rank else None
            yield from _export_one(entry, parameter, stage, bridge, groups)


def save_hf_checkpoint(
    directory: str | Path,
    chunks: Sequence[torch.nn.Module],
    groups: ParallelGroups,
    *,
    tokenizer_from: str | Path | None = None,
    shard_bytes: int = 4 * 1024**3,
) -> None:
    """Writes config and sharded safetensors that `transformers` loads; collective, rank 0 writes.

    The directory must not exist yet, or be empty; it appears complete or not at all. A failure to write
    is raised on every rank.
    """
    error: str | None = None
    writer = _Writer(Path(directory), shard_bytes) if groups.rank == 0 else None
    # Rank 0 keeps iterating after a failed write, so that nobody waits for it in a collective.
    for name, tensor in export_hf_weights(chunks, groups):
        if writer is not None and error is None:
            error = _message_of(writer.add, name, tensor)
    if writer is not None and error is None:
        hf_config = unwrap(chunks[0]).hf_config
        error = _message_of(writer.finish, hf_config, tokenizer_from)
    shared = [error]
    dist.broadcast_object_list(shared, src=0)
    if shared[0] is not None:
        raise WeightError(f"saving the model to {directory} failed on rank 0: {shared[0]}")


def canonical_name(name: str, model: Any, groups: ParallelGroups) -> str:
    """A parameter's name in the whole model, in Transformer Engine's spelling.

    Layer and expert numbers become global. The local spec's `layers.0.input_layernorm.weight` on the second
    of two 2-layer stages becomes `layers.2.self_attention.linear_qkv.layer_norm_weight`.
    """
    match = _LAYER.match(name)
    if match is None:
        return name
    layer = model.decoder.layers[int(match.group(1))]
    prefix, rest = f"decoder.layers.{layer.layer_number - 1}.", name[match.end() :]
    if rest == "input_layernorm.weight":
        rest = "self_attention.linear_qkv.layer_norm_weight"
    elif rest == "pre_mlp_layernorm.weight" and not hasattr(layer.mlp, "router"):
        rest = "mlp.linear_fc1.layer_norm_weight"
    return prefix + _with_global_expert(rest, model, groups)


def _with_global_expert(rest: str, model: Any, groups: ParallelGroups) -> str:
    if match := _LOCAL_EXPERT.match(rest):
        index, linear = int(match.group(1)), match.group(2)
    elif match := _GROUPED_EXPERT.match(rest):
        linear, index = match.group(1), int(match.group(2))
    else:
        return rest
    per_rank = model.config.num_moe_experts // groups.ep_size
    return f"mlp.experts.{linear}.weight{groups.ep_rank * per_rank + index}"


def _bridge(model: Any, groups: ParallelGroups) -> LLMBridge:
    """mbridge's tables for this model; a subclass, because mbridge edits class attributes when tied."""
    hf_config = model.hf_config
    base = _BRIDGES[hf_config.model_type]
    tables = {
        "_DIRECT_MAPPING": dict(base._DIRECT_MAPPING),
        # Qwen3-MoE's table lacks the dense layers that `mlp_only_layers` asks for.
        "_MLP_MAPPING": {**base._MLP_MAPPING, **LLaMABridge._MLP_MAPPING},
    }
    states = ParallelStates(
        tp_size=groups.tp_size,
        tp_rank=groups.tp_rank,
        pp_size=groups.pp_size,
        pp_rank=groups.pp_rank,
        vpp_size=groups.vpp_size,
        ep_size=groups.ep_size,
        ep_rank=groups.ep_rank,
        etp_size=groups.etp_size,
        etp_rank=groups.etp_rank,
    )
    bridge = type(base.__name__, (base,), tables)(
        hf_config,
        dtype=model.config.params_dtype,
        parallel_states=states,
        make_vocab_size_divisible_by=groups.tp_size,
    )
    bridge.vocab_size = hf_config.vocab_size
    bridge.padded_vocab_size = padded_vocab_size(hf_config.vocab_size, groups.tp_size)
    shared_name = "model.embed_tokens.weight" if hf_config.tie_word_embeddings else "lm_head.weight"
    bridge._DIRECT_MAPPING["output_layer.weight"] = shared_name
    return bridge


class _StateDict:
    """Weights in memory; accepts the fused expert tensors of transformers 5 models as well."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.where = "the given state dict"
        for name in [name for name in self.tensors if name.endswith(".mlp.experts.gate_up_proj")]:
            self._split_experts(name.removesuffix(".gate_up_proj"))

    def _split_experts(self, prefix: str) -> None:
        gate_up = self.tensors.pop(f"{prefix}.gate_up_proj")  # [experts, 2 * ffn, hidden]
        down = self.tensors.pop(f"{prefix}.down_proj")  # [experts, hidden, ffn]
        for expert in range(gate_up.shape[0]):
            gate, up = gate_up[expert].chunk(2)
            self.tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate
            self.tensors[f"{prefix}.{expert}.up_proj.weight"] = up
            self.tensors[f"{prefix}.{expert}.down_proj.weight"] = down[expert]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def get(self, name: str) -> Tensor:
        return self.tensors[name]


class _Safetensors:
    """Weights of a Hugging Face directory, read tensor by tensor."""

    def __init__(self, directory: Path) -> None:
        self.where = str(directory)
        if not directory.is_dir():
            raise WeightError(
                f"{directory} is not a directory; pass a local Hugging Face model directory"
            )
        self._files = sorted(directory.glob("*.safetensors"))
        if not self._files:
            raise WeightError(
                f"{directory} holds no *.safetensors file; convert the model with "
                "save_pretrained(safe_serialization=True)"
            )

    @cached_property
    def _open_file_of(self) -> dict[str, Any]:
        opened = [safe_open(file, framework="pt") for file in self._files]
        return {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._open_file_of

    def names(self) -> Iterable[str]:
        return self._open_file_of

    def get(self, name: str) -> Tensor:
        return self._open_file_of[name].get_tensor(name)


_Weights = _StateDict | _Safetensors


def _check_layer_count(weights: _Weights, hf_config: Any) -> None:
    layers = {int(match.group(1)) for match in map(_HF_LAYER.match, weights.names()) if match}
    if layers != set(range(hf_config.num_hidden_layers)):
        raise WeightError(
            f"{weights.where} holds {len(layers)} layers but the model has "
            f"{hf_config.num_hidden_layers}; load weights that belong to the config"
        )


def _local_shard(
    canonical: str,
    parameter: Tensor,
    weights: _Weights,
    bridge: LLMBridge,
    groups: ParallelGroups,
) -> Tensor:
    """This rank's part of one parameter, cut out of the Hugging Face tensors that it is made of."""
    hf_names = bridge._weight_name_mapping_mcore_to_hf(canonical)
    missing = [name for name in hf_names if name not in weights]
    if missing:
        raise WeightError(
            f"{weights.where} lacks {', '.join(missing)}, which {canonical} is made of; "
            "load weights that belong to the config"
        )
    is_expert = _GROUPED_EXPERT.search(canonical) is not None
    size, rank = (
        (groups.etp_size, groups.etp_rank) if is_expert else (groups.tp_size, groups.tp_rank)
    )
    tensors = [weights.get(name) for name in hf_names]
    try:
        whole = bridge._weight_to_mcore_format(canonical, tensors)
        shard = list(bridge._weight_split_across_tp(canonical, whole, parameter, size))[rank]
    except (AssertionError, RuntimeError) as error:
        raise _shape_error(canonical, parameter, hf_names, tensors) from error
    if shard.shape != parameter.shape:
        raise _shape_error(canonical, parameter, hf_names, tensors)
    return shard


def _shape_error(
    canonical: str, parameter: Tensor, hf_names: list[str], tensors: list[Tensor]
) -> WeightError:
    found = ", ".join(
        f"{name} {list(tensor.shape)}" for name, tensor in zip(hf_names, tensors, strict=True)
    )
    return WeightError(
        f"{found} does not fit {canonical}, of which this rank holds {list(parameter.shape)}; "
        "load weights that belong to the config"
    )


@dataclass(frozen=True)
class _Entry:
    """What every pipeline stage must know about a parameter to take part in its export."""

    name: str
    """Canonical name; experts are numbered as on expert rank 0, so that all expert ranks agree on it."""
    whole_shape: tuple[int, ...]
    """Shape once merged over tensor parallel ranks; experts have the expert rank in front."""
    dtype: torch.dtype
    is_sharded: bool


def _local_parameters(
    models: Sequence[Any], groups: ParallelGroups
) -> dict[_Entry, torch.nn.Parameter]:
    """This rank's parameters in model order, without the second copy of a tied embedding."""
    local: dict[_Entry, torch.nn.Parameter] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            canonical = canonical_name(name, model, groups)
            if canonical == "output_layer.weight" and model.hf_config.tie_word_embeddings:
                continue
            local[_entry(canonical, parameter, model, groups)] = parameter
    return local


def _entry(
    canonical: str, parameter: torch.nn.Parameter, model: Any, groups: ParallelGroups
) -> _Entry:
    shape = list(parameter.shape)
    match = _GROUPED_EXPERT.search(canonical)
    if match is None:
        is_sharded = bool(getattr(parameter, "tensor_model_parallel", False))
        if is_sharded:
            shape[parameter.partition_dim] *= groups.tp_size  # type: ignore[attr-defined]
    else:
        is_sharded = groups.etp_size > 1
        shape[0 if match.group(1) == "linear_fc1" else 1] *= groups.etp_size
        shape = [groups.ep_size, *shape]
        per_rank = model.config.num_moe_experts // groups.ep_size
        lowest = int(match.group(2)) - groups.ep_rank * per_rank
        canonical = f"{canonical[: match.start(2)]}{lowest}"
    return _Entry(canonical, tuple(shape), parameter.dtype, is_sharded)


def _gather_entries(own: Sequence[_Entry], groups: ParallelGroups) -> list[list[_Entry]]:
    """Per pipeline stage, what it exports, in the same order on every rank."""
    if groups.pp_size == 1:
        return [list(own)]
    everyone: list[Any] = [None] * groups.pp_size
    dist.all_gather_object(everyone, list(own), group=groups.pp_group)
    return everyone


def _export_one(
    entry: _Entry,
    parameter: torch.nn.Parameter | None,
    stage: int,
    bridge: LLMBridge,
    groups: ParallelGroups,
) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors of one parameter; `parameter` is None on stages that do not hold it."""
    match = _GROUPED_EXPERT.search(entry.name)
    whole = None
    if parameter is not None:
        whole = _merge_shards(entry, parameter, bridge, groups, is_expert=match is not None)
    whole = _from_stage(whole, stage, entry, groups)
    if match is None:
        yield from _hf_tensors(entry.name, whole, bridge)
        return
    per_rank = bridge.config.num_moe_experts // groups.ep_size
    for ep_rank, expert in enumerate(whole):
        number = ep_rank * per_rank + int(match.group(2))
        yield from _hf_tensors(f"{entry.name[: match.start(2)]}{number}", expert, bridge)


def _hf_tensors(name: str, whole: Tensor, bridge: LLMBridge) -> Iterator[tuple[str, Tensor]]:
    names, tensors = bridge._weight_to_hf_format(name, whole)
    yield from zip(names, tensors, strict=True)


def _merge_shards(
    entry: _Entry,
    parameter: torch.nn.Parameter,
    bridge: LLMBridge,
    groups: ParallelGroups,
    *,
    is_expert: bool,
) -> Tensor:
    """The parameter whole; for an expert, those of all expert ranks stacked in front."""
    tensor = parameter.detach()
    if entry.is_sharded:
        shards = _all_gather(tensor, groups.etp_group if is_expert else groups.tp_group)
        if len(shards) > 1:
            tensor = bridge._weight_merge_across_tp(entry.name, shards, parameter)
    return torch.stack(_all_gather(tensor, groups.ep_group)) if is_expert else tensor


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    tensor = tensor.contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def _from_stage(whole: Tensor | None, stage: int, entry: _Entry, groups: ParallelGroups) -> Tensor:
    """The merged tensor of pipeline stage `stage`, on all stages."""
    if whole is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        whole = torch.empty(entry.whole_shape, dtype=entry.dtype, device=device)
    if groups.pp_size > 1:
        whole = whole.contiguous()
        source = dist.get_global_rank(groups.pp_group, stage)
        dist.broadcast(whole, src=source, group=groups.pp_group)
    return whole


class _Writer:
    """Collects tensors into shards and makes the finished directory appear at once."""

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        self._directory = directory
        self._partial = directory.with_name(directory.name + ".partial")
        self._shard_bytes = shard_bytes
        self._shard: dict[str, Tensor] = {}
        self._names_by_shard: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a copy of one tensor; writes a shard whenever one is full."""
        if not self._total_bytes:
            self._start()
        # A copy: exported tensors may be views of the model, which safetensors refuses when they overlap.
        self._shard[name] = tensor.to("cpu", copy=True).contiguous()
        self._total_bytes += tensor.nbytes
        if sum(held.nbytes for held in self._shard.values()) >= self._shard_bytes:
            self._flush()

    def _start(self) -> None:
        if self._directory.exists() and any(self._directory.iterdir()):
            raise WeightError(f"{self._directory} exists and is not empty; choose a new directory")
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)

    def _flush(self) -> None:
        number = len(self._names_by_shard)
        save_file(self._shard, self._partial / f"shard-{number}", metadata={"format": "pt"})
        self._names_by_shard.append(sorted(self._shard))
        self._shard = {}

    def finish(self, hf_config: Any, tokenizer_from: str | Path | None) -> None:
        """Names the shards the way transformers expects, adds index, config and tokenizer."""
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
        _with_architecture(hf_config).save_pretrained(self._partial)
        for pattern in _TOKENIZER_FILES if tokenizer_from else ():
            for tokenizer_file in Path(str(tokenizer_from)).glob(pattern):
                shutil.copy(tokenizer_file, self._partial)
        if self._directory.exists():
            self._directory.rmdir()
        self._partial.rename(self._directory)


def _with_architecture(hf_config: Any) -> Any:
    """The config naming its model class, which inference engines need; one made by hand may not."""
    named = copy.deepcopy(hf_config)
    named.architectures = hf_config.architectures or [_ARCHITECTURES[hf_config.model_type]]
    return named


def _message_of(action: Callable[..., None], *args: Any) -> str | None:
    """Runs `action`; what went wrong as text, for the ranks that did not see it, or None."""
    try:
        action(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
