"""How a correction is written, and how slime's hook signature is made of it.

A built-in correction is a function of tokens,

    fn(tokens, config) -> (weight, keep, metrics)

weight: [T] what the policy loss is multiplied by, None = 1; keep: bool [T] the tokens that stay,
    None = all;
metrics: name -> [T]. It runs without gradient and need not look at the mask: what is masked is 0 in
    every log-ratio, and its weight and metrics are ignored.

`@correction` turns it into a hook. What it needs to know of the whole batch it declares with
`@batch_statistics` and finds in `tokens.statistics`; `@token_separable` says that it needs no other
token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.errors import BatchError, ConfigError
from plugin.ppo_utils.batch_statistics import (
    Statistics,
    declared_statistics,
    microbatch_statistics,
)
from plugin.ppo_utils.importance_ratio import log_ratio
from plugin.ppo_utils.masked_ops import zero_masked
from plugin.sharding.sequence_shards import SequenceShards

Corrected = tuple[Tensor | None, Tensor | None, dict[str, Tensor]]
Function = TypeVar("Function", bound=Callable[..., Any])
HookResult = tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(LossConfig)}


@dataclass(frozen=True)
class CorrectionTokens:
    """The local response tokens of a microbatch, flat.

    mask: [T] bool, the loss mask; shards: which tokens of which sample these are
    given: the [T] float32 inputs without gradient by name, None where the caller passed none
    correction: name of the correction, for errors
    original: [T] bool, the loss mask before earlier corrections dropped tokens; metrics are of it
    statistics: what it declared of the whole batch, round by round
    loss_masks: the full-response masks, one per sample, before any correction
    """

    mask: Tensor
    shards: SequenceShards
    given: Mapping[str, Tensor | None]
    correction: str
    statistics: Statistics = ()
    original: Tensor | None = None
    loss_masks: Sequence[Tensor] = ()

    def get(self, name: str) -> Tensor:
        """Return the input `name` [T], or raise a `ConfigError` if the caller did not pass it."""
        value = self.given[name]
        if value is None:
            missing = [key for key, values in self.given.items() if values is None]
            raise ConfigError(
                f"{self.correction} needs {name} and was called without {', '.join(missing)}; call "
                "it through plugin.loss.policy_loss_function (--loss-type custom_loss "
                "--custom-loss-function-path plugin.loss.policy_loss_function), which passes them"
            )
        return value

    def log_ratio(self, numerator: str, denominator: str) -> Tensor:
        """log(numerator / denominator) [T] of two policies ("cur", "rollout"); 0 where masked."""
        names = (f"{numerator}_log_probs", f"{denominator}_log_probs")
        return log_ratio(self.get(names[0]), self.get(names[1]), self.mask)

    def segment_sums(self, length: int | str, *values: Tensor) -> list[Tensor]:
        """[T] each: sums over a token's segment of `length` response tokens, or over its turn."""
        if length == "turn":
            return self.shards.turn_sums(self.loss_masks, *values)
        return self.shards.segment_sums(int(length), *values)


class FlagsWithDefaults:
    """Another framework's namespace; a flag that is missing or None has its default."""

    def __init__(self, args: Any) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._args, name, None)
        return _DEFAULTS.get(name) if value is None else value


def flags_of(args: Any) -> Any:
    """Every flag as an attribute, whosever namespace `args` is."""
    return args if isinstance(args, LossConfig) else FlagsWithDefaults(args)


