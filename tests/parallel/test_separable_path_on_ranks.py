"""The separable path inside real training steps: the same update as in two phases."""

from __future__ import annotations

from unittest import mock

import pytest

from plugin.errors import ConfigError
from plugin.megatron_backend.step import microbatch_loss
from tests.parallel.training_jobs import (
    Case,
    Layout,
    RunRanks,
    Start,
    differences,
    new_trainer,
    run_cases,
    uneven_batch,
)

TWO_PHASES = Case(
    settings={
        "separable_fast_path": "off",
        "entropy_coef": 0.01,
        "use_tis": True,
        "tis_clip": 1.2,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "k2",
    },
    masked_garbage=True,
)
CUTS = {
    "one sample at a time": {"micro_batch_size": 1},
    "per token": {"max_tokens_per_gpu": 30, "calculate_per_token_loss": True},
    "insisting on the fused head": {"max_tokens_per_gpu": 30, "fused_lm_head": "on"},
}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(2),
        pytest.param(Layout(2, {"pipeline_model_parallel_size": 2}), marks=pytest.mark.slow),
    ],
    ids=["one process", "DP2 with padding", "PP2"],
)
def test_the_separable_path_gives_the_same_updates_as_two_phases(
    run_ranks: RunRanks, layout: Layout
) -> None:
    cases = {
        f"{name}, {choice}": TWO_PHASES.cut(**settings, separable_fast_path=choice)
        for name, settings in CUTS.items()
        for choice in ("off", "on")
    }
    found = run_cases(run_ranks, layout, cases)
    for name in CUTS:
        assert not differences(found[f"{name}, on"], found[f"{name}, off"], TWO_PHASES.family), name


def _heads_of_a_step(groups, start: Start, settings: dict[str, str]) -> int:  # type: ignore[no-untyped-def]
    trainer = new_trainer(groups, start, settings)
    with mock.patch.object(
        microbatch_loss, "separable_lm_head", wraps=microbatch_loss.separable_lm_head
    ) as head:
        trainer.train_step(uneven_batch())
    return head.call_count


def test_by_default_the_head_is_fused_with_a_separable_loss_and_with_no_other(
    run_ranks: RunRanks,
) -> None:
    start = Start.of("qwen3")
    assert run_ranks(_heads_of_a_step, 1, start, {})[0] > 0
    for settings in ({"fused_lm_head": "off"}, {"policy_loss": "gspo"}):
        assert run_ranks(_heads_of_a_step, 1, start, settings)[0] == 0


def _refusal(groups, start: Start) -> str:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as caught:
        new_trainer(groups, start, {"separable_fast_path": "on"})
    return str(caught.value)


def test_insisting_on_it_over_tensor_parallel_ranks_is_refused(run_ranks: RunRanks) -> None:
    start = Start.of("qwen3")
    messages = run_ranks(_refusal, 2, start, tensor_model_parallel_size=2)
    assert all("split over 2 tensor parallel ranks; use auto or off" in m for m in messages)
