"""Stock Megatron-Core schedules, DDP and optimizers run on CPU ranks and agree between layouts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.megatron_backend import cpu_runtime
from plugin.megatron_backend.hf_weights.export import export_hf_weights
from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel.rank_pool import RankPool
from tests.parallel.schedule_runs import loaded_model, train_one_step
from tests.parallel.tiny_models import (
    VOCAB_SIZE,
    hf_log_probs,
    hf_model,
    hf_state_dict,
    tiny_qwen3,
    tiny_qwen3_moe,
)

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, EP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size"
FULL_RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def microbatches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCAB_SIZE, (2, 8), generator=generator) for _ in range(4)]


def step_on_rank(
    groups: ParallelGroups,
    config: Any,
    state: dict[str, Tensor],
    settings: TrainerConfig,
    **overrides: Any,
) -> tuple[float, dict[str, Tensor]]:
    """Gradient norm and whole weights after one step on 4 microbatches, shared out over DP ranks."""
    tokens = microbatches()
    per_rank = len(tokens) // groups.dp_size
    own = tokens[groups.dp_rank * per_rank : (groups.dp_rank + 1) * per_rank]
    chunks = loaded_model(config, state, groups, settings, **overrides)
    wrapped, grad_norm = train_one_step(chunks, own, groups, settings)
    weights = {name: tensor.clone() for name, tensor in export_hf_weights(wrapped, groups)}
    return grad_norm, weights


# Large epsilon: the update is then proportional to the gradient, not to its sign, and rounding of tiny
# gradients cannot flip it.
PLAIN: dict[str, Any] = {"lr": 1e-2, "adam_eps": 1e-2}
SHARDED = {**PLAIN, "use_distributed_optimizer": True}
SP = {"sequence_parallel": True, TP: 2}
CONFIGS = {"dense": tiny_qwen3(), "moe": tiny_qwen3_moe()}

DENSE_STEPS = [
    ("TP2", 2, {TP: 2}, {}, PLAIN),
    ("TP2+SP", 2, {TP: 2}, SP, PLAIN),
    ("PP2", 2, {PP: 2}, {}, PLAIN),
    ("PP2 x VPP2", 2, {PP: 2, VPP: 2}, {}, PLAIN),
    ("PP2 x VPP2, full recompute", 2, {PP: 2, VPP: 2}, FULL_RECOMPUTE, PLAIN),
    ("DP2", 2, {}, {}, PLAIN),
    ("DP2, distributed optimizer", 2, {}, {}, SHARDED),
    ("TP2+SP x PP2, full recompute", 4, {TP: 2, PP: 2}, SP | FULL_RECOMPUTE, PLAIN),
    ("DP2 x TP2, distributed optimizer", 4, {TP: 2}, {}, SHARDED),
]
MOE_STEPS = [
    ("TP2+SP", 2, {TP: 2}, SP, PLAIN),
    ("EP2", 2, {EP: 2}, {}, PLAIN),
    ("EP2, distributed optimizer", 2, {EP: 2}, {}, SHARDED),
    ("EP2 x TP2+SP", 4, {EP: 2, TP: 2}, SP, PLAIN),
    ("EP2 x PP2, full recompute", 4, {EP: 2, PP: 2}, FULL_RECOMPUTE, PLAIN),
]
# The trainer's own tests go through these layouts as well (test_layout_equality.py).
DEFAULT_STEPS = {
    "dense": (
        *("TP2+SP", "PP2 x VPP2, full recompute", "DP2, distributed optimizer"),
        "TP2+SP x PP2, full recompute",
    ),
    "moe": ("TP2+SP", "EP2 x TP2+SP", "EP2 x PP2, full recompute"),
}


@pytest.fixture(scope="module")
def one_process(rank_pool: RankPool) -> Callable[[str], tuple[float, dict[str, Tensor]]]:
    """Gradient norm and weights of a family after one step in one process."""

    @cache
    def compute(family: str) -> tuple[float, dict[str, Tensor]]:
        config = CONFIGS[family]
        arguments = (config, hf_state_dict(config), TrainerConfig(**PLAIN))
        return rank_pool.run_ranks(step_on_rank, 1, *arguments)[0]

    return compute


@pytest.mark.parametrize(
    ("family", "ranks", "sizes", "settings", "optimizer"),
    [
        pytest.param(
            family,
            *case,
            id=f"{family}, {name}",
            marks=() if name in DEFAULT_STEPS[family] else pytest.mark.slow,
        )
        for family, steps in {"dense": DENSE_STEPS, "moe": MOE_STEPS}.items()
        for name, *case in steps
    ],
)
def test_a_step_has_the_gradient_norm_and_weights_of_one_process(
    run_ranks: Any,
    one_process: Callable[[str], tuple[float, dict[str, Tensor]]],
    family: str,
    ranks: int,
    sizes: dict[str, int],
    settings: dict[str, Any],
    optimizer: dict[str, Any],
) -> None:
    config = CONFIGS[family]
    state = hf_state_dict(config)
    arguments = (config, state, TrainerConfig(**settings, **optimizer))
    norm, weights = one_process(family)
    for got_norm, got_weights in run_ranks(step_on_rank, ranks, *arguments, **sizes):
        assert got_norm == pytest.approx(norm, rel=1e-5)
        for name, tensor in weights.items():
            assert (tensor - state[name]).abs().max() > 1e-5, f"{name} must have been updated"
            torch.testing.assert_close(got_weights[name], tensor, rtol=1e-5, atol=1e-5)


def dropout_step_on_rank(
    groups: ParallelGroups,
    config: Any,
    state: dict[str, Tensor],
    dropout: float,
    recompute: dict[str, Any],
) -> float:
    settings = TrainerConfig(**PLAIN, **recompute)
    dropouts = {"attention_dropout": dropout, "hidden_dropout": dropout}
    return step_on_rank(groups, config, state, settings, **dropouts)[0]


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        pytest.param(1, {}, id="one rank", marks=pytest.mark.slow),
        pytest.param(2, {TP: 2}, id="TP2"),
    ],
)
def test_recomputation_draws_the_dropout_of_the_first_pass_again(
    run_ranks: Any, ranks: int, sizes: dict[str, int]
) -> None:
    config = tiny_qwen3()
    state = hf_state_dict(config)
    norms = {}
    for name, changes in {"kept": {}, "recomputed": FULL_RECOMPUTE}.items():
        norms[name] = run_ranks(dropout_step_on_rank, ranks, config, state, 0.3, changes, **sizes)
    assert norms["kept"] == pytest.approx(norms["recomputed"], rel=1e-6)
    without = run_ranks(dropout_step_on_rank, ranks, config, state, 0.0, {}, **sizes)
    assert norms["kept"] != pytest.approx(without, rel=1e-3), "dropout must have had an effect"


def random_numbers_on_rank(groups: ParallelGroups) -> tuple[list[float], list[float], list[float]]:
    """What a fresh model's generators give before, inside and after a fork of the tracker."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from plugin.megatron_backend.model.builder import build_model

    build_model(tiny_qwen3(), TrainerConfig(), groups, seed=5)
    torch.manual_seed(99)
    before = torch.rand(2).tolist()
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(2).tolist()
    return before, inside, torch.rand(2).tolist()


