"""What runs, but an expert would not do: one line each, only for a model of one's own.

What cannot work is refused elsewhere; what only measuring can tell is `megatron-tis plan`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from plugin.cluster.model_source import ModelSource
from plugin.config import JobConfig
from plugin.config.device_defaults import Capabilities, engine_dtype, on_device, trainer_dtype
from plugin.config.engines import SHARED_GPU_SHARE
from plugin.controller.preflight.resource_checks import RESIDENT, Room
from plugin.engines.choice import bytes_per_position, cpu_cache_bytes
from plugin.megatron_backend.cpu_products import has_slow_products

_PRETRAINING_LR = 1e-4
#: Of a GPU's memory, what vLLM takes by default.
_SHARE_OF_VLLM = 0.92
_RECOMPUTE = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 saves most"
)


@dataclass(frozen=True)
class Machine:
    """Where the ranks will run.

    multiplies_bfloat16: whether the CPU has instructions for it, and float32 is slower
    room: what models leave of its memory
    """

    on_cuda: bool
    multiplies_bfloat16: bool
    room: Room

    @classmethod
    def here(cls, room: Room) -> Machine:
        """The driver's."""
        found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.6 has none
        native = any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
        # oneDNN multiplies float32 as fast there.
        return cls(torch.cuda.is_available(), native and not has_slow_products(), room)


def advice(config: JobConfig, policy: ModelSource, machine: Machine | None) -> list[str]:
    """Lines for the terminal; none for the built-in model, whose flags are chosen.

    machine: None = not this one
    """
    if config.hf_checkpoint is None:
        return []
    lines = [_on_microbatches(config), _on_engines(config), _on_learning_rate(config)]
    if machine is not None:
        lines += [_on_dtypes(config, machine), _on_activations(config, policy, machine)]
        lines += [_on_cache(config, policy, machine), _on_shared_gpus(config, machine)]
    return [line for line in lines if line is not None]


def _on_shared_gpus(config: JobConfig, machine: Machine) -> str | None:
    """What is left of a GPU beside vLLM, and who needs it."""
    given = config.vllm_arguments()
    if not (config.colocate and machine.on_cuda and config.rollout_engine == "vllm"):
        return None
    if "kv_cache_memory_bytes" in given:
        return None
    share = float(given.get("gpu_memory_utilization", SHARED_GPU_SHARE))
    gpu = machine.room.memory
    left = (1 - share) * gpu
    told = (
        f"--colocate: vLLM takes {share:.0%} of a GPU's {gpu / 2**30:.0f} GiB while it "
        f"generates (gpu_memory_utilization in --vllm-args), and {left / 2**30:.1f} GiB are left "
        "for what stays: the CUDA contexts of rank and engine, NCCL's buffers"
    )
    if left < RESIDENT:
        told += f"; they take about {RESIDENT >> 30} GiB, so lower it"
    return told


def _on_dtypes(config: JobConfig, machine: Machine) -> str | None:
    trainer = trainer_dtype(config, cuda=machine.on_cuda)
    if trainer != "float32" and engine_dtype(config, cuda=machine.on_cuda) == "float32":
        return (
            f"--rollout-dtype float32 with a {trainer} trainer: engines take twice the memory and "
            "time, and their log-probs differ more from the trainer's; drop it"
        )
    if config.train_dtype == "auto" and not machine.on_cuda and machine.multiplies_bfloat16:
        return (
            "--train-dtype auto: float32, as on every CPU; this one multiplies bfloat16, with "
            "which a step takes about half the time: --train-dtype bfloat16"
        )
    return None


def _on_microbatches(config: JobConfig) -> str | None:
    budget = config.max_tokens_per_gpu
    if budget is None and config.micro_batch_size == 1 and config.responses_per_rollout > 1:
        return (
            "--micro-batch-size 1: a pass through the model for every sample; drop it, and "
            "--max-tokens-per-gpu auto fills microbatches"
        )
    if isinstance(budget, int) and budget < config.max_response_length:
        return (
            f"--max-tokens-per-gpu {budget} is less than one response may have "
            f"(--max-response-length {config.max_response_length}): longer samples are "
            "microbatches of their own and take more memory; use auto, or a larger number"
        )
    return None


