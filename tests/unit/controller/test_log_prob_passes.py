"""Which log-prob passes a rollout needs, and the seconds that an approximation saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from plugin.batch_types import RolloutBatch, RolloutSample
from plugin.config import JobConfig
from plugin.controller.batch import MiniBatch
from plugin.controller.passes import LogProbPasses
from plugin.ragged import Ragged

BATCH = RolloutBatch.from_samples(
    [RolloutSample(torch.tensor([1, 7]), 1, torch.ones(1, dtype=torch.int64)) for _ in range(4)]
)
HALVES = [MiniBatch(0, 0, np.array([0, 1])), MiniBatch(0, 1, np.array([2, 3]))]


class CountingTrainer:
    """Remembers which policy was asked about how many samples, and whether routes were kept."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, bool]] = []

    def log_probs(self, name: str, batch: RolloutBatch, *, keep_routes: bool = False) -> Ragged:
        self.asked.append((name, len(batch), keep_routes))
        return Ragged(torch.full((len(batch),), -1.0), [1] * len(batch))


def passes_of(**settings: Any) -> tuple[LogProbPasses, CountingTrainer]:
    trainer, parts = CountingTrainer(), SimpleNamespace(reference=None)
    config = JobConfig(rollout_batch_size=2, n_samples_per_prompt=2, **settings)
    return LogProbPasses(config, parts, trainer), trainer  # type: ignore[arg-type]


def test_old_log_probs_are_of_the_whole_rollout_before_the_first_of_several_updates() -> None:
    passes, trainer = passes_of(global_batch_size=2)
    batch, _ = passes.added_to(BATCH, HALVES)
    assert trainer.asked == [("policy", 4, False)]
    assert batch.columns["log_probs"].values.tolist() == [-1.0] * 4
    passes, trainer = passes_of()
    assert "log_probs" not in passes.added_to(BATCH, [MiniBatch(0, 0)])[0] and not trainer.asked


def test_a_correction_that_looks_at_the_whole_batch_first_has_a_pass_on_an_only_update() -> None:
    hook = "plugin.ppo_utils.m2po_function"
    passes, trainer = passes_of(use_tis=True, custom_tis_function_path=hook)
    batch, _ = passes.added_to(BATCH, [MiniBatch(0, 0)])
    assert trainer.asked == [("policy", 4, False)] and "log_probs" in batch
    for clip, asked in (("auto:ess=0.9", 1), (2.0, 0)):
        passes, trainer = passes_of(use_tis=True, tis_clip=clip)
        passes.added_to(BATCH, [MiniBatch(0, 0)])
        assert len(trainer.asked) == asked, clip


def test_routes_are_recorded_mini_batch_by_mini_batch() -> None:
    passes, trainer = passes_of(global_batch_size=2, use_routing_replay=True)
    batch, _ = passes.added_to(BATCH, [*HALVES, MiniBatch(1, 0, np.array([2, 3]))])
    assert trainer.asked == [("policy", 2, False), ("policy", 2, True)]
    assert len(batch.columns["log_probs"]) == 4


def test_an_approximation_is_checked_now_and_then_and_reports_the_other_passes_as_saved() -> None:
    passes, trainer = passes_of(global_batch_size=2, train_log_probs="approximate")
    reported, checked = [], []
    for number in range(1, 53):
        batch, seconds = passes.added_to(BATCH, HALVES)
        checked += [number] if "log_probs" in batch else []
        reported += [number] if "seconds_log_probs_saved" in seconds else []
    assert trainer.asked == [("policy", 4, False)] * 2
    assert checked == [2, 52]
    assert reported == list(range(3, 52)), "unknown, measured, estimated"
