"""From the columns of a batch to the flat, checked inputs of a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.batch_types import MAX_ABS_VALUE, spread
from plugin.config import LossConfig
from plugin.errors import BatchError, ConfigError
from plugin.loss.interfaces import Head, LossInputs
from plugin.ppo_utils.batch_statistics import Statistics
from plugin.ppo_utils.masked_ops import zero_masked
from plugin.ragged import Ragged
from plugin.sharding.parallel_context import SINGLE_PROCESS
from plugin.sharding.sequence_shards import SequenceShards

_OPTIONAL_LOG_PROBS = ("rollout_log_probs", "ref_log_probs", "teacher_log_probs")
#: exp of more than this overflows float32 (at 88.7); no numeric mismatch comes near it.
MAX_ABS_LOG_RATIO = 80.0


def loss_inputs(
    config: LossConfig,
    batch: Mapping[str, Any],
    cur_log_probs: Tensor,
    entropy: Tensor | None = None,
    *,
    shards: SequenceShards | None = None,
    distill_kl: Tensor | None = None,
    head: Head | None = None,
) -> LossInputs:
    """Flatten, check and mask the per-token fields of a batch around `cur_log_probs` [T].

    shards: those of the batch, where the caller has them already
    distill_kl, head: see `LossInputs`
    """
    shards = shards or batch_shards(batch, cur_log_probs.device)
    known = KnownTokens.of(config, batch, shards)
    return known.at_policy(config, cur_log_probs, entropy, distill_kl=distill_kl, head=head)


@dataclass(frozen=True)
class KnownTokens:
    """What is known about the local response tokens before the forward pass.

    mask: [T] bool; fields: [T] float32 by the names of `LossInputs`, arbitrary where masked, None
        where the batch has none; `train_log_probs` is None where no pass was run, and the
        trainer's own are those of this update
    sample_numbers: sample numbers for error messages; None = their places in the batch
    share_of_current: [T] weight of the current policy in the approximated proximal one; None where
        it is not approximated
    statistics: the batch statistics that hooks declared, by path; None where they are not known
    """

    mask: Tensor
    shards: SequenceShards
    loss_masks: Sequence[Tensor]
    fields: Mapping[str, Tensor | None]
    sample_numbers: Sequence[int] | None = None
    share_of_current: Tensor | None = None
    statistics: Mapping[str, Statistics] | None = None

    @classmethod
    def of(
        cls, config: LossConfig, batch: Mapping[str, Any], shards: SequenceShards
    ) -> KnownTokens:
        """Flatten the columns of a batch; inconsistent lengths are a `BatchError`."""
        require_columns(batch, "loss_masks", "advantages")
        config.require_rollout_log_probs(batch.get("rollout_log_probs") is not None)
        config.require_teacher({name for name, values in batch.items() if values is not None})
        fields = {
            name: shards.flat(name, batch.get(name))
            for name in ("advantages", *_OPTIONAL_LOG_PROBS)
        }
        fields["train_log_probs"] = shards.flat("log_probs", batch.get("log_probs"))
        if config.train_log_probs == "engine-version":
            name = "proximal_log_probs"
            fields[name] = shards.flat(name, batch.get(name))
        approximate = config.train_log_probs == "approximate"
        share = share_of_current(batch, shards) if approximate else None
        loss_masks = Ragged.of(batch["loss_masks"])
        lengths = loss_masks.lengths.tolist()
        if lengths != shards.response_lengths:
            raise BatchError(
                f"loss_masks have lengths {lengths} but the responses {shards.response_lengths}; "
                "give one mask per sample, as long as its whole response"
            )
        mask = shards.local_mask(loss_masks)
        numbers, statistics = batch.get("sample_numbers"), batch.get("batch_statistics")
        return cls(mask, shards, loss_masks, fields, numbers, share, statistics)

    def at_policy(
        self,
        config: LossConfig,
        cur: Tensor,
        entropy: Tensor | None,
        *,
        distill_kl: Tensor | None = None,
        head: Head | None = None,
        check: bool = True,
    ) -> LossInputs:
        """Add what is known of the current policy [T]; check all tokens' values."""
        mask = self.mask
        if mask.numel() != cur.numel():
            raise BatchError(
                f"cur_log_probs has {cur.numel()} tokens but the samples have {mask.numel()} local "
                "ones"
            )
        raw = {**self.fields, "cur_log_probs": cur}
        if raw["train_log_probs"] is None:
            raw["train_log_probs"] = cur.detach()
        if check and config.validates_on(cur.device):
            check_tokens(raw, mask, self.shards, self.sample_numbers)
        if entropy is not None:
            entropy = zero_masked(entropy if config.entropy_coef else entropy.detach(), mask)
        clean = {
            name: None if value is None else zero_masked(value, mask) for name, value in raw.items()
        }
        clean["advantages"] = guided_advantages(config, clean)
        if config.train_log_probs in ("approximate", "rollout"):
            clean["proximal_log_probs"] = zero_masked(self._proximal(clean), mask)
        return LossInputs(
            mask=mask,
            shards=self.shards,
            loss_masks=self.loss_masks,
            entropy=entropy,
            distill_kl=distill_kl,
            head=head,
            statistics=self.statistics,
            **clean,  # type: ignore[arg-type]
        )

    def _proximal(self, clean: Mapping[str, Tensor | None]) -> Tensor:
        """The engine's log-probs [T], or those interpolated towards the current ones."""
        rollout, cur = clean["rollout_log_probs"], clean["cur_log_probs"]
        assert rollout is not None and cur is not None
        if self.share_of_current is None:
            return rollout
        return rollout + self.share_of_current * (cur.detach() - rollout)

    def part(self, index: Tensor) -> KnownTokens:
        """Return the tokens at `index` [n] as one sample of a single process.

        A token-separable loss cannot tell the difference.
        """
        mask = self.mask[index]
        length = [mask.numel()]
        return replace(
            self,
            mask=mask,
            shards=SequenceShards.of(length, length, mask.device, SINGLE_PROCESS),
            loss_masks=Ragged(mask.long(), length),
            fields={k: None if v is None else v[index] for k, v in self.fields.items()},
            share_of_current=None
            if self.share_of_current is None
            else self.share_of_current[index],
        )


