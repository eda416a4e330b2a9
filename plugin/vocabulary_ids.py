"""Columns with several vocabulary ids per response token: their formats and their checks.

The ids that truncated sampling kept are in compressed rows: `rollout_kept_ids`, the ids of all
response tokens end to end, and `rollout_kept_counts`, how many belong to each token. The ids of a
token ascend; a token without any was drawn from the whole vocabulary. Seen as one `Ragged` with an
entry per response token this is what log-probs are computed over (`plugin.logprobs.row_ids`).
slime's format is read here, too: `rollout_top_p_token_ids` and `rollout_top_p_token_offsets` per
sample.

A teacher's most likely ids are `teacher_topk_ids` and `teacher_topk_log_probs`, [response, k] per
sample: the log-probs are of the teacher's whole distribution, so that 1 less the sum of their
probabilities is what is left for all other ids together.

The head of the sampler's distribution, `rollout_topk_token_ids` and `rollout_topk_log_probs`, has
the same form; slime, miles and vime have it under these names. It is of the distribution that the
token was drawn from, after temperature and truncation. Where that had fewer than k ids, and for
tokens that nobody sampled, the id is -1 and the log-prob is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plugin.errors import BatchError
from plugin.ragged import Integers, Ragged, as_integers

KEPT_IDS, KEPT_COUNTS = "rollout_kept_ids", "rollout_kept_counts"
TOP_P_IDS, TOP_P_OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"
TOPK_IDS, TOPK_LOG_PROBS = "teacher_topk_ids", "teacher_topk_log_probs"
HEAD_IDS, HEAD_LOG_PROBS = "rollout_topk_token_ids", "rollout_topk_log_probs"
#: The pairs of columns of the form [response, k], and who reports them.
_TOPK_COLUMNS = ((TOPK_IDS, TOPK_LOG_PROBS, "teacher"), (HEAD_IDS, HEAD_LOG_PROBS, "engine"))
#: Probabilities of one distribution may add up to this, by rounding.
_MOST_MASS = 1.01
#: No real log-prob is larger; a sentinel such as -1e30 is.
_LARGEST_LOG_PROB = 1e4


class SamplerHead(NamedTuple):
    """The likeliest ids [n, k] int32 of the distributions n tokens were drawn from; -1 = none.

    log_probs: [n, k] float32 of each, 0 where there is none
    """

    ids: Tensor
    log_probs: Tensor

    @classmethod
    def of(cls, log_probs: Tensor, k: int) -> SamplerHead:
        """From whole distributions [n, V]; -inf is no candidate."""
        largest = log_probs.topk(min(k, log_probs.shape[-1]), dim=-1)
        found = largest.values.isfinite()
        head = cls.absent(len(log_probs), k)
        width = found.shape[1]
        head.ids[:, :width] = torch.where(found, largest.indices, -1).cpu()
        head.log_probs[:, :width] = torch.where(found, largest.values, 0.0).cpu()
        return head

    @classmethod
    def absent(cls, n: int, k: int) -> SamplerHead:
        """Of tokens that nobody sampled."""
        return cls(torch.full((n, k), -1, dtype=torch.int32), torch.zeros(n, k))

    @classmethod
    def joined(cls, parts: Sequence[SamplerHead]) -> SamplerHead:
        """One after the other."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    def first(self, n: int) -> SamplerHead:
        """Those of the first n tokens."""
        return SamplerHead(self.ids[:n], self.log_probs[:n])


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
        given = [batch[name][sample] for name in (TOP_P_IDS, TOP_P_OFFSETS)]
        # A sample may have none, such as one that was never sampled.
        own, ends = (torch.as_tensor([] if value is None else value) for value in given)
        offsets = as_integers(ends)
        sound = len(offsets) == length + 1 and offsets[0] == 0 and offsets[-1] == len(own)
        if not sound or bool((np.diff(offsets) < 0).any()):
            raise BatchError(
                f"{TOP_P_OFFSETS} of sample {sample} are {_shown(offsets)}; a response of {length} "
                f"tokens with {len(own)} kept ids needs {length + 1} that ascend from 0 to "
                f"{len(own)}"
            )
        ids.append(own.to(torch.int64))
        counts.append(np.diff(offsets))
    return Ragged(Ragged.of(ids).values, np.concatenate(counts) if counts else [])


