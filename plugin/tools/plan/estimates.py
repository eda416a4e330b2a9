"""GPUs by their data sheets, and the seconds and bytes that follow from a plan by formula.

Nothing here was measured. Times are for comparing layouts: a share of the GPU's peak for products,
link bandwidth for messages, nothing hidden but what --overlap-grad-reduce and
--overlap-param-gather hide.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plugin.config import JobConfig
from plugin.config.device_defaults import engine_dtype
from plugin.engines.expert_routes import RouteShape
from plugin.errors import ConfigError
from plugin.weights.expert_ways import expert_ways

if TYPE_CHECKING:
    from plugin.tools.plan.job_plan import JobPlan, RankKind

#: Share of the GPU's peak that matrix products and attention reach.
ASSUMED_UTILIZATION = 0.4
#: Share of an engine's GPU memory that weights and KV cache may take: vLLM's default.
ENGINE_MEMORY_SHARE = 0.9

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Gpu:
    """A GPU and its links.

    memory: bytes; tflops: dense bfloat16, 10^12 per second; link: bytes per second to GPUs of the
        same node, one direction; network: to other nodes, per GPU
    """

    name: str
    memory: int
    tflops: float
    link: float
    network: float


def _gpu(name: str, gib: float, tflops: float, link: float, network: float = 50) -> Gpu:
    return Gpu(name, int(gib * 2**30), tflops, link * 1e9, network * 1e9)


#: Memory: what torch can allocate from, as its out-of-memory errors state it ("has a total capacity
#: of ..."): H100 79.11 GiB (vllm-project/vllm issue 27508), H20 95.00 (modelscope/DiffSynth-Studio
#: issue 1238), RTX 4090 23.64 (ali-vilab/VGen issue 104), B200 178.35 (pytorch/ao pull request
#: 4002); others a little below nvidia-smi's total (A100 81,920 and 40,960 MiB, L40S 46,068 MiB in
#: modal-labs/modal-client pull request 2797).
#: FLOPs and links: data sheets of NVIDIA and AMD, dense (half of what is stated with sparsity) and
#: one direction of NVLink (A100 600, H100, H200 and H20 900, B200 1,800 GB/s in both), of MI300X's
#: Infinity Fabric (896 GB/s in both) or of PCIe 4.0 x16.
#: Public pages that repeat the makers' figures: A100 312 TFLOPS,
#: 300 + 300 GB/s, HGX B200 2,250, 2 x 900 (glennklockwood.com/garden/processors); H200 989, 900
#: (itkb.uw.cz); L40S 362.05, PCIe 4.0 with 64 GB/s in both (mullet.se); MI300X 896 in both
#: (gpu.blog). CUDA says of an A100 with 40 GB: 42,405,855,232 bytes (upb-pc2.atlassian.net).
#: Network: assumed, one port of 400 Gb/s per GPU, 200 or 100 with older and smaller ones.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40g", 39.4, 312, 300, 25),
        _gpu("a100-80g", 79.2, 312, 300, 25),
        _gpu("h100-80g", 79.1, 989, 450),
        _gpu("h200-141g", 139.8, 989, 450),
        _gpu("h20-96g", 95.0, 148, 450),
        _gpu("b200-180g", 178.4, 2250, 900),
        _gpu("l40s-48g", 44.4, 362, 32, 12.5),
        _gpu("rtx4090-24g", 23.6, 165, 32, 12.5),
        _gpu("mi300x-192g", 191.0, 1307, 448),
    )
}


def gpu_named(name: str) -> Gpu:
    """An entry of the table; a `ConfigError` that names the nearest for anything else."""
    if name in GPUS:
        return GPUS[name]
    near = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"--gpu {name} is not known; {hint}choose {', '.join(GPUS)}")


#: Megatron's names of groups -> ours
GROUP_NAMES = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "CONTEXT_PARALLEL_GROUP": "context",
    "DATA_PARALLEL_GROUP": "data",
    "DATA_PARALLEL_GROUP_WITH_CP": "data x context",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "optimizer",
    "EXPERT_MODEL_PARALLEL_GROUP": "expert",
    "EXPERT_DATA_PARALLEL_GROUP": "expert data",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "expert x expert tensor",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "expert x pipeline",
    "MODEL_PARALLEL_GROUP": "model",
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step; per planned stage.

    bubble: share of the step that a stage waits for others
    """

    compute: list[float]
    messages: list[float]
    step: float
    bubble: float
    balance: float


