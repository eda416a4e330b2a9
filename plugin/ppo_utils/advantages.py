"""Advantage estimators: from one reward per sample to one advantage per token.

Group estimators work on `rewards` [N] with `group_index` [N] (samples of one prompt share an index)
and return [N]; `spread_over_tokens` gives every token of a sample its value. Token estimators
(REINFORCE++, GAE) work on lists of 1-D tensors, one per sample; only unmasked tokens count as
steps, so tool output between two turns is no step of the policy. Results are float32, or float64
where an input is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.config import AdvantageFlags
from plugin.config.import_paths import load_function
from plugin.errors import BatchError

#: fn(rewards [N], group_index [N], loss_masks, config) -> advantages; `loss_masks` and the result
#: have one [response] tensor per sample.
Estimator = Callable[[Tensor, Tensor, Sequence[Tensor], AdvantageFlags], Sequence[Tensor]]

_SCAN_BLOCK = 128


def grpo_advantages(
    rewards: Tensor, group_index: Tensor, *, std_normalization: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """(reward - group mean) / (group std + epsilon) [N]; without std, only the difference.

    The standard deviation is the unbiased one; a group of one has advantage 0.
    """
    centered = _centered_in_group(rewards, group_index)
    if not std_normalization:
        return centered.to(_result_dtype(rewards))
    count = _group_sum(torch.ones_like(centered), group_index)
    variance = _group_sum(centered.square(), group_index) / (count - 1).clamp(min=1)
    return (centered / (variance.sqrt() + epsilon)).to(_result_dtype(rewards))


def rloo_advantages(rewards: Tensor, group_index: Tensor) -> Tensor:
    """reward - mean reward of the others of its group [N]; a group of one has advantage 0."""
    # All n deviations from the group mean add up to 0, so
    # r - mean(others) = (r - mean) * n / (n - 1).
    centered = _centered_in_group(rewards, group_index)
    count = _group_sum(torch.ones_like(centered), group_index)
    return (centered * count / (count - 1).clamp(min=1)).to(_result_dtype(rewards))


def reinforce_plus_plus_returns(
    rewards: Tensor,
    loss_masks: Sequence[Tensor],
    *,
    gamma: float = 1.0,
    kl: Sequence[Tensor] | None = None,
    kl_coef: float = 0.0,
) -> list[Tensor]:
    """Discounted returns per token: the reward comes at the last unmasked token, the KL at each."""
    _check_count("loss_masks", loss_masks, rewards)
    if kl is not None:
        _check_lengths("kl", kl, loss_masks)
    dtype = _result_dtype(rewards, *(kl or ()))
    results = []
    for i, (reward, mask) in enumerate(zip(rewards.to(dtype), loss_masks, strict=True)):
        steps = mask.nonzero().flatten()
        step_rewards = torch.zeros(len(steps), dtype=dtype, device=mask.device)
        if kl is not None and kl_coef:
            step_rewards -= kl_coef * kl[i].to(dtype)[steps]
        if len(steps):
            step_rewards[-1] += reward
        results.append(_at_steps(discounted_suffix_sums(step_rewards, gamma), steps, mask))
    return results


def reinforce_plus_plus_advantages(
    rewards: Tensor,
    loss_masks: Sequence[Tensor],
    *,
    gamma: float = 1.0,
    kl: Sequence[Tensor] | None = None,
    kl_coef: float = 0.0,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """REINFORCE++: token returns, whitened over the whole batch."""
    returns = reinforce_plus_plus_returns(rewards, loss_masks, gamma=gamma, kl=kl, kl_coef=kl_coef)
    return whiten(returns, loss_masks, group=group)


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor,
    group_index: Tensor,
    loss_masks: Sequence[Tensor],
    *,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """REINFORCE++-baseline: reward - group mean at every token, whitened over the whole batch."""
    centered = _centered_in_group(rewards, group_index).to(_result_dtype(rewards))
    return whiten(spread_over_tokens(centered, loss_masks), loss_masks, group=group)


def gae_advantages(
    rewards: Tensor,
    values: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Generalized advantage estimation; returns (advantages, returns), one tensor per sample.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum_k (gamma lambda)^k delta_{t+k}, V = 0 at the end.
    """
    _check_count("loss_masks", loss_masks, rewards)
    _check_lengths("values", values, loss_masks)
    dtype = _result_dtype(rewards, *values)
    advantages, returns = [], []
    for reward, value, mask in zip(rewards.to(dtype), values, loss_masks, strict=True):
        steps = mask.nonzero().flatten()
        step_values = value.to(dtype)[steps]
        next_values = torch.cat([step_values[1:], step_values.new_zeros(min(1, len(steps)))])
        delta = gamma * next_values - step_values
        if len(steps):
            delta[-1] += reward
        step_advantages = discounted_suffix_sums(delta, gamma * lambd)
        advantages.append(_at_steps(step_advantages, steps, mask))
        returns.append(_at_steps(step_advantages + step_values, steps, mask))
    return advantages, returns


