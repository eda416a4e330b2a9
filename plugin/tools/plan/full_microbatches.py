"""The batch that a planned step runs on: microbatches as full as the job allows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from plugin.batch_types import RolloutBatch, route_dtype
from plugin.config import JobConfig, TrainerConfig
from plugin.megatron_backend.model.families import family_of
from plugin.megatron_backend.step.batch_share import BatchShare
from plugin.ragged import Integers, Ragged
from plugin.tools.plan.sample_lengths import SampleLengths
from plugin.tools.plan.stand_ins import even_routes


def full_microbatch(config: JobConfig, lengths: SampleLengths, longest: int) -> Integers:
    """[samples] total lengths of the largest microbatch: the token budget, or the longest samples.

    longest: positions of the model
    """
    most = min(int(lengths.totals.max()), longest)
    if config.max_tokens_per_gpu is None:
        return np.full(config.micro_batch_size, most, np.int64)
    budget = config.max_tokens_per_gpu * config.context_parallel_size
    if most >= budget:
        return np.array([most], np.int64)
    samples = max(1, round(budget / float(lengths.totals.mean())), -(-budget // longest))
    cuts = np.arange(samples + 1) * budget // samples
    return np.diff(cuts)


def full_share(
    config: TrainerConfig,
    hf_config: Any,
    microbatch: Integers,
    response_share: float,
    *,
    microbatches: int,
    padding: int = 0,
    route_layers: list[int] | None = None,
) -> BatchShare:
    """A rank's share of a step: `microbatches` alike, the last `padding` of them padding.

    microbatch: [samples] total lengths; route_layers: MoE layers of this stage, if replayed
    """
    real = microbatches - padding
    totals = np.tile(microbatch, real)
    responses = np.clip((totals * response_share).astype(np.int64), 1, np.maximum(1, totals - 1))
    tokens, answers = int(totals.sum()), int(responses.sum())
    columns: dict[str, Any] = {
        "unconcat_tokens": Ragged(torch.arange(tokens) % hf_config.vocab_size, totals),
        "total_lengths": torch.from_numpy(totals),
        "response_lengths": torch.from_numpy(responses),
        "loss_masks": Ragged(torch.ones(answers, dtype=torch.int64), responses),
        "weight_versions": Ragged(torch.zeros(answers, dtype=torch.int64), responses),
        "rewards": torch.zeros(len(totals)),
        "group_index": torch.zeros(len(totals), dtype=torch.int64),
    }
    names = ["advantages", "rollout_log_probs", "log_probs"]
    names += ["ref_log_probs"] if config.use_kl_loss else []
    names += ["teacher_log_probs"] if config.teacher_tau else []
    for name in names:
        columns[name] = Ragged(torch.full((answers,), -1.0), responses)
    if k := config.distill_topk:
        ids = torch.arange(answers * k, dtype=torch.int32).view(answers, k) % hf_config.vocab_size
        columns["teacher_topk_ids"] = Ragged(ids, responses)
        columns["teacher_topk_log_probs"] = Ragged(
            torch.full((answers, k), -math.log(2 * k)), responses
        )
    if route_layers is not None and config.use_rollout_routing_replay:
        model = family_of(hf_config).transformer_arguments(hf_config)
        experts, topk = model["num_moe_experts"], model["moe_router_topk"]
        routes = even_routes(tokens, experts, topk).to(route_dtype(experts))
        whole = routes[:, None].repeat(1, len(route_layers), 1)
        columns["rollout_routed_experts"] = Ragged(whole, totals)
        if config.replays_route_weights:
            columns["rollout_routed_weights"] = Ragged(torch.full(whole.shape, 1 / topk), totals)
    counts = np.full(microbatches, len(microbatch), np.int64)
    counts[real:] = 0
    return BatchShare(
        RolloutBatch(columns),
        counts,
        np.arange(len(totals)),
        totals[:1],
        float(max(1, answers)),  # of all ranks: also one that has only padding divides by it
        padding / microbatches,
        0,
    )