def _on_activations(config: JobConfig, policy: ModelSource, machine: Machine) -> str | None:
    from plugin.megatron_backend.step.token_budget import activation_bytes_per_token

    budget = config.max_tokens_per_gpu
    tokens = config.max_response_length // config.context_parallel_size
    if isinstance(budget, int):
        tokens = max(tokens, budget)
    capabilities = Capabilities(cuda=machine.on_cuda, transformer_engine=machine.on_cuda)
    decided = on_device(config, capabilities)
    needed = tokens * activation_bytes_per_token(policy.as_config(), decided)
    if needed <= machine.room.rank:
        return None
    fix = "raise --context-parallel-size or --tensor-model-parallel-size"
    if config.recompute_granularity != "full":
        fix = _RECOMPUTE
    return (
        f"a microbatch of {tokens} tokens has about {needed / 2**30:.1f} GiB of activations, and a "
        f"rank has {machine.room.rank / 2**30:.1f} GiB for them; {fix}; megatron-tis plan computes "
        "it"
    )


def _on_cache(config: JobConfig, policy: ModelSource, machine: Machine) -> str | None:
    """On the keys and values of all responses that an engine of this process may have at once."""
    if config.rollout_engine not in ("transformers", "vllm"):
        return None
    width = bytes_per_position(policy.hf_config, engine_dtype(config, cuda=machine.on_cuda))
    width //= config.rollout_num_gpus_per_engine
    positions = policy.hf_config["max_position_embeddings"]
    longest = min(config.longest_sample, positions)
    rows = config.rollout_max_batch
    if not config.async_rollouts:
        rows = min(rows, math.ceil(config.responses_per_rollout / config.num_rollout_engines))
    room, more = machine.room.engine, ""
    if config.rollout_engine == "vllm":
        context = width * min(config.max_context_length or positions, positions)
        room, more = _room_in_vllm(config, context, machine)
        if room > machine.room.engine:
            return (
                f"vLLM takes {room / 2**30:.1f} GiB for keys and values, and the ranks and its "
                f"weights leave {machine.room.engine / 2**30:.1f} GiB; lower {more}"
            )
        more = f"raise {more}, or "
    fitting = max(1, room // (width * longest))
    if rows <= fitting:
        return None
    return (
        f"the keys and values of {rows} responses of up to {longest} tokens have "
        f"{rows * longest * width / 2**30:.1f} GiB, and an engine has {room / 2**30:.1f} GiB for "
        f"them; {more}lower --rollout-max-batch to {fitting}"
    )


def _room_in_vllm(config: JobConfig, row: int, machine: Machine) -> tuple[int, str]:
    """Bytes that vLLM reserves for keys and values, and what changes that."""
    given = config.vllm_arguments()
    if machine.on_cuda or "gpu_memory_utilization" in given:
        usual = SHARED_GPU_SHARE if config.colocate else _SHARE_OF_VLLM
        share = float(given.get("gpu_memory_utilization", usual))
        room = int(share * machine.room.memory) - machine.room.weights
        return room, "--vllm-args gpu_memory_utilization"
    reserved = cpu_cache_bytes(row, config.rollout_max_batch)
    return int(given.get("kv_cache_memory_bytes", reserved)), "--vllm-args kv_cache_memory_bytes"


def _on_engines(config: JobConfig) -> str | None:
    if config.num_rollout_engines <= config.rollout_batch_size:
        return None
    return (
        f"--num-rollout-engines {config.num_rollout_engines} for --rollout-batch-size "
        f"{config.rollout_batch_size}: an engine gets whole groups, so some have nothing to do"
    )


def _on_learning_rate(config: JobConfig) -> str | None:
    if config.lora_rank or config.lr < _PRETRAINING_LR:
        return None
    return (
        f"--lr {config.lr:g} is typical of pretraining and tends to destroy a pretrained model in "
        "RL; 1e-6 to 2e-5 are common, more with --lora-rank"
    )
