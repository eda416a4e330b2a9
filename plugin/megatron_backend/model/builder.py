"""From a Hugging Face config to Megatron-Core model chunks, DDP and optimizer, all of them stock.

What a model decides comes from `families`, what a run decides from its `TrainerConfig`, and
parallel sizes from the groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.config.device_defaults import Capabilities, on_device
from plugin.errors import ConfigError
from plugin.megatron_backend import cpu_runtime
from plugin.megatron_backend.model.device_settings import (
    capabilities,
    ddp_settings,
    on_this_device,
    transformer_settings,
)
from plugin.megatron_backend.model.families import family_of
from plugin.megatron_backend.model.family_layers import fit_to_family, layer_spec
from plugin.megatron_backend.model.layout_rules import (
    check_layout,
    split_arguments,
    with_engine_for,
)
from plugin.megatron_backend.model.rope import rope_factor
from plugin.megatron_backend.model.rotary_embedding import scale_rotation
from plugin.megatron_backend.parallel_groups import ParallelGroups

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_STATE_DTYPES = _DTYPES | {"fp8": torch.uint8}

_PADDING_LOGIT = -1e30
"""Logit of vocabulary padding. Finite, and still finite after division by a small temperature, so
that probability times logit is 0 and not NaN."""


def build_model(
    hf_config: Any,
    config: TrainerConfig,
    groups: ParallelGroups,
    *,
    seed: int = 1234,
    **overrides: Any,
) -> list[GPTModel]:
    """This rank's model chunks with random weights: one, or one per virtual pipeline stage.

    The chunks are not wrapped in DDP. Weights come from `hf_weights.load_hf_weights`; the random
    ones differ between pipeline layouts.

    overrides: arguments of Megatron's `TransformerConfig` for which there is no flag
    """
    config = on_this_device(config, hf_config)
    arguments = transformer_arguments(hf_config, config, groups) | overrides
    check_layout(hf_config.model_type, arguments)
    if config.moe_router_fusion:
        _check_router_fusion()
    cpu_runtime.activate()
    is_latent = arguments.get("multi_latent_attention")
    transformer = (MLATransformerConfig if is_latent else TransformerConfig)(**arguments)
    if not is_latent:
        scale_rotation(transformer, rope_factor(hf_config))
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    use_te = config.transformer_impl == "transformer_engine"
    fuses = use_te and bool(config.gradient_accumulation_fusion)
    return [
        _build_chunk(hf_config, transformer, groups, number, use_te=use_te, fuses_gradients=fuses)
        for number in range(groups.num_chunks)
    ]


def transformer_arguments(
    hf_config: Any,
    config: TrainerConfig,
    groups: ParallelGroups,
    found: Capabilities | None = None,
) -> dict[str, Any]:
    """Arguments of Megatron's `TransformerConfig` for a Hugging Face model in a run.

    found: what the device can do; None = what this process finds
    """
    arguments = family_of(hf_config).transformer_arguments(hf_config)
    found = capabilities() if found is None else found
    config = on_device(config, with_engine_for(hf_config, config, found))
    # The fused RoPE of packed rows supports neither of these, nor a factor (YaRN).
    special = arguments.get("multi_latent_attention") or arguments.get("rotary_interleaved")
    fuses_rope = not special and rope_factor(hf_config) == 1.0
    return arguments | {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": groups.tp_size,
        "pipeline_model_parallel_size": groups.pp_size,
        "virtual_pipeline_model_parallel_size": groups.vpp_size,
        **split_arguments(config),
        "context_parallel_size": groups.cp_size,
        "expert_model_parallel_size": groups.ep_size,
        "expert_tensor_parallel_size": groups.etp_size,
        "sequence_parallel": config.sequence_parallel,
        "params_dtype": _DTYPES[config.train_dtype],
        "pipeline_dtype": _DTYPES[config.train_dtype],
        "bf16": config.train_dtype == "bfloat16",
        "fp16": config.train_dtype == "float16",
        "attention_softmax_in_fp32": True,
        # Rows of one length: `preparation.prepare` fills them up.
        "variable_seq_lengths": groups.vpp_size is None and config.variable_seq_lengths,
        "calculate_per_token_loss": config.per_token,
        "recompute_granularity": config.recompute_granularity,
        "recompute_modules": config.recomputed_modules,
        "recompute_method": config.recompute_method,
        "recompute_num_layers": config.recompute_num_layers,
        "deallocate_pipeline_outputs": True,
        # also for dense models: the default, allgather, refuses variable_seq_lengths
        "moe_token_dispatcher_type": config.moe_token_dispatcher_type,
        "moe_flex_dispatcher_backend": config.moe_flex_dispatcher_backend,
        "moe_router_fusion": config.moe_router_fusion,
        **transformer_settings(config, found, arguments, fuses_rope=fuses_rope),
    }


def _check_router_fusion() -> None:
    kernel = getattr(moe_utils, "fused_topk_with_score_function", None)
    if kernel is None or not torch.cuda.is_available():
        raise ConfigError(
            "--moe-router-fusion is a CUDA kernel of Transformer Engine (2.6 or newer), and CUDA "
            "or the kernel is missing here; drop it"
        )


def _build_chunk(
    hf_config: Any,
    config: TransformerConfig,
    groups: ParallelGroups,
    number: int,
    *,
    use_te: bool,
    fuses_gradients: bool,
) -> GPTModel:
    vp_stage = number if groups.vpp_size else None
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(hf_config, config, groups, vp_stage, use_te),
        vocab_size=padded_vocab_size(hf_config.vocab_size, groups.tp_size),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=groups.starts_model(number),
        post_process=groups.ends_model(number),
        share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings),
        position_embedding_type="rope",
        pg_collection=groups.collection,
        vp_stage=vp_stage,
    )
    fit_to_family(model, hf_config, groups, use_te)
    _drop_used_probs(model)
    if fuses_gradients:
        _fuse_weight_gradients(model)
    if model.post_process:
        # A step may mix microbatches that fuse this layer with the log-probs and others that do
        # not; Megatron takes a weight's gradients either from its fused kernel or from autograd.
        model.output_layer.gradient_accumulation_fusion = False
        _hide_vocab_padding(model, hf_config.vocab_size, groups)
    # Names and shapes on the Hugging Face side; weights are loaded and exported by them.
    model.hf_config = hf_config
    return model.cuda() if torch.cuda.is_available() else model


def _fuse_weight_gradients(model: GPTModel) -> None:
    """Let Transformer Engine's linear layers add up their own weight gradients; in place.

    Megatron's flag for it is refused by the LM head, which has APEX's kernel for that or none.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def _drop_used_probs(model: GPTModel) -> None:
    """Let MoE layers drop their router's probabilities once they have used them.

    Megatron's dispatcher keeps them, and with them the graph of a recomputed layer: its input and
    the gradient of that would stay in memory until the layer's next forward pass.
    """

    def drop(layer: Any, *_: Any) -> None:
        if hasattr(layer.token_dispatcher, "probs"):
            layer.token_dispatcher.probs = None

    for module in model.modules():
        if isinstance(module, MoELayer):
            module.register_forward_hook(drop)


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """The vocabulary rounded up so that tensor parallel ranks hold equal shares."""
    return -(-vocab_size // tp_size) * tp_size


def real_vocab_rows(vocab_size: int, tp_size: int, tp_rank: int) -> int:
    """How many of a tensor parallel rank's output rows are tokens; padding is at the end."""
    share = padded_vocab_size(vocab_size, tp_size) // tp_size
    return max(0, min(share, vocab_size - tp_rank * share))


def _hide_vocab_padding(model: GPTModel, vocab_size: int, groups: ParallelGroups) -> None:
    """Keep padding columns out of every softmax: pin their logits, without gradient.

    The weight is marked with `vocab_rows`, its number of tokens, for code that reads it without the
    layer.
    """
    padded = padded_vocab_size(vocab_size, groups.tp_size)
    if padded == vocab_size:
        return
    share = padded // groups.tp_size
    real_rows = real_vocab_rows(vocab_size, groups.tp_size, groups.tp_rank)
    layer: Any = model.output_layer
    weight = model.shared_embedding_or_output_weight() if layer.weight is None else layer.weight
    weight.vocab_rows = real_rows

    def pin(module: Any, _inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        if "forward" in vars(module):
            return output  # `skip_output_layer` has it return hidden states
        logits = output[0]
        first = real_rows if logits.shape[-1] == share else vocab_size
        logits[..., first:] = max(_PADDING_LOGIT, torch.finfo(logits.dtype).min)
        return output

    layer.register_forward_hook(pin)


def wrap_with_ddp(
    chunks: Sequence[GPTModel], config: TrainerConfig, groups: ParallelGroups
) -> list[DistributedDataParallel]:
    """Stock Megatron DDP around each chunk, with its gradient buffers."""
    ddp_config = DistributedDataParallelConfig(**ddp_settings(on_device(config, capabilities())))
    wrapped = [
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
    if ddp_config.overlap_grad_reduce:
        # Schedules start reductions in the last microbatch only if they can hold them back before.
        hold_back = [chunk.no_sync for chunk in wrapped]
        for chunk in wrapped:
            chunk.config.no_sync_func = hold_back if len(wrapped) > 1 else hold_back[0]
    return wrapped


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], config: TrainerConfig
) -> MegatronOptimizer:
    """Stock Megatron Adam over DDP-wrapped chunks, state kept per rank or sharded over DP ranks."""
    params_dtype = chunks[0].config.params_dtype
    config = on_device(config, capabilities())
    try:
        optimizer_config = _optimizer_config(config, params_dtype)
    except RuntimeError as error:  # Transformer Engine's Adam is missing
        raise ConfigError(
            f"--use-precision-aware-optimizer: {error} Install it, or drop the flag"
        ) from None
    if config.optimizer_cpu_offload:
        # Megatron's offloaded optimizer is a kind of precision-aware one: it reads gradients where
        # DDP leaves them. Said later, because Megatron then asks for Transformer Engine's version.
        optimizer_config.use_precision_aware_optimizer = True
        optimizer_config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    return get_megatron_optimizer(optimizer_config, list(chunks))


def _optimizer_config(config: TrainerConfig, params_dtype: torch.dtype) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        use_distributed_optimizer=bool(config.use_distributed_optimizer),
        use_precision_aware_optimizer=config.use_precision_aware_optimizer,
        # Halves of weights: a checkpoint of them could only be loaded by the same optimizer.
        store_param_remainders=False,
        main_params_dtype=_STATE_DTYPES[config.main_params_dtype],
        exp_avg_dtype=_STATE_DTYPES[config.exp_avg_dtype],
        exp_avg_sq_dtype=_STATE_DTYPES[config.exp_avg_sq_dtype],
        optimizer_cpu_offload=config.optimizer_cpu_offload,
        optimizer_offload_fraction=config.optimizer_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=config.overlap_cpu_optimizer_d2h_h2d,
        overlap_param_gather=bool(config.overlap_param_gather),
        bf16=params_dtype is torch.bfloat16,
        fp16=params_dtype is torch.float16,
        loss_scale=config.loss_scale,
        initial_loss_scale=config.initial_loss_scale,
        min_loss_scale=config.min_loss_scale,
        loss_scale_window=config.loss_scale_window,
        hysteresis=config.hysteresis,
        params_dtype=params_dtype,
    )


