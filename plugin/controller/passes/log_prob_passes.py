"""The forward-only passes before the first update on a rollout, and what they take or save."""

from __future__ import annotations

import time
from collections.abc import Sequence

from plugin.batch_types import RolloutBatch
from plugin.cluster.trainer_group import TrainerGroup
from plugin.config import JobConfig
from plugin.controller.batch import MiniBatch
from plugin.controller.passes.teachers import Teachers
from plugin.controller.preflight.job_checks import JobParts
from plugin.loss.hook_chain import batch_declarations
from plugin.ragged import Ragged

#: An approximation is checked by a pass on its second rollout, as the first also warms up, and on
#: every one of so many after that.
_FIRST_CHECK, _CHECK_EVERY = 2, 50


class LogProbPasses:
    """Adds what the loss needs from forward-only passes.

    The trainer's own log-probs are computed where they can differ from those of the update: with
    more than one update on a rollout, or when its routes are replayed, and where a correction has
    to know them of the whole batch first. Otherwise, on an only update, they are the update's own.
    """

    def __init__(
        self,
        config: JobConfig,
        parts: JobParts,
        trainer: TrainerGroup,
        teachers: Teachers | None = None,
    ) -> None:
        self._config, self._parts, self._trainer = config, parts, trainer
        self._teachers = teachers
        self._whole_batch_first = bool(batch_declarations(config))
        self._approximated = 0
        self._seconds_per_token: float | None = None

    def added_to(
        self, batch: RolloutBatch, updates: list[MiniBatch], prompts: Sequence[int] = ()
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """The batch with log-probs of the policies that were asked, and seconds as metrics.

        prompts: the numbers of the groups' prompts
        """
        began = time.monotonic()
        saved: dict[str, float] = {}
        if self._config.train_log_probs == "approximate" and len(updates) > 1:
            batch, saved = self._checked(batch)
        elif len(updates) > 1 or self._config.use_routing_replay or self._whole_batch_first:
            batch = batch.with_column("log_probs", self._train_log_probs(batch, updates))
        if self._parts.reference is not None:
            batch = batch.with_column("ref_log_probs", self._trainer.log_probs("reference", batch))
        if self._teachers is not None:
            batch = self._teachers.added_to(batch, updates, prompts)
        return batch, {"seconds_log_probs": time.monotonic() - began, **saved}

    def _train_log_probs(self, batch: RolloutBatch, updates: list[MiniBatch]) -> Ragged:
        if not self._config.use_routing_replay:
            return self._trainer.log_probs("policy", batch)
        # Recorded routes belong to one cut of one batch. The first epoch is in order.
        parts = [update.of(batch) for update in updates if update.epoch == 0]
        return Ragged.concatenated(
            [
                self._trainer.log_probs("policy", part, keep_routes=number > 0)
                for number, part in enumerate(parts)
            ]
        )

    def _checked(self, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        """Seconds of the pass that was not run, by one that was, now and then.

        The batch carries what that one found for metrics alone: it trains on the approximation, so
        that a resumed run trains as one that was never interrupted.
        """
        self._approximated += 1
        tokens = int(batch.columns["total_lengths"].sum())
        if self._approximated % _CHECK_EVERY == _FIRST_CHECK:
            began = time.monotonic()
            batch = batch.with_column("log_probs", self._trainer.log_probs("policy", batch))
            self._seconds_per_token = (time.monotonic() - began) / tokens
            return batch, {}
        if self._seconds_per_token is None:
            return batch, {}
        return batch, {"seconds_log_probs_saved": self._seconds_per_token * tokens}
