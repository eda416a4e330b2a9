"""Flags of a trainer: optimizer, critic, parallel sizes, batching; and `TrainerConfig`.

Parallel sizes keep Megatron's own names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from plugin.config.flags import (
    FlagGroup,
    Needs,
    absolute_path,
    expect,
    flag,
    needs_flag,
    option_name,
)
from plugin.config.loss.loss_config import LossConfig
from plugin.config.model import LoraFlags, ModelFlags

_FLOAT16 = Needs("--train-dtype float16", lambda config: config.train_dtype == "float16")


_scale_flag = partial(
    flag,
    needs=Needs(
        "--train-dtype float16 without --loss-scale",
        lambda config: config.train_dtype == "float16" and config.loss_scale is None,
    ),
)


_precision_flag = partial(flag, needs=needs_flag("use_precision_aware_optimizer"))

_STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True)
class OptimizerFlags(FlagGroup):
    title: ClassVar[str] = "optimizer"

    lr: float = flag(1e-6, "learning rate; 1e-5 with --lora-rank", above=0, common_in="train")
    min_lr: float = flag(
        0.0,
        "learning rate at the end of the decay",
        at_least=0,
        needs=Needs(
            "--lr-decay-style linear or cosine", lambda config: config.lr_decay_style != "constant"
        ),
    )
    lr_decay_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", "schedule of the learning rate from --lr to --min-lr over the job"
    )
    lr_warmup_steps: int = flag(0, "optimizer steps of linear warm-up", at_least=0)
    weight_decay: float = flag(0.0, "decoupled weight decay", at_least=0)
    adam_beta1: float = flag(0.9, "Adam beta1", at_least=0, below=1)
    adam_beta2: float = flag(0.98, "Adam beta2", at_least=0, below=1)
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
    optimizer_cpu_offload: bool = flag(
        False,
        "keep main weights and moments in host memory and update them there: 12 bytes per weight "
        "less on the device; needs the distributed optimizer and half-precision weights",
    )
    optimizer_offload_fraction: float = flag(
        1.0,
        "the share of the weights that --optimizer-cpu-offload takes",
        above=0,
        at_most=1,
        needs=needs_flag("optimizer_cpu_offload"),
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False,
        "copy one weight's gradient and result while others are updated on the host",
        needs=needs_flag("optimizer_cpu_offload"),
    )
    use_precision_aware_optimizer: bool = flag(
        False,
        "Transformer Engine's fused Adam, with main weights and moments in the dtypes below; "
        "gradients stay float32; CUDA with the distributed optimizer only",
    )
    main_params_dtype: Literal["float32", "float16"] = _precision_flag("float32", "main weights")
    exp_avg_dtype: Literal["float32", "bfloat16", "float16", "fp8"] = _precision_flag(
        "float32", "the first moment"
    )
    exp_avg_sq_dtype: Literal["float32", "bfloat16", "float16", "fp8"] = _precision_flag(
        "float32", "the second moment"
    )
    gradient_accumulation_fusion: bool | None = flag(
        None,
        "add weight gradients to their float32 buffer inside the product; none = on CUDA where "
        "Transformer Engine's layers or APEX have it",
    )
    entropy_target: float | None = flag(
        None,
        "hold the policy's entropy (nats, metric entropy_loss) here: the entropy bonus starts at "
        "--entropy-coef, moves after every update, and acts only below",
        above=0,
    )
    entropy_coef_step: float = flag(
        1e-4,
        "how far the bonus moves: up where the entropy is below the target, else down",
        above=0,
        needs=needs_flag("entropy_target"),
    )
    entropy_coef_max: float = flag(
        5e-3, "the largest bonus", above=0, needs=needs_flag("entropy_target")
    )
    skip_on_grad_norm: float | None = flag(
        None, "skip a step whose gradient norm is above this", above=0
    )
    max_skipped_steps: int = flag(
        20,
        "consecutive skipped steps (gradient not finite, or above --skip-on-grad-norm) that end "
        "the job; overflows while a dynamic loss scale settles do not count",
        at_least=1,
    )
    loss_scale: float | None = flag(
        None,
        "float16: constant factor of the loss in the backward pass; none = a dynamic one",
        above=0,
        needs=_FLOAT16,
    )
    initial_loss_scale: float = _scale_flag(
        2.0**16,
        "dynamic loss scale of the first step; every halving costs a step, so this is lower than "
        "Megatron's 2^32",
        above=0,
    )
    min_loss_scale: float = _scale_flag(
        1.0, "a dynamic loss scale does not fall below this", above=0
    )
    loss_scale_window: int = _scale_flag(
        1000,
        "consecutive steps without overflow after which a dynamic loss scale doubles",
        at_least=1,
    )
    hysteresis: int = _scale_flag(
        2,
        "overflows since the last doubling after which each one halves a dynamic loss scale",
        at_least=1,
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
        expect(self.min_lr <= self.lr, f"--min-lr is {self.min_lr}, above --lr {self.lr}; lower it")
        for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
            expect(
                not (getattr(self, name) and self.use_distributed_optimizer is False),
                f"{option_name(name)} with --no-use-distributed-optimizer: Megatron has it for the "
                "distributed optimizer only; drop one of the two",
            )
        expect(
            not (self.optimizer_cpu_offload and self.use_precision_aware_optimizer),
            "--optimizer-cpu-offload with --use-precision-aware-optimizer: the host updates in "
            "float32, whatever dtypes are asked for; keep one of the two",
        )

    def state_bytes(self, *, half: bool) -> float:
        """Bytes on the device of one weight's main copy and moments.

        half: whether the weight itself is bfloat16 or float16; others are their own main copy
        """
        main = _STATE_BYTES[self.main_params_dtype] if half else 0
        moments = _STATE_BYTES[self.exp_avg_dtype] + _STATE_BYTES[self.exp_avg_sq_dtype]
        kept = 1 - self.optimizer_offload_fraction if self.optimizer_cpu_offload else 1
        return kept * (main + moments)


_stage_flag = partial(
    flag,
    needs=Needs(
        "--pipeline-model-parallel-size above 1",
        lambda config: config.pipeline_model_parallel_size > 1,
    ),
)


@dataclass(frozen=True)
class ParallelFlags(FlagGroup):
    title: ClassVar[str] = "parallel layout (Megatron's names)"

    tensor_model_parallel_size: int = flag(
        1, "tensor parallel ranks", at_least=1, common_in="train"
    )
    pipeline_model_parallel_size: int = flag(1, "pipeline stages", at_least=1, common_in="train")
    virtual_pipeline_model_parallel_size: int | None = flag(
        None, "model chunks per pipeline stage (interleaved schedule)", at_least=2
    )
    decoder_first_pipeline_num_layers: int | None = _stage_flag(
        None, "layers of the first pipeline stage; none = as many as the others", at_least=1
    )
    decoder_last_pipeline_num_layers: int | None = _stage_flag(
        None, "layers of the last pipeline stage; none = as many as the others", at_least=1
    )
    account_for_embedding_in_pipeline_split: bool = _stage_flag(
        False, "count the embedding as a layer when the model is cut into stages"
    )
    account_for_loss_in_pipeline_split: bool = _stage_flag(
        False, "count the LM head and the loss as a layer when the model is cut into stages"
    )
    context_parallel_size: int = flag(1, "context parallel ranks", at_least=1)
    expert_model_parallel_size: int = flag(1, "expert parallel ranks", at_least=1)
    expert_tensor_parallel_size: int = flag(1, "tensor parallel ranks of an expert", at_least=1)
    sequence_parallel: bool = flag(False, "split norms and dropouts over tensor parallel ranks")
    variable_seq_lengths: bool = _stage_flag(
        True,
        "stages announce the length of each row, for which the device is waited for twice per "
        "hand-off; without it all rows of a pass are filled up to the longest (as the interleaved "
        "schedule always does)",
    )

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
            "--decoder-first-pipeline-num-layers with --decoder-last-pipeline-num-layers: with "
            "two stages one determines the other; drop one of the two",
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


#: Parts of a layer that can be computed again in the backward pass, by Megatron's names.
RECOMPUTE_MODULES = (
    *("core_attn", "layernorm", "mlp", "mla_up_proj"),
    *("moe", "moe_act", "shared_experts"),
)


@dataclass(frozen=True)
class BatchingFlags(FlagGroup):
    title: ClassVar[str] = "batching and memory"

    micro_batch_size: int = flag(
        1, "samples per microbatch, unless --max-tokens-per-gpu is set", at_least=1
    )
    max_tokens_per_gpu: int | Literal["auto"] | None = flag(
        None,
        "token budget of a microbatch: packs samples of different length; auto = from memory, "
        "model and layout, the default with --hf-checkpoint unless --micro-batch-size is given",
        at_least=2,
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
    recompute_modules: str | None = flag(
        None,
        "what selective recompute covers, comma-separated: " + ", ".join(RECOMPUTE_MODULES) + "; "
        "none = core_attn",
        needs=Needs(
            "--recompute-granularity selective",
            lambda config: config.recompute_granularity == "selective",
        ),
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None, "which layers full recompute covers"
    )
    recompute_num_layers: int | None = flag(None, "layers per recompute unit", at_least=1)

    @property
    def recomputed_modules(self) -> list[str] | None:
        """The names in --recompute-modules."""
        if self.recompute_modules is None:
            return None
        return [name.strip() for name in self.recompute_modules.split(",")]

    def check(self) -> None:
        for name in self.recomputed_modules or []:
            expect(
                name in RECOMPUTE_MODULES,
                f"--recompute-modules {self.recompute_modules!r}: {name!r} cannot be recomputed; "
                f"choose of {', '.join(RECOMPUTE_MODULES)}",
            )
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


_critic_flag = partial(
    flag,
    needs=Needs("--advantage-estimator gae", lambda config: config.advantage_estimator == "gae"),
)


@dataclass(frozen=True)
class CriticFlags(FlagGroup):
    title: ClassVar[str] = "critic"

    critic_hf_checkpoint: str | None = _critic_flag(
        None, "model that the critic starts from; none = the policy's", path=absolute_path
    )
    critic_lr: float | None = _critic_flag(None, "the critic's learning rate; none = --lr", above=0)
    critic_lr_warmup_steps: int = _critic_flag(
        0, "optimizer steps of linear warm-up of the critic", at_least=0
    )
    num_critic_only_rollouts: int = _critic_flag(
        0,
        "initial rollouts that train only the critic: the policy's learning rate is 0",
        at_least=0,
    )
    value_clip: float | None = _critic_flag(
        0.2,
        "clip range of the value loss around the values before the rollout's updates; none = no "
        "clipping",
        above=0,
    )
