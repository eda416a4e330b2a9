"""What a detector says, and the tokens it looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from plugin.observe.dump_columns import DumpBlock

Severity = Literal["info", "warning", "error"]
#: More tokens than this say nothing more; of a larger step every n-th sample is looked at.
MAX_TOKENS = 1 << 17


@dataclass(frozen=True)
class Finding:
    """Evidence, likely cause and advice; `numbers` holds the evidence for machines."""

    detector: str
    title: str
    severity: Severity
    evidence: str
    likely_cause: str
    what_to_try: str
    numbers: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.severity}: {self.title}\n  evidence: {self.evidence}\n  likely cause: {self.likely_cause}\n"
            f"  what to try: {self.what_to_try}"
        )


@dataclass(frozen=True)
class StepTokens:
    """The unmasked response tokens of a step, flat [T].

    rollout, train: float64 log-probs; sample: int64 index; position: int64 in the response (gaps where masked)
    ids: int64 token ids or None
    """

    rollout: NDArray[np.float64]
    train: NDArray[np.float64]
    sample: NDArray[np.int64]
    position: NDArray[np.int64]
    ids: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return int(self.rollout.size)

    @property
    def log_ratio(self) -> NDArray[np.float64]:
        """train - rollout, bounded so that its exponential stays finite."""
        return np.clip(self.train - self.rollout, -20.0, 20.0)

    def k3(self) -> float:
        """KL(rollout || train) per token."""
        ratio = self.log_ratio
        return float(np.mean(np.expm1(ratio) - ratio)) if len(self) else 0.0


def tokens_of_columns(columns: Mapping[str, Sequence[Any]]) -> StepTokens | None:
    """The tokens of a rollout batch's columns; None without rollout or trainer log-probs."""
    if "rollout_log_probs" not in columns or "log_probs" not in columns:
        return None
    lengths = [len(value) for value in columns["rollout_log_probs"]]
    chosen = _spread(lengths)
    flat = {
        name: _joined([np.asarray(columns[name][i]) for i in chosen])
        for name in ("rollout_log_probs", "log_probs", "loss_masks")
    }
    ids = None
    if "unconcat_tokens" in columns:
        ids = _joined(
            [np.asarray(columns["unconcat_tokens"][i])[-lengths[i] or None :] for i in chosen]
        )
        if ids.size != flat["rollout_log_probs"].size:
            ids = None
    return _tokens(
        flat["rollout_log_probs"],
        flat["log_probs"],
        flat["loss_masks"] != 0,
        np.array([lengths[i] for i in chosen], np.int64),
        ids,
    )


def tokens_of_block(block: DumpBlock, rows: NDArray[np.bool_]) -> StepTokens:
    """The tokens of some rows of a dump's block."""
    selected = np.repeat(rows, block.lengths)
    return _tokens(
        block.rollout[selected],
        block.train[selected],
        block.mask[selected],
        block.lengths[rows],
        None if block.ids is None else block.ids[selected],
    )


def joined_tokens(parts: Sequence[StepTokens]) -> StepTokens:
    """The tokens of several steps as of one; their samples stay apart."""
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


def _tokens(
    rollout: NDArray[Any],
    train: NDArray[Any],
    mask: NDArray[np.bool_],
    lengths: NDArray[np.int64],
    ids: NDArray[Any] | None,
) -> StepTokens:
    sample = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(sample)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return StepTokens(
        rollout[mask].astype(np.float64),
        train[mask].astype(np.float64),
        sample[mask],
        position[mask],
        None if ids is None else ids[mask].astype(np.int64),
    )


def _spread(lengths: Sequence[int]) -> list[int]:
    stride = max(1, -(-sum(lengths) // MAX_TOKENS))
    return list(range(0, len(lengths), stride))


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0)