def _shown(offsets: Integers) -> str:
    few = ", ".join(map(str, offsets[:4]))
    return (
        f"[{few}, ... {offsets[-1]}] ({len(offsets)} of them)" if len(offsets) > 4 else f"[{few}]"
    )


def check_columns(
    columns: Mapping[str, Any],
    tokens: Integers,
    numbers: Integers,
    vocabulary: int | None,
) -> None:
    """Check the kept ids of a batch, if it has any; `tokens` [R] are the response tokens.

    numbers: [N] sample numbers for error messages
    """
    given = [name for name in (KEPT_COUNTS, KEPT_IDS) if name in columns]
    if len(given) == 1:
        raise BatchError(
            f"the batch has only {given[0]}; {KEPT_IDS} are all kept ids end to end and "
            f"{KEPT_COUNTS} says how many belong to each token: give both or neither"
        )
    for name in given:
        dtype = columns[name].values.dtype
        if dtype.is_floating_point or dtype == torch.bool:
            raise BatchError(f"{name} are {dtype}; give integers")
    rows = kept_rows(columns)
    if rows is None:
        return
    counts: Ragged = columns[KEPT_COUNTS]
    for token in np.flatnonzero(rows.lengths < 0)[:1]:
        sample, position = counts.place_of(int(token))
        raise BatchError(
            f"{KEPT_COUNTS} of sample {numbers[sample]} is {rows.lengths[token]} at position "
            f"{position}; it is at least 0 (0 = the whole vocabulary)"
        )
    expected, found = counts.sums(), columns[KEPT_IDS].lengths
    for i in np.flatnonzero(expected != found)[:1]:
        raise BatchError(
            f"{KEPT_IDS} of sample {numbers[i]} has {found[i]} ids and its {KEPT_COUNTS} add up to "
            f"{expected[i]}; rows are missing or left over"
        )
    unmasked = as_integers(columns["loss_masks"].values) != 0
    check_rows(rows, counts.lengths, tokens, unmasked, numbers=numbers, vocabulary=vocabulary)


def check_rows(
    rows: Ragged,
    response_lengths: Integers,
    tokens: Integers,
    unmasked: NDArray[np.bool_],
    *,
    numbers: Integers | None = None,
    vocabulary: int | None = None,
    ordered: bool = True,
    complete: bool = False,
) -> None:
    """Raise a `BatchError` for the first unmasked token [R] with kept ids that it cannot have.

    numbers: sample numbers for error messages; None = their places
    vocabulary: ids are below it, where it is known; ordered: ids ascend, else they only differ
    complete: every token has kept ids
    """
    fault = _find_fault(rows, tokens, unmasked, vocabulary, ordered, complete)
    if fault is not None:
        token, problem = fault
        sample, position = Ragged(rows.values, response_lengths).place_of(token)
        number = sample if numbers is None else numbers[sample]
        raise BatchError(
            f"the token at position {position} of sample {number} {problem}; repair what reports "
            "the sampling mask, or mask the token"
        )


def _find_fault(
    rows: Ragged,
    tokens: Integers,
    unmasked: NDArray[np.bool_],
    vocabulary: int | None,
    ordered: bool,
    complete: bool,
) -> tuple[int, str] | None:
    """The first response token (of all samples end to end) with wrong kept ids, and the fault."""
    ids, owner = as_integers(rows.values), rows.sample_index
    if not ordered:
        ids = ids[np.lexsort((ids, owner))]
    inside = unmasked[owner]
    follows = np.append(False, inside[1:] & (owner[1:] == owner[:-1])) if len(ids) else inside
    step = np.diff(ids, prepend=0)
    outside = (ids < 0) | (ids >= (np.iinfo(np.int64).max if vocabulary is None else vocabulary))
    of_all = "" if vocabulary is None else f" of {vocabulary}"
    for wrong, problem in (
        (inside & outside, f"keeps the id {{}}, which is not in the vocabulary{of_all}"),
        (follows & (step == 0), "keeps the id {} twice"),
        (follows & (step < 0), "has kept ids that do not ascend (at {})"),
    ):
        for place in np.flatnonzero(wrong)[:1]:
            return int(owner[place]), problem.format(ids[place])
    found = np.zeros(len(rows), bool)
    found[owner[ids == tokens[owner]]] = True
    truncated = rows.lengths > 0
    for token in np.flatnonzero(unmasked & truncated & ~found)[:1]:
        count = rows.lengths[token]
        return int(
            token
        ), f"was sampled as {tokens[token]}, which is not among its {count} kept ids"
    for token in np.flatnonzero(unmasked & ~truncated)[:1] if complete else ():
        return int(token), "has no kept ids"
    return None


