"""Engines show that they compute with the trainer's weights before their tokens are trained on.

The engine answers a short probe right after it got new weights (`EnginePool`); here the trainer
scores the same tokens, and the job ends if the two differ by more than their dtypes explain.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch, with_checked_routes
from plugin.cluster.array_transport import only
from plugin.cluster.engine_pool import EnginePool, Probed
from plugin.cluster.trainer_group import TrainerGroup
from plugin.config import JobConfig
from plugin.config.engines import ENGINES
from plugin.controller.preflight.job_checks import JobParts
from plugin.controller.weight_sync import WeightSync
from plugin.engines.protocol import Generation, GenerationFailure, GenerationRequest
from plugin.engines.weight_changes import ProbeAnswer, WeightProbe
from plugin.environments.group_server import trajectory_of
from plugin.environments.trajectory import Rollouts
from plugin.errors import FindingError
from plugin.observe.console import Console
from plugin.observe.findings import Finding
from plugin.observe.probe_diagnosis import (
    STALE_LIMIT,
    ProbedModel,
    ProbeScores,
    limit_for,
    probe_finding,
)
from plugin.observe.run_files import RunFiles
from plugin.weights.checksums import differing

_RESPONSES, _TOKENS = 4, 16


def make_probe(config: JobConfig, parts: JobParts) -> WeightProbe | None:
    """A few short responses to the job's first prompt; None where engines are not verified."""
    reports = parts.sampling.log_probs or config.rollout_engine in ENGINES
    if config.verify_weights == "off" or not reports:
        return None
    sampling = replace(
        parts.sampling,
        top_p=1.0,
        top_k=None,
        sampling_mask=False,
        log_probs=True,
        routed_experts=bool(config.use_rollout_routing_replay),
        routed_weights=config.replays_route_weights,
        max_response_length=min(_TOKENS, parts.sampling.max_response_length),
    )
    draw = random.Random(f"{config.seed}/probe")
    seeds = tuple(draw.getrandbits(62) for _ in range(_RESPONSES))
    request = GenerationRequest(parts.task.prompt(0).tokens, seeds)
    exact = config.rollout_quantization == "none" and not config.syncs_adapters
    return WeightProbe(request, sampling, checksums=exact)


@dataclass(frozen=True)
class _Asked:
    """One model that was asked: an engine, or a server of one."""

    probed: Probed
    answer: ProbeAnswer

    @property
    def name(self) -> str:
        server = f" ({self.answer.server})" if self.answer.server else ""
        return f"engine {self.probed.engine}{server}"

    @property
    def responses(self) -> list[Generation]:
        """Those that are not empty."""
        found = [one for one in self.answer.answers if isinstance(one, Generation)]
        return [one for one in found if one.tokens.numel()]

    @property
    def versions(self) -> set[int]:
        """Of the weights that sampled the responses."""
        return {int(v) for one in self.responses for v in one.token_versions().tolist()}

    @property
    def problem(self) -> str:
        """Why the answer cannot be judged; empty if it can."""
        for one in self.answer.answers:
            if isinstance(one, GenerationFailure):
                return one.reason
        return "" if self.responses else "every response to the probe was empty"


class WeightVerification:
    """Compares what engines answered to the probe with what the trainer says of the same tokens."""

    def __init__(
        self,
        config: JobConfig,
        parts: JobParts,
        trainer: TrainerGroup,
        engines: EnginePool,
        weights: WeightSync,
        files: RunFiles,
        console: Console,
    ) -> None:
        self._config, self._parts = config, parts
        self._trainer, self._engines, self._weights = trainer, engines, weights
        self._files, self._console = files, console
        self._probe = engines.probe = make_probe(config, parts)

    def check(self, version: int, step: int) -> None:
        """Verify the engines that answered since the last call, or raise a `FindingError`.

        version: of the trainer's weights; step: the last one, for findings.jsonl
        """
        if self._probe is None:
            return
        self._engines.poll()
        self._engines.probe_returned_servers()
        probed = self._engines.take_probed()
        asked = [_Asked(one, answer) for one in probed for answer in one.answers]
        answered = [one for one in asked if not one.problem]
        for one in asked:
            if one.problem:
                self._console.warn(f"{one.name} is not verified yet: {one.problem}")
        findings = []
        for one, scores in zip(answered, self._scored(answered), strict=True):
            findings.append(self._judged(one, scores, version))
        if wrong := [finding for finding in findings if finding is not None]:
            self._files.log_findings(step, wrong)
            raise FindingError(wrong[0].text)
        unsettled = [one.probed for one in asked if one.problem or one.versions != {version}]
        for engine in probed:
            if engine not in unsettled:
                self._engines.set_verified(engine)

    def _scored(self, answered: Sequence[_Asked]) -> list[ProbeScores]:
        """Log-probs of engine and trainer, by one pass over the responses of all models."""
        if not answered:
            return []
        assert self._probe is not None
        parts = [probe_batch(self._probe, one.responses) for one in answered]
        batch = parts[0].concatenated(*parts[1:])
        if self._config.use_rollout_routing_replay:
            assert self._parts.route_shape is not None
            batch = with_checked_routes(batch, self._parts.route_shape)
        batch = only(
            batch.with_column("log_probs", self._trainer.log_probs("policy", batch)), "log_probs"
        )
        log_probs, found, first = batch.columns["log_probs"], [], 0
        for part in parts:
            found.append(scores_of(part, list(log_probs)[first : first + len(part)]))
            first += len(part)
        return found

    def _judged(self, asked: _Asked, scores: ProbeScores, version: int) -> Finding | None:
        """The finding for one model that is wrong; one that is right is logged."""
        limit = limit_for(
            *(self._config, self._trainer.dtype),
            on_gpu=self._trainer.on_gpu,
            is_moe=self._parts.route_shape is not None,
        )
        if asked.versions != {version}:
            reason = f"{limit.reason}, the trainer has moved on since"
            limit = replace(limit, value=max(limit.value, STALE_LIMIT), reason=reason)
        model = self._model(asked)
        finding = probe_finding(asked.name, scores, limit, model, self._config)
        if finding is None:
            checked = f"; {model.checked} tensors have its checksums" if model.checked else ""
            self._console.log(
                f"{asked.name} computes with the trainer's weights: mean |log-prob difference| "
                f"{scores.mean:.1e}, limit {limit.value:.0e}{checked}"
            )
        return finding

    def _model(self, asked: _Asked) -> ProbedModel:
        hf_config = self._parts.policy.hf_config
        model = ProbedModel(hf_config["vocab_size"], bool(hf_config.get("tie_word_embeddings")))
        own, sums = asked.answer.checksums, self._weights.checksums
        if not own or not sums or asked.versions != {self._weights.version}:
            return model
        checked = len(own.keys() & sums.keys())
        return replace(model, differing=differing(own, sums), checked=checked)


def probe_batch(probe: WeightProbe, responses: Iterable[Generation]) -> RolloutBatch:
    """The responses to the probe as a batch that the trainer can score."""
    assert probe.request is not None
    prompt = probe.request.prompt
    return Rollouts.of([[trajectory_of(prompt, one) for one in responses]]).batch


def scores_of(batch: RolloutBatch, log_probs: Sequence[Tensor]) -> ProbeScores:
    """The batch's tokens with the log-probs of both sides; the trainer's are one row per sample."""
    lengths = batch.columns["response_lengths"].tolist()
    return ProbeScores(
        batch.columns["rollout_log_probs"].values.numpy().astype(np.float64),
        torch.cat(list(log_probs)).numpy().astype(np.float64),
        np.concatenate([np.arange(length) for length in lengths]),
    )