def guided_advantages(config: LossConfig, fields: Mapping[str, Tensor | None]) -> Tensor:
    """Return adv_tau A + teacher_tau sg(teacher - cur) [T]: the A of every loss and correction.

    fields: masked columns by the names of `LossInputs`
    """
    advantages, teacher = fields["advantages"], fields.get("teacher_log_probs")
    cur = fields["cur_log_probs"]
    assert advantages is not None and cur is not None
    advantages = config.adv_tau * advantages
    if config.teacher_tau and teacher is not None:
        advantages = advantages + config.teacher_tau * (teacher - cur.detach())
    return advantages


def share_of_current(batch: Mapping[str, Any], shards: SequenceShards) -> Tensor:
    """alpha [T] of A-3PO: proximal = rollout + alpha (cur - rollout), in log-probs.

    alpha = (v_train - v_rollout) / (v_cur - v_rollout) in weight versions: `weight_versions` of the
    samples or their tokens, `trainer_version` before the first update on the rollout, and
    `current_version`, which lies between that and the next by the updates made since. Before the
    first update alpha is 1 and nothing is approximated.
    """
    names = ("weight_versions", "trainer_version", "current_version")
    missing = [name for name in names if batch.get(name) is None]
    if missing:
        raise ConfigError(
            f"--train-log-probs approximate needs {', '.join(names)} and the batch has no "
            f"{', '.join(missing)}; add them, or use --train-log-probs recompute"
        )
    versions, old, current = (batch[name] for name in names)
    if not isinstance(versions, Ragged):
        versions = spread(versions, shards.held)
    sampled = shards.flat("weight_versions", versions)
    assert sampled is not None
    behind = (old - sampled).clamp(min=0.0)
    if current <= old:
        return torch.ones_like(behind)
    return behind / (behind + (current - old))


def require_columns(batch: Mapping[str, Any], *names: str) -> None:
    """Raise a `BatchError` for columns that the batch lacks."""
    missing = [name for name in names if batch.get(name) is None]
    if missing:
        raise BatchError(
            f"the batch has no {', '.join(missing)}; policy_loss_function needs unconcat_tokens, "
            "total_lengths, response_lengths, loss_masks and advantages"
        )


def topk_columns(
    batch: Mapping[str, Any], names: tuple[str, str], shards: SequenceShards
) -> tuple[Tensor, Tensor]:
    """[T, k] each: two columns of a batch with one local [response, k] tensor per sample.

    Under context parallelism they may also be of whole responses.
    """
    found = []
    for name in names:
        column = Ragged.of(batch[name])
        lengths = column.lengths.tolist()
        if column.values.dim() != 2 or lengths not in (
            shards.local_lengths,
            shards.response_lengths,
        ):
            raise BatchError(
                f"{name} has lengths {lengths} and shape {list(column.values.shape)}, but the "
                f"samples have {shards.local_lengths} local response tokens; give one "
                "[response, k] tensor per sample"
            )
        local = column.values if lengths == shards.local_lengths else shards.local(column)
        found.append(local.to(shards.device))
    if found[0].shape != found[1].shape:
        raise BatchError(
            f"{names[0]} is {list(found[0].shape)} and {names[1]} {list(found[1].shape)}; give one "
            "log-prob per id"
        )
    return found[0], found[1]


def batch_shards(batch: Mapping[str, Any], device: torch.device) -> SequenceShards:
    """Return which response tokens of a batch this rank holds, in the current parallel context."""
    require_columns(batch, "total_lengths", "response_lengths")
    return SequenceShards.of(batch["total_lengths"], batch["response_lengths"], device)


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
            "misaligned or of a different model. Check that both belong to the same token",
        )
        for name in ("log_probs", "rollout_log_probs", "proximal_log_probs")
        if (values := fields.get(name)) is not None
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
