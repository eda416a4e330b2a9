"""What families need beyond Megatron's config: their layers, and settings of a built model.

Latent attention (DeepSeek-V3): Megatron's local layer spec cuts the two projections into the
latents over tensor parallel ranks and gathers what they give. The gradient of the gathered
positional part of the keys is then that of one rank's heads only, so ranks would train it apart.
Transformer Engine's layers keep these projections whole on every rank; here a plain linear layer
does. Not needed once the local spec does the same.

Norms after attention and MLP, before they are added to the residual (GLM-4, Gemma 3).

Linear attention by the gated delta rule (Qwen3-Next) on the local layers, with packing: the module,
its parameters and their cuts are Megatron-Core's `GatedDeltaNet`, and so is the rule in plain torch
that it has for deterministic runs. The stock module refuses packed rows, and cannot be built
without the CUDA kernels of flash-linear-attention.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm import gated_delta_net as stock
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from plugin.errors import ConfigError
from plugin.megatron_backend.model.families import family_of
from plugin.megatron_backend.model.local_layers import SequenceParallelRMSNorm, use_local_layers
from plugin.megatron_backend.model.packed_attention import PackedLayout
from plugin.megatron_backend.model.rope import (
    FULL,
    SLIDING,
    has_rope_per_layer_type,
    inverse_frequencies,
    rope_factor,
)
from plugin.megatron_backend.model.rotary_embedding import (
    LayoutRotaryEmbedding,
    RotaryEmbeddingPerWindow,
    SelfAttentionPerWindow,
)
from plugin.megatron_backend.parallel_groups import ParallelGroups


def layer_spec(
    hf_config: Any,
    config: TransformerConfig,
    groups: ParallelGroups,
    vp_stage: int | None,
    use_te: bool,
) -> TransformerBlockSubmodules:
    """The layers of one chunk: Megatron's spec, changed as the family needs it."""
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=use_te,
        normalization=config.normalization,
        vp_stage=vp_stage,
        pp_rank=groups.pp_rank,
    )
    if not use_te:
        block = use_local_layers(block)
    if config.linear_attention_freq:
        _use_delta_nets(block, config, vp_stage, groups.pp_rank)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        if config.multi_latent_attention and not use_te:
            attention.module = LocalLatentAttention
        if has_rope_per_layer_type(hf_config):
            attention.module = SelfAttentionPerWindow
    if family_of(hf_config).post_norms:
        block = add_post_norms(block, block.layer_norm)
    return block


def _use_delta_nets(
    block: TransformerBlockSubmodules, config: Any, vp_stage: int | None, pp_rank: int
) -> None:
    """Put the gated delta rule into the layers of a local block that have it; changed in place."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    for number, layer in enumerate(block.layer_specs):
        if config.linear_attention_freq[first + number]:
            # A copy: layers of one kind share a spec.
            rule = delta_net_spec(layer.submodules.self_attention)
            parts = replace(layer.submodules, self_attention=rule)
            block.layer_specs[number] = replace(layer, submodules=parts)


def fit_to_family(model: GPTModel, hf_config: Any, groups: ParallelGroups, use_te: bool) -> None:
    """Give a built chunk the RoPE of its config, and whatever else the family needs; in place."""
    family, config = family_of(hf_config), model.config
    if config.multi_latent_attention:
        _fit_latent_attention(model, hf_config, groups, use_te, family.latent_norm_eps)
    else:
        model.rotary_pos_emb = _rotary_embedding(hf_config, config, groups)
    if use_te:
        _unmark_whole_weights(model)
    if config.num_moe_experts and groups.etp_size != groups.tp_size:
        _reduce_over_expert_ranks(model)
    if config.num_moe_experts and config.add_bias_linear and not use_te:
        _copy_expert_outputs(model)
    if family.scales_embeddings and model.pre_process:
        scale = hf_config.hidden_size**0.5
        model.embedding.register_forward_hook(
            # The factor is rounded to the embeddings' precision, as in pretraining.
            lambda _module, _inputs, output: output * output.new_tensor(scale)
        )


def _unmark_whole_weights(model: GPTModel) -> None:
    """Take the mark of a tensor parallel weight off those that every rank holds whole; in place.

    Transformer Engine marks the weights of every linear layer. Megatron would count these in the
    gradient norm once per rank, and an export would join the ranks' copies.
    """
    for module in model.modules():
        # "duplicated" to Megatron's class; those for experts are classes of their own.
        if type(module) is multi_latent_attention.TELinear and module.parallel_mode is None:
            for parameter in module.parameters():
                parameter.tensor_model_parallel, parameter.partition_dim = False, -1


def _reduce_over_expert_ranks(model: GPTModel) -> None:
    """Have experts' gradients summed over all ranks with the same experts.

    Megatron-Core 0.16 does so only with more than one expert parallel rank. Experts that are cut
    into fewer parts than the dense layers see the tokens of one tensor parallel rank each, and
    would be trained apart. The mark of sequence parallelism on an expert's bias would have it
    summed once more. Not needed once Megatron checks the size of the expert groups.
    """
    for layer in model.decoder.layers:
        if hasattr(layer.mlp, "experts"):
            for parameter in layer.mlp.experts.parameters():
                parameter.allreduce = parameter.sequence_parallel = False
                # Otherwise the gradient norm would count it on the first TP rank only.
                parameter.tensor_model_parallel = True


def _copy_expert_outputs(model: GPTModel) -> None:
    """Megatron adds an expert's bias in place, to what may be a view that autograd protects."""
    for layer in model.decoder.layers:
        for expert in layer.mlp.experts.local_experts:
            expert.linear_fc2.register_forward_hook(
                lambda _module, _inputs, output: (output[0].clone(), output[1])
            )


