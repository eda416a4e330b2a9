"""What unset flags of a trainer mean on the devices it runs on. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from plugin.config.flags import expect, option_name
from plugin.config.job_config import JobConfig
from plugin.config.model import DtypeName
from plugin.config.trainer_config import TrainerConfig

Config = TypeVar("Config", bound=TrainerConfig)


@dataclass(frozen=True)
class Capabilities:
    """What a rank's device and packages can do.

    transformer_engine: Transformer Engine's layers, of the model that is built
    compute_capability: of the device, such as (9, 0); None = not known
    no_engine_because: why they are not, where more is known than that something is missing
    gradient_fusion: APEX's extension that adds weight gradients to their float32 buffer
    """

    cuda: bool = False
    transformer_engine: bool = False
    compute_capability: tuple[int, int] | None = None
    no_engine_because: str | None = None
    gradient_fusion: bool = False


def on_device(config: Config, found: Capabilities) -> Config:
    """The configuration with every `auto` and unset flag decided; what is set explicitly stays.

    On CUDA: bfloat16 with float32 main weights, Transformer Engine, the distributed optimizer, and
    its communication overlapped with computation.
    """
    dtype = trainer_dtype(config, cuda=found.cuda)
    _check_transformer_engine(config, dtype, found)
    expect(
        not (config.overlap_grad_reduce and config.freezes_routers),
        "--overlap-grad-reduce with --use-rollout-routing-replay ids+weights and --router-gradient "
        "stop: a reduction waits for every gradient of its bucket, and routers get none; drop "
        "--overlap-grad-reduce, or use --router-gradient keep",
    )
    layers = config.transformer_impl
    if layers == "auto":
        # In float32 its attention has no kernel for packed rows: it would hold all their scores.
        usable = found.cuda and found.transformer_engine and dtype != "float32"
        layers = "transformer_engine" if usable else "local"
    expect(
        config.fp8 is None or layers == "transformer_engine",
        f"--fp8 {config.fp8} needs Transformer Engine's layers, and this run has local ones; use "
        "--train-dtype bfloat16 on CUDA with the transformer_engine package, or drop --fp8",
    )
    sharded, reduces, gathers = (
        config.use_distributed_optimizer,
        config.overlap_grad_reduce,
        config.overlap_param_gather,
    )
    if sharded is None:
        sharded = found.cuda
    if reduces is None:
        reduces = found.cuda and not config.freezes_routers
    if gathers is None:
        gathers = found.cuda and sharded and reduces
    _check_optimizer(config, dtype, found, sharded=sharded)
    fusable = found.cuda and (layers == "transformer_engine" or found.gradient_fusion)
    _check_layers(config, layers, found, fusable=fusable)
    fuses = config.gradient_accumulation_fusion
    if fuses is None:
        fuses = fusable and not config.lora_rank
    return config.unchecked_copy(
        train_dtype=dtype,
        transformer_impl=layers,
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=reduces,
        overlap_param_gather=gathers,
        gradient_accumulation_fusion=fuses,
    )


def _check_optimizer(
    config: TrainerConfig, dtype: str, found: Capabilities, *, sharded: bool
) -> None:
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        if not getattr(config, name):
            continue
        option = option_name(name)
        expect(
            sharded,
            f"{option} needs --use-distributed-optimizer, which is off by default without CUDA; "
            "add it",
        )
        # Megatron would go on from the weights that the optimizer was built with.
        expect(
            dtype != "float32",
            f"{option} with --train-dtype float32: Megatron brings new weights to main weights "
            "only where these are copies in another precision; use --train-dtype bfloat16",
        )
    expect(
        found.cuda or not config.use_precision_aware_optimizer,
        "--use-precision-aware-optimizer is Adam in kernels of Transformer Engine, and there is no "
        "CUDA here; drop it (--optimizer-cpu-offload works without)",
    )


def _check_layers(
    config: TrainerConfig, layers: str, found: Capabilities, *, fusable: bool
) -> None:
    expect(
        layers == "transformer_engine" or "moe_act" not in (config.recomputed_modules or []),
        "--recompute-modules moe_act: only Transformer Engine's grouped experts can recompute "
        "their activation alone, and this run has local layers; use moe, which recomputes the "
        "whole layer",
    )
    expect(
        found.cuda or config.moe_token_dispatcher_type != "flex",
        "--moe-token-dispatcher-type flex needs the CUDA kernels of DeepEP, and there is no CUDA "
        "here; use alltoall",
    )
    expect(
        fusable or not config.gradient_accumulation_fusion,
        "--gradient-accumulation-fusion needs CUDA and either Transformer Engine's layers or APEX; "
        "drop it",
    )
    expect(
        not (config.gradient_accumulation_fusion and config.lora_rank),
        "--gradient-accumulation-fusion with --lora-rank: frozen weights have no gradient buffer; "
        "drop it",
    )


def trainer_dtype(config: TrainerConfig, *, cuda: bool) -> DtypeName:
    """Of weights and activations: bfloat16 on CUDA and float32 elsewhere, unless it is given."""
    if config.train_dtype != "auto":
        return config.train_dtype
    return "bfloat16" if cuda else "float32"


def engine_dtype(config: JobConfig, *, cuda: bool) -> DtypeName:
    """Of an engine's weights: the trainer's, unless it is given."""
    if config.rollout_dtype != "auto":
        return config.rollout_dtype
    return trainer_dtype(config, cuda=cuda)


def _check_transformer_engine(config: TrainerConfig, dtype: str, found: Capabilities) -> None:
    if config.transformer_impl != "transformer_engine":
        return
    missing = found.no_engine_because or "at least one is missing here"
    expect(
        found.cuda and found.transformer_engine,
        "--transformer-impl transformer_engine needs CUDA and the transformer_engine package, "
        f"and {missing}; use --transformer-impl auto or local",
    )
    expect(
        dtype != "float32",
        "--train-dtype float32 with --transformer-impl transformer_engine: its attention for "
        "packed rows computes in half precision only; use --train-dtype bfloat16, or "
        "--transformer-impl local",
    )


def cuda_environment(config: TrainerConfig) -> dict[str, str]:
    """Environment variables of a rank on CUDA, to be set before CUDA starts unless already set."""
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if config.tensor_model_parallel_size > 1 or config.context_parallel_size > 1:
        # Megatron relies on one hardware queue to start a collective before the kernels that it
        # is overlapped with.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return variables


def nccl_environment(config: JobConfig) -> dict[str, str]:
    """NCCL's variables that ranks and engines have to agree on, unless already set.

    On a node NCCL hands memory over in one of two ways, and its members fail or hang if they
    choose differently. SGLang's servers choose the older one where the variable is not set.
    """
    return {"NCCL_CUMEM_ENABLE": "0"} if config.server_dialect == "sglang" else {}