#: The estimators of `--advantage-estimator` that need no value model, see `ESTIMATOR_TRAITS`.
ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda rewards, groups, masks, config: spread_over_tokens(
        grpo_advantages(rewards, groups, std_normalization=config.grpo_std_normalization), masks
    ),
    "rloo": lambda rewards, groups, masks, config: spread_over_tokens(
        rloo_advantages(rewards, groups), masks
    ),
    "reinforce_plus_plus": lambda rewards, groups, masks, config: reinforce_plus_plus_advantages(
        rewards, masks, gamma=config.gamma
    ),
    "reinforce_plus_plus_baseline": lambda rewards, groups, masks, config: (
        reinforce_plus_plus_baseline_advantages(rewards, groups, masks)
    ),
}


def estimator_of(name: str) -> Estimator:
    """The built-in estimator `name`, or the user's own at an import path."""
    return ESTIMATORS.get(name) or load_function(name)


def spread_over_tokens(per_sample: Tensor, loss_masks: Sequence[Tensor]) -> list[Tensor]:
    """Every unmasked token of sample i gets `per_sample[i]`, masked tokens 0."""
    _check_count("loss_masks", loss_masks, per_sample)
    return [
        torch.where(mask != 0, value, torch.zeros_like(value))
        for value, mask in zip(per_sample, loss_masks, strict=True)
    ]


def whiten(
    values: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    *,
    shift_mean: bool = True,
    group: dist.ProcessGroup | None = None,
    epsilon: float = 1e-8,
) -> list[Tensor]:
    """Zero mean and unit variance over all unmasked tokens, of every rank of `group` if given.

    The variance is unbiased. Masked tokens become 0. `shift_mean=False` keeps the mean.
    """
    _check_lengths("values", values, loss_masks)
    device = values[0].device if values else torch.device("cpu")
    kept = [value.double()[mask != 0] for value, mask in zip(values, loss_masks, strict=True)]
    flat = torch.cat(kept) if kept else torch.zeros(0, dtype=torch.float64, device=device)
    # Two rounds, mean first: a sum of squares of uncentered values cancels.
    total, count = _reduced(torch.stack([flat.sum(), flat.new_tensor(flat.numel())]), group)
    mean = total / count.clamp(min=1)
    squares = _reduced((flat - mean).square().sum(), group)
    scale = (squares / (count - 1).clamp(min=1) + epsilon).rsqrt()
    offset, dtype = 0.0 if shift_mean else mean, _result_dtype(*values)
    return [
        torch.where(mask != 0, ((value.double() - mean) * scale + offset).to(dtype), 0.0)
        for value, mask in zip(values, loss_masks, strict=True)
    ]


def discounted_suffix_sums(values: Tensor, discount: float) -> Tensor:
    """y_t = sum over k >= t of discount^(k - t) * values_k [L], computed in blocks."""
    result = torch.empty_like(values, dtype=torch.float64)
    position = torch.arange(_SCAN_BLOCK, dtype=torch.float64, device=values.device)
    exponent = position[None, :] - position[:, None]
    weights = torch.where(exponent >= 0, discount ** exponent.clamp(min=0), 0.0)
    carry = values.new_zeros((), dtype=torch.float64)
    for start in range((len(values) - 1) // _SCAN_BLOCK * _SCAN_BLOCK, -1, -_SCAN_BLOCK):
        block = values[start : start + _SCAN_BLOCK].double()
        n = len(block)
        carried = carry * discount ** (n - position[:n])
        result[start : start + n] = weights[:n, :n] @ block + carried
        carry = result[start]
    return result.to(_result_dtype(values))


def _result_dtype(*inputs: Tensor) -> torch.dtype:
    has_double = any(tensor.dtype == torch.float64 for tensor in inputs)
    return torch.float64 if has_double else torch.float32


def _group_sum(values: Tensor, group_index: Tensor) -> Tensor:
    # Indices are names, not positions: they may be sparse, huge or negative.
    names, position = group_index.unique(return_inverse=True)
    sums = torch.zeros(names.numel(), dtype=values.dtype, device=values.device)
    return sums.index_add_(0, position, values)[position]


def _centered_in_group(rewards: Tensor, group_index: Tensor) -> Tensor:
    """reward - group mean [N], in float64.

    In float32 the mean of equal rewards is off by a rounding error, which dividing by a standard
    deviation of that same size turns into an advantage of about 0.01 for a group that teaches
    nothing.
    """
    if rewards.shape != group_index.shape:
        raise BatchError(
            f"rewards have shape {tuple(rewards.shape)}, group_index {tuple(group_index.shape)}; "
            "give one group index per reward"
        )
    rewards = rewards.double()
    count = _group_sum(torch.ones_like(rewards), group_index)
    return rewards - _group_sum(rewards, group_index) / count


def _at_steps(step_values: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
    full = torch.zeros(mask.numel(), dtype=step_values.dtype, device=mask.device)
    full[steps] = step_values
    return full


def _check_count(name: str, per_sample: Sequence[Tensor], rewards: Tensor) -> None:
    if len(per_sample) != rewards.numel():
        raise BatchError(
            f"{len(per_sample)} {name} for {rewards.numel()} rewards; give one per sample"
        )


def _check_lengths(name: str, per_token: Sequence[Tensor], loss_masks: Sequence[Tensor]) -> None:
    lengths, expected = ([value.numel() for value in values] for values in (per_token, loss_masks))
    if lengths != expected:
        raise BatchError(
            f"{name} have lengths {lengths} but the loss masks {expected}; give one tensor per "
            "sample, as long as its response"
        )


def _reduced(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(value, group=group)
    return value
