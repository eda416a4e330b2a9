"""Where the first value that is not finite came from, once a gradient turned out not to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.loss.hook_chain import hook_chain
from plugin.loss.inputs import KnownTokens
from plugin.loss.objective import regularizer_terms
from plugin.loss.policy_losses import resolve_policy_loss
from plugin.loss.value_checks import token_place


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
