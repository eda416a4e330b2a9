"""Find invalid values of tokens and report where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import BatchError
from plugin.sharding.sequence_shards import SequenceShards

#: No real log-prob or advantage is larger; a sentinel such as -1e30 is.
MAX_ABS_VALUE = 1e4
#: exp of more than this overflows float32 (at 88.7); no numeric mismatch comes near it.
MAX_ABS_LOG_RATIO = 80.0


def check_tokens(
    fields: Mapping[str, Tensor | None],
    mask: Tensor,
    shards: SequenceShards,
    sample_numbers: Sequence[int] | None = None,
) -> None:
    """Raise a `BatchError` for the first unmasked value that is not finite, huge or misaligned.

    fields: `LossInputs` names -> [T] raw values, masked positions may hold anything. Waits for
        the device.
    sample_numbers: sample numbers for error messages; None = their places in the microbatch
    Under context parallelism every rank that holds a part of the same samples raises, or none:
    sequence-level losses wait for each other.
    """
    # Named as the batch names it: the trainer's log-probs arrive as `log_probs`.
    named = {"log_probs" if n == "train_log_probs" else n: v for n, v in fields.items()}
    found = _bad_value(named, mask)
    for other in ("log_probs", "rollout_log_probs"):
        found = found or _bad_log_ratio(named, other, mask)
    message = None
    if found is not None:
        sample, position = token_place(found.token, shards)
        number = sample if sample_numbers is None else sample_numbers[sample]
        message = f"{found.value} at sample {number}, position {position}{found.constraint}"
    context = shards.context
    if context.cp_group is not None and context.cp_size > 1:
        failed = torch.tensor(float(message is not None), device=shards.device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=context.cp_group)
        if message is None and bool(failed):
            message = (
                "another context parallel rank found an invalid value in its part of these "
                "samples; its error names field, sample and position"
            )
    if message is not None:
        error = BatchError(message)
        error.on_every_rank = True
        raise error


class _Bad(NamedTuple):
    """The flat local index of a token, and what an error says before and after the place."""

    token: int
    value: str
    constraint: str


def _bad_value(fields: Mapping[str, Tensor | None], mask: Tensor) -> _Bad | None:
    # NaN fails every comparison, so "not within bounds" also catches it.
    bad = {
        name: mask & ~(values.detach().abs() <= MAX_ABS_VALUE)
        for name, values in fields.items()
        if values is not None
    }
    if not bool(torch.stack([flags.any() for flags in bad.values()]).any()):
        return None
    name, flags = next((name, flags) for name, flags in bad.items() if bool(flags.any()))
    index, values = int(flags.nonzero()[0]), fields[name]
    assert values is not None
    return _Bad(
        index,
        f"{name} is {float(values.detach()[index])}",
        f", where the loss mask is 1; it must be finite and within +-{MAX_ABS_VALUE:g}. Mask the "
        f"token or repair the source of {name}",
    )


def _bad_log_ratio(fields: Mapping[str, Tensor | None], other: str, mask: Tensor) -> _Bad | None:
    cur, values = fields["cur_log_probs"], fields[other]
    if cur is None or values is None:
        return None
    difference = cur.detach() - values
    flags = mask & (difference.abs() > MAX_ABS_LOG_RATIO)
    if not bool(flags.any()):
        return None
    index = int(flags.nonzero()[0])
    return _Bad(
        index,
        f"cur_log_probs - {other} is {float(difference[index]):.4g}",
        f"; a log-ratio beyond +-{MAX_ABS_LOG_RATIO:g} is no mismatch: the log-probs are "
        "misaligned or of another model. Check that both belong to the same token",
    )


def token_place(index: int, shards: SequenceShards) -> tuple[int, int]:
    """Sample and response position of a flat local index."""
    return int(shards.sample_index[index]), int(shards.positions[index])