def _rotary_embedding(hf_config: Any, config: TransformerConfig, groups: ParallelGroups) -> Any:
    kinds = (FULL, SLIDING) if has_rope_per_layer_type(hf_config) else (FULL,)
    assert config.kv_channels is not None
    made = [
        LayoutRotaryEmbedding(
            inverse_frequencies(hf_config, config.kv_channels, kind),
            groups.cp_group,
            is_interleaved=config.rotary_interleaved,
        )
        for kind in kinds
    ]
    return made[0] if len(made) == 1 else RotaryEmbeddingPerWindow(*made)


def _fit_latent_attention(
    model: GPTModel, hf_config: Any, groups: ParallelGroups, use_te: bool, norm_eps: float | None
) -> None:
    """Latent attention computes its RoPE itself; with local layers it has to follow the layout."""
    config: Any = model.config
    for layer in model.decoder.layers:
        attention = layer.self_attention
        if not use_te:
            attention.rotary_pos_emb = LayoutRotaryEmbedding(
                inverse_frequencies(hf_config, config.qk_pos_emb_head_dim),
                groups.cp_group,
                is_latent=True,
                factor=rope_factor(hf_config) if config.rope_type == "yarn" else None,
            )
        # Transformer Engine has each norm inside the linear layer that follows it.
        norms = (
            ("linear_q_up_proj", "linear_kv_up_proj") if use_te else ("q_layernorm", "kv_layernorm")
        )
        for norm in norms:
            if norm_eps is not None and hasattr(attention, norm):
                getattr(attention, norm).eps = norm_eps


class WholeWeight(MegatronModule):
    """Holds `weight` whole on every tensor parallel rank; in a checkpoint it is there once."""

    def __init__(self, config: TransformerConfig, weight: Tensor, tp_group: Any) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.weight = torch.nn.Parameter(weight)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The weight, not cut over tensor parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


# Megatron-Core 0.16 takes Transformer Engine to be there because its own wrapper can be imported,
# and then calls `isinstance` with a mock. Not needed once it looks at the class.
if not isinstance(multi_latent_attention.TELinear, type):
    multi_latent_attention.HAVE_TE = False


class WholeLinear(WholeWeight):
    """A linear layer without bias that every tensor parallel rank holds whole.

    Under sequence parallelism each rank sees its slice of the sequence; the mark on the weight
    makes Megatron sum the gradients.
    """

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int, tp_group: Any) -> None:
        empty = torch.empty(outputs, inputs, dtype=config.params_dtype)
        super().__init__(config, empty, tp_group)
        config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[S, B, inputs] -> [S, B, outputs], and no bias."""
        return F.linear(x, self.weight), None


class LocalLatentAttention(MLASelfAttention):
    """Latent attention whose projections into the latents are whole on every rank."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        group = self.pg_collection.tp
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, width, group)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(
                config, config.hidden_size, config.q_lora_rank, group
            )


def add_post_norms(block: TransformerBlockSubmodules, norm: Any) -> TransformerBlockSubmodules:
    """Put `norm` behind the last linear layer of every attention and MLP; changed in place.

    Megatron's layers have no place for such norms; behind the linear layer they see what the
    residual gets, under sequence parallelism this rank's slice of it.
    """
    for layer in block.layer_specs:
        attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp
        # From Megatron-Core 0.17 on the spec of an MLP may be a `functools.partial`.
        mlp = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
        attention.linear_proj = _followed_by(attention.linear_proj, norm)
        mlp.linear_fc2 = _followed_by(mlp.linear_fc2, norm)
    return block


