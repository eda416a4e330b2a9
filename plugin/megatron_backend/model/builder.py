"""From a Hugging Face config to Megatron-Core model chunks, DDP and optimizer, all of them stock.

Supported families: Llama, Qwen3 and Qwen3-MoE. `transformer_impl` chooses between Transformer Engine's
layers and Megatron's local ones; "auto" takes Transformer Engine where it can run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from plugin.errors import ConfigError
from plugin.megatron_backend import cpu_runtime
from plugin.megatron_backend.model.local_layers import LayoutRotaryEmbedding, use_local_layers
from plugin.megatron_backend.parallel_groups import ParallelGroups

TransformerImpl = Literal["auto", "transformer_engine", "local"]

SUPPORTED_FAMILIES = ("llama", "qwen3", "qwen3_moe")

_PADDING_LOGIT = -1e30
"""Logit of vocabulary padding. Finite, and still finite after division by a small temperature, so that
probability times logit is 0 and not NaN."""


@dataclass(frozen=True)
class ModelSettings:
    """What is chosen about a model besides its weights' shape; parallel sizes come from the groups."""

    transformer_impl: TransformerImpl = "auto"
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    moe_enable_routing_replay: bool = False
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    variable_seq_lengths: bool = True
    calculate_per_token_loss: bool = False
    max_sequence_length: int | None = None
    """Longest sequence; None takes the Hugging Face config's `max_position_embeddings`."""
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    seed: int = 1234


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam's numbers and how its state is kept."""

    lr: float = 1e-6
    min_lr: float = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = False


def build_model(hf_config: Any, settings: ModelSettings, groups: ParallelGroups) -> list[GPTModel]:
    """This rank's model chunks with random weights: one, or one per virtual pipeline stage.

    The chunks are not wrapped in DDP. Weights come from `hf_weights.load_hf_weights`; the random ones
    differ between pipeline layouts.
    """
    cpu_runtime.activate()
    config = transformer_config(hf_config, settings, groups)
    torch.manual_seed(settings.seed)
    model_parallel_cuda_manual_seed(settings.seed)
    return [
        _build_chunk(hf_config, config, settings, groups, number)
        for number in range(groups.num_chunks)
    ]


def transformer_config(
    hf_config: Any, settings: ModelSettings, groups: ParallelGroups
) -> TransformerConfig:
    """Megatron's config for a Hugging Face config; refuses what the two models would do differently."""
    check_supported(hf_config)
    _check_divisible(hf_config, settings, groups)
    use_te = uses_transformer_engine(settings.transformer_impl)
    on_cuda = torch.cuda.is_available()
    moe = _moe_arguments(hf_config, settings, use_te)
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_dim(hf_config),
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=hf_config.model_type in ("qwen3", "qwen3_moe"),
        attention_dropout=settings.attention_dropout,
        hidden_dropout=settings.hidden_dropout,
        init_method_std=hf_config.initializer_range,
        tensor_model_parallel_size=groups.tp_size,
        pipeline_model_parallel_size=groups.pp_size,
        virtual_pipeline_model_parallel_size=groups.vpp_size,
        context_parallel_size=groups.cp_size,
        expert_model_parallel_size=groups.ep_size,
        expert_tensor_parallel_size=groups.etp_size,
        sequence_parallel=settings.sequence_parallel,
        params_dtype=settings.dtype,
        pipeline_dtype=settings.dtype,
        bf16=settings.dtype is torch.bfloat16,
        fp16=settings.dtype is torch.float16,
        attention_softmax_in_fp32=True,
        variable_seq_lengths=settings.variable_seq_lengths,
        calculate_per_token_loss=settings.calculate_per_token_loss,
        recompute_granularity=settings.recompute_granularity,
        recompute_method=settings.recompute_method,
        recompute_num_layers=settings.recompute_num_layers,
        deallocate_pipeline_outputs=True,
        # gloo matches batched messages of one pair of ranks in posting order, which mixes up the two
        # directions that the interleaved schedule exchanges at once
        batch_p2p_comm=on_cuda,
        use_cpu_initialization=not on_cuda,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=on_cuda,
        bias_dropout_fusion=on_cuda,
        persist_layer_norm=use_te,
        # also for dense models: the default, allgather, refuses variable_seq_lengths
        moe_token_dispatcher_type=settings.moe_token_dispatcher_type,
        **moe,
    )


