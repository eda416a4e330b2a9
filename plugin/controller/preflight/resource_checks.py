"""What a job needs of memory, files and disk, known within a second and before it starts.

Of a rank the least that it must hold, by the checkpoint's shapes: weights, gradients and optimizer
state of the mean rank, no activations. A job that is refused here cannot run; one that passes may
still be too large, which `megatron-tis plan` says.

Of Ray open files, shared memory, its object store and disk to spill to, estimated from the largest
batch that the flags allow. Too few files end a job in the middle with an error that names none of
its causes, so they are refused; a small store only makes it slow, so it is a warning, in one line:
value, constraint, fix.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from plugin.cluster.model_source import ModelSource
from plugin.config import JobConfig
from plugin.config.device_defaults import Capabilities, engine_dtype, on_device
from plugin.errors import ConfigError
from plugin.megatron_backend.hf_weights.files import HfDirectory
from plugin.megatron_backend.model.families import is_extra_layer
from plugin.weights.buckets import BUCKET_BYTES


@dataclass(frozen=True)
class LeastBytes:
    """Bytes of the mean rank between steps."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


#: Of a rank and an engine on one GPU: assumed, as in `megatron-tis plan`, for each of the two.
RESIDENT = 2 * (2 << 30)


@dataclass(frozen=True)
class Room:
    """Bytes of a GPU, or of this machine without one, and what is left of them.

    rank: beside its `LeastBytes`; engine: beside its `weights` and, without GPUs, the ranks
    versions: host memory in which a rank keeps the weights of earlier versions
    """

    memory: int
    rank: int
    engine: int
    weights: int
    versions: int = 0


@dataclass(frozen=True)
class WeightCounts:
    """Numbers of a whole model: in experts, which are cut by expert ranks, and elsewhere."""

    dense: int
    experts: int


def count_weights(shapes: Mapping[str, Sequence[int]]) -> WeightCounts:
    """Numbers of the tensors with these names and shapes."""
    dense = experts = 0
    for name, shape in shapes.items():
        if ".experts." in name:
            experts += math.prod(shape)
        else:
            dense += math.prod(shape)
    return WeightCounts(dense, experts)


def least_bytes(counts: WeightCounts, config: JobConfig, *, on_cuda: bool) -> LeastBytes:
    """The least that a rank of the job holds of a model with these weights."""
    config = on_device(config, Capabilities(cuda=on_cuda, transformer_engine=on_cuda))
    stage = config.world_size // config.pipeline_model_parallel_size
    parameters = gradients = optimizer = 0.0
    for numbers, cut in (
        (counts.dense, config.tensor_model_parallel_size),
        (counts.experts, config.expert_model_parallel_size * config.expert_tensor_parallel_size),
    ):
        held = numbers / (cut * config.pipeline_model_parallel_size)
        copies = stage / cut if config.use_distributed_optimizer else 1
        half = config.train_dtype != "float32"
        parameters += held * (2 if half else 4)
        if config.lora_rank:
            continue  # adapters are small beside the model, which has neither of these
        gradients += held * 4
        optimizer += held * config.state_bytes(half=half) / copies
    return LeastBytes(int(parameters), int(gradients), int(optimizer))


def refuse_what_cannot_fit(least: LeastBytes, memory: int, where: str) -> None:
    """Raise a `ConfigError` with the numbers if a rank's least does not fit into `memory` bytes."""
    if least.total <= memory:
        return
    gib = {
        name: f"{value / 2**30:.1f}"
        for name, value in (*vars(least).items(), ("total", least.total), ("memory", memory))
    }
    raise ConfigError(
        f"a rank holds at least {gib['total']} GiB ({gib['parameters']} of weights, "
        f"{gib['gradients']} of gradients, {gib['optimizer']} of optimizer state), and there are "
        f"{gib['memory']} GiB {where}; use more ranks with --use-distributed-optimizer, or raise "
        "--tensor-model-parallel-size, --pipeline-model-parallel-size or "
        "--expert-model-parallel-size; megatron-tis plan shows what each would save"
    )


