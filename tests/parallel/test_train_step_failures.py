"""Every rank raises or none does, a step that cannot be trusted changes no weight, and the trainer goes on afterwards."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from plugin.batch_types import RolloutBatch
from plugin.logprobs import row_gradients
from plugin.megatron_backend.model.builder import unwrap
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.trainer import MegatronTrainer
from plugin.sharding.sequence_shards import SequenceShards
from tests.parallel import misbehaving_hooks
from tests.parallel.rank_pool import RankError
from tests.parallel.training_jobs import (
    SMOOTH_ADAM,
    Layout,
    RunRanks,
    Start,
    exported,
    metric_differences,
    new_trainer,
)

#: No hang: far below the 120 s after which a collective gives up, far above what a step takes.
SECONDS = 15.0
HOOKS = "tests.parallel.misbehaving_hooks"
BY_BUDGET = {"use_tis": True, "max_tokens_per_gpu": 20}
LAYOUTS = {
    "TP2": Layout(2, {"tensor_model_parallel_size": 2}),
    "PP2": Layout(2, {"pipeline_model_parallel_size": 2}),
    "DP2": Layout(2),
    "TP2xPP2": Layout(4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


def _caught(call: Callable[[], Any]) -> tuple[str, str, float]:
    """(class of the error, its message, seconds until it came)."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def _weights_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def fail_then_go_on(
    groups: ParallelGroups, start: Start, hook: str, bad_rank: int
) -> dict[str, Any]:
    """A step in which a hook misbehaves, then a sound one, and the same sound step by a fresh trainer."""
    settings = {**BY_BUDGET, "custom_tis_function_path": f"{HOOKS}.{hook}"}
    trainer = new_trainer(groups, start, settings)
    before = exported(trainer)
    with misbehaving_hooks.armed(bad_rank):
        error = _caught(lambda: trainer.train_step(start.batch))
    untouched = _weights_equal(before, exported(trainer))
    after = trainer.train_step(start.batch)
    fresh = new_trainer(groups, start, settings)
    expected = fresh.train_step(start.batch)
    return {
        "error": error,
        "untouched": untouched,
        "difference": metric_differences(after, expected, 0.0),
        "same weights": _weights_equal(exported(trainer), exported(fresh)),
    }


@pytest.mark.parametrize(
    ("name", "bad_rank"),
    [
        pytest.param("TP2", 1, marks=pytest.mark.slow),
        pytest.param("PP2", 1, marks=pytest.mark.slow),
        ("DP2", 1),
        ("TP2xPP2", 3),
    ],
)
def test_a_hook_that_raises_on_one_rank_ends_the_step_everywhere_with_its_traceback(
    run_ranks: RunRanks, name: str, bad_rank: int
) -> None:
    # Hooks run on the last stage: rank 1 of PP2, ranks 2 and 3 of TP2xPP2.
    layout = LAYOUTS[name]
    # Over 2 DP ranks the longest response falls on one of them; the hook raises wherever it is.
    hook = "raises_for_one_sample" if name == "DP2" else "raises_once"
    start = Start.of("qwen3")
    results = run_ranks(fail_then_go_on, layout.ranks, start, hook, bad_rank, **layout.sizes)
    classes = [result["error"][0] for result in results]
    assert classes.count("ZeroDivisionError") == 1
    assert classes.count("ParallelError") == layout.ranks - 1
    failed = classes.index("ZeroDivisionError")
    for result in results:
        kind, message, seconds = result["error"]
        assert f"a hook failed on rank {failed}" in message
        assert seconds < SECONDS
        if kind == "ParallelError":
            assert f"the training step failed on rank {failed}" in message
            assert "misbehaving_hooks.py" in message and "Traceback" in message
        assert result["untouched"]
        assert not result["difference"] and result["same weights"]


@pytest.mark.parametrize("hook", ["metric_of_one_rank", "metric_of_one_microbatch"])
def test_metrics_that_only_some_record_are_an_error_and_no_hang(
    run_ranks: RunRanks, hook: str
) -> None:
    results = run_ranks(fail_then_go_on, 2, Start.of("qwen3"), hook, 1)
    for result in results:
        kind, message, seconds = result["error"]
        assert kind in ("ParallelError", "BatchError")
        assert "recorded different metrics" in message and "metric names" in message
        assert seconds < SECONDS
        assert result["untouched"] and not result["difference"] and result["same weights"]


def _poison(trainer: MegatronTrainer, groups: ParallelGroups, bad_rank: int) -> list[Any]:
    """Makes one parameter's gradient NaN on one rank; returns the handles that undo it."""
    if groups.rank != bad_rank:
        return []
    parameter = dict(unwrap(trainer.chunks[-1]).named_parameters())[POISONED]
    return [parameter.register_hook(lambda gradient: gradient * float("nan"))]


POISONED = "decoder.layers.1.mlp.linear_fc2.weight"


