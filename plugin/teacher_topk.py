"""The most likely ids of a teacher for every response token: their format and its checks.

A batch holds them as `teacher_topk_ids` and `teacher_topk_log_probs`, [response, k] per sample: the
log-probs are of the teacher's whole distribution, so that 1 less the sum of their probabilities is
what is left for all other ids together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from plugin.errors import BatchError
from plugin.ragged import Integers, Ragged

TOPK_IDS, TOPK_LOG_PROBS = "teacher_topk_ids", "teacher_topk_log_probs"
#: Probabilities of one distribution may add up to this, by rounding.
_MOST_MASS = 1.01


def check_topk(
    columns: Mapping[str, Any], numbers: Integers, vocabulary: int | None = None
) -> None:
    """Check the teacher's most likely ids of a batch, if it has any.

    numbers: [N] sample numbers for error messages; vocabulary: ids are below it, where it is known
    """
    given = [name for name in (TOPK_IDS, TOPK_LOG_PROBS) if name in columns]
    if not given:
        return
    if len(given) == 1:
        raise BatchError(f"the batch has only {given[0]}; give ids and their log-probs, or neither")
    ids, log_probs = (columns[name].values for name in given)
    if ids.dim() != 2 or ids.shape != log_probs.shape or ids.dtype.is_floating_point:
        raise BatchError(
            f"{TOPK_IDS} are {ids.dtype} {list(ids.shape)}, {TOPK_LOG_PROBS} "
            f"{list(log_probs.shape)}; both are [response, k] per sample, ids are integers"
        )
    for wrong, problem in _faults(ids, log_probs, vocabulary):
        bad = wrong & (columns["loss_masks"].values != 0)
        if bool(bad.any()):
            place = int(bad.nonzero()[0])
            column: Ragged = columns[TOPK_IDS]
            sample, position = column.place_of(place)
            raise BatchError(
                f"{TOPK_IDS} of sample {numbers[sample]} {problem} at position {position}, where "
                "the loss mask is 1; repair the teacher that reports them, or mask the token"
            )


def _faults(ids: Tensor, log_probs: Tensor, vocabulary: int | None) -> list[tuple[Tensor, str]]:
    """[T] bool of every fault, and its name."""
    ordered = ids.long().sort(dim=1).values
    outside = ordered[:, 0] < 0
    if vocabulary is not None:
        outside |= ordered[:, -1] >= vocabulary
    of_all = "" if vocabulary is None else f" of {vocabulary}"
    mass = log_probs.double().exp().sum(1)
    return [
        (outside, f"contain an id outside the vocabulary{of_all}"),
        ((ordered[:, 1:] == ordered[:, :-1]).any(dim=1), "contain an id twice"),
        (mass > _MOST_MASS, "have probabilities that add up to more than 1"),
    ]