def uses_transformer_engine(choice: TransformerImpl) -> bool:
    """Resolves "auto"; asking for Transformer Engine where it cannot run is an error."""
    if choice == "local":
        return False
    runnable = (
        torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    )
    if choice == "transformer_engine" and not runnable:
        raise ConfigError(
            "--transformer-impl transformer_engine needs CUDA and the transformer_engine package, and at "
            "least one is missing here; use --transformer-impl auto or local"
        )
    return runnable


def check_supported(hf_config: Any) -> None:
    """Raises `ConfigError` for a model that would silently compute something else in Megatron."""
    if hf_config.model_type not in SUPPORTED_FAMILIES:
        raise ConfigError(
            f"model_type {hf_config.model_type!r} is not supported; "
            f"choose a model of {', '.join(SUPPORTED_FAMILIES)}"
        )
    if hf_config.hidden_act != "silu":
        raise ConfigError(
            f"hidden_act {hf_config.hidden_act!r} is not supported; only silu (SwiGLU) models are"
        )
    for flag in ("attention_bias", "mlp_bias"):
        if getattr(hf_config, flag, False):
            raise ConfigError(f"{flag}=True is not supported; choose a model without these biases")
    if getattr(hf_config, "use_sliding_window", False):
        raise ConfigError(
            "use_sliding_window=True is not supported; set it to false in config.json if the sequences "
            "are shorter than the window"
        )


def _check_divisible(hf_config: Any, settings: ModelSettings, groups: ParallelGroups) -> None:
    chunks = groups.pp_size * groups.num_chunks
    experts = getattr(hf_config, "num_experts", 0) if is_moe(hf_config) else 0
    for what, value, divisor in (
        (
            "num_key_value_heads by the tensor parallel size",
            hf_config.num_key_value_heads,
            groups.tp_size,
        ),
        (
            "num_attention_heads by the tensor parallel size",
            hf_config.num_attention_heads,
            groups.tp_size,
        ),
        ("num_hidden_layers by the number of pipeline chunks", hf_config.num_hidden_layers, chunks),
        ("num_experts by the expert parallel size", experts, groups.ep_size),
    ):
        if value % divisor:
            raise ConfigError(f"cannot divide {what}: {value} / {divisor}; choose another size")
    if not is_moe(hf_config) and groups.ep_size > 1:
        raise ConfigError(
            f"expert parallel size {groups.ep_size} needs a MoE model, and {hf_config.model_type} has "
            "no experts; drop --expert-model-parallel-size"
        )
    if settings.moe_token_dispatcher_type == "allgather" and settings.variable_seq_lengths:
        raise ConfigError(
            "the allgather MoE dispatcher needs micro-batches of one length; use alltoall, or turn "
            "variable sequence lengths off"
        )
    if is_moe(hf_config) and groups.tp_size > 1 and not settings.sequence_parallel:
        raise ConfigError(
            f"a MoE model with tensor parallel size {groups.tp_size} needs --sequence-parallel"
        )
    if groups.tp_size == 1 and settings.sequence_parallel:
        raise ConfigError(
            "--sequence-parallel splits the sequence over tensor parallel ranks, and there is only one; "
            "drop it or raise --tensor-model-parallel-size"
        )


def is_moe(hf_config: Any) -> bool:
    """Whether the model has expert layers."""
    return hf_config.model_type == "qwen3_moe"


def head_dim(hf_config: Any) -> int:
    """Width of one attention head."""
    explicit = getattr(hf_config, "head_dim", None)
    return explicit or hf_config.hidden_size // hf_config.num_attention_heads


def moe_layer_pattern(hf_config: Any) -> list[int]:
    """One entry per layer: 1 where transformers builds an expert layer, 0 where a dense one."""
    return [
        int(
            index not in hf_config.mlp_only_layers
            and (index + 1) % hf_config.decoder_sparse_step == 0
        )
        for index in range(hf_config.num_hidden_layers)
    ]


def _moe_arguments(hf_config: Any, settings: ModelSettings, use_te: bool) -> dict[str, Any]:
    if not is_moe(hf_config):
        return {}
    return {
        "num_moe_experts": hf_config.num_experts,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_layer_freq": moe_layer_pattern(hf_config),
        # softmax over the chosen logits equals softmax over all of them, renormalized over the chosen
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": use_te,
        "moe_enable_routing_replay": settings.moe_enable_routing_replay,
    }


