"""Steps that are skipped name their cause on every rank, and do not go on for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plugin.errors import TrainingError
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.observe.run_record import group_findings, read_run
from tests.parallel.misbehaving_hooks import BAD_RESPONSE, armed
from tests.parallel.training_jobs import Layout, RunRanks, Start, new_trainer
from tests.ray.small_jobs import run_small

pytestmark = pytest.mark.hostile


HOOK = "tests.parallel.misbehaving_hooks.nan_for_one_sample"


def causes(groups: ParallelGroups, start: Start) -> list[Any]:
    """What a step with a NaN of a hook, one with a NaN in the batch, and a sound one report."""
    settings = {"use_tis": True, "custom_tis_function_path": HOOK, "validate_batch": "never"}
    trainer = new_trainer(groups, start, {**settings, "max_tokens_per_gpu": 20})
    with armed(0):
        by_hook = trainer.train_step(start.batch)
    return [by_hook, trainer.train_step(start.batch)]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2),
        Layout(2, {"pipeline_model_parallel_size": 2}),
        pytest.param(Layout(2, {"context_parallel_size": 2}), marks=pytest.mark.slow),
    ],
    ids=["DP2", "PP2", "CP2"],
)
def test_a_hooks_nan_is_not_blamed_on_a_parameter(run_ranks: RunRanks, layout: Layout) -> None:
    start = Start.of("qwen3")
    sample = start.batch.columns["response_lengths"].tolist().index(BAD_RESPONSE)
    position = int(start.batch.columns["loss_masks"][sample].nonzero()[0])
    for by_hook, sound in run_ranks(causes, layout.ranks, start, **layout.sizes):
        assert not by_hook.updated and sound.updated and sound.cause is None
        assert f"hook {HOOK} is not finite at sample {sample}, position" in by_hook.cause
        if "context_parallel_size" not in layout.sizes:
            assert by_hook.cause.endswith(f"position {position}")


NAN_AFTER_SET_UP = """
def hook(args, *, pg_loss, loss_masks, **_):
    # Without a graph it is only tried out at set-up.
    factor = 1.0 if pg_loss.grad_fn is None else float("nan")
    return pg_loss * factor, loss_masks, {}
"""


@pytest.mark.slow
def test_a_job_does_not_skip_steps_for_ever(two_nodes: str, tmp_path: Path) -> None:
    hook = tmp_path / "nan.py"
    hook.write_text(NAN_AFTER_SET_UP)
    settings = {"use_tis": True, "custom_tis_function_path": f"{hook}:hook"}
    with pytest.raises(TrainingError, match=r"the last 2 steps were skipped.*nan\.py:hook is not"):
        run_small(two_nodes, tmp_path / "run", max_skipped_steps=2, num_rollouts=9, **settings)
    record = read_run(tmp_path / "run")
    assert [step["skipped"] for step in record.steps] == [1.0, 1.0]
    [finding] = group_findings(record.findings)
    assert finding["detector"] == "skipped_step" and finding["steps"] == 2
    assert torch.isnan(torch.tensor(record.steps[0]["grad_norm"]))
