"""Which samples of a rollout each optimizer step trains on.

A mini-batch is `--global-batch-size` responses. The first epoch takes them in the order of the
rollout; every later one is a new permutation by seed: of whole prompts where mini-batches hold
whole prompts, otherwise of responses. Advantages are known before, so a group may be split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plugin.batch_types import RolloutBatch
from plugin.config import JobConfig
from plugin.environments.trajectory import Rollouts
from plugin.ragged import Integers, ragged_range


@dataclass(frozen=True)
class MiniBatch:
    """The samples of one optimizer step.

    epoch, number: which pass over the rollout, and which step of that pass, from 0
    samples: [n] their places in the rollout's batch, ascending; None = all
    """

    epoch: int
    number: int
    samples: Integers | None = None

    def of(self, batch: RolloutBatch) -> RolloutBatch:
        """The part of the rollout's batch; the batch itself where that is all of it."""
        return batch if self.samples is None else batch.select(self.samples)


def mini_batches(config: JobConfig, rollouts: Rollouts, rollout: int) -> list[MiniBatch]:
    """The optimizer steps on a rollout, in order; `rollout`: its number in the run.

    The last mini-batch of an epoch is smaller where the rollout holds fewer responses than planned.
    """
    size = config.global_batch_size or len(rollouts)
    steps = []
    for epoch in range(config.num_updates_per_rollout):
        if size >= len(rollouts):
            steps.append(MiniBatch(epoch, 0))
            continue
        for number, part in enumerate(_responses(config, rollouts, rollout, epoch, size)):
            part.sort()
            samples = ragged_range(rollouts.sample_starts[part], rollouts.samples[part])
            steps.append(MiniBatch(epoch, number, samples))
    return steps


def _responses(
    config: JobConfig, rollouts: Rollouts, rollout: int, epoch: int, size: int
) -> list[Integers]:
    """The responses of each mini-batch of an epoch."""
    everything = np.arange(len(rollouts))
    cuts = range(size, len(rollouts), size)
    in_order = np.split(everything, cuts)
    if epoch == 0:
        return in_order
    generator = np.random.default_rng([config.seed, rollout, epoch])
    if config.use_routing_replay:
        # Routes are recorded for these very mini-batches: only their order changes.
        return [in_order[i] for i in generator.permutation(len(in_order))]
    unit = rollouts.groups if size % config.n_samples_per_prompt == 0 else everything
    order = np.argsort(generator.permutation(unit.max() + 1)[unit], kind="stable")
    return np.split(order, cuts)
