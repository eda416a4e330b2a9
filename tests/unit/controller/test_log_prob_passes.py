"""Which log-prob passes a rollout needs, by which weights, and the seconds that an approximation saves."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plugin.batch_types import RolloutBatch, RolloutSample
from plugin.config import JobConfig
from plugin.controller.batch import MiniBatch
from plugin.controller.passes import LogProbPasses, SampledVersions, UpdateKl
from plugin.observe.metric_table import row_of
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


class VersionedTrainer(CountingTrainer):
    """Gives a token of weights v the log-prob -1 - v / 100, and keeps the versions it is told to."""

    def __init__(self, *kept: int) -> None:
        super().__init__()
        self._kept = kept
        self.passes: list[tuple[int | None, int]] = []

    def kept_versions(self) -> list[int]:
        return list(self._kept)

    def version_log_probs(self, batch: RolloutBatch, version: int | None) -> Ragged:
        self.passes.append((version, len(batch)))
        versions = batch.columns["weight_versions"]
        found = torch.full(
            (len(versions.values),), -1 - (CURRENT if version is None else version) / 100
        )
        if "proximal_log_probs" in batch:
            own = versions.values == version
            found = torch.where(own, found, batch.columns["proximal_log_probs"].values)
        return versions.like(found)


CURRENT = 7


def sampled_by(*versions: list[int], masked: tuple[int, ...] = ()) -> RolloutBatch:
    """One sample for each list of its tokens' weight versions; samples of `masked` carry no loss."""
    return RolloutBatch.from_samples(
        [
            RolloutSample(
                torch.arange(1 + len(own)),
                len(own),
                torch.full((len(own),), int(i not in masked)),
                weight_version=torch.tensor(own),
            )
            for i, own in enumerate(versions)
        ]
    )


def of_versions(
    batch: RolloutBatch, *kept: int
) -> tuple[list[list[float]] | None, dict[str, float], VersionedTrainer]:
    trainer, parts = VersionedTrainer(*kept), SimpleNamespace(reference=None)
    config = JobConfig(train_log_probs="engine-version", async_rollouts=True)
    passes = LogProbPasses(config, parts, trainer)  # type: ignore[arg-type]
    sampled = SampledVersions.of(batch, CURRENT)
    batch, found = passes.added_to(batch, [MiniBatch(0, 0)], (), sampled)
    column = batch.columns.get("proximal_log_probs")
    shown = None if column is None else [(-100 * (v + 1)).round().tolist() for v in column]
    return shown, found, trainer


def test_every_token_is_scored_by_the_weights_that_sampled_it() -> None:
    batch = sampled_by([6, 6], [5], [5, 6, 7], [7, 7], [5, 6])
    found, metrics, trainer = of_versions(batch, 5, 6)
    assert found == [[6, 6], [5], [5, 6, 7], [7, 7], [5, 6]]
    assert metrics["lost_version_share"] == 0
    # A sample has one pass for each of its versions, first those that have had none yet.
    assert trainer.passes == [(None, 2), (5, 2), (5, 1), (6, 1), (6, 2)]


def test_tokens_of_versions_that_are_lost_are_scored_by_the_current_weights() -> None:
    found, metrics, _ = of_versions(sampled_by([3, 3], [3, 6, 7], [6]), 6)
    assert found == [[7, 7], [7, 6, 7], [6]]
    assert metrics["lost_version_share"] == 3 / 6


def test_a_rollout_without_a_stale_token_has_the_passes_of_recompute() -> None:
    found, metrics, trainer = of_versions(sampled_by([7], [7, 7]), 5, 6)
    assert found is None and not trainer.passes and not trainer.asked
    assert "lost_version_share" not in metrics


def test_what_is_masked_has_no_version() -> None:
    found, metrics, trainer = of_versions(sampled_by([6], [1, 1], masked=(1,)), 6)
    assert found == [[6], [7, 7]] and metrics["lost_version_share"] == 0
    assert trainer.passes == [(None, 1), (6, 1)]


def test_the_kl_of_the_updates_is_between_the_passes_before_and_after_them() -> None:
    passes = iter([torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.5, -1.9, -1.0])])
    trainer: Any = SimpleNamespace(log_probs=lambda _, batch: Ragged(next(passes), [2, 1]))
    batch = RolloutBatch.from_samples(
        [
            RolloutSample(torch.tensor([1, 7, 8]), 2, torch.ones(2).long(), rollout_log_probs=torch.tensor([-1.2, -2.0])),
            RolloutSample(torch.tensor([1, 7]), 1, torch.zeros(1).long(), rollout_log_probs=torch.tensor([math.nan])),
        ]
    )  # fmt: skip
    found = UpdateKl(trainer, batch).metrics()

    def k3(*distances: float) -> float:
        return sum(math.exp(-d) - 1 + d for d in distances) / len(distances)

    # before - after: 0.5, -0.1; rollout - before: -0.2, 0; rollout - after: 0.3, -0.1; the third token is masked.
    expected = {
        "update_kl/k1": 0.2,
        "update_kl/abs": 0.3,
        "update_kl/k3": k3(0.5, -0.1),
        "update_kl/mismatch_before": k3(-0.2, 0.0),
        "update_kl/mismatch_after": k3(0.3, -0.1),
    }
    assert found == pytest.approx(expected, rel=1e-5)
    assert all(row_of(name) for name in found)
