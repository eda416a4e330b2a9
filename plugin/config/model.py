"""Flags of the model that is trained, and of LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from plugin.config.flags import FlagGroup, Needs, absolute_path, expect, flag, needs_flag

DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ModelFlags(FlagGroup):
    title: ClassVar[str] = "model"

    hf_checkpoint: str | None = flag(
        None,
        "Hugging Face model directory; none = a tiny model with random weights",
        path=absolute_path,
        common_in="train",
    )
    embedded_model: Literal["qwen3", "qwen3_moe", "llama"] = flag(
        "qwen3", "family of the tiny model that is used without --hf-checkpoint"
    )
    ref_hf_checkpoint: str | None = flag(
        None,
        "reference policy of --use-kl-loss; none = the weights the run starts from (with "
        "--lora-rank the model without adapters)",
        path=absolute_path,
    )
    reference_offload: bool = flag(
        False,
        "keep the weights of reference and teacher in host memory between their passes",
        needs=Needs(
            "--use-kl-loss or a teacher that the job loads",
            lambda config: config.use_kl_loss or config.loads_teachers,
        ),
    )
    transformer_impl: Literal["auto", "transformer_engine", "local"] = flag(
        "auto",
        "Megatron's layers; auto = Transformer Engine where it can run (CUDA, not in float32)",
    )
    train_dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto",
        "dtype of the trainer's weights and activations; the optimizer's main weights are float32; "
        "auto = bfloat16 on CUDA, float32 elsewhere; float16 scales the loss",
    )
    fp8: Literal["e4m3", "hybrid"] | None = flag(
        None, "format in which Transformer Engine multiplies matrices; hybrid = gradients in e5m2"
    )
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] = flag(
        "tensorwise",
        "how values are scaled to the format; mxfp8 on Blackwell only; there is no delayed "
        "scaling, because checkpoints do not hold its history",
        needs=needs_flag("fp8"),
    )
    fused_lm_head: Literal["auto", "on", "off"] = flag(
        "auto", "compute log-probs inside the LM head, without logits; auto = where it pays"
    )
    inplace_logits_grad: bool = flag(
        True, "write the gradient of the logits over the logits (saves their size in memory)"
    )
    separable_fast_path: Literal["auto", "on", "off"] = flag(
        "auto",
        "evaluate a token-separable loss inside the LM head, block by block; auto = where it can",
    )
    use_routing_replay: bool = flag(
        False, "MoE: the training pass replays the routes of the trainer's own log-prob pass"
    )
    use_rollout_routing_replay: Literal[False, "ids", "ids+weights"] = flag(
        False,
        "MoE: the trainer replays the routes that the rollout engine reports; ids+weights also "
        "mixes the experts with the engine's weights, which stops the router's gradient",
    )
    router_gradient: Literal["stop", "keep"] = flag(
        "stop",
        "MoE, with the engine's weights replayed: stop = the router gets no gradient; keep = "
        "forward with the engine's weights, backward with the gradient of the trainer's own",
        needs=Needs(
            "--use-rollout-routing-replay ids+weights", lambda config: config.replays_route_weights
        ),
    )
    detect_routing: bool = flag(
        False,
        "MoE: have the engine report its routes and compare them with the trainer's own choices",
        needs=needs_flag("detect_mismatch"),
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = flag(
        "alltoall", "how tokens reach their experts; flex = by kernels of DeepEP, on CUDA"
    )
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] = flag(
        "deepep",
        "whose kernels: DeepEP, or its branch hybrid-ep",
        needs=Needs(
            "--moe-token-dispatcher-type flex",
            lambda config: config.moe_token_dispatcher_type == "flex",
        ),
    )
    moe_router_fusion: bool = flag(
        False,
        "fused MoE router of Transformer Engine on CUDA; not with routing replay or "
        "--detect-routing",
    )

    @property
    def replays_routes(self) -> bool:
        return self.use_routing_replay or bool(self.use_rollout_routing_replay)

    @property
    def replays_route_weights(self) -> bool:
        return self.use_rollout_routing_replay == "ids+weights"

    @property
    def row_alignment(self) -> int:
        """What the number of rows of a matrix has to be a multiple of on every rank."""
        if self.fp8 is None:
            return 1
        return 32 if self.fp8_recipe == "mxfp8" else 16

    @property
    def freezes_routers(self) -> bool:
        """Whether routers get no gradient at all."""
        return self.replays_route_weights and self.router_gradient == "stop"

    @property
    def wants_rollout_routes(self) -> bool:
        return bool(self.use_rollout_routing_replay) or self.detect_routing

    @property
    def looks_at_routes(self) -> bool:
        return self.replays_routes or self.detect_routing

    def check(self) -> None:
        expect(
            not (self.use_routing_replay and self.use_rollout_routing_replay),
            "--use-routing-replay with --use-rollout-routing-replay: routes can come from one "
            "source only; drop one of the two",
        )
        expect(
            not (self.moe_router_fusion and self.replays_routes),
            "--moe-router-fusion with routing replay: the fused router ignores replayed routes; "
            "drop --moe-router-fusion",
        )
        expect(
            not (self.moe_router_fusion and self.detect_routing),
            "--moe-router-fusion with --detect-routing: the fused router does not report its "
            "choices; drop one of the two",
        )


#: The linear layers that can have an adapter, as Hugging Face models name them: attention, latent
#: attention, MLP (of experts and shared experts, too).
LORA_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)


#: All of them that the model has.
ALL_LINEAR = "all-linear"


_lora_flag = partial(flag, needs=needs_flag("lora_rank"))


@dataclass(frozen=True)
class LoraFlags(FlagGroup):
    title: ClassVar[str] = "LoRA"

    lora_rank: int = flag(
        0, "train adapters of this rank and freeze the model; 0 = train all weights", at_least=0
    )
    lora_alpha: float = _lora_flag(32.0, "an adapter's output is scaled by alpha / rank", above=0)
    lora_target: str = _lora_flag(
        ALL_LINEAR,
        "linear layers with an adapter, by their Hugging Face names, comma-separated: "
        f"{', '.join(LORA_TARGETS)}; {ALL_LINEAR} = all of these that the model has",
    )
    lora_path: str | None = _lora_flag(
        None,
        "directory of a PEFT adapter that the run starts from; none = new ones",
        path=absolute_path,
    )
    lora_sync: Literal["merged", "adapter"] = _lora_flag(
        "merged",
        "what engines are sent: merged weights, or the base weights once and then only adapters "
        "(--rollout-engine transformers or vllm)",
    )

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The names in --lora-target."""
        return tuple(name.strip() for name in self.lora_target.split(","))

    @property
    def lora_scale(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.lora_alpha / self.lora_rank

    @property
    def syncs_adapters(self) -> bool:
        """Whether engines get adapters instead of whole weights."""
        return self.lora_rank > 0 and self.lora_sync == "adapter"

    def check(self) -> None:
        named = self.lora_targets
        choices = f"{ALL_LINEAR}, or several of {', '.join(LORA_TARGETS)}"
        for name in named:
            expect(
                name in LORA_TARGETS or named == (ALL_LINEAR,),
                f"--lora-target {self.lora_target!r}: {name!r} cannot have an adapter; choose "
                f"{choices} (routers, embeddings and the LM head stay as they are)",
            )
        expect(
            len(set(named)) == len(named),
            f"--lora-target {self.lora_target!r} names a layer twice; name each once",
        )