def _build_chunk(
    hf_config: Any,
    config: TransformerConfig,
    settings: ModelSettings,
    groups: ParallelGroups,
    number: int,
) -> GPTModel:
    use_te = uses_transformer_engine(settings.transformer_impl)
    vp_stage = number if groups.vpp_size else None
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=use_te,
        normalization="RMSNorm",
        vp_stage=vp_stage,
        pp_rank=groups.pp_rank,
    )
    if not use_te:
        use_local_layers(spec)
    rotary = rotary_arguments(hf_config)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(hf_config.vocab_size, groups.tp_size),
        max_sequence_length=settings.max_sequence_length or hf_config.max_position_embeddings,
        pre_process=groups.starts_model(number),
        post_process=groups.ends_model(number),
        share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings),
        position_embedding_type="rope",
        pg_collection=groups.collection,
        vp_stage=vp_stage,
        **rotary,
    )
    if not use_te:
        model.rotary_pos_emb = LayoutRotaryEmbedding(
            kv_channels=config.kv_channels,
            rotary_percent=1.0,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=groups.cp_group,
            **rotary,
        )
    if model.post_process:
        _hide_vocab_padding(model, hf_config.vocab_size, groups)
    # Names and shapes on the Hugging Face side; weights are loaded and exported by them.
    model.hf_config = hf_config
    return model.cuda() if torch.cuda.is_available() else model


def rotary_arguments(hf_config: Any) -> dict[str, Any]:
    """`RotaryEmbedding`'s arguments; refuses scalings that Megatron computes differently."""
    parameters = dict(getattr(hf_config, "rope_parameters", None) or {})
    if not parameters:
        parameters = dict(getattr(hf_config, "rope_scaling", None) or {})
    theta = parameters.get("rope_theta", getattr(hf_config, "rope_theta", 10000.0))
    arguments: dict[str, Any] = {"rotary_base": theta}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "linear":
        arguments["seq_len_interpolation_factor"] = parameters["factor"]
    elif kind == "llama3":
        built_in = {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        given = {name: parameters[name] for name in built_in}
        if given != built_in:
            raise ConfigError(
                f"llama3 RoPE scaling with {given} is not supported: Megatron-Core fixes these to {built_in}"
            )
        arguments |= {"rope_scaling": True, "rope_scaling_factor": parameters["factor"]}
    elif kind != "default":
        raise ConfigError(f"RoPE type {kind!r} is not supported; use default, linear or llama3")
    return arguments


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """The vocabulary rounded up so that tensor parallel ranks hold equal shares."""
    return -(-vocab_size // tp_size) * tp_size


def real_vocab_rows(vocab_size: int, tp_size: int, tp_rank: int) -> int:
    """How many of a tensor parallel rank's output rows are tokens; the rest, at the end, is padding."""
    share = padded_vocab_size(vocab_size, tp_size) // tp_size
    return max(0, min(share, vocab_size - tp_rank * share))


def _hide_vocab_padding(model: GPTModel, vocab_size: int, groups: ParallelGroups) -> None:
    """Keeps padding columns out of every softmax by pinning their logits, without gradient."""
    padded = padded_vocab_size(vocab_size, groups.tp_size)
    if padded == vocab_size:
        return
    share = padded // groups.tp_size
    real_rows = real_vocab_rows(vocab_size, groups.tp_size, groups.tp_rank)

    def pin(_module: Any, _inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits = output[0]
        first = real_rows if logits.shape[-1] == share else vocab_size
        value = max(_PADDING_LOGIT, torch.finfo(logits.dtype).min)
        logits[..., first:] = value
        return output

    model.output_layer.register_forward_hook(pin)


def wrap_with_ddp(
    chunks: Sequence[GPTModel],
    *,
    use_distributed_optimizer: bool = False,
    grad_reduce_in_fp32: bool = True,
    overlap_grad_reduce: bool = False,
    groups: ParallelGroups,
) -> list[DistributedDataParallel]:
    """Stock Megatron DDP around each chunk, with its gradient buffers."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        overlap_grad_reduce=overlap_grad_reduce,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    return [
        DistributedDataParallel(
            config=chunk.config,
            ddp_config=ddp_config,
            module=chunk,
            # Later chunks wait for nothing: Megatron buckets only the first chunk's gradients.
            disable_bucketing=number > 0,
            pg_collection=groups.collection,
        )
        for number, chunk in enumerate(chunks)
    ]


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], settings: OptimizerSettings
) -> MegatronOptimizer:
    """Stock Megatron Adam over DDP-wrapped chunks, state kept per rank or sharded over DP ranks."""
    params_dtype = chunks[0].config.params_dtype
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        use_distributed_optimizer=settings.use_distributed_optimizer,
        bf16=params_dtype is torch.bfloat16,
        fp16=params_dtype is torch.float16,
        params_dtype=params_dtype,
    )
    return get_megatron_optimizer(config, list(chunks))
