"""What a layout costs by formula alone, in microseconds: enough to leave out what cannot win.

A search plans the layouts that remain. Only the order of these seconds matters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from plugin.config import JobConfig
from plugin.controller.preflight.memory_check import WeightCounts, least_bytes
from plugin.tools.plan.estimates import ASSUMED_UTILIZATION, group_span
from plugin.tools.plan.gpus import Gpu
from plugin.tools.plan.job_plan import RESERVED_BYTES
from plugin.tools.plan.layouts import stage_ends
from plugin.tools.plan.workload import whole_counts


@dataclass(frozen=True)
class RoughModel:
    """The numbers of a model and of a step that the formulas use.

    tokens: of all samples of a step; copies: models beside the policy, such as a reference
    head: numbers of the LM head
    """

    counts: WeightCounts
    layers: int
    hidden: int
    experts: int
    topk: int
    tokens: int
    copies: int = 0
    head: int = 0

    @classmethod
    def of(cls, hf_config: Any, tokens: int, copies: int) -> RoughModel:
        """Count the weights that transformers would build."""
        from plugin.megatron_backend.model.families import family_of

        arguments = family_of(hf_config).transformer_arguments(hf_config)
        return cls(
            whole_counts(hf_config),
            arguments["num_layers"],
            hf_config.hidden_size,
            arguments.get("num_moe_experts", 0),
            arguments.get("moe_router_topk", 0),
            tokens,
            copies,
            hf_config.vocab_size * hf_config.hidden_size,
        )


def rough_bytes(model: RoughModel, config: JobConfig) -> int:
    """The least that a GPU must hold: no activations, the mean rank."""
    least = least_bytes(model.counts, config, on_cuda=True)
    copies = 0 if config.reference_offload else model.copies
    return least.total + copies * least.parameters + RESERVED_BYTES


def rough_seconds(model: RoughModel, config: JobConfig, gpu: Gpu) -> float:
    """A step's products, messages and bubble by formula."""
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    cp, ep = config.context_parallel_size, config.expert_model_parallel_size
    world, chunks = config.world_size, config.virtual_pipeline_model_parallel_size or 1
    active = model.counts.dense + model.counts.experts * model.topk / max(1, model.experts)
    imbalance = _imbalance(model, active, pp)
    compute = imbalance * 6 * active * model.tokens / world
    compute /= gpu.tflops * 1e12 * ASSUMED_UTILIZATION

    def link(name: str) -> float:
        ranks, distance = group_span(config, name, world)
        return gpu.link if (ranks - 1) * distance < config.ranks_per_node else gpu.network

    # Tokens that a tensor parallel group works on, and their hidden states in one layer.
    tokens = model.tokens * tp * pp / world
    states = 2 * tokens * model.hidden * imbalance * model.layers / pp
    # Forward and backward: gathers and scatters around attention and MLP; to the experts and back;
    # keys and values around the ring; hidden states to the next stage and their gradients back.
    messages = 8 * states * (tp - 1) / tp / link("tensor")
    messages += 4 * states / tp * model.topk * (ep - 1) / ep / link("expert")
    messages += 3 * states / tp * (cp - 1) / link("context")
    if pp > 1:
        messages += 4 * tokens * model.hidden / tp * chunks / link("pipeline")
    assert config.max_tokens_per_gpu != "auto"
    microbatches = max(1.0, tokens / (config.max_tokens_per_gpu or tokens))
    waiting = 1 + (pp - 1) / (chunks * microbatches)
    if chunks > 1:
        # The interleaved schedule runs whole rounds of microbatches, some of them padding.
        waiting *= pp * math.ceil(microbatches / pp) / microbatches
    if config.overlap_grad_reduce:
        return (compute + messages) * waiting
    held = (model.counts.dense / tp + model.counts.experts / ep) / pp
    return (compute + messages) * waiting + 6 * held / link("data x context")


def _imbalance(model: RoughModel, active: float, stages: int) -> float:
    """Work of the busiest pipeline stage over the mean: uneven layers, and the LM head in the last.

    active: numbers that a token is multiplied with in the whole model
    """
    head = model.head * model.layers / (active - model.head)  # in layers
    first, last = stage_ends(model.layers, stages)
    given = [end for end in (first, last) if end is not None]
    middle = (model.layers - sum(given)) / max(1, stages - len(given))
    at_end = (middle if last is None else last) + head
    if stages == 1:
        return 1.0
    return max(middle, first or 0, at_end) * stages / (model.layers + head)