def check_topk(
    columns: Mapping[str, Any], numbers: Integers, vocabulary: int | None = None
) -> None:
    """Check the likeliest ids of a batch, of the teacher and of the engine, if it has any.

    numbers: [N] sample numbers for error messages; vocabulary: ids are below it, where it is known
    """
    for ids_name, log_probs_name, source in _TOPK_COLUMNS:
        given = [name for name in (ids_name, log_probs_name) if name in columns]
        if len(given) == 1:
            raise BatchError(
                f"the batch has only {given[0]}; give ids and their log-probs, or neither"
            )
        if given:
            _check_pair(columns, ids_name, log_probs_name, source, numbers, vocabulary)


def _check_pair(
    columns: Mapping[str, Any],
    ids_name: str,
    log_probs_name: str,
    source: str,
    numbers: Integers,
    vocabulary: int | None,
) -> None:
    ids, log_probs = columns[ids_name].values, columns[log_probs_name].values
    if ids.dim() != 2 or ids.shape != log_probs.shape or ids.dtype.is_floating_point:
        raise BatchError(
            f"{ids_name} are {ids.dtype} {list(ids.shape)}, {log_probs_name} "
            f"{list(log_probs.shape)}; both are [response, k] per sample, ids are integers"
        )
    may_lack = ids_name == HEAD_IDS
    unmasked = columns["loss_masks"].values != 0
    if may_lack:
        finite = log_probs.abs() <= _LARGEST_LOG_PROB
        wrong_value = (ids >= 0) & ~finite & unmasked[:, None]
        for place in wrong_value.nonzero()[:1].tolist():
            sample, position = columns[ids_name].place_of(place[0])
            raise BatchError(
                f"{log_probs_name} of sample {numbers[sample]} is {float(log_probs[tuple(place)])} "
                f"at position {position}, where the loss mask is 1; it must be finite. Mask the "
                f"token or repair the {source} that reports it"
            )
    faults = _faults(ids, log_probs, vocabulary, may_lack)
    if may_lack:
        faults.append((_not_kept(ids, kept_rows(columns)), "are not all among the kept ids"))
    for wrong, problem in faults:
        bad = wrong & unmasked
        if bool(bad.any()):
            place = int(bad.nonzero()[0])
            column: Ragged = columns[ids_name]
            sample, position = column.place_of(place)
            raise BatchError(
                f"{ids_name} of sample {numbers[sample]} {problem} at position {position}, where "
                f"the loss mask is 1; repair the {source} that reports them, or mask the token"
            )


def _not_kept(ids: Tensor, rows: Ragged | None) -> Tensor:
    """[T] bool: tokens with kept ids and an id [T, k] that is none of them."""
    wrong = torch.zeros(len(ids), dtype=torch.bool)
    if rows is None or not len(ids):
        return wrong
    base = int(max(ids.max(), rows.values.max() if len(rows.values) else 0)) + 1
    token = np.arange(len(ids))[:, None]
    sought, kept = as_integers(ids) + base * token, as_integers(rows.values)
    inside = np.isin(sought, kept + base * rows.sample_index) | (as_integers(ids) < 0)
    return torch.from_numpy(~inside.all(1) & (rows.lengths > 0))


def _faults(
    ids: Tensor, log_probs: Tensor, vocabulary: int | None, may_lack: bool
) -> list[tuple[Tensor, str]]:
    """[T] bool of every fault, and its name; may_lack: whether an id of -1 means none."""
    ordered = ids.long().sort(dim=1).values
    least = -1 if may_lack else 0
    outside = ordered[:, 0] < least
    if vocabulary is not None:
        outside |= ordered[:, -1] >= vocabulary
    of_all = "" if vocabulary is None else f" of {vocabulary}"
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    found = ids >= 0
    mass = torch.where(found, log_probs.double(), -torch.inf).exp().sum(1)
    faults = [
        (outside, f"contain an id outside the vocabulary{of_all}"),
        (twice.any(dim=1), "contain an id twice"),
        (mass > _MOST_MASS, "have probabilities that add up to more than 1"),
    ]
    if may_lack:
        faults.append((~found.any(dim=1), "are all absent"))
    return faults