def correction(function: Callable[[CorrectionTokens, Any], Corrected]) -> Callable[..., HookResult]:
    """Give a function of tokens the signature that slime calls its TIS hooks with.

    A correction that weights leaves the loss masks as they are; one that only drops zeroes them.
    Our own loss calls `hook.on_tokens` with flat tokens and never makes lists of them.
    """

    def weigh(
        args: Any, tokens: CorrectionTokens, batch_statistics: Statistics | None
    ) -> Corrected:
        config = flags_of(args)
        with torch.no_grad():
            if batch_statistics is None and (declared := declared_statistics(hook, config)):
                log_r = tokens.log_ratio("proximal", "rollout")[tokens.mask]
                batch_statistics = microbatch_statistics(
                    declared, log_r, config, tokens.shards.context.cp_group
                )
            tokens = dataclasses.replace(tokens, statistics=batch_statistics or ())
            weight, keep, metrics = function(tokens, config)
            if tokens.original is not None:  # what was dropped before counts in the metrics
                _, _, metrics = function(
                    dataclasses.replace(tokens, mask=tokens.original, original=None), config
                )
        return weight, keep, metrics

    def on_tokens(
        args: Any,
        tokens: CorrectionTokens,
        pg_loss: Tensor,
        loss_masks: Sequence[Tensor],
        batch_statistics: Statistics | None,
    ) -> HookResult:
        config, mask, shards = flags_of(args), tokens.mask, tokens.shards
        weight, keep, metrics = weigh(args, tokens, batch_statistics)
        observed = config.get_mismatch_metrics and not config.use_tis
        kept = mask if keep is None else mask & keep
        loss = torch.where(kept, pg_loss, pg_loss.new_zeros(()))
        if keep is not None:
            metrics["is_masked"] = mask & ~keep
        if observed:  # slime calls a hook for its metrics alone and would train on its loss
            loss = torch.where(mask, pg_loss, pg_loss.new_zeros(()))
        elif weight is not None:
            loss = loss * weight.to(pg_loss.dtype)
        elif keep is not None:
            loss_masks = shards.masks_and(loss_masks, keep)
        measured = mask if tokens.original is None else tokens.original
        metrics = {name: zero_masked(values, measured) for name, values in metrics.items()}
        return loss, loss_masks, metrics

    def hook(
        args: Any,
        *,
        pg_loss: Tensor,
        loss_masks: Sequence[Tensor],
        train_log_probs: Sequence[Tensor] | None = None,
        proximal_log_probs: Sequence[Tensor] | None = None,
        rollout_log_probs: Sequence[Tensor] | None = None,
        cur_log_probs: Sequence[Tensor] | None = None,
        advantages: Sequence[Tensor] | None = None,
        total_lengths: Sequence[int] | None = None,
        response_lengths: Sequence[int] | None = None,
        batch_statistics: Statistics | None = None,
        **_: Any,
    ) -> HookResult:
        if response_lengths is None:
            response_lengths = [mask.numel() for mask in loss_masks]
        shards = SequenceShards.of(total_lengths, response_lengths, pg_loss.device)
        mask = shards.local_mask(loss_masks)
        if mask.numel() != pg_loss.numel():
            raise BatchError(
                f"pg_loss has {pg_loss.numel()} tokens but the loss masks select {mask.numel()} "
                "local response tokens; both must cover the same responses"
            )
        given = {
            "train_log_probs": train_log_probs,
            "proximal_log_probs": proximal_log_probs or train_log_probs,
            "rollout_log_probs": rollout_log_probs,
            "cur_log_probs": cur_log_probs,
            "advantages": advantages,
        }
        flat = {name: shards.flat(name, values) for name, values in given.items()}
        tokens = CorrectionTokens(mask, shards, flat, function.__name__, loss_masks=loss_masks)
        return on_tokens(args, tokens, pg_loss, loss_masks, batch_statistics)

    functools.update_wrapper(hook, function)
    del hook.__wrapped__  # type: ignore[attr-defined]  # the signature is the hook's
    hook.on_tokens = on_tokens  # type: ignore[attr-defined]
    hook.weigh = weigh  # type: ignore[attr-defined]
    return hook


def mask_only(function: Function) -> Function:
    """Declare that `function` only drops tokens: what it keeps, it leaves as it is.

    Such a correction counts no ratio, so it fits every policy loss. The declaration is checked.
    """
    function.mask_only = True  # type: ignore[attr-defined]
    return function


def token_separable(function: Function) -> Function:
    """Declare that what `function` makes of a token depends on that token's inputs alone.

    Not on other tokens, not on the length or the number of samples. The loss of such tokens can be
    evaluated inside the LM head, block by block. The declaration is checked: a function that turns
    out to mix tokens is evaluated the ordinary way.
    """
    function.token_separable = True  # type: ignore[attr-defined]
    return function


def declares_separable(function: Callable[..., Any]) -> bool:
    """Whether `function` was declared `token_separable`."""
    return bool(getattr(function, "token_separable", False))
