"""Which parallel layouts a model can be cut into: checked before a job starts, and by the builder.

Nothing here imports Megatron, so that the driver has its answer before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plugin.config import TrainerConfig
from plugin.config.device_defaults import Capabilities
from plugin.errors import ConfigError
from plugin.megatron_backend.model.families import family_of
from plugin.megatron_backend.model.rope import check_rope

_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("expert_tensor_parallel_size", "sequence_parallel"),
    *("moe_token_dispatcher_type", "moe_router_fusion"),
)


def check_model(hf_config: Any, config: TrainerConfig) -> None:
    """Refuse a model that Megatron cannot compute, or cannot cut as the configuration says."""
    arguments = family_of(hf_config).transformer_arguments(hf_config)
    check_rope(hf_config)
    layout = {name: getattr(config, name) for name in _SIZES} | split_arguments(config)
    # --no-variable-seq-lengths makes the rows of a rank equal, not those of different ranks.
    variable = config.virtual_pipeline_model_parallel_size is None
    layout |= {"variable_seq_lengths": variable, "recompute_modules": config.recomputed_modules}
    check_layout(hf_config.model_type, arguments | layout)
    fault = engine_fault(hf_config.model_type, arguments, config)
    if config.transformer_impl == "transformer_engine" and fault is not None:
        raise ConfigError(
            f"--transformer-impl transformer_engine: {fault}; use --transformer-impl auto or local"
        )


def with_engine_for(hf_config: Any, config: TrainerConfig, found: Capabilities) -> Capabilities:
    """`found`, without Transformer Engine's layers if they cannot compute the model so cut."""
    arguments = family_of(hf_config).transformer_arguments(hf_config)
    capability = found.compute_capability
    fault = engine_fault(hf_config.model_type, arguments, config, capability)
    if not found.transformer_engine or fault is None:
        return found
    return replace(found, transformer_engine=False, no_engine_because=fault)


