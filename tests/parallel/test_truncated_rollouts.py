"""An engine that truncates its sampling and a trainer that replays it disagree no more than without truncation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plugin.batch_types import RolloutBatch
from plugin.engines.protocol import GenerationRequest, SamplingParameters
from plugin.engines.transformers.engine import TransformersEngine
from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel import tiny_models
from tests.parallel.training_jobs import RunRanks, Start, exported, new_trainer
from tests.unit.engines.tiny_engines import load
from tests.unit.environments.played_groups import run_single_turn

STEPS = 3
UNTRUNCATED = SamplingParameters(max_response_length=12)
TRUNCATED = replace(UNTRUNCATED, top_p=0.9, top_k=20)


def mismatch_kl(
    groups: ParallelGroups, start: Start, parameters: SamplingParameters
) -> list[float]:
    """The metric of three updates, each on rollouts of a bfloat16 engine with the newest weights."""
    trainer = new_trainer(
        groups, start, {"use_tis": True, "micro_batch_size": 8, "lr": 1e-3, "adam_eps": 1e-8}
    )
    engine = TransformersEngine(tiny_models.FAMILIES["qwen3"]().to_dict(), dtype="bfloat16")
    found = []
    for step in range(STEPS):
        load(engine, exported(trainer), step)
        requests = [
            GenerationRequest(
                (1 + p, 2, 3), tuple(range(100 * step + 8 * p, 100 * step + 8 * p + 8))
            )
            for p in range(4)
        ]
        answers = run_single_turn(engine, requests, parameters)
        batch = RolloutBatch.from_samples([t.samples[0] for group in answers for t in group])
        masks = batch.columns["loss_masks"]
        advantages = [torch.full((len(m),), 1.0 - 2 * (i % 2)) for i, m in enumerate(masks)]
        result = trainer.train_step(batch.with_column("advantages", advantages))
        assert result.updated
        found.append(result.metrics["mismatch_kl"])
    return found


def test_replay_keeps_the_mismatch_of_truncated_sampling_at_the_untruncated_level(
    run_ranks: RunRanks,
) -> None:
    start = Start.of("qwen3")
    ways = {
        "untruncated": UNTRUNCATED,
        "without replay": TRUNCATED,
        "with replay": replace(TRUNCATED, sampling_mask=True),
    }
    kl = {name: run_ranks(mismatch_kl, 1, start, way)[0] for name, way in ways.items()}
    for level, without, replayed in zip(*kl.values(), strict=True):
        assert 0 < level < 1e-3  # what bfloat16 does
        assert replayed < 2 * level
        assert without > 100 * level and without > 0.05
    assert kl["with replay"] != pytest.approx(kl["untruncated"])
