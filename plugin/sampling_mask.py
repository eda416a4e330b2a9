"""The ids that truncated sampling kept for every response token: their form, and what is wrong.

A batch holds them in compressed rows: `rollout_kept_ids`, the ids of all response tokens end to
end, and `rollout_kept_counts`, how many belong to each token. The ids of a token ascend; a token
without any was drawn from the whole vocabulary. Seen as one `Ragged` with an entry per response
token this is what log-probs are computed over (`plugin.logprobs.kept_ids`).

slime's form, `rollout_top_p_token_ids` and `rollout_top_p_token_offsets` per sample, is read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from plugin.errors import BatchError
from plugin.ragged import Integers, Ragged, as_integers

KEPT_IDS, KEPT_COUNTS = "rollout_kept_ids", "rollout_kept_counts"
TOP_P_IDS, TOP_P_OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"


def kept_rows(columns: Mapping[str, Any]) -> Ragged | None:
    """One entry of kept ids per response token, of all samples end to end; None if there are none.

    columns: of a batch, with whole responses
    """
    if columns.get(KEPT_IDS) is None or columns.get(KEPT_COUNTS) is None:
        return None
    return Ragged(Ragged.of(columns[KEPT_IDS]).values, Ragged.of(columns[KEPT_COUNTS]).values)


def top_p_rows(batch: Mapping[str, Any], response_lengths: Sequence[int]) -> Ragged:
    """The same from slime's batch; a `BatchError` where a field or a row is missing."""
    missing = [name for name in (TOP_P_IDS, TOP_P_OFFSETS) if batch.get(name) is None]
    if missing:
        raise BatchError(
            f"--rollout-top-p is below 1 and the batch has no {', '.join(missing)}; the engine "
            "sampled from a nucleus that our log-probs need. Use a slime that records it, or set "
            "--rollout-top-p 1"
        )
    ids, counts = [], []
    for sample, length in enumerate(response_lengths):
        offsets = as_integers(torch.as_tensor(batch[TOP_P_OFFSETS][sample]))
        own = torch.as_tensor(batch[TOP_P_IDS][sample])
        if len(offsets) != length + 1 or offsets[0] != 0 or offsets[-1] != len(own):
            raise BatchError(
                f"{TOP_P_OFFSETS} of sample {sample} has {len(offsets)} entries and ends at "
                f"{offsets[-1] if len(offsets) else 'nothing'}; a response of {length} tokens and "
                f"{len(own)} kept ids needs {length + 1}, from 0 to {len(own)}"
            )
        ids.append(own)
        counts.append(np.diff(offsets))
    return Ragged(Ragged.of(ids).values, np.concatenate(counts) if counts else [])


class KeptFault(NamedTuple):
    """The first response token (of all samples end to end) with wrong kept ids, and what is."""

    token: int
    problem: str


def find_fault(
    rows: Ragged,
    tokens: Integers,
    loss_mask: NDArray[np.bool_],
    *,
    vocabulary: int | None = None,
    ordered: bool = True,
    complete: bool = False,
) -> KeptFault | None:
    """Look at every token [R] whose loss mask is 1; what is masked may hold anything.

    vocabulary: ids are below it, where it is known; ordered: ids ascend, else they only differ
    complete: every token has kept ids
    """
    ids, owner = as_integers(rows.values), rows.sample_index
    if not ordered:
        order = np.lexsort((ids, owner))
        ids = ids[order]
    inside = loss_mask[owner]
    same_row = owner[1:] == owner[:-1]
    step = np.diff(ids)
    highest = np.iinfo(np.int64).max if vocabulary is None else vocabulary
    found = np.zeros(len(rows), bool)
    found[owner[ids == tokens[owner]]] = True
    truncated = rows.lengths > 0
    kept_id = lambda places: f"{ids[places[0]]}"  # noqa: E731
    for places, problem in (
        (
            np.flatnonzero(inside & ((ids < 0) | (ids >= highest))),
            "keeps the id {id}, which is not in the vocabulary"
            + ("" if vocabulary is None else f" of {vocabulary}"),
        ),
        (1 + np.flatnonzero(inside[1:] & same_row & (step == 0)), "keeps the id {id} twice"),
        (
            1 + np.flatnonzero(inside[1:] & same_row & (step < 0)),
            "has kept ids that do not ascend (at {id})",
        ),
    ):
        if len(places):
            return KeptFault(int(owner[places[0]]), problem.format(id=kept_id(places)))
    for outside in np.flatnonzero(loss_mask & truncated & ~found)[:1]:
        return KeptFault(
            int(outside),
            f"was sampled as {tokens[outside]}, which is not among its {rows.lengths[outside]} "
            "kept ids",
        )
    for bare in np.flatnonzero(loss_mask & ~truncated)[:1] if complete else ():
        return KeptFault(int(bare), "has no kept ids")
    return None
