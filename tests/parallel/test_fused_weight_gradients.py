"""Weight gradients that a kernel adds to their buffers, beside those that autograd brings."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.tensor_parallel import layers
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.config.device_defaults import Capabilities
from plugin.megatron_backend.model import builder, device_settings
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step import schedule
from tests.parallel.training_jobs import (
    Case,
    Layout,
    Outcome,
    RunRanks,
    Start,
    differences,
    exported,
    new_trainer,
    run_cases,
)

SETTINGS = {
    "policy_loss": "ppo",
    "entropy_coef": 0.05,
    "max_tokens_per_gpu": 20,
    "separable_fast_path": "off",
}


def train_with_fused_gradients(
    groups: ParallelGroups, start: Start, settings: dict[str, Any]
) -> Outcome:
    """Two steps with the kernel of APEX, written out, that adds weight gradients to their float32 buffers."""

    def add_gradient(inputs: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(gradient.t() @ inputs)

    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=add_gradient)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "_grad_accum_fusion_available", True)
        patch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernel, raising=False)
        found = Capabilities(gradient_fusion=True)
        patch.setattr(builder, "transformer_settings", partial(_with_fusion, found))
        trainer = new_trainer(groups, start, settings)
        # The head is fused for every second microbatch, so that both ways meet in one step.
        turns = itertools.cycle([True, False])
        patch.setattr(schedule, "use_fused_head", lambda *_, **__: next(turns))
        steps = [trainer.train_step(start.batch) for _ in range(2)]
        return Outcome([], steps, exported(trainer))


def _with_fusion(
    found: Capabilities, config: TrainerConfig, _: Any, model: Any, **rope: bool
) -> dict[str, Any]:
    settings = device_settings.transformer_settings(config, found, model, **rope)
    return settings | {"gradient_accumulation_fusion": found.gradient_fusion}


def test_fused_weight_gradients_are_those_of_autograd_also_where_the_head_is_fused_now_and_then(
    run_ranks: RunRanks,
) -> None:
    case = Case(settings=SETTINGS)
    plain = run_cases(run_ranks, Layout(), {"plain": case.uncut()})["plain"]
    [fused] = run_ranks(train_with_fused_gradients, 1, Start.of("qwen3"), dict(case.settings))
    found = differences(replace(fused, log_probs=plain.log_probs), plain, "qwen3")
    assert not found, found[:8]