def engine_fault(
    model_type: str,
    arguments: Mapping[str, Any],
    config: TrainerConfig,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Why Transformer Engine (2.11) cannot compute a model's packed rows; None if it can.

    `make test-te` compares these rules with Transformer Engine's own choice of a kernel.

    arguments: of Megatron's `TransformerConfig`, those that the model decides
    capability: of the device, where it is known
    """
    if arguments.get("multi_latent_attention") and capability and capability < (9, 0):
        return (
            f"it has kernels for packed rows with the latent attention of {model_type} from "
            "compute capability 9.0 (H100) on"
        )
    if arguments.get("softmax_type", "vanilla") != "vanilla":
        return f"it has no attention for packed rows with the sinks of {model_type}"
    if arguments.get("linear_attention_freq"):
        return f"Megatron-Core's gated delta rule of {model_type} takes no packed rows there"
    if context_exchange(config, arguments) is None:
        return None
    size, tp_size = config.context_parallel_size, config.tensor_model_parallel_size
    for name in ("num_attention_heads", "num_query_groups"):
        heads = arguments[name] // tp_size
        if heads % size:
            return (
                f"with sliding windows its context parallel ranks share the heads, and the {heads} "
                f"({name}) of a tensor parallel rank of {model_type} cannot be divided by "
                f"--context-parallel-size {size}"
            )
    return None


def context_exchange(config: TrainerConfig, arguments: Mapping[str, Any]) -> str | None:
    """Megatron's `cp_comm_type` on Transformer Engine; None = its default, keys and values in turn.

    That one knows no sliding windows: with them ranks exchange heads instead.
    """
    windows = config.context_parallel_size > 1 and arguments.get("window_size") is not None
    return "a2a" if windows else None


def check_layout(model_type: str, arguments: Mapping[str, Any]) -> None:
    """Refuse a layout that does not divide the model, or that the model cannot use.

    A vocabulary of any size fits: it is padded to equal shares.

    arguments: of Megatron's `TransformerConfig`
    """
    experts, tp_size = arguments.get("num_moe_experts", 0), arguments["tensor_model_parallel_size"]
    ep_size, etp_size = (arguments[f"expert_{kind}_parallel_size"] for kind in ("model", "tensor"))
    tensor = f"--tensor-model-parallel-size {tp_size}"
    for what, value, size, option in (
        ("num_key_value_heads", arguments["num_query_groups"], tp_size, tensor),
        ("num_attention_heads", arguments["num_attention_heads"], tp_size, tensor),
        ("intermediate_size", arguments["ffn_hidden_size"], tp_size, tensor),
        ("linear_num_key_heads", arguments.get("linear_num_key_heads", 0), tp_size, tensor),
        ("num_experts", experts, ep_size, f"--expert-model-parallel-size {ep_size}"),
        (
            "moe_intermediate_size",
            arguments.get("moe_ffn_hidden_size", 0),
            etp_size,
            f"--expert-tensor-parallel-size {etp_size}",
        ),
        (
            "moe_intermediate_size x n_shared_experts",
            arguments.get("moe_shared_expert_intermediate_size", 0),
            tp_size,
            tensor,
        ),
    ):
        if value % size:
            fitting = [str(n) for n in range(1, min(value, 2 * size) + 1) if value % n == 0]
            raise ConfigError(
                f"{option}: the model's {what} is {value}, which cannot be divided by {size}; it "
                f"can by {', '.join(fitting)}"
            )
    heads, key_heads = arguments["num_attention_heads"], arguments["num_query_groups"]
    if heads % key_heads:
        raise ConfigError(
            f"the model's num_attention_heads is {heads} and its num_key_value_heads {key_heads}, "
            "and as many queries have to share each key; give the config.json of a "
            f"{model_type} model"
        )
    layers_per_stage(arguments)
    if arguments.get("linear_attention_freq") and arguments["context_parallel_size"] > 1:
        raise ConfigError(
            f"--context-parallel-size {arguments['context_parallel_size']}: the gated delta rule "
            f"of {model_type} reads a sequence from its start, and Megatron-Core does not hand its "
            "state from rank to rank; use --context-parallel-size 1"
        )
    if experts and etp_size > 1 and arguments["add_bias_linear"]:
        raise ConfigError(
            f"--expert-tensor-parallel-size {etp_size}: experts of {model_type} have biases, which "
            "Megatron-Core would add once per rank; use --expert-tensor-parallel-size 1"
        )
    if not experts and ep_size > 1:
        raise ConfigError(
            f"--expert-model-parallel-size {ep_size} needs a MoE model, and {model_type} has no "
            "experts; drop it"
        )
    if arguments["moe_token_dispatcher_type"] == "allgather" and arguments["variable_seq_lengths"]:
        raise ConfigError(
            "--moe-token-dispatcher-type allgather needs microbatches of one length, which only "
            "--virtual-pipeline-model-parallel-size makes; use alltoall"
        )
    if arguments["moe_token_dispatcher_type"] == "flex" and ep_size * tp_size == 1:
        raise ConfigError(
            "--moe-token-dispatcher-type flex: there is one rank, and nothing to dispatch; raise "
            "--expert-model-parallel-size, or use alltoall"
        )
    _check_recomputed(model_type, arguments)
    if experts and tp_size > 1 and not arguments["sequence_parallel"]:
        raise ConfigError(
            f"a MoE model with {tensor} needs --sequence-parallel; add it, or use expert ranks "
            "instead (--expert-model-parallel-size)"
        )
    if tp_size == 1 and arguments["sequence_parallel"]:
        raise ConfigError(
            "--sequence-parallel splits the sequence over tensor parallel ranks, and there is "
            "only one; drop it or raise --tensor-model-parallel-size"
        )
    if not experts and arguments["moe_router_fusion"]:
        raise ConfigError(f"--moe-router-fusion needs a MoE model, not {model_type}; drop it")


def _check_recomputed(model_type: str, arguments: Mapping[str, Any]) -> None:
    has = {
        "moe": arguments.get("num_moe_experts"),
        "moe_act": arguments.get("num_moe_experts"),
        "shared_experts": arguments.get("moe_shared_expert_intermediate_size"),
        "mla_up_proj": arguments.get("multi_latent_attention"),
    }
    for name in arguments.get("recompute_modules") or ():
        if name in has and not has[name]:
            raise ConfigError(
                f"--recompute-modules {name}: {model_type} has no such part; drop it from the list"
            )


def split_arguments(config: TrainerConfig) -> dict[str, Any]:
    """Arguments of Megatron's `TransformerConfig` that cut the model into uneven stages."""
    return {
        "num_layers_in_first_pipeline_stage": config.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": config.decoder_last_pipeline_num_layers,
        "account_for_embedding_in_pipeline_split": config.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": config.account_for_loss_in_pipeline_split,
    }


def layers_per_stage(arguments: Mapping[str, Any]) -> list[int]:
    """Decoder layers of every pipeline stage, as Megatron cuts them; a `ConfigError` if it cannot.

    94 layers over 4 stages with 23 in the first and in the last: [23, 24, 24, 23].
    arguments: of Megatron's `TransformerConfig`
    """
    layers, stages = arguments["num_layers"], arguments["pipeline_model_parallel_size"]
    chunks = arguments["virtual_pipeline_model_parallel_size"] or 1
    first, last = (arguments[f"num_layers_in_{end}_pipeline_stage"] for end in ("first", "last"))
    embedding, loss = (
        int(arguments[f"account_for_{part}_in_pipeline_split"]) for part in ("embedding", "loss")
    )
    middle = stages - (first is not None) - (last is not None)
    rest = layers + embedding + loss - (first or 0) - (last or 0)
    even = rest // middle if middle else 0
    split = [even] * stages
    split[0] = even - embedding if first is None else first
    if last is not None:
        split[-1] = last
    elif stages > 1:
        split[-1] -= loss
    fits = rest == even * middle and rest >= middle * chunks
    if not fits or any((size or 0) % chunks for size in (even, first, last)) or min(split) < 0:
        raise ConfigError(_does_not_fit(arguments, chunks))
    return split


def _does_not_fit(arguments: Mapping[str, Any], chunks: int) -> str:
    layers, stages = arguments["num_layers"], arguments["pipeline_model_parallel_size"]
    pieces = stages * chunks
    option = f"--pipeline-model-parallel-size {stages}"
    if chunks > 1:
        option += f" x --virtual-pipeline-model-parallel-size {chunks}"
    for end in ("first", "last"):
        size = arguments[f"num_layers_in_{end}_pipeline_stage"]
        option += "" if size is None else f" with --decoder-{end}-pipeline-num-layers {size}"
    for part in ("embedding", "loss"):
        if arguments[f"account_for_{part}_in_pipeline_split"]:
            option += f" with --account-for-{part}-in-pipeline-split"
    fitting = [str(n) for n in range(1, min(layers, 2 * pieces) + 1) if layers % n == 0]
    # Stages at the ends hold the embedding and the LM head, so they get the smaller share.
    ends = _equal_ends(layers, stages, chunks)
    hint = (
        ""
        if ends is None
        else (
            f" evenly, but fits with --decoder-first-pipeline-num-layers {ends} "
            f"--decoder-last-pipeline-num-layers {ends}"
        )
    )
    return (
        f"{option}: the model's num_hidden_layers is {layers}, which cannot be divided by "
        f"{pieces}{hint}; it can by {', '.join(fitting)}"
    )


def _equal_ends(layers: int, stages: int, chunks: int) -> int | None:
    """The largest size of both end stages, below that of the others, that leaves an even rest."""
    if stages < 3:
        return None
    for size in range(layers // stages, 0, -1):
        rest = layers - 2 * size
        if size % chunks == 0 and rest % ((stages - 2) * chunks) == 0:
            return size
    return None
