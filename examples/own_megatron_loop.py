"""The policy loss inside your own Megatron-Core loop: stock GPTModel, DDP, optimizer and schedule.

    python examples/own_megatron_loop.py                             # one process, CPU or GPU
    torchrun --nproc-per-node 2 examples/own_megatron_loop.py        # data parallel

The loop trains a small random model on a fixed batch in which every second response is rewarded, and
prints its metrics. Copy `policy_gradient_step` into your code; the rest is an ordinary Megatron job.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from plugin.batch_types import RolloutBatch
from plugin.config import TrainerConfig
from plugin.megatron_backend.parallel_groups import ParallelGroups, destroy_parallel, init_parallel
from plugin.megatron_backend.step.batch_share import cut_share
from plugin.megatron_backend.step.loss_scaling import LossScale, total_weight
from plugin.megatron_backend.step.microbatching import BatchingLimits, plan_microbatches
from plugin.megatron_backend.step.preparation import prepare
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.megatron_backend.step.schedule import training_forward_step
from plugin.megatron_backend.step.step_metrics import step_metrics
from plugin.ppo_utils.sufficient_statistics import StatisticsTable

VOCABULARY, PROMPT, RESPONSE = 32, 3, 6


# [snippet]
def policy_gradient_step(
    chunks: Sequence[Any],
    optimizer: MegatronOptimizer,
    config: TrainerConfig,
    batch: RolloutBatch,
    groups: ParallelGroups,
    layout: Any = "packed",
) -> dict[str, float]:
    """One update on a global batch that every rank holds; returns metrics on the last pipeline stage."""
    device = next(chunks[0].parameters()).device
    limits = BatchingLimits(config.max_tokens_per_gpu, config.micro_batch_size)
    plan = plan_microbatches(batch.columns["total_lengths"], limits, dp_size=groups.dp_size)
    weight = total_weight(batch, per_token=config.per_token)
    share = cut_share(batch, plan, groups.dp_rank, weight=weight)
    microbatches = prepare(share.microbatches(), groups, layout=layout, device=device)
    scale = LossScale(config.per_token, weight, plan.num_microbatches, groups.dp_cp_size)
    errors, table = ErrorCollector(device), StatisticsTable(device)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=training_forward_step(config, groups, scale, table, errors),
        data_iterator=[iter(microbatches) for _ in chunks],
        model=list(chunks),
        num_microbatches=plan.num_microbatches,
        seq_length=microbatches[0].inputs.tokens.shape[1],
        micro_batch_size=microbatches[0].inputs.tokens.shape[0],
        forward_only=False,
    )
    last = groups.is_last_stage
    errors.agree("the training step", table.digest() if last else None)  # all ranks raise or none
    _, grad_norm, _ = optimizer.step()
    metrics = step_metrics(table.reduced(groups.dp_cp_group)) if last else {}
    return metrics | {"grad_norm": float(grad_norm)}


# [/snippet]


def build(config: TrainerConfig, groups: ParallelGroups) -> tuple[list[Any], MegatronOptimizer]:
    """A stock model with DDP and Adam; the three settings that the closures rely on are marked."""
    on_gpu = torch.cuda.is_available()
    model_config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=groups.tp_size,
        pipeline_model_parallel_size=groups.pp_size,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,  # microbatches differ in length
        calculate_per_token_loss=config.per_token,  # the convention that LossScale assumes
        finalize_model_grads_func=finalize_model_grads,  # sums gradients over ranks
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=not on_gpu,
        masked_softmax_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(
        model_config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        max_sequence_length=64,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        position_embedding_type="rope",
    )
    model = model.cuda() if on_gpu else model
    chunks = [DistributedDataParallel(model_config, DistributedDataParallelConfig(), model)]
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), chunks)
    return chunks, optimizer


def rewarded_batch(samples: int = 8) -> RolloutBatch:
    """Random tokens of different lengths; every second response has a positive advantage."""
    generator = torch.Generator().manual_seed(0)
    responses = [RESPONSE - i % 3 for i in range(samples)]
    return RolloutBatch(
        {
            "unconcat_tokens": [
                torch.randint(0, VOCABULARY, (PROMPT + r,), generator=generator) for r in responses
            ],
            "total_lengths": [PROMPT + r for r in responses],
            "response_lengths": responses,
            "loss_masks": [torch.ones(r, dtype=torch.int64) for r in responses],
            "advantages": [torch.full((r,), 1.0 - 2 * (i % 2)) for i, r in enumerate(responses)],
            "rollout_log_probs": [torch.full((r,), -3.4) for r in responses],
        }
    )


def main(steps: int = 8) -> None:
    """Join the ranks, build, train, print."""
    rank, world = (int(os.environ.get(name, default)) for name, default in _PLACE)
    with tempfile.TemporaryDirectory() as directory:
        address = "env://" if world > 1 else f"file://{directory}/rendezvous"
        groups = init_parallel(rank, world, init_method=address)
        try:
            model_parallel_cuda_manual_seed(1)
            torch.manual_seed(1)
            # IcePop compares the policy with rollout_log_probs, what the engine reported, token by token, and drops tokens
            # whose ratio leaves 0.2 to 5: no log-prob pass of the trainer is needed. off_policy_is_function on reinforce
            # reads the same two, but collapses on older samples at its default clip (docs/evidence.md).
            config = TrainerConfig(policy_loss="icepop", max_tokens_per_gpu=24)
            chunks, optimizer = build(config, groups)
            batch = rewarded_batch()
            for step in range(steps):
                # Stock local attention takes no packed rows; Transformer Engine's takes layout="packed".
                metrics = policy_gradient_step(
                    chunks, optimizer, config, batch, groups, layout="padded"
                )
                if rank == 0:
                    shown = {name: round(metrics[name], 4) for name in _SHOWN}
                    print(f"step {step}: {shown}", flush=True)
        finally:
            destroy_parallel()


_SHOWN = ("loss", "mismatch_kl", "grad_norm")
_PLACE = (("RANK", 0), ("WORLD_SIZE", 1))

if __name__ == "__main__":
    main()
