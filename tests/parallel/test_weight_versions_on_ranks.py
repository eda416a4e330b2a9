"""Earlier weights of a trainer: their log-probs are bit for bit those that it had, and nothing else changes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel.training_jobs import Layout, RunRanks, Start, exported, new_trainer

UPDATES = 3
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
CUT = {"micro_batch_size": 2}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
# name -> (layout, family, settings)
CASES: dict[str, tuple[Layout, str, dict[str, Any]]] = {
    "TP2": (Layout(2, TP2), "qwen3", {}),
    "PP2": (Layout(2, PP2), "qwen3", {}),
    "DP2": (Layout(2), "qwen3", {"use_distributed_optimizer": True, "train_dtype": "bfloat16"}),
    "DP2, adapters": (Layout(2), "qwen3", LORA),
    "CP2": (Layout(2, {"context_parallel_size": 2}), "qwen3", {}),
    "EP2": (Layout(2, {"expert_model_parallel_size": 2}), "qwen3_moe", {}),
    "VPP": (Layout(2, {**PP2, "virtual_pipeline_model_parallel_size": 2}), "qwen3", {}),
}
BY_DEFAULT = ("TP2", "PP2", "DP2", "DP2, adapters")


def versions_of(
    groups: ParallelGroups, start: Start, settings: dict[str, Any], keeps: bool
) -> dict[str, Any]:
    """Updates with a log-prob pass before each; then passes of the earlier versions, and one more update."""
    trainer = new_trainer(groups, start, {**CUT, **settings})
    batch = start.batch
    if keeps:
        trainer.keep_versions(UPDATES)
    before: list[Tensor] = []
    for version in range(UPDATES):
        before.append(trainer.compute_log_probs(batch).values)
        if trainer.kept_weights is not None:
            trainer.kept_weights.keep(version)
        assert trainer.train_step(batch).updated
    before.append(trainer.compute_log_probs(batch).values)
    again, mixed, held = [], None, 0
    if trainer.kept_weights is not None:
        held = trainer.kept_weights.nbytes
        assert trainer.kept_weights.versions == list(range(UPDATES))
        again = [trainer.compute_version_log_probs(batch, v).values for v in range(UPDATES)]
        again.append(trainer.compute_version_log_probs(batch, None).values)
        # Token by token: -2, -1 and 0 behind the trainer are versions 1, 2 and 3.
        own = batch.columns["weight_versions"].values + UPDATES
        mixing = batch.with_column("weight_versions", batch.columns["loss_masks"].like(own))
        for version in (None, 1, 2):
            found = trainer.compute_version_log_probs(mixing, version)
            mixing = mixing.with_column("proximal_log_probs", found)
        mixed = mixing.columns["proximal_log_probs"].values
    last = trainer.train_step(batch).metrics
    trained = sum(p.nbytes for c in trainer.chunks for p in c.parameters() if p.requires_grad)
    whole = sum(p.nbytes for c in trainer.chunks for p in c.parameters())
    return {
        "before": before,
        "again": again,
        "mixed": mixed,
        "last": (last["loss"], last["grad_norm"]),
        "weights": exported(trainer),
        "held": held,
        "trained": trained,
        "whole": whole,
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in CASES],
)
def test_log_probs_of_kept_versions_are_those_they_had_to_the_bit(
    run_ranks: RunRanks, name: str
) -> None:
    layout, family, settings = CASES[name]
    start = Start.of(family)
    [found, *others] = run_ranks(versions_of, layout.ranks, start, settings, True, **layout.sizes)
    plain = run_ranks(versions_of, layout.ranks, start, settings, False, **layout.sizes)[0]
    counts = start.batch.columns["loss_masks"].values != 0
    before = [values[counts] for values in found["before"]]
    assert all(torch.equal(a, b[counts]) for a, b in zip(before, plain["before"], strict=True))
    distances = [float((a - b).abs().max()) for a, b in pairwise(before)]
    assert min(distances) > 1e-3, "updates that change nothing show nothing"
    for values, expected in zip(found["again"], before, strict=True):
        assert torch.equal(values[counts], expected)
    own = start.batch.columns["weight_versions"].values[counts] + UPDATES
    assert {1, 2, 3} == set(own.tolist())
    expected = torch.stack(before).gather(0, own[None])[0]
    assert torch.equal(found["mixed"][counts], expected)
    assert found["last"] == plain["last"], "a pass of earlier weights changed the next update"
    assert all(torch.equal(plain["weights"][key], v) for key, v in found["weights"].items())
    assert all(torch.equal(other["mixed"][counts], expected) for other in others)
    assert UPDATES * found["trained"] <= found["held"] < UPDATES * (found["trained"] + 4096)
    assert (found["trained"] < found["whole"] / 2) == ("lora_rank" in settings)


def against_checkpoints(groups: ParallelGroups, start: Start, root: str) -> list[bool]:
    """Whether a kept version's log-probs are those of a new trainer with that version's checkpoint."""
    trainer = new_trainer(groups, start, CUT)
    trainer.keep_versions(2)
    for version in range(2):
        trainer.save_checkpoint(f"{root}/{version}", version, {})
        assert trainer.kept_weights is not None
        trainer.kept_weights.keep(version)
        trainer.train_step(start.batch)
    same = []
    for version in range(2):
        other = new_trainer(groups, start, CUT)
        other.load_checkpoint(f"{root}/{version}")
        expected = other.compute_log_probs(start.batch).values
        found = trainer.compute_version_log_probs(start.batch, version).values
        same.append(torch.equal(found, expected))
    return same


def test_they_are_those_of_the_versions_checkpoint(run_ranks: RunRanks, tmp_path: Path) -> None:
    for same in run_ranks(against_checkpoints, 2, Start.of("qwen3"), str(tmp_path), **TP2):
        assert same == [True, True]


def forgotten(groups: ParallelGroups, start: Start) -> list[list[int]]:
    trainer = new_trainer(groups, start, CUT)
    trainer.keep_versions(2)
    assert trainer.kept_weights is not None
    found = []
    for version in (3, 4, 4, 5, 9):  # versions after a restart begin later
        trainer.kept_weights.keep(version)
        found.append(trainer.kept_weights.versions)
    trainer.kept_weights.forget()
    return [*found, trainer.kept_weights.versions]


def test_versions_beyond_the_limit_are_forgotten(run_ranks: RunRanks) -> None:
    [found] = run_ranks(forgotten, 1, Start.of("qwen3"))
    assert found == [[3], [3, 4], [3, 4], [4, 5], [9], []]