def skip_then_go_on(
    groups: ParallelGroups, start: Start, settings: dict[str, Any], bad_rank: int
) -> dict[str, Any]:
    """A step with a NaN gradient, then a sound one, and the same sound step by a fresh trainer."""
    trainer = new_trainer(groups, start, settings)
    before = exported(trainer)
    handles = _poison(trainer, groups, bad_rank)
    skipped = trainer.train_step(start.batch)
    for handle in handles:
        handle.remove()
    untouched = _weights_equal(before, exported(trainer))
    version = trainer.version
    after = trainer.train_step(start.batch)
    fresh = new_trainer(groups, start, settings)
    expected = fresh.train_step(start.batch)
    return {
        "skipped": skipped,
        "untouched": untouched,
        "version": version,
        "count": after.metrics["skipped_steps"],
        "updated": after.updated,
        "loss": (after.metrics["loss"], expected.metrics["loss"]),
        "same weights": _weights_equal(exported(trainer), exported(fresh)),
    }


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("TP2", {}),
        ("PP2", {"clip_grad": 0.0}),
        pytest.param("DP2", {}, marks=pytest.mark.slow),
        ("DP2", {"use_distributed_optimizer": True}),
    ],
)
def test_a_gradient_that_is_not_finite_skips_the_step_on_every_rank(
    run_ranks: RunRanks, name: str, settings: dict[str, Any]
) -> None:
    layout = LAYOUTS[name]
    start = Start.of("qwen3")
    settings = {"max_tokens_per_gpu": 20, **settings}
    results = run_ranks(skip_then_go_on, layout.ranks, start, settings, 1, **layout.sizes)
    for result in results:
        step = result["skipped"]
        assert not step.updated and step.grad_norm != step.grad_norm
        assert step.bad_parameter is not None and POISONED in step.bad_parameter
        assert step.bad_parameter == results[0]["skipped"].bad_parameter
        assert step.metrics["skipped_steps"] == 1 and result["version"] == 0
        assert result["untouched"]
        assert result["updated"] and result["count"] == 1
        # The skipped step left nothing behind, neither in the gradients nor in Adam's moments.
        assert result["loss"][0] == result["loss"][1] and result["same weights"]


def bad_batches(groups: ParallelGroups, start: Start) -> dict[str, Any]:
    """What each bad batch gives in the two passes, and whether a sound one still works afterwards."""
    trainer = new_trainer(groups, start, {"use_tis": True})
    batch = start.batch.select(range(4))
    errors = {}
    for name, bad in _bad_batches(batch).items():
        for call in ("compute_log_probs", "train_step"):
            method = getattr(trainer, call)
            errors[f"{name}, {call}"] = _caught(lambda m=method, b=bad: m(b))
    return {"errors": errors, "updated": trainer.train_step(batch).updated}


def _bad_batches(batch: RolloutBatch) -> dict[str, RolloutBatch]:
    columns = batch.columns
    long = torch.zeros(300, dtype=torch.int64)
    lengths = columns["total_lengths"]
    too_long = {
        **columns,
        "unconcat_tokens": [*columns["unconcat_tokens"][:3], long],
        "total_lengths": [*lengths[:3], 300],
    }
    unknown_token = [ids.clone() for ids in columns["unconcat_tokens"]]
    unknown_token[2][1] = 96
    no_tokens = {name: values for name, values in columns.items() if name != "unconcat_tokens"}
    return {
        "too long": RolloutBatch(too_long),
        "unknown token": batch.with_column("unconcat_tokens", unknown_token),
        "no tokens": RolloutBatch(no_tokens),
        "no samples": batch.select([]),
    }


@pytest.mark.parametrize("name", ["PP2", "DP2"])
def test_a_batch_that_the_model_cannot_take_is_an_error_on_every_rank(
    run_ranks: RunRanks, name: str
) -> None:
    layout = LAYOUTS[name]
    expected = {
        "too long": "sample 3 has 300 tokens, the model takes 256",
        "unknown token": "sample 2 holds token 96, the model has 96",
        "no tokens": "the batch has no unconcat_tokens",
        "no samples": "has no samples",
    }
    for result in run_ranks(bad_batches, layout.ranks, Start.of("qwen3"), **layout.sizes):
        for what, (kind, message, seconds) in result["errors"].items():
            assert kind == "BatchError", what
            assert expected[what.split(",")[0]] in message
            assert seconds < SECONDS
        assert result["updated"]


def missing_fields(groups: ParallelGroups, start: Start) -> list[tuple[str, str, float]]:
    """Training without advantages, and a correction without what the engine reported."""
    trainer = new_trainer(groups, start, {"use_tis": True})
    results = []
    for name in ("advantages", "rollout_log_probs"):
        columns = {key: value for key, value in start.batch.columns.items() if key != name}
        results.append(_caught(lambda c=columns: trainer.train_step(RolloutBatch(c))))
    return results


def test_a_step_without_advantages_or_rollout_log_probs_is_an_error_on_every_rank(
    run_ranks: RunRanks,
) -> None:
    for without_advantages, without_rollout in run_ranks(missing_fields, 2, Start.of("qwen3")):
        assert without_advantages[0] == "BatchError"
        assert without_rollout[0] == "ConfigError" and "--use-tis" in without_rollout[1]