def _followed_by(linear: Any, norm: Any) -> Any:
    """The row-parallel class `linear` with a norm of its output."""
    if hasattr(linear, "post_norm_of"):
        return linear  # layers of one kind share a spec

    class NormedLinear(linear):
        post_norm_of = linear

        def __init__(self, inputs: int, outputs: int, *, config: Any, **arguments: Any) -> None:
            super().__init__(inputs, outputs, config=config, **arguments)
            self.post_layernorm = norm(
                config=config, hidden_size=outputs, eps=config.layernorm_epsilon
            )
            # In a hook: an adapter of the layer has its own before it.
            self.register_forward_hook(
                lambda layer, _inputs, output: (layer.post_layernorm(output[0]), output[1])
            )

    return NormedLinear


class _PlainNorm(SequenceParallelRMSNorm):
    """Multiplies by its weight where the other norms of the model multiply by 1 + weight."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        self.is_centered = False
        torch.nn.init.ones_(self.weight)


class LocalGatedDeltaNet(stock.GatedDeltaNet):
    """Gated delta rule whose state and convolution restart with every sample of a row."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Stock wants flash-linear-attention, whose kernels only its own `forward` calls.
        reader: Any = sys.modules[stock.GatedDeltaNet.__init__.__module__]
        has_kernels, reader.HAVE_FLA = reader.HAVE_FLA, True
        try:
            super().__init__(*args, **kwargs)
        finally:
            reader.HAVE_FLA = has_kernels
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            for name in ("tensor_model_parallel", "partition_dim"):
                vars(parameter).pop(name, None)
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def _setup_variant_attrs(self) -> None:
        """Name a kernel, as Megatron-Core 0.19 wants; only its own `forward` would call it."""
        super()._setup_variant_attrs()
        self.gated_delta_rule = stock.torch_chunk_gated_delta_rule

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [S, B, H] (this rank's slice of S under SP) -> the same shape, no bias."""
        projected, _ = self.in_proj(hidden_states)
        lengths = [len(projected)]
        if packed_seq_params is not None:
            if not isinstance(packed_seq_params, PackedLayout):
                raise ConfigError(
                    "the gated delta rule takes packed rows on the local layers only; use "
                    "--transformer-impl local"
                )
            lengths = packed_seq_params.lengths.tolist()
        mixed = torch.cat([self._mixed(part) for part in projected.split(lengths)])
        return self.out_proj(mixed)

    def _mixed(self, projected: Tensor) -> Tensor:
        """One sample: [S, B, q k v gate beta alpha], of this rank's heads -> [S, B, v]."""
        keys, values, heads = (
            size // self.tp_size for size in (self.qk_dim, self.v_dim, self.num_value_heads)
        )
        qkv, gate, beta, alpha = projected.transpose(0, 1).split(
            [2 * keys + values, values, heads, heads], dim=-1
        )
        length = qkv.shape[1]
        qkv = self.act_fn(self.conv1d(qkv.transpose(1, 2))[..., :length]).transpose(1, 2)
        query, key, value = qkv.split([keys, keys, values], dim=-1)
        query, key = (_normalized(x.unflatten(-1, (-1, self.key_head_dim))) for x in (query, key))
        repeats = self.num_value_heads // self.num_key_heads
        query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
        decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias.float())
        output, _ = stock.torch_chunk_gated_delta_rule(
            query, key, value.unflatten(-1, (heads, -1)), g=decay, beta=beta.sigmoid()
        )
        gate = self.act_fn(gate.float()).unflatten(-1, (heads, -1))
        gated = (self.out_norm(output) * gate).to(projected.dtype)
        return gated.flatten(2).transpose(0, 1)


def _normalized(x: Tensor) -> Tensor:
    """`x` with vectors of length 1 in the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_net_spec(attention: Any) -> ModuleSpec:
    """A gated delta net of the linear layers that `attention`, a local spec, is made of."""
    parts = attention.submodules
    return ModuleSpec(
        module=LocalGatedDeltaNet,
        submodules=stock.GatedDeltaNetSubmodules(
            in_proj=parts.linear_qkv, out_norm=_PlainNorm, out_proj=parts.linear_proj
        ),
    )
