"""Find invalid values of tokens and report where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    message = _invalid(named, mask, shards, sample_numbers)
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


def _invalid(
    fields: Mapping[str, Tensor | None],
    mask: Tensor,
    shards: SequenceShards,
    sample_numbers: Sequence[int] | None,
) -> str | None:
    """The message for the first unmasked value or log-ratio that is invalid, if there is one."""
    cur = fields["cur_log_probs"]
    assert cur is not None
    checks = [
        (
            name,
            values.detach(),
            MAX_ABS_VALUE,
            f", where the loss mask is 1; it must be finite and within +-{MAX_ABS_VALUE:g}. Mask "
            f"the token or repair the source of {name}",
        )
        for name, values in fields.items()
        if values is not None
    ]
    checks += [
        (
            f"cur_log_probs - {name}",
            cur.detach() - values,
            MAX_ABS_LOG_RATIO,
            f"; a log-ratio beyond +-{MAX_ABS_LOG_RATIO:g} is no mismatch: the log-probs are "
            "misaligned or of another model. Check that both belong to the same token",
        )
        for name in ("log_probs", "rollout_log_probs")
        if (values := fields[name]) is not None
    ]
    # NaN fails every comparison, so "not within bounds" also catches it.
    bad = [mask & ~(values.abs() <= limit) for _, values, limit, _ in checks]
    if not bool(torch.stack([flags.any() for flags in bad]).any()):  # waits for the device once
        return None
    number = next(i for i, flags in enumerate(bad) if bool(flags.any()))
    name, values, _, constraint = checks[number]
    token = int(bad[number].nonzero()[0])
    sample, position = token_place(token, shards)
    sample = sample if sample_numbers is None else sample_numbers[sample]
    return (
        f"{name} is {float(values[token]):.6g} at sample {sample}, position {position}{constraint}"
    )


def token_place(index: int, shards: SequenceShards) -> tuple[int, int]:
    """Sample and response position of a flat local index."""
    return int(shards.sample_index[index]), int(shards.positions[index])