def warnings_of_oversize(groups: ParallelGroups, start: Start) -> tuple[list[str], list[Any]]:
    """Warnings of two log-prob passes and two steps with a budget below the longest samples, and the plans."""
    trainer = new_trainer(groups, start, {"max_tokens_per_gpu": 10})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.compute_log_probs(start.batch)
            trainer.train_step(start.batch)
    messages = [str(w.message) for w in caught if "max-tokens-per-gpu" in str(w.message)]
    return messages, [trainer.train_step(start.batch).metrics["num_microbatches"]]


def test_samples_beyond_the_budget_get_microbatches_of_their_own_and_one_warning(
    run_ranks: RunRanks,
) -> None:
    # Lengths 9, 6, 11, 11, 16, 8, 8, 8, 10 with a budget of 10: 11, 11 and 16 are beyond it.
    first, second = run_ranks(warnings_of_oversize, 2, Start.of("qwen3"))
    assert len(first[0]) == 1 and "3 samples are longer than --max-tokens-per-gpu 10" in first[0][0]
    assert second[0] == []
    # No two samples fit together: 9 microbatches and one of padding.
    assert first[1] == second[1] == [5.0]


def unmasked_nan(groups: ParallelGroups, start: Start) -> tuple[str, str, float]:
    """A step with a NaN where the mask is 1."""
    spoiled = [values.clone() for values in start.batch.columns["rollout_log_probs"]]
    spoiled[4][int((start.batch.columns["loss_masks"][4] != 0).nonzero()[0])] = float("nan")
    batch = start.batch.with_column("rollout_log_probs", spoiled)
    trainer = new_trainer(groups, start, {"use_tis": True, **SMOOTH_ADAM})
    return _caught(lambda: trainer.train_step(batch))


def test_a_nan_where_the_mask_is_1_is_named_on_every_rank_before_any_collective(
    run_ranks: RunRanks,
) -> None:
    for kind, message, _ in run_ranks(unmasked_nan, 2, Start.of("qwen3")):
        assert kind == "BatchError"
        assert "rollout_log_probs of sample 4 is nan" in message


def foreign_log_prob(groups: ParallelGroups, start: Start) -> dict[str, Any]:
    """A step in which one token's log-ratio is absurd, seen only by the rank that holds the token; then a sound one."""
    spoiled = [values.clone() for values in start.batch.columns["rollout_log_probs"]]
    spoiled[4][int((start.batch.columns["loss_masks"][4] != 0).nonzero()[0])] = -200.0
    batch = start.batch.with_column("rollout_log_probs", spoiled)
    # Both look at whole sequences, which takes a collective among context parallel ranks.
    settings = {
        "policy_loss": "gspo",
        "use_tis": True,
        "custom_tis_function_path": "plugin.ppo_utils.sequence_tis_function",
        "max_tokens_per_gpu": 10,
    }
    trainer = new_trainer(groups, start, settings)
    error = _caught(lambda: trainer.train_step(batch))
    return {"error": error, "updated": trainer.train_step(start.batch).updated}


@pytest.mark.parametrize("name", ["DP2", "CP2"])
def test_a_value_that_one_rank_finds_wrong_ends_the_step_everywhere(
    run_ranks: RunRanks, name: str
) -> None:
    layout = {**LAYOUTS, "CP2": Layout(2, {"context_parallel_size": 2})}[name]
    results = run_ranks(foreign_log_prob, layout.ranks, Start.of("qwen3"), **layout.sizes)
    errors = sorted(result["error"] for result in results)
    assert any(kind == "BatchError" and "log-ratio beyond +-80" in text for kind, text, _ in errors)
    # Alone in its microbatch, and named as in the batch of the caller.
    assert any("at sample 4, position" in text for _, text, _ in errors)
    for result in results:
        kind, message, seconds = result["error"]
        told = "a log-ratio beyond +-80" in message or "another context parallel rank" in message
        assert kind in ("BatchError", "ParallelError") and told
        assert seconds < SECONDS and result["updated"]


def out_of_memory(groups: ParallelGroups, start: Start, where: str) -> None:
    """A pass in which rank 1 runs out of memory while rank 0 waits for it in a collective of the same closure."""
    settings = {"policy_loss": "gspo", "fused_lm_head": "off"}
    trainer = new_trainer(groups, start, settings)

    def no_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    module, name, call = {
        "log-probs": (row_gradients, "row_kernels_for", trainer.compute_log_probs),
        "loss": (SequenceShards, "sequence_sums", trainer.train_step),
    }[where]
    with pytest.MonkeyPatch.context() as patch:
        if groups.rank == 1:
            patch.setattr(module, name, no_memory)
        call(start.batch)


@pytest.mark.parametrize(
    ("where", "size"),
    [("log-probs", "tensor_model_parallel_size"), ("loss", "context_parallel_size")],
)
def test_out_of_memory_between_two_collectives_ends_the_group_at_once(
    run_ranks: RunRanks, where: str, size: str
) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match="out of memory") as caught:
        run_ranks(out_of_memory, 2, Start.of("qwen3"), where, **{size: 2})
    assert caught.value.rank == 1 and isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert "did not finish" not in str(caught.value) and time.monotonic() - begin < 2 * SECONDS