def group_span(config: JobConfig, name: str, world_size: int) -> tuple[int, int]:
    """(ranks, distance between neighbors) of a group, by Megatron's order of ranks."""
    tp, pp, cp = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.context_parallel_size,
    )
    ep, etp = config.expert_model_parallel_size, config.expert_tensor_parallel_size
    stage = world_size // pp
    spans = {
        "tensor": (tp, 1),
        "context": (cp, tp),
        "data": (stage // (tp * cp), tp * cp),
        "data x context": (stage // tp, tp),
        "pipeline": (pp, stage),
        "expert": (ep, etp),
        "expert x expert tensor": (ep * etp, 1),
        "expert data": (stage // (ep * etp), ep * etp),
    }
    return spans.get(name, (world_size, 1))


def message_seconds(plan: JobPlan, kind: RankKind, gpu: Gpu) -> dict[str, float]:
    """Seconds that one rank's messages of a step take on their links, one after the other.

    By what they are, such as `expert all_to_all over the network`. Without those between data
    parallel ranks where they are overlapped with computation.
    """
    found: dict[str, float] = {}
    fill = _mean_fill(plan)
    for (group, operation), (_, most) in kind.collectives.items():
        name = GROUP_NAMES.get(group, "world")
        if "data" in name and plan.config.overlap_grad_reduce:
            continue
        ranks, distance = group_span(plan.config, name, plan.world_size)
        if operation in ("send", "receive"):
            # Pairs of neighboring stages, also where Megatron sends through the world's group.
            ranks, distance = group_span(plan.config, "pipeline", plan.world_size)
        near = (ranks - 1) * distance < plan.config.ranks_per_node
        share = (ranks - 1) / max(1, ranks)
        factor = {
            "all_reduce": 2 * share,
            "all_gather": float(ranks - 1),
            "reduce_scatter": share,
            "all_to_all": share,
            "receive": 0.0,  # the same message as the neighbor's send
        }.get(operation, 1.0)
        what = f"{name} {operation} {'within nodes' if near else 'over the network'}"
        # Gradients and weights are as large as ever; the others grow with a microbatch's tokens.
        size = most if "data" in name else most * fill
        seconds = size * factor / (gpu.link if near else gpu.network)
        found[what] = found.get(what, 0.0) + seconds
    return found


def step_time(plan: JobPlan, gpu: Gpu) -> StepTime:
    """The slowest stage sets the pace; the pipeline fills and drains once per step."""
    rate = gpu.tflops * 1e12 * ASSUMED_UTILIZATION
    fill = _mean_fill(plan)
    compute = [kind.flops * fill / rate for kind in plan.stages]
    messages = [sum(message_seconds(plan, kind, gpu).values()) for kind in plan.stages]
    busy = [c + m for c, m in zip(compute, messages, strict=True)]
    stages = plan.config.pipeline_model_parallel_size
    chunks = plan.config.virtual_pipeline_model_parallel_size or 1
    waiting = (stages - 1) / (chunks * plan.batching.microbatches)
    step = max(busy) * (1 + waiting)
    return StepTime(
        compute, messages, step, waiting / (1 + waiting), max(busy) / (sum(busy) / len(busy))
    )


def _mean_fill(plan: JobPlan) -> float:
    """Tokens of the mean microbatch over those of the largest, which was planned."""
    if plan.config.virtual_pipeline_model_parallel_size:
        return 1.0  # the interleaved schedule wants all of one shape, so they are filled up
    room = plan.batching.microbatches * sum(plan.batching.largest)
    return min(1.0, max(plan.batching.tokens) / room)


def weight_sync(plan: JobPlan) -> dict[str, Any]:
    """Bytes of new weights for the engines, and their transport."""
    config = plan.config
    size = _BYTES[config.train_dtype]
    links = config.transport_traits.links
    if config.syncs_adapters:
        links += "; once, then adapters alone"
    of_ranks, of_engine = config.delta_copies
    copy = plan.total_parameters * _BYTES[engine_dtype(config, cuda=plan.gpu is not None)]
    return _expert_ways(plan, size) | {
        "trainer_host_bytes": of_ranks * copy,
        "engine_host_bytes": of_engine * copy,
        "bytes": plan.total_parameters * size,
        "transport": config.weight_transport,
        "links": links,
        "engines": config.num_rollout_engines,
        "largest_tensor_bytes": plan.model.vocab_size * plan.model.hidden_size * size,
    }


def _expert_ways(plan: JobPlan, size: int) -> dict[str, Any]:
    """Ways for the experts and what each costs; nothing where ranks do not share them."""
    config, described = plan.config, plan.model.to_dict()
    shape, ranks = RouteShape.of(described), config.expert_model_parallel_size
    if config.weight_transport != "broadcast" or not shape.layers or ranks == 1:
        return {}
    width = described.get("moe_intermediate_size") or described["intermediate_size"]
    one = 3 * described["hidden_size"] * width * size
    experts = len(shape.layers) * shape.experts * one
    ways = expert_ways(
        plan.total_parameters * size - experts,
        experts,
        stages=config.pipeline_model_parallel_size,
        ranks=ranks,
        owners=config.rollout_num_gpus_per_engine,
    )
    _, distance = group_span(config, "expert", plan.world_size)
    near = (ranks - 1) * distance < config.ranks_per_node
    found = {name: dict(vars(way)) for name, way in ways.items()}
    if plan.gpu is not None:
        network, link = plan.gpu.network, plan.gpu.link if near else plan.gpu.network
        for name, way in ways.items():
            found[name]["seconds"] = way.seconds(network, link)
    traits = config.engine_traits
    is_served = traits.asks_servers or traits.starts_servers is not None
    return {"expert_way": "gathered" if is_served else "own", "expert_ways": found}


def rollout_memory(plan: JobPlan) -> dict[str, Any]:
    """The KV cache of an engine and how many sequences it holds (formulas)."""
    config, model, gpu = plan.config, plan.model, plan.gpu
    width = _BYTES[engine_dtype(config, cuda=gpu is not None)]
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    heads, numbers = model.num_key_value_heads, 2 * model.num_key_value_heads * head_dim
    if getattr(model, "kv_lora_rank", None):
        # Latent attention caches one compressed vector for all heads, on every GPU.
        heads, numbers = 1, model.kv_lora_rank + model.qk_rope_head_dim
    per_token = model.num_hidden_layers * numbers * width
    gpus = getattr(config, "rollout_num_gpus_per_engine", 1)
    report: dict[str, Any] = {
        "kv_bytes_per_token": per_token,
        "gpus_per_engine": gpus,
        "weight_bytes_per_gpu": plan.total_parameters * width // gpus,
    }
    if gpu is None:
        return report
    # Key and value heads are shared out at most once each; beyond that they are copied.
    shards = min(gpus, heads)
    free = gpu.memory * ENGINE_MEMORY_SHARE - report["weight_bytes_per_gpu"]
    tokens = max(0, int(free / (per_token / shards)))
    longest = min(
        config.max_prompt_length + config.max_response_length, model.max_position_embeddings
    )
    return report | {
        "kv_tokens": tokens,
        "fits": free > per_token * longest / shards,
        "sequences_of_mean_length": int(tokens / plan.lengths.totals.mean()),
        "sequences_of_largest_length": tokens // longest,
    }
