"""Flags of a trainer: model, optimizer, parallel sizes, batching.

Parallel sizes keep Megatron's own names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from plugin.config.flags import FlagGroup, Needs, expect, flag, needs_flag
from plugin.config.lora_flags import LoraFlags
from plugin.config.loss_flags import LossConfig

DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ModelFlags(FlagGroup):
    title: ClassVar[str] = "model"

    hf_checkpoint: str | None = flag(
        None, "Hugging Face model directory; none = a tiny model built on the spot"
    )
    embedded_model: Literal["qwen3", "qwen3_moe", "llama"] = flag(
        "qwen3", "family of the tiny model that is built without --hf-checkpoint"
    )
    ref_hf_checkpoint: str | None = flag(
        None,
        "reference policy of --use-kl-loss; none = the weights the run starts from (with "
        "--lora-rank the model without adapters)",
    )
    teacher_hf_checkpoint: str | None = flag(
        None, "teacher of --teacher-tau and --distill-topk, loaded by the job"
    )
    reference_offload: bool = flag(
        False,
        "keep the weights of reference and teacher in host memory between their passes",
        needs=Needs(
            "--use-kl-loss or a teacher that the job loads",
            lambda config: config.use_kl_loss or getattr(config, "loads_teachers", False),
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
        None,
        "format in which Transformer Engine multiplies matrices; hybrid = gradients in e5m2",
    )
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] = flag(
        "tensorwise",
        "how values are scaled to the format; mxfp8 on Blackwell only. Delayed scaling is not "
        "offered: checkpoints do not hold its history",
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
        False, "MoE: the training pass repeats the routes of the trainer's own log-prob pass"
    )
    use_rollout_routing_replay: Literal[False, "ids", "ids+weights"] = flag(
        False,
        "MoE: the trainer repeats the routes that the rollout engine reports; ids+weights also "
        "mixes the experts with the engine's weights, which stops the router's gradient",
    )
    router_gradient: Literal["stop", "keep"] = flag(
        "stop",
        "MoE, where the engine's weights are replayed: stop = the router learns nothing; keep = "
        "the value is the engine's, the gradient that of the trainer's own weights",
        needs=Needs(
            "--use-rollout-routing-replay ids+weights",
            lambda config: config.replays_route_weights,
        ),
    )
    detect_routing: bool = flag(
        False,
        "MoE: have the engine report its routes and compare them with the trainer's own choices",
        needs=needs_flag("detect_mismatch"),
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = flag(
        "alltoall", "how tokens reach their experts"
    )
    moe_router_fusion: bool = flag(
        False,
        "fused MoE router of Transformer Engine on CUDA; refuses every routing replay and "
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
            "--moe-router-fusion with routing replay: the fused router never looks at the "
            "replayed routes; drop --moe-router-fusion",
        )
        expect(
            not (self.moe_router_fusion and self.detect_routing),
            "--moe-router-fusion with --detect-routing: the fused router does not tell what it "
            "chose; drop one of the two",
        )


_FLOAT16 = Needs("--train-dtype float16", lambda config: config.train_dtype == "float16")
_DYNAMIC = Needs(
    "--train-dtype float16 without --loss-scale",
    lambda config: config.train_dtype == "float16" and config.loss_scale is None,
)


@dataclass(frozen=True)
class OptimizerFlags(FlagGroup):
    title: ClassVar[str] = "optimizer"

    lr: float = flag(1e-6, "learning rate; 1e-5 with --lora-rank", above=0)
    min_lr: float = flag(
        0.0,
        "learning rate at the end of the decay",
        at_least=0,
        needs=Needs(
            "--lr-decay-style linear or cosine", lambda config: config.lr_decay_style != "constant"
        ),
    )
    lr_decay_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", "from lr to min-lr over the job"
    )
    lr_warmup_steps: int = flag(0, "optimizer steps of linear warm-up", at_least=0)
    weight_decay: float = flag(0.0, "decoupled weight decay", at_least=0)
    adam_beta1: float = flag(0.9, "Adam beta1", at_least=0)
    adam_beta2: float = flag(0.98, "Adam beta2", at_least=0)
    adam_eps: float = flag(1e-8, "Adam epsilon", above=0)
    clip_grad: float = flag(1.0, "largest gradient norm; 0 = no clipping", at_least=0)
    use_distributed_optimizer: bool | None = flag(
        None, "shard the optimizer state over data parallel ranks; none = on CUDA"
    )
    overlap_grad_reduce: bool | None = flag(
        None, "reduce gradients while others are computed; none = on CUDA"
    )
    overlap_param_gather: bool | None = flag(
        None,
        "gather updated weights while the next forward pass runs; none = on CUDA with "
        "--use-distributed-optimizer",
    )
    skip_on_grad_norm: float | None = flag(
        None, "skip a step whose gradient norm is above this", above=0
    )
    max_skipped_steps: int = flag(
        20,
        "skipped steps in a row (gradient not finite, or above --skip-on-grad-norm) that end the "
        "job; those by which a dynamic loss scale finds its place do not count",
        at_least=1,
    )
    loss_scale: float | None = flag(
        None,
        "float16: constant factor of the loss in the backward pass; none = a dynamic one",
        above=0,
        needs=_FLOAT16,
    )
    initial_loss_scale: float = flag(
        2.0**16,
        "dynamic loss scale of the first step; every halving costs a step, so this is lower than "
        "Megatron's 2^32",
        above=0,
        needs=_DYNAMIC,
    )
    min_loss_scale: float = flag(
        1.0, "a dynamic loss scale does not fall below this", above=0, needs=_DYNAMIC
    )
    loss_scale_window: int = flag(
        1000,
        "steps in a row without overflow after which a dynamic loss scale doubles",
        at_least=1,
        needs=_DYNAMIC,
    )
    hysteresis: int = flag(
        2,
        "overflows since the last doubling from which on each halves a dynamic loss scale",
        at_least=1,
        needs=_DYNAMIC,
    )

    def check(self) -> None:
        expect(
            self.min_loss_scale <= self.initial_loss_scale,
            f"--min-loss-scale is {self.min_loss_scale}, above --initial-loss-scale "
            f"{self.initial_loss_scale}; lower it",
        )
        without = False in (self.use_distributed_optimizer, self.overlap_grad_reduce)
        expect(
            not (self.overlap_param_gather and without),
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; "
            "add them, or drop it",
        )
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            expect(value < 1, f"--{name.replace('_', '-')} is {value}; it must lie in [0, 1)")
        expect(
            self.min_lr <= self.lr,
            f"--min-lr is {self.min_lr}, above --lr {self.lr}; lower it",
        )


_PIPELINE = Needs(
    "--pipeline-model-parallel-size above 1",
    lambda config: config.pipeline_model_parallel_size > 1,
)


@dataclass(frozen=True)
class ParallelFlags(FlagGroup):
    title: ClassVar[str] = "parallel layout (Megatron's names)"

    tensor_model_parallel_size: int = flag(1, "tensor parallel ranks", at_least=1)
    pipeline_model_parallel_size: int = flag(1, "pipeline stages", at_least=1)
    virtual_pipeline_model_parallel_size: int | None = flag(
        None, "model chunks per pipeline stage (interleaved schedule)", at_least=2
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None,
        "layers of the first pipeline stage; none = as many as the others",
        at_least=1,
        needs=_PIPELINE,
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None,
        "layers of the last pipeline stage; none = as many as the others",
        at_least=1,
        needs=_PIPELINE,
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False,
        "count the embedding as a layer when the model is cut into stages",
        needs=_PIPELINE,
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False,
        "count the LM head and the loss as a layer when the model is cut into stages",
        needs=_PIPELINE,
    )
    context_parallel_size: int = flag(1, "context parallel ranks", at_least=1)
    expert_model_parallel_size: int = flag(1, "expert parallel ranks", at_least=1)
    expert_tensor_parallel_size: int = flag(1, "tensor parallel ranks of an expert", at_least=1)
    sequence_parallel: bool = flag(False, "split norms and dropouts over tensor parallel ranks")

    def check(self) -> None:
        expect(
            self.virtual_pipeline_model_parallel_size is None
            or self.pipeline_model_parallel_size > 1,
            "--virtual-pipeline-model-parallel-size is "
            f"{self.virtual_pipeline_model_parallel_size} with one pipeline stage; raise "
            "--pipeline-model-parallel-size or drop it",
        )
        explicit = (self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers)
        counted = (
            self.account_for_embedding_in_pipeline_split or self.account_for_loss_in_pipeline_split
        )
        expect(
            not (all(explicit) and self.pipeline_model_parallel_size == 2),
            "--decoder-first-pipeline-num-layers with --decoder-last-pipeline-num-layers: of two "
            "stages one decides the other; drop one of the two",
        )
        expect(
            not (counted and any(explicit)),
            "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split "
            "with --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers: both "
            "decide how many layers a stage holds; keep one of the two",
        )
        expect(
            not self.sequence_parallel or self.tensor_model_parallel_size > 1,
            "--sequence-parallel splits the sequence over tensor parallel ranks, and there is "
            "only one; drop it or raise --tensor-model-parallel-size",
        )

    @property
    def smallest_world_size(self) -> int:
        """The fewest ranks that hold one copy of the model in this layout."""
        dense = self.tensor_model_parallel_size * self.context_parallel_size
        expert = self.expert_tensor_parallel_size * self.expert_model_parallel_size
        return math.lcm(dense, expert) * self.pipeline_model_parallel_size


@dataclass(frozen=True)
class BatchingFlags(FlagGroup):
    title: ClassVar[str] = "batching and memory"

    micro_batch_size: int = flag(
        1, "samples per microbatch, unless --max-tokens-per-gpu is set", at_least=1
    )
    max_tokens_per_gpu: int | None = flag(
        None, "token budget of a microbatch: packs samples of different length", at_least=2
    )
    global_batch_size: int | None = flag(
        None,
        "responses per optimizer step: a mini-batch of the rollout; none = the whole rollout",
        at_least=1,
    )
    num_updates_per_rollout: int = flag(
        1, "epochs over the mini-batches of a rollout, each a new shuffle by seed", at_least=1
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(None, "activation recompute")
    recompute_method: Literal["uniform", "block"] | None = flag(
        None, "which layers full recompute covers"
    )
    recompute_num_layers: int | None = flag(None, "layers per recompute unit", at_least=1)

    def check(self) -> None:
        full = self.recompute_granularity == "full"
        given = self.recompute_method is not None and self.recompute_num_layers is not None
        expect(
            not full or given,
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers; "
            "for example --recompute-method uniform --recompute-num-layers 1",
        )
        expect(
            full or (self.recompute_method is None and self.recompute_num_layers is None),
            "--recompute-method and --recompute-num-layers would do nothing; add "
            "--recompute-granularity full",
        )


@dataclass(frozen=True)
class TrainerConfig(
    LossConfig, ModelFlags, LoraFlags, OptimizerFlags, ParallelFlags, BatchingFlags
):
    """Everything a trainer reads."""
