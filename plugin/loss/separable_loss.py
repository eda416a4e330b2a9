"""The gradient of a token-separable loss as a `TokenProgram`, and why a loss has none."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.config.import_paths import load_function
from plugin.errors import ConfigError
from plugin.loss.interfaces import LossInputs, LossOutputs
from plugin.loss.policy_loss import compute_loss
from plugin.loss.policy_losses import POLICY_LOSSES
from plugin.loss.token_program import NotSeparableError, TokenProgram, record_program
from plugin.ppo_utils.separability import declares_separable
from plugin.sharding.parallel_context import SINGLE_PROCESS, use_parallel_context
from plugin.sharding.sequence_shards import SequenceShards

#: Inputs that the kernel itself supplies.
CUR, ENTROPY = "cur_log_probs", "entropy"
#: Inputs that are known before the forward pass, in the order of the kernel's table; `weights` comes first.
FIELDS = (
    "weights",
    "advantages",
    "train_log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
)


def separable_obstacle(config: LossConfig) -> str | None:
    """Why the configured loss is not token-separable by its own declaration, if it is not."""
    if not declares_separable(POLICY_LOSSES[config.policy_loss]):
        return f"--policy-loss {config.policy_loss} is not token-separable"
    if config.loss_denominator == "kept" and not config.per_token:
        return "--loss-denominator kept divides every sample by its own count of kept tokens"
    if config.use_tis:
        for name in config.hook_names():
            if not declares_separable(load_function(name)):
                return f"the correction {name} does not declare itself @token_separable"
    return None


def program_or_refusal(
    config: LossConfig, tp_size: int, has_train_log_probs: bool = True, *, insist: bool
) -> TokenProgram | None:
    """The program of the configured loss; where there is none, None, or a ConfigError for a user who insists."""
    if tp_size > 1:
        reason = f"the vocabulary is split over {tp_size} tensor parallel ranks"
    else:
        try:
            return gradient_program(config, has_train_log_probs)
        except NotSeparableError as error:
            reason = str(error)
    if insist:
        raise ConfigError(f"--separable-fast-path on: {reason}; use auto or off")
    return None


@lru_cache(maxsize=64)
def gradient_program(config: LossConfig, has_train_log_probs: bool) -> TokenProgram:
    """The derivatives of a token's weighted loss by its log-prob and its entropy, in that order.

    Recorded twice, on other values and another length: what would differ is not separable. Raises
    `NotSeparableError`.
    """
    obstacle = separable_obstacle(config)
    if obstacle is not None:
        raise NotSeparableError(obstacle)
    first, second = (_recorded(config, has_train_log_probs, tokens) for tokens in (5, 8))
    if first != second:
        raise NotSeparableError(
            "what a token contributes depends on the length of its sample or on values read in Python"
        )
    return first


def weighted_total(outputs: LossOutputs, weights: Tensor, policy: Tensor | None = None) -> Tensor:
    """[T]: every token's weighted share of the loss; `policy` replaces the policy loss of `outputs`."""
    total = outputs.policy.loss if policy is None else policy
    for term in outputs.regularizers:
        if term.coefficient:
            total = total + term.coefficient * term.values
    return torch.where(weights > 0, total, 0.0) * weights


def loss_gradients(
    config: LossConfig, inputs: LossInputs, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The same derivatives [T] from the ordinary loss over all tokens at once."""
    with torch.enable_grad():
        cur = inputs.cur_log_probs.detach().requires_grad_()
        entropy = None if inputs.entropy is None else inputs.entropy.detach().requires_grad_()
        fresh = LossInputs(**{**vars(inputs), CUR: cur, ENTROPY: entropy})
        total = weighted_total(compute_loss(config, config, fresh), weights)
        leaves = [cur] if entropy is None else [cur, entropy]
        grads = torch.autograd.grad(total, leaves, torch.ones_like(total), allow_unused=True)
    zero = torch.zeros_like(cur)
    found = [zero if grad is None else grad for grad in grads]
    return found[0], found[1] if len(found) > 1 else zero


def _recorded(config: LossConfig, has_train_log_probs: bool, tokens: int) -> TokenProgram:
    values = _example(tokens)
    with use_parallel_context(SINGLE_PROCESS):
        # Hooks are probed on their first call; what the probe does must not be recorded.
        _gradients(config, has_train_log_probs, values)
        try:
            return record_program(
                lambda given: _gradients(config, has_train_log_probs, given), values
            )
        except NotSeparableError as error:
            raise NotSeparableError(_described(config, error)) from None


def _described(config: LossConfig, error: NotSeparableError) -> str:
    hooks = f" with {', '.join(config.hook_names())}" if config.use_tis else ""
    return f"--policy-loss {config.policy_loss}{hooks}: {error}"


def _gradients(
    config: LossConfig, has_train_log_probs: bool, values: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """`loss_gradients` of unmasked tokens that all belong to one sample."""
    mask = values["weights"] > 0
    lengths = [mask.numel()]
    cur = values[CUR]
    inputs = LossInputs(
        mask=mask,
        shards=SequenceShards.of(lengths, lengths, mask.device, SINGLE_PROCESS),
        cur_log_probs=cur,
        train_log_probs=values["train_log_probs"] if has_train_log_probs else cur.detach(),
        advantages=values["advantages"],
        loss_masks=[mask.long()],
        total_lengths=[lengths[0] + 3],
        rollout_log_probs=values["rollout_log_probs"],
        ref_log_probs=values["ref_log_probs"],
        teacher_log_probs=values["teacher_log_probs"],
        entropy=values[ENTROPY],
    )
    return loss_gradients(config, inputs, values["weights"])


def _example(tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    values = {name: -1 - torch.rand(tokens, generator=generator) for name in (CUR, *FIELDS)}
    values["weights"] = values["weights"].abs()
    values["advantages"] = torch.randn(tokens, generator=generator)
    values[ENTROPY] = torch.rand(tokens, generator=generator)
    return values
