"""The objective on some of the tokens, and term by term.

The loss of a token-separable objective on a block of tokens needs nothing but these tokens, so its
gradient is known while the block's logits are in memory (see `plugin.logprobs.separable_lm_head`).
Term by term it is computed to find where a value that is not finite came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plugin.config import LossConfig, TrainerConfig
from plugin.config.import_paths import load_function
from plugin.errors import ConfigError
from plugin.loss.hook_chain import hook_chain, statistics_of
from plugin.loss.inputs import KnownTokens, token_place
from plugin.loss.interfaces import example_inputs
from plugin.loss.objective import compute_loss, regularizer_terms
from plugin.loss.policy_losses import resolve_policy_loss
from plugin.ppo_utils.correction_interface import declares_separable
from plugin.sharding.parallel_context import SINGLE_PROCESS, use_parallel_context

#: Relative difference of two float32 evaluations of the same formula that is still rounding.
TOLERANCE = 1e-4


def takes_separable_head(config: TrainerConfig, tp_size: int) -> bool:
    """Return whether the loss is evaluated inside the LM head; one rule for every device.

    `--separable-fast-path on` where that cannot work is a `ConfigError`; auto takes it wherever it
    can.
    """
    if config.separable_fast_path == "off":
        return False
    obstacle: str | None = None
    if tp_size > 1:
        obstacle = f"the vocabulary is split over {tp_size} tensor parallel ranks"
    elif config.fused_lm_head == "off":
        obstacle = "it is a part of the fused LM head, and --fused-lm-head is off"
    obstacle = obstacle or separable_obstacle(config) or mixing_obstacle(config)
    if obstacle is not None and config.separable_fast_path == "on":
        raise ConfigError(f"--separable-fast-path on: {obstacle}; use auto or off")
    return obstacle is None


def separable_obstacle(config: LossConfig) -> str | None:
    """Return why the loss does not declare itself token-separable; None if it does."""
    if not declares_separable(resolve_policy_loss(config.policy_loss)):
        return f"--policy-loss {config.policy_loss} is not token-separable"
    if config.distill_topk is not None:
        return "--distill-topk needs the log-probs of several ids of every token"
    if config.score_centering_topk:
        return "--score-centering-topk needs the log-probs of several ids of every token"
    if config.loss_denominator == "kept" and not config.per_token:
        return "--loss-denominator kept divides every sample by its own count of kept tokens"
    if config.use_tis:
        for name in config.hook_names():
            if not declares_separable(load_function(name)):
                return f"the correction {name} does not declare itself @token_separable"
    return None


@lru_cache(maxsize=64)
def mixing_obstacle(config: LossConfig) -> str | None:
    """Evaluate the loss on example tokens together and apart; explain a difference, if any."""
    inputs = example_inputs()
    names = (
        "advantages",
        "train_log_probs",
        "rollout_log_probs",
        "ref_log_probs",
        "teacher_log_probs",
    )
    fields = {name: getattr(inputs, name) for name in names}
    statistics = statistics_of(config, inputs)
    known = KnownTokens(
        inputs.mask, inputs.shards, inputs.loss_masks, fields, statistics=statistics
    )
    everything = torch.arange(inputs.mask.numel())
    assert inputs.entropy is not None
    with torch.no_grad():
        together, *apart = (
            losses_of_part(config, known, index, inputs.cur_log_probs[index], inputs.entropy[index])
            for index in (everything, *everything.split(1))
        )
    if differs(torch.cat(apart), together):
        hooks = f" with {', '.join(config.hook_names())}" if config.use_tis else ""
        return (
            f"--policy-loss {config.policy_loss}{hooks}: what a token contributes depends on other "
            "tokens or on the length of its sample"
        )
    return None


def losses_of_part(
    config: LossConfig, known: KnownTokens, index: Tensor, log_probs: Tensor, entropy: Tensor
) -> Tensor:
    """Return the objective [n] of the tokens at `index` [n], given log-probs and entropies."""
    inputs = known.part(index).at_policy(config, log_probs, entropy, check=False)
    with use_parallel_context(SINGLE_PROCESS):
        return compute_loss(config, inputs, with_metrics=False).total


def differs(found: Tensor, wanted: Tensor) -> bool:
    """Whether two evaluations [n] of the same losses differ by more than rounding."""
    if not wanted.numel():
        return False
    return not bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max() + 1e-12)


class NonFinite(NamedTuple):
    """What was not finite, and at which sample of the microbatch and position of its response."""

    source: str
    sample: int
    position: int


def first_non_finite(
    config: LossConfig,
    known: KnownTokens,
    log_probs: Tensor,
    *,
    args: Any = None,
) -> NonFinite | None:
    """Compute a microbatch's loss again, part by part: the first part that is not finite.

    log_probs: [T] of the step. A part is a field of the batch, the policy loss, a hook or a
    regularizer; one whose values are finite but whose gradient is not counts as well. Hooks may
    communicate: call it on every rank that holds a part of the samples.
    """
    cur = log_probs.detach().float().requires_grad_()
    found: NonFinite | None = None
    for name, values in {**known.fields, "cur_log_probs": cur}.items():
        # Named as the batch names it: the trainer's log-probs arrive as `log_probs`.
        shown = "log_probs" if name == "train_log_probs" else name
        if values is not None:
            found = found or _first(shown, values, known)
    with torch.enable_grad():
        for name, values in _parts(config, known, cur, config if args is None else args):
            if found is None:
                found = _first(name, values, known)
                if found is None and values.requires_grad:
                    (gradient,) = torch.autograd.grad(
                        values.sum(), cur, retain_graph=True, allow_unused=True
                    )
                    if gradient is not None:
                        found = _first(f"the gradient of {name}", gradient, known)
    return found


def _parts(
    config: LossConfig, known: KnownTokens, cur: Tensor, args: Any
) -> Iterator[tuple[str, Tensor]]:
    """Name and values [T] of every part of the objective, in the order they are computed in."""
    inputs = known.at_policy(config, cur, None, check=False)
    term = resolve_policy_loss(config.policy_loss)(inputs, config)
    yield f"--policy-loss {config.policy_loss}", term.loss
    if config.use_tis:
        for path, corrected in hook_chain(config, args).stages(args, term, inputs):
            yield f"hook {path}", corrected.loss
            term = corrected
    for regularizer in regularizer_terms(inputs, config, term.kept):
        if regularizer.coefficient:
            yield regularizer.name, regularizer.values


def _first(source: str, values: Tensor, known: KnownTokens) -> NonFinite | None:
    bad = known.mask & ~torch.isfinite(values.detach())
    if not bool(bad.any()):
        return None
    return NonFinite(source, *token_place(int(bad.nonzero()[0]), known.shards))
