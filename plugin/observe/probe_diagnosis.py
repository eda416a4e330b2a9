"""Does an engine compute with the trainer's weights? Judged by the tokens of one short probe.

Engine and trainer give log-probs to the same tokens. What their dtypes explain is measured; what
exceeds that is a fault, and its pattern hints at the cause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plugin.config import JobConfig
from plugin.config.model import DtypeName
from plugin.observe.findings import Finding, bisect_command

#: From the finest to the coarsest.
Precision = Literal["float32", "float16", "bfloat16", "quantized"]
PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "bfloat16", "quantized")

#: Mean |log-prob difference| at temperature 1 beyond which an engine is wrong. Healthy engines here
#: (SmolLM2-135M, 30 layers; 64 tokens): float32 8e-6, int8 0.04, bfloat16 0.024 to 0.04, which
#: public reports of 8B and 30B models confirm (KL 6e-4 to 2e-3 a token is 0.03 to 0.05). One wrong
#: tensor of 272 reaches 0.13 in bfloat16 where it does least (one output projection times 2).
LIMITS: dict[Precision, float] = {
    "float32": 1e-3,
    "float16": 0.05,
    "bfloat16": 0.1,
    "quantized": 0.5,
}
#: On GPUs float32 products may round to the 10 bits of TF32, as many as float16 has.
_TF32_LIMIT = LIMITS["float16"]
#: In 16 bits near ties between experts are broken differently, each time with another expert's
#: output: public reports have twice the KL of dense models.
_MOE_FACTOR = 2.0
#: Where the trainer has moved on by some versions since. Learning is not that fast.
STALE_LIMIT = 1.5


@dataclass(frozen=True)
class Limit:
    """The mean |log-prob difference| that is still healthy, and why."""

    value: float
    precision: Precision
    reason: str


def limit_for(
    config: JobConfig, trainer: DtypeName, *, on_gpu: bool = False, is_moe: bool = False
) -> Limit:
    """The limit for a job, by the coarser dtype of trainer and engine.

    trainer: the dtype of its weights; on_gpu: where it computes; is_moe: whether it has experts
    """
    engine = _engine_precision(config, trainer)
    ours: Precision = "quantized" if config.fp8 is not None else trainer
    coarser = max(ours, engine, key=PRECISIONS.index)
    value = LIMITS[coarser]
    reason = f"{coarser} (trainer {ours}, engine {engine})"
    if coarser == "float32" and on_gpu:
        value, reason = _TF32_LIMIT, f"{reason}, which may be TF32"
    if coarser != "float32" and is_moe and not config.use_rollout_routing_replay:
        value, reason = value * _MOE_FACTOR, f"{reason}, experts without routing replay"
    if config.rollout_temperature < 1:
        value /= config.rollout_temperature
        reason += f", temperature {config.rollout_temperature:g}"
    return Limit(value, coarser, reason)


def _engine_precision(config: JobConfig, trainer: DtypeName) -> Precision:
    """Servers elsewhere choose their dtype themselves, so the coarsest is assumed."""
    arguments = {**config.vllm_arguments(), **config.sglang_arguments()}
    quantizes = any("quantization" in name or name == "kv_cache_dtype" for name in arguments)
    unknown = config.engine_traits.asks_servers
    if unknown or quantizes or config.rollout_quantization != "none":
        return "quantized"
    return trainer if config.rollout_dtype == "auto" else config.rollout_dtype


@dataclass(frozen=True)
class ProbeScores:
    """The probe's tokens, flat [T]: log-probs of both sides, and the place in the response."""

    rollout: NDArray[np.float64]
    train: NDArray[np.float64]
    position: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.rollout.size)

    @property
    def distance(self) -> NDArray[np.float64]:
        """|difference| of every token, infinite where a side has no number."""
        return np.nan_to_num(np.abs(self.rollout - self.train), nan=math.inf, posinf=math.inf)

    @property
    def mean(self) -> float:
        """Mean |log-prob difference|."""
        return float(self.distance.mean()) if len(self) else 0.0


@dataclass(frozen=True)
class ProbedModel:
    """What is known of the model.

    differing: tensors whose checksums differ; checked: how many could be compared
    """

    vocab_size: int
    is_tied: bool = False
    differing: Sequence[str] = ()
    checked: int = 0


