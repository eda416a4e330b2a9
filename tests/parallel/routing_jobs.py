"""Samples of a low-precision engine with its routes and weights, and what replay makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.config import TrainerConfig
from plugin.controller.local_engine import load_tensors
from plugin.engines.protocol import GenerationRequest, SamplingParameters
from plugin.engines.transformers.engine import TransformersEngine
from plugin.environments.trajectory import Rollouts
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.observe.log_prob_dump import LogProbDump
from plugin.tools.compare.dump_reading import open_dump
from plugin.tools.compare.routing_mismatch import measured, routed_batch
from tests.unit.environments.played_groups import run_single_turn


def sampled(
    hf_config: Any, state_dict: dict[str, Tensor], top_k: int | None = None, **engine: Any
) -> RolloutBatch:
    """128 responses of up to 16 tokens, with log-probs, routes and weights."""
    built = TransformersEngine(hf_config.to_dict(), **engine)
    load_tensors(built, state_dict.items())
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(hf_config.vocab_size, (16, 6), generator=generator).tolist()
    requests = [
        GenerationRequest(tuple(prompt), tuple(range(8 * i, 8 * i + 8)))
        for i, prompt in enumerate(prompts)
    ]
    parameters = SamplingParameters(
        top_k=top_k,
        max_response_length=16,
        stop_token_ids=(0,),
        routed_experts=True,
        routed_weights=True,
        sampling_mask=top_k is not None,
    )
    return Rollouts.of(run_single_turn(built, requests, parameters)).batch


def replay_a_dump(
    groups: ParallelGroups,
    hf_config: Any,
    state_dict: dict[str, Tensor],
    directory: str,
    top_k: int | None = None,
) -> list[dict[str, Any]]:
    """Sample in bfloat16, dump, read back, and measure every way to route."""
    batch = sampled(hf_config, state_dict, top_k, dtype="bfloat16")
    log_probs = batch.columns["rollout_log_probs"]
    LogProbDump(Path(directory), with_routes=True).write(
        0, {**batch.columns, "log_probs": log_probs}
    )
    read = routed_batch(open_dump([directory]), max_tokens=1 << 20)
    assert len(read) == len(batch)
    for name in ("unconcat_tokens", "rollout_routed_weights", "rollout_routed_experts"):
        assert torch.equal(read.columns[name].values.float(), batch.columns[name].values.float())
    return measured(read, hf_config, state_dict, TrainerConfig(max_tokens_per_gpu=512), groups)
