"""Pipeline stages of different sizes: steps, replay, export and checkpoints are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plugin.megatron_backend.model.builder import unwrap
from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel.training_jobs import (
    Case,
    Layout,
    RunRanks,
    Start,
    differences,
    exported,
    new_trainer,
    run_cases,
)

PP2 = Layout(2, {"pipeline_model_parallel_size": 2})
VPP2 = Layout(2, {**PP2.sizes, "virtual_pipeline_model_parallel_size": 2})
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
MOE = {"policy_loss": "icepop", "max_tokens_per_gpu": 20, "use_routing_replay": True}


def check(run_ranks: RunRanks, layout: Layout, cases: dict[str, Case]) -> None:
    expected = run_cases(run_ranks, Layout(), {name: case.uncut() for name, case in cases.items()})
    outcomes = run_cases(run_ranks, layout, cases)
    found = {
        name: differences(outcomes[name], expected[name], cases[name].family) for name in cases
    }
    assert not any(found.values()), found


def test_uneven_stages_train_replay_and_export_like_one_process(run_ranks: RunRanks) -> None:
    cases = {
        "3 + 1": Case(settings={"max_tokens_per_gpu": 20, FIRST: 3}),
        "moe 1 + 3": Case("qwen3_moe", settings={**MOE, LAST: 3}, steps=1),
    }
    check(run_ranks, PP2, cases)


@pytest.mark.slow
def test_uneven_stages_of_several_chunks_are_those_of_one_process(run_ranks: RunRanks) -> None:
    # Of 4 layers in chunks of equal size, 2 + 2 is the only split; naming it takes Megatron's way for uneven ones.
    check(run_ranks, VPP2, {"named": Case(settings={"max_tokens_per_gpu": 20, FIRST: 2})})


def save_on_rank(groups: ParallelGroups, start: Start, path: str) -> tuple[int, dict[str, Any]]:
    """Layers of this stage, and the weights that an uneven trainer saved after a step."""
    trainer = new_trainer(groups, start, {FIRST: 3})
    trainer.train_step(start.batch)
    trainer.save_checkpoint(path, 1, {})
    return len(unwrap(trainer.chunks[0]).decoder.layers), exported(trainer)


def load_on_rank(groups: ParallelGroups, start: Start, path: str, settings: Any) -> dict[str, Any]:
    trainer = new_trainer(groups, start, settings)
    trainer.load_checkpoint(path)
    return exported(trainer)


def test_a_checkpoint_of_uneven_stages_is_read_by_others(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    start, path = Start.of("qwen3"), str(tmp_path)
    (first, saved), (second, _) = run_ranks(save_on_rank, 2, start, path, **PP2.sizes)
    assert (first, second) == (3, 1)
    for settings in ({}, {LAST: 3}):
        loaded, _ = run_ranks(load_on_rank, 2, start, path, settings, **PP2.sizes)
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
