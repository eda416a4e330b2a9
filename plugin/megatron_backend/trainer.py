"""MegatronTrainer: one rank of an RL trainer on stock Megatron-Core."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.errors import BatchError, ReplayError
from plugin.megatron_backend.lora.adapters import adapters_off
from plugin.megatron_backend.rank_model import PreparedStep, RankModel
from plugin.megatron_backend.routing.router_replay import (
    LiveRoutes,
    RecordedRoutes,
    RouterReplaySession,
)
from plugin.megatron_backend.routing.routes import (
    router_order,
    token_places,
)
from plugin.megatron_backend.step.batch_share import (
    BatchShare,
)
from plugin.megatron_backend.step.optimizer_step import cause_of_skip, first_bad_parameter
from plugin.megatron_backend.step.preparation import add_batch_statistics
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.megatron_backend.step.schedule import (
    log_prob_forward_step,
    training_forward_step,
)
from plugin.megatron_backend.step.step_metrics import step_metrics
from plugin.ppo_utils.sufficient_statistics import StatisticsTable
from plugin.ragged import Ragged


@dataclass(frozen=True)
class StepResult:
    """What a training step reports, the same on every rank.

    metrics: exact means, extremes and counts over the global batch
    updated: False if the step was skipped because the gradient was not finite or too large
    bad_parameter: the first parameter with a non-finite gradient, if any
    cause: the field, loss or hook that was not finite first, if the step was skipped for one
    overflow: the step was skipped because gradients do not fit into float16 times the loss scale,
        which is still being lowered
    log_probs: [response] per sample of the global batch, of the weights the step started from, if
        asked for; undefined where the loss mask is 0
    live_routes: [tokens, moe_layers, topk] of the first samples, chosen without replay, if asked
        for
    """

    metrics: dict[str, float]
    updated: bool
    grad_norm: float
    bad_parameter: str | None = None
    cause: str | None = None
    overflow: bool = False
    log_probs: Ragged | None = None
    live_routes: list[Tensor] | None = None


class MegatronTrainer(RankModel):
    """Model, optimizer and the two passes of one rank.

    A rank is given its share of a batch (`BatchShare`), or every rank the same whole batch, of
    which each takes its own share: all ranks compute the same plan without communication.
    """

    def compute_log_probs(
        self, batch: RolloutBatch | BatchShare, *, keep_routes: bool = False
    ) -> Ragged:
        """Return log-probs [response] of every sample, by a forward-only pass.

        Of a whole batch: on every rank. Of a share: of its samples, on the last pipeline stage.
        keep_routes: keep what earlier passes recorded for --use-routing-replay, so that several
            mini-batches can be recorded before the first is trained on
        """
        errors = ErrorCollector(self.device)
        step = self._prepared(batch, errors)
        if self.config.use_routing_replay:
            if not keep_routes:
                self.recorded_routes.clear()
            self.recorded_routes[step.fingerprint] = RecordedRoutes()
        replay = self._replay_session(step)
        forward_step = log_prob_forward_step(self.config, self.groups, errors, replay)
        with replay or nullcontext():
            results = self._forward_only(forward_step, step)
        with errors.collecting():
            if replay is not None:
                replay.check_consumed()
        errors.agree("the log-prob pass")
        return self._gathered(results, step)

    def compute_base_log_probs(self, batch: RolloutBatch | BatchShare) -> Ragged:
        """`compute_log_probs` of the model without its adapters."""
        recorded, self.recorded_routes = self.recorded_routes, {}
        try:
            with adapters_off(self.chunks):
                return self.compute_log_probs(batch)
        finally:
            self.recorded_routes = recorded

    def set_entropy_coef(self, value: float) -> None:
        """Use `value` from the next step on."""
        if value != self.config.entropy_coef:
            self.config = replace(self.config, entropy_coef=value)

    def train_step(
        self,
        batch: RolloutBatch | BatchShare,
        *,
        with_log_probs: bool = False,
        with_live_routes: bool = False,
    ) -> StepResult:
        """One optimizer step on the global batch; either every rank raises or none does.

        with_log_probs: also return the step's own log-probs, as `compute_log_probs` does
        with_live_routes: also return which experts the routers choose without replay; needs
            --detect-routing or a replay flag
        """
        assert self.optimizer is not None, "a trainer built with trainable=False cannot train"
        errors = ErrorCollector(self.device)
        with errors.collecting():
            columns = batch.batch if isinstance(batch, BatchShare) else batch
            if "advantages" not in columns:
                raise BatchError("the batch has no advantages; compute them from the rewards first")
            self.config.require_rollout_log_probs("rollout_log_probs" in columns)
            self.config.require_teacher(columns.columns)
            if self.config.use_routing_replay and not self.recorded_routes:
                raise ReplayError(
                    "--use-routing-replay replays the routes of the log-prob pass and none has "
                    "run; call compute_log_probs on this batch first"
                )
        step = self._prepared(batch, errors, replays_recorded=self.config.use_routing_replay)
        add_batch_statistics(self.config, step.microbatches, self.groups, errors)
        table = StatisticsTable(self.device)
        scale = self._begin_update(step)
        live = self._live_routes(step) if with_live_routes else None
        replay = self._replay_session(step, live)
        kept: list[Tensor | None] = []
        forward_step = training_forward_step(
            self.config, self.groups, scale, table, errors, replay, kept
        )
        with replay or nullcontext():
            self.pipeline.run(forward_step, self.chunks, step.microbatches)
        with errors.collecting():
            if replay is not None:
                replay.check_consumed()
        last = self.groups.is_last_stage
        errors.agree("the training step", table.digest() if last else None)
        metrics = step_metrics(table.reduced(self.groups.dp_cp_group)) if last else None
        metrics = self.pipeline.from_last_stage(metrics)
        if replay is not None and self.config.replays_routes:
            metrics |= replay.metrics(self.groups, sequence_parallel=self.config.sequence_parallel)
        result = self._apply(metrics, step, kept)
        if with_log_probs:
            result = replace(result, log_probs=self._gathered(kept, step))
        if live is not None:
            result = replace(result, live_routes=live.gathered())
        return result

    def _apply(
        self, metrics: dict[str, float], step: PreparedStep, log_probs: list[Tensor | None]
    ) -> StepResult:
        assert self.optimizer is not None
        if self.optimizer.scaler is not None:
            metrics |= {"loss_scale": self.optimizer.loss_scale}
        updated, grad_norm = self.optimizer.step()
        bad, cause = None, None
        if not updated and not math.isfinite(grad_norm):
            bad = first_bad_parameter(self.chunks, self.groups)
            samples = step.share.numbers()
            cause = cause_of_skip(
                self.config, self.groups, step.microbatches, samples, log_probs, metrics
            )
        self.version += int(updated)
        metrics |= {
            "grad_norm": grad_norm,
            "skipped_steps": float(self.optimizer.skipped_steps),
            "num_microbatches": float(len(step.share.counts)),
            "padding_microbatch_share": step.share.padding_share,
        }
        overflow = self.optimizer.overflowed and cause is None
        return StepResult(metrics, updated, grad_norm, bad, cause, overflow)

    def _live_routes(self, step: PreparedStep) -> LiveRoutes:
        model, watched = self.routed_model, step.share.watched
        assert model is not None, "live routes need --detect-routing or a replay flag"
        starts = np.cumsum(np.append(0, watched))
        places = [
            # What is not watched, and padding, starts after the last watched token.
            token_places(
                m.inputs,
                torch.from_numpy(starts[np.minimum(samples, len(watched))]),
                self.groups,
                self.config.sequence_parallel,
            )
            for m, samples in zip(
                step.microbatches,
                [n if len(n) else np.array([len(watched)]) for n in step.share.numbers()],
                strict=True,
            )
        ]
        return LiveRoutes(model.num_layers, model.topk, watched.tolist(), places, self.device)

    def _replay_session(
        self, step: PreparedStep, live: LiveRoutes | None = None
    ) -> RouterReplaySession | None:
        if self.routed_model is None or not (live or self.config.replays_routes):
            return None
        sample_ids = [
            router_order(m.inputs.sample_ids, self.groups, self.config.sequence_parallel)
            for m in step.microbatches
        ]
        return RouterReplaySession(
            self.routed_model,
            [
                (ids >= 0) & (not m.is_padding)
                for ids, m in zip(sample_ids, step.microbatches, strict=True)
            ],
            replayed=step.routes,
            recorded=self.recorded_routes.get(step.fingerprint),
            live=live,
            keep_gradient=self.config.router_gradient == "keep",
            device=self.device,
        )