def version_bytes(config: JobConfig, least: LeastBytes) -> int:
    """Host memory in which a rank keeps the weights of earlier versions; of adapters none."""
    return 0 if config.lora_rank else config.kept_weight_versions * least.parameters


def refuse_many_versions(config: JobConfig, needed: int, memory: int) -> None:
    """Raise a `ConfigError` if the earlier weights of a rank do not fit into `memory` bytes."""
    if needed <= memory:
        return
    raise ConfigError(
        f"--train-log-probs engine-version: every rank keeps the weights of "
        f"{config.kept_weight_versions} versions in host memory, {needed / 2**30:.1f} GiB, and "
        f"there are {max(0, memory) / 2**30:.1f} GiB for each of the {config.ranks_per_node} ranks "
        "of a node; lower --max-weight-staleness, or use --train-log-probs recompute"
    )


def refuse_two_models(least: LeastBytes, of_engine: int, memory: int) -> None:
    """Raise a `ConfigError` unless rank and engine can hold their weights on one GPU (--colocate).

    They do while weights are sent, beside the hand-over buffers. Gradients, optimizer state and the
    engine's cache are not on the GPU then.
    """
    needed = least.parameters + of_engine + BUCKET_BYTES + RESIDENT
    if needed > memory:
        raise ConfigError(
            f"--colocate: while new weights are sent, a GPU holds those of the rank "
            f"({_size(least.parameters)}) and of the engine ({_size(of_engine)}), buffers "
            f"({_size(BUCKET_BYTES)}) and what CUDA and NCCL take (about {_size(RESIDENT)}), and "
            f"it has {_size(memory)}; raise --rollout-num-gpus-per-engine, "
            "--tensor-model-parallel-size or --pipeline-model-parallel-size, or give the engines "
            "GPUs of their own"
        )


