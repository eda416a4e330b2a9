"""float16 training: the loss scale grows, falls and travels alike on every layout, and gradients are those without it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.trainer import MegatronTrainer, StepResult
from tests.parallel.misbehaving_hooks import armed
from tests.parallel.rank_pool import RankPool
from tests.parallel.test_critic import CONFIG as CRITIC_MODEL
from tests.parallel.test_critic import critic, critic_batch
from tests.parallel.tiny_models import hf_state_dict
from tests.parallel.training_jobs import (
    Layout,
    RunRanks,
    Start,
    exported,
    further,
    new_trainer,
    weights_of,
)

FLOAT16 = {"train_dtype": "float16"}
#: Doubles after every step, and halves at the first overflow.
LIVELY = {**FLOAT16, "initial_loss_scale": 4096.0, "loss_scale_window": 1, "hysteresis": 1}
#: Advantages and returns times this are finite, and their gradients at these scales are not.
HUGE = 5e3
#: Log-probs around -4 of a random model of 4 layers, roundings of 2^-11 relative.
CLOSE = 0.01

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True}
SP = {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one process": (Layout(), {"micro_batch_size": 2}),
    "TP2": (Layout(2, TP2), {}),
    "TP2 with sequence parallelism": (Layout(2, TP2), SP),
    "PP2": (Layout(2, PP2), {"max_tokens_per_gpu": 20}),
    # 9 samples on 2 ranks, one at a time: one rank fills up with a padding microbatch
    "DP2 with the distributed optimizer": (Layout(2), {**SHARDED, "micro_batch_size": 1}),
    "CP2": (Layout(2, {"context_parallel_size": 2}), {}),
}


def times(batch: RolloutBatch, factor: float) -> RolloutBatch:
    """The batch with advantages, and so gradients, `factor` times as large."""
    advantages = batch.columns["advantages"]
    return batch.with_column("advantages", advantages.like(advantages.values * factor))


def fits_overflows_fits(
    groups: ParallelGroups, start: Start, settings: dict[str, Any]
) -> dict[str, Any]:
    """Three steps of which the second has gradients that float16 cannot hold."""
    trainer = new_trainer(groups, start, settings)
    log_probs = trainer.compute_log_probs(start.batch)
    weights = [exported(trainer)]
    results: list[StepResult] = []
    for factor in (1.0, HUGE, 1.0):
        results.append(trainer.train_step(times(start.batch, factor)))
        weights.append(exported(trainer))
    held = next(unwrapped_parameters(trainer))
    return {
        "log_probs": log_probs,
        "results": results,
        "version": trainer.version,
        "dtypes": (held.dtype, held.main_grad.dtype, log_probs.values.dtype),
        "kept": [all(map(torch.equal, a.values(), b.values())) for a, b in pairwise(weights)],
        "weights": weights[-1],
    }


def unwrapped_parameters(trainer: MegatronTrainer) -> Any:
    return (parameter for chunk in trainer.chunks for parameter in chunk.parameters())


@pytest.fixture(scope="module")
def whole(rank_pool: RankPool) -> dict[str, Any]:
    """The same steps of one process in one microbatch, in float32 (without overflow) and in float16."""
    start, uncut = Start.of("qwen3"), {"micro_batch_size": 64, "fused_lm_head": "off"}
    return {
        dtype: rank_pool.run_ranks(fits_overflows_fits, 1, start, {**settings, **uncut})[0]
        for dtype, settings in (("float16", LIVELY), ("float32", {"train_dtype": "float32"}))
    }


@pytest.mark.parametrize(
    "name",
    [
        *("TP2", "PP2", "DP2 with the distributed optimizer"),
        *further("one process", "TP2 with sequence parallelism", "CP2"),
    ],
)
def test_the_scale_grows_and_falls_on_every_layout_and_the_gradient_norm_is_without_it(
    run_ranks: RunRanks, whole: dict[str, Any], name: str
) -> None:
    layout, settings = LAYOUTS[name]
    start = Start.of("qwen3")
    ranks = run_ranks(
        fits_overflows_fits, layout.ranks, start, {**LIVELY, **settings}, **layout.sizes
    )
    expected, exact = whole["float16"], whole["float32"]
    for found in ranks:
        assert found["dtypes"] == (torch.float16, torch.float32, torch.float32)
        steps: list[StepResult] = found["results"]
        assert [step.updated for step in steps] == [True, False, True]
        assert [step.overflow for step in steps] == [False, True, False]
        # 4096 doubles after the first step; the second overflows and halves it again.
        assert [step.metrics["loss_scale"] for step in steps] == [4096.0, 8192.0, 4096.0]
        assert [step.metrics["skipped_steps"] for step in steps] == [0.0, 1.0, 1.0]
        assert found["kept"] == [False, True, False] and found["version"] == 2
        for mine, theirs in zip(found["log_probs"], exact["log_probs"], strict=True):
            assert float((mine - theirs).abs().max()) < CLOSE
        for number in (0, 2):
            for key in ("loss", "grad_norm", "mismatch_kl"):
                value = steps[number].metrics[key]
                wanted = expected["results"][number].metrics[key]
                assert value == pytest.approx(wanted, rel=CLOSE, abs=1e-3), (number, key)
        assert steps[0].grad_norm == pytest.approx(exact["results"][0].grad_norm, rel=CLOSE)
    assert all(step.updated for step in exact["results"])  # the second step is huge, not wrong


HEADS: dict[str, dict[str, Any]] = {
    "logits": {"fused_lm_head": "off"},
    "fused": {"fused_lm_head": "on", "separable_fast_path": "off"},
    "gradients in the forward pass": {"fused_lm_head": "on", "separable_fast_path": "on"},
}


def norms_on_rank(groups: ParallelGroups, start: Start, cases: dict[str, Any]) -> dict[str, float]:
    """Gradient norm of one step on the batch with advantages of about 1e-9, by case."""
    small = times(start.batch, 1e-9)
    trainers = {name: new_trainer(groups, start, case) for name, case in cases.items()}
    return {name: trainer.train_step(small).grad_norm for name, trainer in trainers.items()}


def test_every_head_multiplies_by_the_scale_before_it_rounds(run_ranks: RunRanks) -> None:
    """The smallest number of float16 is 6e-8: without the scale all of these gradients are 0."""
    sizes: dict[str, dict[str, Any]] = {
        "per sample": {"micro_batch_size": 2},
        "per token": {"micro_batch_size": 2, "calculate_per_token_loss": True},
    }
    for size, settings in sizes.items():
        large, none = {**FLOAT16, "loss_scale": 2.0**34}, {**FLOAT16, "loss_scale": 1.0}
        cases = {name: {**large, **settings, **head} for name, head in HEADS.items()}
        cases["exact"] = {**settings, "fused_lm_head": "off"}
        cases["without a scale"] = {**none, **settings, **HEADS["gradients in the forward pass"]}
        [norms] = run_ranks(norms_on_rank, 1, Start.of("qwen3"), cases)
        assert norms.pop("without a scale") < 0.1 * norms["exact"], size
        for name, norm in norms.items():
            assert norm == pytest.approx(norms["exact"], rel=CLOSE), (size, name)


def save_in_the_middle(
    groups: ParallelGroups, start: Start, settings: dict[str, Any], root: str
) -> list[float]:
    """An overflow, a step, a checkpoint, two steps: their scales."""
    trainer = new_trainer(groups, start, settings)
    trainer.train_step(times(start.batch, HUGE))
    trainer.train_step(start.batch)
    trainer.save_checkpoint(root, 2, {})
    return [trainer.train_step(start.batch).metrics["loss_scale"] for _ in range(2)]


def resume(
    groups: ParallelGroups, start: Start, settings: dict[str, Any], root: str
) -> list[dict[str, float]]:
    """Two steps from the checkpoint."""
    trainer = new_trainer(groups, start, settings)
    trainer.load_checkpoint(root)
    return [trainer.train_step(start.batch).metrics for _ in range(2)]


def test_a_resumed_run_goes_on_with_the_scale_and_its_count_of_good_steps(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    start, settings = Start.of("qwen3"), {**LIVELY, **SHARDED, "loss_scale_window": 2}
    root = str(tmp_path / "checkpoints")
    # 4096, halved by the overflow; two good steps double it.
    assert run_ranks(save_in_the_middle, 2, start, settings, root) == [[2048.0, 4096.0]] * 2
    metadata = json.loads((tmp_path / "checkpoints/step_0000002/metadata.json").read_text())
    kept = {"scale": 2048.0, "growth_tracker": 1.0, "hysteresis_tracker": 0.0}
    assert metadata["loss_scale"] == kept
    for steps in run_ranks(resume, 2, start, {**LIVELY, "loss_scale_window": 2}, root, **TP2):
        assert [step["loss_scale"] for step in steps] == [2048.0, 4096.0]
        assert [step["skipped_steps"] for step in steps] == [1.0, 1.0]


def overflow_in_experts(
    groups: ParallelGroups, start: Start, settings: dict[str, Any]
) -> dict[str, Any]:
    """A step in which one expert of one rank gets an infinite gradient, then a sound one."""
    trainer = new_trainer(groups, start, settings)
    config = trainer.chunks[0].config

    def spoil(chunks: Any, *args: Any, **kwargs: Any) -> None:
        finalize_model_grads(chunks, *args, **kwargs)
        for name, parameter in chunks[0].named_parameters():
            if groups.ep_rank == groups.ep_size - 1 and "experts" in name:
                parameter.main_grad.fill_(torch.inf)
                return

    config.finalize_model_grads_func = spoil
    spoiled = trainer.train_step(start.batch)
    config.finalize_model_grads_func = finalize_model_grads
    parts = trainer.optimizer.optimizer.chained_optimizers  # type: ignore[union-attr]
    scales = [float(part.get_loss_scale()) for part in parts]
    return {"spoiled": spoiled, "scales": scales, "sound": trainer.train_step(start.batch)}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow, id="whole state"),
        pytest.param(SHARDED, id="sharded"),
    ],
)
def test_dense_and_expert_weights_keep_one_scale(
    run_ranks: RunRanks, settings: dict[str, Any]
) -> None:
    start = Start.of("qwen3_moe")
    [exact] = run_ranks(overflow_in_experts, 1, start, {"micro_batch_size": 64})
    for found in run_ranks(overflow_in_experts, 2, start, {**LIVELY, **settings}, **EP2):
        assert found["spoiled"].overflow and not found["spoiled"].updated
        assert "experts" in found["spoiled"].bad_parameter
        assert found["scales"] == [2048.0, 2048.0]
        assert found["sound"].updated
        assert found["sound"].grad_norm == pytest.approx(exact["sound"].grad_norm, rel=0.05)


def hooks_nan(groups: ParallelGroups, start: Start, settings: dict[str, Any]) -> StepResult:
    trainer = new_trainer(groups, start, settings)
    with armed(0):
        return trainer.train_step(start.batch)


def test_a_nan_of_a_hook_is_no_overflow(run_ranks: RunRanks) -> None:
    hook = "tests.parallel.misbehaving_hooks.nan_for_one_sample"
    settings = {"use_tis": True, "custom_tis_function_path": hook, "validate_batch": "never"}
    for step in run_ranks(hooks_nan, 2, Start.of("qwen3"), {**LIVELY, **settings}):
        assert not step.updated and not step.overflow and hook in step.cause


def critic_steps(
    groups: ParallelGroups, state: dict[str, Tensor], settings: dict[str, Any]
) -> list[StepResult]:
    """A step, one towards returns that are out of reach, a step."""
    trainer, batch = critic(groups, state, settings, "packed"), critic_batch()
    far = batch.columns["returns"]
    far = batch.with_column("returns", far.like(far.values * HUGE))
    return [trainer.train_critic(each) for each in (batch, far, batch)]


@pytest.mark.parametrize("name", ["PP2", *further("TP2", "DP2 with the distributed optimizer")])
def test_the_critic_has_a_scale_of_its_own(run_ranks: RunRanks, name: str) -> None:
    layout, settings = LAYOUTS[name]
    state = hf_state_dict(CRITIC_MODEL)
    [exact] = run_ranks(critic_steps, 1, state, {"micro_batch_size": 64})
    found = run_ranks(critic_steps, layout.ranks, state, {**LIVELY, **settings}, **layout.sizes)
    for steps in found:
        assert [step.updated for step in steps] == [True, False, True]
        assert [step.metrics["critic/loss_scale"] for step in steps] == [4096.0, 8192.0, 4096.0]
        assert steps[2].metrics["critic/skipped_steps"] == 1.0 and steps[1].overflow
        assert steps[0].grad_norm == pytest.approx(exact[0].grad_norm, rel=0.03)


def exported_on_rank(
    groups: ParallelGroups, start: Start, settings: dict[str, Any]
) -> dict[str, Tensor]:
    return exported(new_trainer(groups, start, settings))


@pytest.mark.slow  # as in float32
@pytest.mark.parametrize(
    ("family", "sizes", "settings"),
    [("qwen3", TP2, {}), ("qwen3", PP2, {}), ("qwen3_moe", EP2, {})],
    ids=["dense TP2", "dense PP2", "moe EP2"],
)
def test_exported_weights_are_the_loaded_ones_in_float16(
    run_ranks: RunRanks, family: str, sizes: dict[str, int], settings: dict[str, Any]
) -> None:
    found = run_ranks(exported_on_rank, 2, Start.of(family), {**FLOAT16, **settings}, **sizes)[0]
    weights = weights_of(family)
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert found[name].dtype is torch.float16
        assert torch.equal(found[name], value.half()), name