def checksum_finding(name: str, wrong: Sequence[str], config: JobConfig) -> Finding:
    """What is wrong with the engine `name`, whose checksums still differ after a second version."""
    return Finding(
        f"{name} does not compute with the trainer's weights",
        "error",
        f"the checksums of {len(wrong)} tensors differ from the trainer's, and still do after the "
        f"version was sent again: {_some(wrong)}",
        "the engine changes these tensors when it loads them, or its memory is damaged",
        f"{bisect_command(config)} names the layer; --verify-weights off skips this check",
        {"tensors": float(len(wrong))},
        detector="weight_verification",
        unmistakable=True,
    )


def _some(names: Sequence[str]) -> str:
    """The first of them, and how many there are besides."""
    more = len(names) - 3
    return f"{', '.join(names[:3])}{f' and {more} more' if more > 0 else ''}"


def likely_cause(scores: ProbeScores, limit: Limit, model: ProbedModel) -> str:
    """What the probe's tokens and checksums say about a fault."""
    if model.differing:
        return (
            f"{len(model.differing)} of {model.checked} tensors of the engine differ from the "
            f"trainer's: {_some(model.differing)}"
        )
    outside = ""
    if model.checked:
        outside = (
            f"; all {model.checked} tensors have the trainer's checksums, so look at what is not "
            "a weight: buffers, rotary tables, the engine's config, its kernels"
        )
    return _cause_by_tokens(scores, limit, model) + outside


def _cause_by_tokens(scores: ProbeScores, limit: Limit, model: ProbedModel) -> str:
    if not np.isfinite(scores.rollout).all():
        return "the engine computes NaN or infinity: a missing tensor, or float16 that overflows"
    uniform = -math.log(model.vocab_size)
    if scores.train.mean() < uniform or scores.rollout.mean() < 0.9 * uniform:
        missing = "a missing tensor: the engine generates nearly random tokens"
        if not model.is_tied:
            return missing
        return (
            "the tied LM head: the model shares it with the embedding, and the engine did not "
            f"take the new one for it; or {missing}"
        )
    if cause := _cause_by_position(scores, limit):
        return cause
    explaining = [p for p in PRECISIONS if LIMITS[p] >= scores.mean and p != "quantized"]
    if explaining and PRECISIONS.index(explaining[0]) > PRECISIONS.index(limit.precision):
        return (
            f"a coarser dtype: {explaining[0]} explains a difference of this size, and the job "
            f"says {limit.precision} (--rollout-dtype, --train-dtype); or one slightly wrong tensor"
        )
    return "a wrong tensor: swapped, transposed, scaled, of another layer, or never loaded"


def _cause_by_position(scores: ProbeScores, limit: Limit) -> str | None:
    """The cause, if the difference grows along the response."""
    last = scores.position.max(initial=0)
    first, late = scores.position == 0, scores.position > last / 2
    # Tokens that are nearly certain agree whatever is wrong.
    if last < 4 or not first.any() or scores.rollout[first].mean() > -0.5:
        return None
    at_first = float(scores.distance[first].mean())
    later = float(scores.distance[late].mean())
    if at_first <= limit.value < later:
        return (
            "positions or the KV cache: the first token, which the prompt pass gives, is right, "
            "and those that are decoded are not; otherwise a wrong tensor"
        )
    if later > 4 * at_first:
        return (
            "a wrong rope (theta, scaling) or wrong positions: the difference grows with them; "
            "otherwise a wrong tensor"
        )
    return None


def probe_finding(
    name: str, scores: ProbeScores, limit: Limit, model: ProbedModel, config: JobConfig
) -> Finding | None:
    """What is wrong with the engine `name`; None if it computes with the trainer's weights."""
    if scores.mean <= limit.value and not model.differing:
        return None
    return Finding(
        f"{name} does not compute with the trainer's weights",
        "error",
        f"mean |log-prob difference| {scores.mean:.2g} on {len(scores)} tokens of a probe, limit "
        f"{limit.value:.2g} for {limit.reason}; the engine gives these tokens "
        f"{scores.rollout.mean():.2f} on average and the trainer {scores.train.mean():.2f}",
        likely_cause(scores, limit, model),
        f"{bisect_command(config)} names the layer; --verify-weights off skips this check",
        {"mean_difference": scores.mean, "limit": limit.value, "tokens": float(len(scores))},
        detector="weight_verification",
        unmistakable=True,
    )