def test_forked_random_numbers_differ_between_tp_ranks_and_leave_the_shared_ones_alone(
    run_ranks: Any,
) -> None:
    first, second = run_ranks(random_numbers_on_rank, 2, **{TP: 2})
    torch.manual_seed(99)
    unforked = torch.rand(4).tolist()
    assert first[0] == second[0] == unforked[:2]
    assert first[1] != second[1], "attention dropout of different heads must differ"
    assert first[2] == second[2] == unforked[2:], "hidden dropout must agree between TP ranks"


def bfloat16_step_on_rank(
    groups: ParallelGroups, config: Any, state: dict[str, Tensor]
) -> tuple[Tensor | None, float, bool]:
    from tests.parallel.schedule_runs import forward_log_probs

    settings = TrainerConfig(train_dtype="bfloat16", **SHARDED)
    chunks = loaded_model(config, state, groups, settings)
    log_probs = forward_log_probs(chunks, microbatches(), groups)
    wrapped, norm = train_one_step(chunks, microbatches(), groups, settings)
    all_bfloat16 = all(p.dtype is torch.bfloat16 for c in wrapped for p in c.parameters())
    return log_probs and log_probs[0], norm, all_bfloat16


def test_bfloat16_with_the_distributed_optimizer_stays_close_to_float32(run_ranks: Any) -> None:
    config = tiny_qwen3()
    state = hf_state_dict(config)
    [(norm, _)] = run_ranks(step_on_rank, 1, config, state, TrainerConfig(**PLAIN))
    want = hf_log_probs(hf_model(config), microbatches()[0])
    for log_probs, got_norm, all_bfloat16 in run_ranks(
        bfloat16_step_on_rank, 2, config, state, **{TP: 2}
    ):
        assert all_bfloat16
        # bfloat16 keeps 8 bits: relative error 2^-8 = 0.004 per operation, logits here are below 10
        torch.testing.assert_close(log_probs, want, rtol=0, atol=0.2)
        assert got_norm == pytest.approx(norm, rel=0.1)


