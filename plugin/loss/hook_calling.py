"""Runs a chain of correction hooks over a policy loss and holds them to their contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plugin.errors import BatchError, HookLoadError
from plugin.loss.hook_loading import load_hook
from plugin.loss.interfaces import LossInputs, PolicyTerm
from plugin.sharding.parallel_context import SINGLE_PROCESS, use_parallel_context

_probed: set[str] = set()


def apply_hooks(
    args: Any, names: Sequence[str], term: PolicyTerm, inputs: LossInputs
) -> PolicyTerm:
    """The policy term after every hook, left to right; each sees the loss and masks of the one before."""
    loss_masks: Sequence[Tensor] = inputs.loss_masks
    for name in names:
        term, loss_masks = _apply_hook(args, name, term, inputs, loss_masks)
    return term


def _apply_hook(
    args: Any, name: str, term: PolicyTerm, inputs: LossInputs, loss_masks: Sequence[Tensor]
) -> tuple[PolicyTerm, Sequence[Tensor]]:
    values = hook_arguments(inputs, term.loss, loss_masks)
    if name not in _probed:
        _refuse_gradient_through_weight(args, name, term.loss, inputs)
        if bool(inputs.mask.any()):
            _probed.add(name)
    result = load_hook(name)(args, **values)
    pg_loss, new_masks, metrics = _checked_result(name, result, term.loss, loss_masks)
    kept = term.kept & inputs.shards.local_mask(new_masks)
    if "is_masked" in metrics:  # a hook may drop by a weight of 0 and leave the masks as they were
        kept = kept & (metrics["is_masked"] == 0)
    merged = dict(term.metrics)
    for key, value in metrics.items():
        taken = key in merged and key not in ("pg_clipfrac",)
        merged[f"{name.replace(':', '.').rsplit('.', 1)[-1]}/{key}" if taken else key] = (
            value.detach()
        )
    loss = torch.where(kept, pg_loss, pg_loss.new_zeros(()))
    return replace(term, loss=loss, kept=kept, metrics=merged), new_masks


def hook_arguments(
    inputs: LossInputs, pg_loss: Tensor, loss_masks: Sequence[Tensor]
) -> dict[str, Any]:
    """The keyword arguments of a hook call."""
    rollout = inputs.require_rollout()
    return {
        "pg_loss": pg_loss,
        "train_log_probs": inputs.per_sample(inputs.train_log_probs),
        "rollout_log_probs": inputs.per_sample(rollout),
        "loss_masks": list(loss_masks),
        "cur_log_probs": inputs.per_sample(inputs.cur_log_probs),
        "advantages": inputs.per_sample(inputs.advantages),
        "total_lengths": list(inputs.total_lengths),
        "response_lengths": list(inputs.shards.response_lengths),
    }


def _checked_result(
    name: str, result: Any, pg_loss: Tensor, loss_masks: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    contract = f"hook {name!r} must return (pg_loss, loss_masks, metrics)"
    if not isinstance(result, (tuple, list)) or len(result) != 3:
        raise HookLoadError(f"{contract}; it returned {_described(result)}")
    new_loss, new_masks, metrics = result
    if not isinstance(new_loss, Tensor) or new_loss.shape != pg_loss.shape:
        raise BatchError(
            f"{contract}; its pg_loss is {_described(new_loss)}, expected a tensor of shape {tuple(pg_loss.shape)}"
        )
    if not isinstance(new_masks, Sequence) or len(new_masks) != len(loss_masks):
        raise BatchError(
            f"{contract}; its loss_masks are {_described(new_masks)}, expected {len(loss_masks)} masks"
        )
    for i, (new, old) in enumerate(zip(new_masks, loss_masks, strict=True)):
        if not isinstance(new, Tensor) or new.shape != old.shape:
            raise BatchError(
                f"{contract}; its mask of sample {i} is {_described(new)}, expected shape {tuple(old.shape)}"
            )
    if not isinstance(metrics, dict):
        raise HookLoadError(f"{contract}; its metrics are {_described(metrics)}, expected a dict")
    for key, value in metrics.items():
        if not isinstance(value, Tensor) or value.shape != pg_loss.shape:
            raise BatchError(
                f"{contract}; its metric {key!r} is {_described(value)}, expected one value per token, "
                f"shape {tuple(pg_loss.shape)}"
            )
    return new_loss, new_masks, metrics


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _refuse_gradient_through_weight(
    args: Any, name: str, pg_loss: Tensor, inputs: LossInputs
) -> None:
    """On a hook's first call, run it once more on detached copies to see where its gradient flows.

    A correction weight that is not detached adds a gradient of its own to the policy gradient. What counts is
    that the graph is connected, not the size of the gradient: the first batch may have advantages of 0 or
    weights at their bound. Hooks are pure, so the extra call changes nothing. Under context parallelism it sees
    the local tokens as whole samples of a single process: ranks need not make their first call together, so it
    must not wait for others.
    """
    values = hook_arguments(inputs, pg_loss.detach().clone().requires_grad_(), inputs.loss_masks)
    if inputs.shards.context.cp_size > 1:
        values["loss_masks"] = inputs.per_sample(inputs.mask.long())
        values["response_lengths"] = values["total_lengths"] = list(inputs.shards.local_lengths)
    cur = [value.detach().clone().requires_grad_() for value in values["cur_log_probs"]]
    values["cur_log_probs"] = cur
    if not cur:
        return
    with torch.enable_grad(), use_parallel_context(SINGLE_PROCESS):
        result = load_hook(name)(args, **values)
        new_loss, _, _ = _checked_result(name, result, values["pg_loss"], values["loss_masks"])
        if not new_loss.requires_grad:
            raise BatchError(
                f"hook {name!r} returned a pg_loss without gradient, so nothing would be learned; "
                "detach the weight, not the loss"
            )
        gradients = torch.autograd.grad(new_loss.sum(), cur, allow_unused=True)
    if any(gradient is not None for gradient in gradients):
        raise BatchError(
            f"hook {name!r} lets gradient flow through its weight; compute it under torch.no_grad() or "
            "call .detach() on it"
        )
