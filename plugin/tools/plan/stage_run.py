"""Run one rank of a pipeline stage on microbatches that are as full as the job allows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from plugin.config import JobConfig
from plugin.ragged import Ragged
from plugin.tools.plan.planned_rank import MeasuredRank, MetaRank
from plugin.tools.plan.workload import Batching, SampleLengths, full_share


@dataclass
class StageRun:
    """Runs steps of one rank and scales them to the job's number of microbatches.

    quick: run as few microbatches as a line takes, and none of padding
    batch_bytes: what the driver sends this rank for a step; known after the first step
    """

    planned: MetaRank
    config: JobConfig
    model: Any
    lengths: SampleLengths
    batching: Batching
    quick: bool = False
    batch_bytes: int = 0

    def measure(self, in_flight: int) -> tuple[MeasuredRank, bool]:
        """The measured step, scaled to the job, and whether its activations are extrapolated.

        Its memory is with all microbatches that are in flight, its traffic with all of the busiest
        data parallel rank. Where other ranks have padding microbatches, a step with one runs too.
        """
        microbatches = self.batching.microbatches
        wanted = min(microbatches, in_flight)
        interleaved = self.config.virtual_pipeline_model_parallel_size is not None
        if interleaved:
            run = min(microbatches, 2 * self.config.pipeline_model_parallel_size)
            before = None
        else:
            # The memory of more in flight is a straight line through the last two.
            run = min(wanted, 2 if self.quick else 3)
            before = self._run(run - 1) if wanted > run else None
        last = self._run(run)
        activations = last.activations
        if before is not None:
            activations += (last.activations - before.activations) * (wanted - run)
        if self.batching.padding and not self.quick:
            # The interleaved schedule wants whole rounds, so there it replaces a full one.
            padded = self._run(run if interleaved else min(microbatches, run + 1), padding=1)
            activations = max(activations, padded.activations)
        result = self._scaled(last, microbatches / run)
        return dataclasses.replace(result, activations=activations), before is not None

    def beyond_step(self, weights: int, step: MeasuredRank) -> int:
        """Bytes that a rank needs beyond the step's peak while it asks a model for log-probs.

        weights: of that model, which are there for the pass only
        """
        interleaved = self.config.virtual_pipeline_model_parallel_size is not None
        most = self.config.pipeline_model_parallel_size if interleaved else 2
        count = min(self.batching.microbatches, most)
        needed = self.planned.log_prob_bytes(lambda trainer: self._share(trainer, count, 0))
        return max(0, weights + needed - step.activations - step.logits)

    def _run(self, microbatches: int, padding: int = 0) -> MeasuredRank:
        watch = self.config.detect_mismatch or self.config.dump_log_probs is not None
        return self.planned.measured(
            lambda trainer: self._share(trainer, microbatches, padding), with_log_probs=watch
        )

    def _share(self, trainer: Any, microbatches: int, padding: int) -> Any:
        routed = trainer.routed_model
        share = full_share(
            self.config,
            self.model,
            np.array(self.batching.largest),
            self.lengths.response_share,
            microbatches=microbatches,
            padding=padding,
            route_layers=None if routed is None else routed.route_layers,
        )
        tokens = int(share.batch.columns["total_lengths"].sum())
        if tokens and not padding:
            columns = share.batch.columns.values()
            values = [c.values if isinstance(c, Ragged) else c for c in columns]
            size = sum(v.numel() * v.element_size() for v in values)
            self.batch_bytes = round(size / tokens * max(self.batching.tokens))
        return share

    def _scaled(self, measured: MeasuredRank, times: float) -> MeasuredRank:
        """Multiply what repeats with every microbatch by `times`."""
        scaled = {}
        for key, (count, size) in measured.collectives.items():
            repeated = measured.per_microbatch.get(key, (0, 0))
            scaled[key] = (
                round(count + repeated[0] * (times - 1)),
                round(size + repeated[1] * (times - 1)),
            )
        return dataclasses.replace(
            measured,
            collectives=scaled,
            flops=round(measured.flops * times),
            attention_flops=round(measured.attention_flops * times * self.batching.attention_share),
        )
