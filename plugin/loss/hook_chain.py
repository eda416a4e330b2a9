"""Correction hooks: loaded by import path, tried at set-up, run in order on every microbatch.

Built-in corrections see flat tokens; a hook of the user's gets lists with one tensor per sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from plugin.config import LossConfig
from plugin.config.import_paths import function_name, load_function
from plugin.errors import BatchError, ConfigError, HookLoadError
from plugin.loss.interfaces import LossInputs, PolicyTerm, declared_values, example_inputs
from plugin.loss.policy_losses import resolve_policy_loss
from plugin.ppo_utils.batch_statistics import (
    Declaration,
    Statistics,
    collect_statistics,
    declared_statistics,
    microbatch_statistics,
)
from plugin.ppo_utils.correction_interface import (
    CorrectionTokens,
    declares_separable,
    flags_of,
)
from plugin.sharding.parallel_context import SINGLE_PROCESS, use_parallel_context

#: What slime passes to a hook; every hook has to accept these.
REQUIRED_ARGUMENTS = (
    *("pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks"),
    *("total_lengths", "response_lengths"),
)
#: What we pass in addition, to the hooks that accept it.
EXTRA_ARGUMENTS = ("proximal_log_probs", "cur_log_probs", "advantages", "batch_statistics")


@lru_cache(maxsize=256)
def load_hook(path: str) -> Callable[..., Any]:
    """Load the hook at `path` as a function of keywords that passes on what the hook accepts."""
    function = load_function(path)
    accepted, takes_any = _keyword_arguments(path, function)
    missing = [name for name in REQUIRED_ARGUMENTS if name not in accepted and not takes_any]
    if missing:
        raise HookLoadError(
            f"hook {path!r} does not accept {', '.join(missing)}; name these arguments or add "
            "**kwargs"
        )
    extras = [name for name in EXTRA_ARGUMENTS if takes_any or name in accepted]
    # slime passes `args` by name; a hook whose namespace comes first under another name gets it by
    # position.
    by_keyword = "args" in accepted

    def call(args: Any, **values: Any) -> Any:
        passed = {name: values[name] for name in REQUIRED_ARGUMENTS}
        passed |= {name: values[name] for name in extras if name in values}
        return function(args=args, **passed) if by_keyword else function(args, **passed)

    #: It takes the trainer's own log-probs for those of the loss's ratio.
    call.ignores_proximal = (  # type: ignore[attr-defined]
        "train_log_probs" in accepted and "proximal_log_probs" not in accepted
    )
    return call


def _keyword_arguments(path: str, function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the keywords a hook accepts and whether it takes any; refuse unknown required ones."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return {"args"}, True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # The namespace comes first, under whatever name; everything else is matched by name.
    first = positional[0].name if positional else "args"
    known = {"args", *REQUIRED_ARGUMENTS, *EXTRA_ARGUMENTS}
    optional_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    unknown = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in optional_kinds and p.name not in {first, *known}
    ]
    if unknown:
        raise HookLoadError(
            f"hook {path!r} requires {', '.join(unknown)}, which is never passed; give it a default"
        )
    accepted = {p.name for p in parameters if p.kind not in (*optional_kinds, p.POSITIONAL_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if first in known and "args" not in accepted:
        if not takes_any:
            raise HookLoadError(
                f"hook {path!r} does not accept args; give it a first argument for the flags, or "
                "**kwargs"
            )
        accepted |= {"args"}
    return accepted, takes_any


_chains: dict[tuple[str, ...], HookChain] = {}


def hook_chain(config: LossConfig, args: Any = None) -> HookChain:
    """Return the chain that `config` names; it is loaded and tried when it is first asked for.

    args: the namespace that hooks receive; None = `config`
    """
    paths = tuple(config.hook_names())
    if paths not in _chains:
        _chains[paths] = HookChain(paths, config if args is None else args)
    if config.use_tis and config.train_log_probs != "recompute":
        _chains[paths].require_proximal(config.train_log_probs)
    return _chains[paths]


class HookChain:
    """Corrections in order; each sees the loss and the masks of the one before."""

    def __init__(self, paths: Sequence[str], args: Any) -> None:
        self.hooks = [(path, load_hook(path)) for path in paths]
        for path, hook in self.hooks:
            _try_out(path, hook, args)

    def require_proximal(self, choice: str) -> None:
        """Refuse a hook that would weight by another policy than the loss's ratio is taken against.

        choice: the value of --train-log-probs
        """
        for path, hook in self.hooks:
            if hook.ignores_proximal:  # type: ignore[attr-defined]
                raise ConfigError(
                    f"hook {path!r} with --train-log-probs {choice}: it names train_log_probs, the "
                    "trainer's own, and the loss's ratio is taken against others; give it an "
                    "argument proximal_log_probs and compare with these, or use --train-log-probs "
                    "recompute"
                )

    def apply(
        self, args: Any, term: PolicyTerm, inputs: LossInputs, *, with_weights: bool = False
    ) -> PolicyTerm:
        """Run the hooks on a policy term.

        with_weights: also find each token's ratio and weight. The weight is the derivative of the
            loss after the hooks by the loss before: exact for hooks that multiply, also where the
            loss is 0.
        """
        before = term.loss
        if with_weights and not before.requires_grad:
            before = before.detach().requires_grad_()
        with torch.set_grad_enabled(with_weights or torch.is_grad_enabled()):
            stages = list(self.stages(args, replace(term, loss=before), inputs))
            corrected = stages[-1][1]
            if not with_weights:
                return corrected
            weights = [
                torch.autograd.grad(stage.loss.sum(), before, retain_graph=True)[0]
                for _, stage in stages
            ]
        if not torch.is_grad_enabled():
            corrected = replace(corrected, loss=corrected.loss.detach())
        weight = weights[-1]
        if len(stages) > 1:
            found = stage_metrics(term.kept, stages, weights)
            corrected = replace(corrected, metrics=corrected.metrics | found)
        if term.ratio is not None and term.weight is not None:  # masks on a loss with its own
            return replace(corrected, weight=term.weight * weight)
        # A pure rejection keeps a token as it is: its ratio is 1, its weight 1 or 0.
        ratio = corrected.metrics.get("tis", torch.ones_like(weight))
        return replace(corrected, ratio=ratio, weight=weight)

    def stages(
        self, args: Any, term: PolicyTerm, inputs: LossInputs
    ) -> Iterator[tuple[str, PolicyTerm]]:
        """Run the hooks one after the other; yield the path and the term after each."""
        loss_masks: Sequence[Tensor] = inputs.loss_masks
        inputs = self.with_statistics(args, inputs)
        for path, hook in self.hooks:
            term, loss_masks = _apply(path, hook, args, term, inputs, loss_masks)
            yield path, term

    def with_statistics(self, args: Any, inputs: LossInputs) -> LossInputs:
        """The inputs with what the hooks declare; of this microbatch where only that is known."""
        if inputs.statistics is not None:
            return inputs
        collect = partial(microbatch_statistics, cp_group=inputs.shards.context.cp_group)
        found = _statistics_of([path for path, _ in self.hooks], args, inputs, collect)
        return replace(inputs, statistics=found)

    def weights_of_tokens(self, args: Any, inputs: LossInputs) -> Tensor:
        """[T]: what the token-separable corrections multiply each token with, 0 where one drops."""
        weights = torch.ones_like(inputs.advantages)
        for path, _ in self.hooks:
            if declares_separable(load_function(path)):
                weights = weights * _weigh(path, args, inputs, inputs.loss_masks)[0]
        return weights

    def weights_of_others(self, args: Any, inputs: LossInputs) -> Tensor:
        """[T]: the same of those that look at more than one token; each after the one before."""
        weights, loss_masks = torch.ones_like(inputs.advantages), inputs.loss_masks
        for path, _ in self.hooks:
            found, loss_masks = _weigh(path, args, inputs, loss_masks)
            if not declares_separable(load_function(path)):
                weights = weights * found
        return weights


def batch_declarations(config: LossConfig) -> dict[str, Declaration]:
    """The batch statistics that policy loss and corrections in use declare, by name and path."""
    used = config.use_tis or config.get_mismatch_metrics
    found = _declarations(config.hook_names(), config) if used else {}
    of_loss = declared_statistics(resolve_policy_loss(config.policy_loss), config)
    return found if of_loss is None else {config.policy_loss: of_loss, **found}


def statistics_of(config: LossConfig, inputs: LossInputs) -> dict[str, Statistics]:
    """The statistics that loss and corrections declare, of these tokens as the whole batch."""
    return _collected(batch_declarations(config), config, inputs)


def _declarations(paths: Sequence[str], args: Any) -> dict[str, Declaration]:
    flags = flags_of(args)
    found = {path: declared_statistics(load_function(path), flags) for path in paths}
    return {path: declared for path, declared in found.items() if declared is not None}


def _statistics_of(
    paths: Sequence[str], args: Any, inputs: LossInputs, collect: Any = collect_statistics
) -> dict[str, Statistics]:
    return _collected(_declarations(paths, args), args, inputs, collect)


def _collected(
    declared: dict[str, Declaration],
    args: Any,
    inputs: LossInputs,
    collect: Any = collect_statistics,
) -> dict[str, Statistics]:
    with torch.no_grad():
        return {
            path: collect(found, declared_values(found, inputs), flags_of(args))
            for path, found in declared.items()
        }


def stage_metrics(
    kept: Tensor, stages: Sequence[tuple[str, PolicyTerm]], weights: Sequence[Tensor]
) -> dict[str, Tensor]:
    """What each stage of a chain did to each token [T].

    removed: whether it dropped the token; weighted: whether it changed the token's weight; weight:
        the product of the weights so far
    """
    found: dict[str, Tensor] = {}
    before = torch.ones_like(weights[0])
    for number, ((path, term), weight) in enumerate(zip(stages, weights, strict=True), 1):
        name = function_name(path).removesuffix("_function")
        changed = term.kept & ((weight - before).abs() > 1e-6 * before.abs())
        found |= {
            f"chain/{number}_{name}/removed": (kept & ~term.kept).float(),
            f"chain/{number}_{name}/weighted": changed.float(),
            f"chain/{number}_{name}/weight": weight,
        }
        kept, before = term.kept, weight
    return found


def _apply(
    path: str,
    hook: Callable[..., Any],
    args: Any,
    term: PolicyTerm,
    inputs: LossInputs,
    loss_masks: Sequence[Tensor],
) -> tuple[PolicyTerm, Sequence[Tensor]]:
    on_tokens = getattr(load_function(path), "on_tokens", None)
    if on_tokens is None:
        result = hook(args, **_arguments(path, inputs, term.loss, loss_masks))
    else:
        tokens = _tokens(path, inputs, loss_masks)
        statistics = (inputs.statistics or {}).get(path)
        result = on_tokens(args, tokens, term.loss, loss_masks, statistics)
    pg_loss, new_masks, metrics = _checked_result(path, result, term.loss, loss_masks)
    kept = term.kept & inputs.shards.local_mask(new_masks)
    if "is_masked" in metrics:  # a hook may drop by a weight of 0 and leave the masks as they were
        kept = kept & (metrics["is_masked"] == 0)
    merged = dict(term.metrics)
    for key, value in metrics.items():
        if key in merged and key != "pg_clipfrac":
            key = f"{function_name(path)}/{key}"
        merged[key] = value.detach()
    loss = torch.where(kept, pg_loss, pg_loss.new_zeros(()))
    return replace(term, loss=loss, kept=kept, metrics=merged), new_masks


def _tokens(path: str, inputs: LossInputs, loss_masks: Sequence[Tensor]) -> CorrectionTokens:
    """What a correction written for tokens is given; `loss_masks`: left by those before it."""
    given = _policies(inputs) | {"cur_log_probs": inputs.cur_log_probs.detach()}
    return CorrectionTokens(
        *(inputs.shards.local_mask(loss_masks), inputs.shards, given, function_name(path)),
        original=None if loss_masks is inputs.loss_masks else inputs.mask,
        loss_masks=inputs.loss_masks,
    )


def _weigh(
    path: str, args: Any, inputs: LossInputs, loss_masks: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    """[T] the weight of a correction written for tokens, 0 where it drops; and the masks it leaves.

    Also of tokens that an earlier correction dropped.
    """
    weigh = getattr(load_function(path), "weigh", None)
    if weigh is None:
        raise ConfigError(
            f"--score-centering-topk with the correction {path!r}, which cannot be asked for the "
            "weight of a token that was not sampled; write it as a function of tokens "
            "(plugin.ppo_utils.correction_interface.correction), or turn score centering off"
        )
    tokens = replace(_tokens(path, inputs, loss_masks), original=None)
    weight, keep, _ = weigh(args, tokens, (inputs.statistics or {}).get(path))
    if weight is None and keep is not None:
        loss_masks = inputs.shards.masks_and(loss_masks, keep)
    weight = torch.ones_like(inputs.advantages) if weight is None else weight
    return weight if keep is None else torch.where(keep, weight, 0.0), loss_masks


def _policies(inputs: LossInputs) -> dict[str, Tensor]:
    """The policies and advantages [T] of a microbatch, by the names of the hook contract."""
    return {
        "train_log_probs": inputs.train_log_probs,
        "proximal_log_probs": inputs.proximal_log_probs,
        "rollout_log_probs": inputs.require_rollout(),
        "cur_log_probs": inputs.cur_log_probs,
        "advantages": inputs.advantages,
    }


def _arguments(
    path: str, inputs: LossInputs, pg_loss: Tensor, loss_masks: Sequence[Tensor]
) -> dict[str, Any]:
    """What a hook is called with: one tensor per sample of everything that is per token."""
    return {
        "pg_loss": pg_loss,
        **{name: inputs.per_sample(values) for name, values in _policies(inputs).items()},
        "loss_masks": list(loss_masks),
        "total_lengths": list(inputs.shards.total_lengths),
        "response_lengths": list(inputs.shards.response_lengths),
        "batch_statistics": (inputs.statistics or {}).get(path),
    }


def _try_out(path: str, hook: Callable[..., Any], args: Any) -> None:
    """Call a hook on example tokens and see what it returns and where its gradient flows.

    A correction weight that is not detached adds a gradient of its own to the policy gradient. What
    counts is that the graph is connected, not the size of the gradient: a weight at its bound has
    none.
    """
    inputs = example_inputs()
    inputs = replace(inputs, statistics=_statistics_of([path], args, inputs))
    pg_loss = torch.where(inputs.mask, 1.0, 0.0).requires_grad_()
    # In slime's recomputed loss the first call is inside torch's checkpoint, which counts the
    # tensors that a graph saves; it does not see those saved under hooks of our own.
    unseen = saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with torch.enable_grad(), unseen, use_parallel_context(SINGLE_PROCESS), _some_process_group():
        result = hook(args, **_arguments(path, inputs, pg_loss, inputs.loss_masks))
        new_loss, _, _ = _checked_result(path, result, pg_loss, inputs.loss_masks)
        if getattr(load_function(path), "mask_only", False):
            _require_mask(path, pg_loss.detach(), new_loss.detach())
        if not new_loss.requires_grad:
            raise BatchError(
                f"hook {path!r} returned a pg_loss without gradient, so nothing would be learned; "
                "detach the weight, not the loss"
            )
        through_loss, through_weight = torch.autograd.grad(
            new_loss.sum(), (pg_loss, inputs.cur_log_probs), allow_unused=True
        )
    if through_weight is not None:
        raise BatchError(
            f"hook {path!r} lets gradient flow through its weight; compute it under "
            "torch.no_grad() or call .detach() on it"
        )
    if through_loss is None:
        raise BatchError(
            f"hook {path!r} returned a loss that does not depend on pg_loss, so nothing would be "
            "learned; return pg_loss times a weight"
        )


def _require_mask(path: str, before: Tensor, after: Tensor) -> None:
    changed = (after != before) & (after != 0)
    if bool(changed.any()):
        i = int(changed.nonzero()[0])
        raise BatchError(
            f"hook {path!r} is declared @mask_only and turned the loss {float(before[i]):g} of a "
            f"token into {float(after[i]):g}; return it as it is or 0, or remove the declaration"
        )


@contextmanager
def _some_process_group() -> Iterator[None]:
    """Join a group of one process if there is none, as on the driver: a hook may communicate."""
    if not dist.is_available() or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _checked_result(
    path: str, result: Any, pg_loss: Tensor, loss_masks: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    contract = f"hook {path!r} must return (pg_loss, loss_masks, metrics)"
    if not isinstance(result, (tuple, list)) or len(result) != 3:
        raise HookLoadError(f"{contract}; it returned {_described(result)}")
    new_loss, new_masks, metrics = result
    if not isinstance(metrics, dict):
        raise HookLoadError(f"{contract}; its metrics are {_described(metrics)}, expected a dict")
    if not isinstance(new_masks, Sequence) or len(new_masks) != len(loss_masks):
        raise BatchError(
            f"{contract}; its loss_masks are {_described(new_masks)}, expected {len(loss_masks)} "
            "masks"
        )
    parts = [
        ("pg_loss", new_loss, pg_loss),
        *((f"mask of sample {i}", new_masks[i], mask) for i, mask in enumerate(loss_masks)),
        *((f"metric {name!r}", value, pg_loss) for name, value in metrics.items()),
    ]
    for what, value, like in parts:
        if not isinstance(value, Tensor) or value.shape != like.shape:
            raise BatchError(
                f"{contract}; its {what} is {_described(value)}, expected a tensor of shape "
                f"{tuple(like.shape)}"
            )
    return new_loss, new_masks, metrics


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    length = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"a {type(value).__name__}{length}"