def reload_main_weights(optimizer: MegatronOptimizer) -> None:
    """Bring the model's weights to the optimizer's own copies of them."""
    optimizer.reload_model_params()
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = part.optimizer
        if not getattr(adam, "master_weights", False):
            continue
        # Megatron leaves those of Transformer Engine's Adam as they were.
        for parameter, state in adam.state.items():
            if state:
                weights = parameter.detach().float().clone()
                adam.set_scaled_state(parameter, "master_param", weights)


def unwrap(chunk: torch.nn.Module) -> Any:
    """The `GPTModel` inside DDP or precision wrappers."""
    inner: Any = chunk
    while hasattr(inner, "module"):
        inner = inner.module
    return inner


def model_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a chunk, adapters left out, and its routers' biases, which are not trained."""
    for name, parameter in model.named_parameters():
        if ".lora." not in name:
            yield name, parameter
    for name, tensor in model.named_buffers():
        if name.endswith(".router.expert_bias"):
            yield name, tensor


def experts_per_rank(model: Any, groups: ParallelGroups) -> int:
    return (model.config.num_moe_experts or 0) // groups.ep_size


def first_expert(model: Any, groups: ParallelGroups) -> int:
    """Return the number, in the whole model, of the first expert that this rank holds."""
    return groups.ep_rank * experts_per_rank(model, groups)


def gather_updated_weights(chunks: Sequence[Any]) -> None:
    """Complete the weights that the next forward pass would gather; a collective.

    With --overlap-param-gather an optimizer step leaves every rank with its own share updated.
    """
    for chunk in chunks:
        if getattr(chunk, "use_forward_hook", False):
            chunk.start_param_sync(force_sync=True)