def patched_functions_on_rank(groups: ParallelGroups) -> dict[str, bool]:
    before = {name: getattr(torch, name) for name in ("empty", "zeros", "tensor")}
    tensor_type = torch.Tensor.type
    active = cpu_runtime.activate()
    not_installed = [s for s in cpu_runtime.SHIMS if s.name not in cpu_runtime._installed]
    return {
        "only what Megatron-Core has itself is left out": {shim.name for shim in not_installed}
        <= {"moe_gemm"},
        "active": active and not any(shim.missing() for shim in not_installed),
        "not wrapped twice": all(getattr(torch, name) is fn for name, fn in before.items())
        and torch.Tensor.type is tensor_type,
        "cuda factory gives cpu": torch.empty(2, device="cuda").device.type == "cpu",
        "current device is cpu": torch.cuda.current_device() == torch.device("cpu"),
        "other callers see the true type": torch.zeros(1).type() == "torch.FloatTensor",
        "type still converts": torch.zeros(1).type(torch.int64).dtype is torch.int64,
    }


def test_activating_twice_changes_nothing_and_others_see_true_types(run_ranks: Any) -> None:
    for facts in run_ranks(patched_functions_on_rank, 1):
        assert all(facts.values()), facts


def activate_with_cuda_on_rank(groups: ParallelGroups) -> list[tuple[bool, list[str]]]:
    """Pretends that CUDA is there and nothing is installed yet, with and without Transformer Engine's name."""
    answers = []
    for gemm in (None, "of Transformer Engine"):
        installed: list[str] = []
        shims = tuple(
            replace(shim, install=partial(installed.append, shim.name))
            for shim in cpu_runtime.SHIMS
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(cpu_runtime, "SHIMS", shims)
            patch.setattr(cpu_runtime, "_installed", set())
            patch.delattr(moe_utils, "te_general_gemm")
            if gemm is not None:
                moe_utils.te_general_gemm = gemm
            answers.append((cpu_runtime.activate(), installed))
    return answers


def test_a_device_context_entered_after_the_shims_still_decides_where_tensors_are_made() -> None:
    # In a process of its own: the first use of a device context is what counts.
    code = """
import torch
from plugin.megatron_backend import cpu_runtime
cpu_runtime.activate()
with torch.device("meta"):
    made = [torch.empty(2), torch.ones(2), torch.nn.Linear(2, 2).weight]
assert {tensor.device.type for tensor in made} == {"meta"}, made
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_where_cuda_is_available_only_a_missing_name_of_transformer_engine_is_put_in_place(
    run_ranks: Any,
) -> None:
    assert run_ranks(activate_with_cuda_on_rank, 1) == [[(False, ["moe_gemm"]), (False, [])]]


def polling_threads(groups: ParallelGroups) -> list[str]:
    """Names of this rank's threads that poll sockets."""
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo_tcp_loop" in name]


def test_all_groups_of_a_rank_wait_on_one_thread(run_ranks: Any) -> None:
    # 21 groups; each would have a thread that wakes up 100 times a second.
    for threads in run_ranks(polling_threads, 2, tensor_model_parallel_size=2):
        assert len(threads) == 1


def test_every_shim_says_what_it_replaces_why_and_until_when() -> None:
    names = [shim.name for shim in cpu_runtime.SHIMS]
    assert len(set(names)) == len(names)
    for shim in cpu_runtime.SHIMS:
        assert shim.stands_in_for and shim.cause and shim.removed_when
