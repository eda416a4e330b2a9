"""What the detectors look at (`Step`) and what they report (`Finding`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from plugin.config import JobConfig
from plugin.ppo_utils.importance_ratio import MAX_LOG_RATIO, k3
from plugin.ragged import Integers, Ragged, as_integers, ragged_range

Severity = Literal["info", "warning", "error"]
#: More tokens than this add no evidence; of a larger step every n-th sample is used.
MAX_TOKENS = 1 << 17


@dataclass(frozen=True)
class Finding:
    """Evidence, likely cause and advice; `numbers` holds the evidence for machines.

    detector: name of the detector, filled in by `MismatchDetectors`
    unmistakable: no healthy job has it, so it ends the job (--on-finding) and is reported first
    """

    title: str
    severity: Severity
    evidence: str
    likely_cause: str
    what_to_try: str
    numbers: dict[str, float] = field(default_factory=dict)
    detector: str = ""
    unmistakable: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def text(self) -> str:
        """See `finding_text`."""
        return finding_text(vars(self))

    def __str__(self) -> str:
        return f"{self.severity}: {self.text}"


def finding_text(entry: Mapping[str, Any]) -> str:
    """A finding, or its line of findings.jsonl, as text without severity and steps."""
    lines = [str(entry.get("title"))]
    for key in ("evidence", "likely_cause", "what_to_try"):
        lines.append(f"  {key.replace('_', ' ')}: {entry.get(key)}")
    return "\n".join(lines)


def bisect_command(config: JobConfig | None) -> str:
    """The `doctor --bisect` that compares the layers of engine and trainer as the job has them."""
    words = ["megatron-tis", "doctor", "--bisect"]
    if config is None:
        return " ".join(words)
    if config.hf_checkpoint is not None:
        words += ["--hf-checkpoint", config.hf_checkpoint]
    else:
        words += ["--embedded-model", config.embedded_model]
    if config.train_dtype != "auto":
        words += ["--train-dtype", config.train_dtype]
    if config.rollout_dtype != "auto":
        words += ["--rollout-dtype", config.rollout_dtype]
    if config.rollout_quantization != "none":
        words += ["--rollout-quantization", config.rollout_quantization]
    return shlex.join(words)


@dataclass(frozen=True)
class StepTokens:
    """The unmasked response tokens of a step, flat [T].

    rollout, train: float64 log-probs; sample: int64 index
    position: int64 in the response (gaps where masked); ids: int64 token ids or None
    age: int64 weight versions behind the trainer, 0 where unknown; None after joining steps
    """

    rollout: NDArray[np.float64]
    train: NDArray[np.float64]
    sample: NDArray[np.int64]
    position: NDArray[np.int64]
    ids: NDArray[np.int64] | None = None
    age: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return int(self.rollout.size)

    @property
    def log_ratio(self) -> NDArray[np.float64]:
        """train - rollout, bounded so that its exponential stays finite."""
        return np.clip(self.train - self.rollout, -MAX_LOG_RATIO, MAX_LOG_RATIO)

    def k3(self) -> float:
        """KL(rollout || train) per token."""
        return float(k3(torch.from_numpy(-self.log_ratio)).mean()) if len(self) else 0.0

    def fresh(self) -> StepTokens:
        """The tokens that the trainer's own weights sampled, as far as versions are known.

        Older ones come from another policy: any difference may be what was learned since.
        """
        if self.age is None or not (self.age > 0).any():
            return self
        keep = self.age <= 0
        return StepTokens(
            self.rollout[keep],
            self.train[keep],
            self.sample[keep],
            self.position[keep],
            None if self.ids is None else self.ids[keep],
        )


@dataclass(frozen=True)
class Step:
    """One training step as the detectors see it.

    columns: the samples, named as in `RolloutBatch`; `log_probs` are the trainer's and
        `train_routed_experts` its own choices for the first samples, where known
    tokens: the log-probs of the columns; empty where one side has none
    staleness: mean number of weight versions that unmasked tokens are behind the trainer
    version: newest weight version of a token; trainer_version: of the trainer. All three are None
        where versions are unknown
    max_staleness: the staleness that the user allows, or None
    config: the settings of the job, None where they are unknown (a dump)
    """

    number: int
    columns: Mapping[str, Sequence[Any]]
    tokens: StepTokens
    staleness: float | None = None
    version: int | None = None
    trainer_version: int | None = None
    max_staleness: float | None = None
    config: JobConfig | None = None

    @classmethod
    def of(
        cls,
        number: int,
        columns: Mapping[str, Sequence[Any]],
        trainer_version: int | Sequence[int] | None,
        max_staleness: float | None = None,
        config: JobConfig | None = None,
    ) -> Step:
        """trainer_version: of the step, or one per sample; None or -1 where unknown."""
        if not len(columns.get("weight_versions", ())):
            return cls(
                number, columns, _tokens(columns), max_staleness=max_staleness, config=config
            )
        masks = Ragged.of(columns["loss_masks"])
        lengths = masks.lengths
        versions = _per_token(columns["weight_versions"], lengths)
        of_trainer = np.asarray(-1 if trainer_version is None else trainer_version)
        trainer = np.repeat(np.broadcast_to(of_trainer, len(lengths)), lengths)
        known = (versions >= 0) & (trainer >= 0)
        ages = np.where(known, trainer - versions, 0)
        tokens = _tokens({**columns, "ages": masks.like(torch.from_numpy(ages))})
        known &= masks.values.numpy() != 0
        behind, newest, trainer_newest = None, None, None
        if known.any():
            behind = float(ages[known].mean())
            newest, trainer_newest = int(versions[known].max()), int(trainer[known].max())
        return cls(number, columns, tokens, behind, newest, trainer_newest, max_staleness, config)


def join_tokens(parts: Sequence[StepTokens]) -> StepTokens:
    """The tokens of several steps as of one; samples of different steps stay different samples."""
    if len(parts) == 1:
        return parts[0]
    counts = [int(part.sample.max()) + 1 if len(part) else 0 for part in parts]
    firsts = np.cumsum([0, *counts[:-1]])
    ids = [part.ids for part in parts if part.ids is not None]
    return StepTokens(
        np.concatenate([part.rollout for part in parts]),
        np.concatenate([part.train for part in parts]),
        np.concatenate([part.sample + first for part, first in zip(parts, firsts, strict=True)]),
        np.concatenate([part.position for part in parts]),
        np.concatenate(ids) if len(ids) == len(parts) else None,
    )


def _per_token(versions: Sequence[Any], lengths: Integers) -> Integers:
    """[T] int64 of one entry per token, or of one number that stands for a sample's tokens."""
    if isinstance(versions, Ragged):
        return as_integers(versions.values)
    rows = zip(versions, lengths, strict=True)
    return np.concatenate([np.broadcast_to(row, n) for row, n in rows]).astype(np.int64)


def _tokens(columns: Mapping[str, Sequence[Any]]) -> StepTokens:
    rollouts = Ragged.of(columns.get("rollout_log_probs", ()))
    stride = max(1, -(-int(rollouts.lengths.sum()) // MAX_TOKENS))
    chosen = np.arange(0, len(rollouts), stride)
    if not len(chosen) or "log_probs" not in columns:
        empty = np.zeros(0)
        return StepTokens(empty, empty, np.zeros(0, np.int64), np.zeros(0, np.int64))
    lengths = rollouts.lengths[chosen]

    def flat(name: str) -> NDArray[Any]:
        """[T] values of the response; the end of a column that also covers the prompt."""
        column = Ragged.of(columns[name])
        ends = column.starts[chosen] + column.lengths[chosen]
        return column.values.numpy()[ragged_range(ends - lengths, lengths)]

    mask = flat("loss_masks") != 0
    sample = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(sample)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return StepTokens(
        flat("rollout_log_probs")[mask].astype(np.float64),
        flat("log_probs")[mask].astype(np.float64),
        sample[mask],
        position[mask],
        flat("unconcat_tokens")[mask].astype(np.int64) if "unconcat_tokens" in columns else None,
        flat("ages")[mask] if "ages" in columns else None,
    )