def check_memory(config: JobConfig, policy: ModelSource) -> Room | None:
    """What weights, gradients and optimizer state leave; refuses less than 0 of a rank.

    None where this machine does not tell: for the built-in model, and on a cluster.
    """
    if policy.directory is None or config.address is not None:
        return None
    on_cuda = torch.cuda.is_available()
    described = SimpleNamespace(**policy.hf_config)
    tied = {"lm_head.weight"} if policy.hf_config.get("tie_word_embeddings") else set()
    shapes = {
        name: shape
        for name, shape in HfDirectory(Path(policy.directory)).shapes().items()
        if name not in tied and not is_extra_layer(name, described)
    }
    counts = count_weights(shapes)
    least = least_bytes(counts, config, on_cuda=on_cuda)
    element = 4 if engine_dtype(config, cuda=on_cuda) == "float32" else 2
    weights = (counts.dense + counts.experts) * element
    ranks, versions = config.ranks_per_node, version_bytes(config, least)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host -= refuse_large_copies(config, weights, host)
    if on_cuda:
        memory = torch.cuda.get_device_properties(0).total_memory
        refuse_what_cannot_fit(least, memory, "on its GPU")
        refuse_many_versions(config, versions, host // ranks)
        of_engine = weights // config.rollout_num_gpus_per_engine
        if config.colocate:
            refuse_two_models(least, of_engine, memory)
        return Room(memory, memory - least.total, memory - of_engine, of_engine, versions)
    refuse_what_cannot_fit(
        least, host // ranks, f"of this machine's memory for each of its {ranks} ranks"
    )
    of_rank = host // ranks - least.total
    refuse_many_versions(config, versions, of_rank)
    weights *= 2  # an engine on CPU has them as they arrive, and packed
    left = (host - ranks * (least.total + versions)) // config.num_rollout_engines - weights
    return Room(host, of_rank - versions, max(0, left), weights, versions)


def refuse_large_copies(config: JobConfig, weights: int, memory: int) -> int:
    """Bytes of the copies that deltas are made from and applied to, or a `ConfigError`.

    weights: bytes of the model; memory: of this machine
    """
    of_ranks, of_engine = config.delta_copies
    copies = weights * (of_ranks + of_engine * config.num_rollout_engines)
    if copies > memory:
        raise ConfigError(
            f"--weight-sync delta keeps {copies / weights:.0f} copies of {_size(weights)} in host "
            f"memory ({of_ranks} of the trainer, {of_engine} of every engine), and this machine "
            f"has {_size(memory)}; use --weight-sync broadcast"
        )
    return copies


#: Of the driver and of Ray's own processes without any actor, and for each actor; as seen, doubled.
_FILES, _FILES_PER_ACTOR = 256, 16

#: Of a token in a batch: ids, masks, log-probs, advantages and versions, once from the engine and
#: once to the ranks.
_BYTES_PER_TOKEN = 64


@dataclass(frozen=True)
class RayMachine:
    """What the machine of the driver has for Ray.

    shared_memory: bytes of /dev/shm; None where there is none
    spill_free: free bytes where Ray writes what its object store cannot hold
    """

    shared_memory: int | None
    spill_free: int

    @classmethod
    def here(cls, spill_directory: Path) -> RayMachine:
        """Of this machine."""
        shm = Path("/dev/shm")
        return cls(
            shutil.disk_usage(shm).total if shm.is_dir() else None,
            shutil.disk_usage(spill_directory).free,
        )


def check_open_files(config: JobConfig) -> None:
    """Raise this process's limit of open files as far as it may; refuse a job that needs more.

    A private Ray inherits the limit. On a cluster it is that of `ray start`.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or limit == resource.RLIM_INFINITY:
        return
    if limit < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    refuse_few_files(config, most)


def refuse_few_files(config: JobConfig, limit: int) -> None:
    """Raise a `ConfigError` if a driver of this job needs more than `limit` open files."""
    engines = config.num_rollout_engines * config.rollout_num_gpus_per_engine
    needed = _FILES + _FILES_PER_ACTOR * (config.world_size + engines)
    if needed > limit:
        raise ConfigError(
            f"a process may open {limit} files here, and {config.world_size} ranks and {engines} "
            f"workers of engines need about {needed}; raise it with `ulimit -n 65536` (as root, or "
            "in /etc/security/limits.conf) in the shell of the job and before `ray start`"
        )


def rollout_bytes(config: JobConfig, route_shape: tuple[int, int, int] | None) -> int:
    """What the longest rollout that the flags allow has in Ray's object store, about.

    route_shape: (MoE layers, experts per token, experts) of a MoE model
    """
    samples = config.rollout_batch_size * config.n_samples_per_prompt
    per_token = _BYTES_PER_TOKEN
    if route_shape is not None and config.wants_rollout_routes:
        layers, topk, experts = route_shape
        each = 1 if experts <= 256 else 2
        per_token += 2 * layers * topk * (each + 4 * config.wants_route_weights)
    return samples * config.longest_sample * per_token


def store_warnings(
    config: JobConfig, needed: int, stores: Mapping[str, int], machine: RayMachine
) -> Iterator[str]:
    """What is too small on the way of a rollout of `needed` bytes; nothing if it all fits.

    stores: the object store of every node, by its address
    """
    address, store = min(stores.items(), key=lambda item: item[1])
    private = config.address is None
    if private and machine.shared_memory is not None and machine.shared_memory < store:
        yield (
            f"/dev/shm has {_size(machine.shared_memory)}, and Ray's object store of "
            f"{_size(store)} is in files of /tmp instead, which is slow; mount a larger one (a "
            f"container: --shm-size {math.ceil(store / 2**30)}g)"
        )
    if needed <= store:
        return
    change = "lower --rollout-batch-size or --max-response-length"
    if not private:
        wanted = f"{math.ceil(1.2 * needed / 1e9)}000000000"
        change = f"start Ray with --object-store-memory {wanted} on every node, or {change}"
    spills = "Ray writes the rest to disk, which is slow"
    if machine.spill_free < needed - store:
        spills = f"the disk that Ray writes the rest to has {_size(machine.spill_free)} left here"
    yield (
        f"a rollout has up to {_size(needed)} and Ray's object store on {address} "
        f"{_size(store)}: {spills}; {change}"
    )


def _size(number: int) -> str:
    gib = number / 2**30
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{number / 2**20:.0f} MiB"
