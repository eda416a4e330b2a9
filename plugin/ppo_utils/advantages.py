"""Advantage estimators: from one reward per sample to one advantage per token.

Group estimators work on `rewards` [N] with `group_index` [N] (samples of one prompt share an index)
and return [N]; `spread_over_tokens` gives every token of a sample its value. Token estimators
(REINFORCE++, GAE) work on lists of 1-D tensors, one per sample; only unmasked tokens count as
steps, so tool output between two turns is no step of the policy. Results are float32, or float64
where an input is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from plugin.config import AdvantageFlags
from plugin.config.import_paths import load_function
from plugin.errors import BatchError
from plugin.ragged import Integers, Ragged

RlooStd = Literal["none", "group", "others", "batch"]
#: fn(rewards [N], group_index [N], loss_masks, config) -> advantages; `loss_masks` and the result
#: have one [response] tensor per sample.
Estimator = Callable[[Tensor, Tensor, Sequence[Tensor], AdvantageFlags], Sequence[Tensor]]


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


def rloo_advantages(
    rewards: Tensor, group_index: Tensor, *, std: RlooStd = "none", epsilon: float = 1e-6
) -> Tensor:
    """reward - mean reward of the others of its group [N]; a group of one has advantage 0.

    std: what divides it, plus epsilon: the standard deviation (unbiased) of the group's rewards, of
        those of the others, or of the advantages of all N. Where that is 0, nothing does.
    """
    # All n deviations from the group mean add up to 0, so
    # r - mean(others) = (r - mean) * n / (n - 1).
    centered = _centered_in_group(rewards, group_index)
    count = _group_sum(torch.ones_like(centered), group_index)
    advantages = centered * count / (count - 1).clamp(min=1)
    if std == "none":
        return advantages.to(_result_dtype(rewards))
    squares = _group_sum(centered.square(), group_index)
    if std == "group":
        variance = squares / (count - 1).clamp(min=1)
    elif std == "others":
        # Leaving out one of n values takes n / (n - 1) times its squared deviation off the sum.
        rest = squares - centered.square() * count / (count - 1).clamp(min=1)
        # What rounding leaves of the difference of two equal sums is no deviation.
        rest = torch.where(rest > 1e-9 * squares, rest, 0.0)
        variance = rest / (count - 2).clamp(min=1)
    else:
        # Advantages add up to 0 in every group, so their mean is 0.
        variance = advantages.square().sum() / max(len(advantages) - 1, 1)
    scale = torch.where(variance > 0, variance.sqrt() + epsilon, 1.0)
    return (advantages / scale).to(_result_dtype(rewards))


def opo_advantages(rewards: Tensor, group_index: Tensor, lengths: Tensor) -> Tensor:
    """reward - length-weighted mean reward of its group [N]; `lengths` [N] in tokens.

    The baseline of least variance if every token's gradient has the same size and they are
    orthogonal (OPO, arXiv 2505.23585): sum(l r) / sum(l).
    """
    centered, weight = _centered_in_group(rewards, group_index), lengths.double()
    total = _group_sum(weight, group_index).clamp(min=1.0)
    baseline = _group_sum(weight * centered, group_index) / total
    return (centered - baseline).to(_result_dtype(rewards))


def maxrl_advantages(rewards: Tensor, group_index: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """(reward - group mean) / (group mean + epsilon) [N]; 0 in a group that earned nothing.

    For rewards of 0 and 1 the expected gradient is that of the likelihood of success, expanded to
    the size of the group (MaxRL, arXiv 2602.02710). A negative reward is a `BatchError`.
    """
    if bool((rewards < 0).any()):
        raise BatchError(
            f"maxrl divides by the mean reward of a group and one reward is {float(rewards.min())};"
            " rewards must be at least 0, for example 0 and 1"
        )
    centered = _centered_in_group(rewards, group_index)
    mean = rewards.double() - centered
    return (centered / (mean + epsilon)).to(_result_dtype(rewards))


def gdpo_advantages(
    rewards: Tensor,
    group_index: Tensor,
    weights: Sequence[float],
    *,
    std_normalization: bool = True,
    epsilon: float = 1e-6,
) -> Tensor:
    """Sum over k of weights[k] times GRPO's advantage for reward k alone, whitened over all N [N].

    rewards: [N, K]. So a reward of small spread counts as much as one of large spread, and
    responses that earn equal sums in different ways differ (GDPO, arXiv 2601.05242). Where all sums
    are equal, they are 0.
    """
    total = rewards.new_zeros(len(rewards), dtype=torch.float64)
    for weight, reward in zip(weights, rewards.double().T, strict=True):
        total += weight * grpo_advantages(
            reward, group_index, std_normalization=std_normalization, epsilon=epsilon
        )
    centered = total - total.mean()
    scale = centered.square().sum().div(max(len(rewards) - 1, 1)).sqrt()
    # What rounding leaves of equal sums is no spread.
    spread = scale > 1e-9 * total.abs().max() if len(rewards) else scale > 0
    return torch.where(spread, centered / (scale + epsilon), 0.0).to(_result_dtype(rewards))


def best_of_group_advantages(
    rewards: Tensor, group_index: Tensor, *, std_normalization: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """Best reward less second best for the best response of a group, 0 for the others [N].

    What the best response adds to the maximum of its group: pass@k for groups of k (arXiv
    2503.19595). Where the two are equal, all are 0. Divided by the standard deviation as in GRPO.
    """
    normalized = grpo_advantages(
        rewards, group_index, std_normalization=std_normalization, epsilon=epsilon
    ).double()
    # By group, and in it from worst to best.
    order = normalized.argsort(stable=True)
    order = order[group_index[order].argsort(stable=True)]
    groups, values = group_index[order], normalized[order]
    best = torch.ones_like(groups, dtype=torch.bool)
    best[:-1] = groups[1:] != groups[:-1]
    follows = torch.zeros_like(best)
    follows[1:] = groups[1:] == groups[:-1]
    margin = values - torch.cat([values.new_zeros(1), values])[: len(values)]
    gained = torch.where(best & follows, margin, 0.0)
    return torch.zeros_like(gained).index_copy(0, order, gained).to(_result_dtype(rewards))


def reinforce_plus_plus_returns(
    rewards: Tensor,
    loss_masks: Sequence[Tensor],
    *,
    gamma: float = 1.0,
    kl: Sequence[Tensor] | None = None,
    kl_coef: float = 0.0,
) -> Ragged:
    """Discounted returns per token: the reward comes at the last unmasked token, the KL at each."""
    _check_count("loss_masks", loss_masks, rewards)
    steps, dtype = _Steps.of(loss_masks), _result_dtype(rewards, *(kl or ()))
    step_rewards = steps.at_last(rewards)
    if kl is not None:
        _check_lengths("kl", kl, loss_masks)
        if kl_coef:
            step_rewards -= kl_coef * Ragged.of(kl).values.double()[steps.places]
    return steps.spread(discounted_suffix_sums(step_rewards, gamma, steps.counts), dtype)


def reinforce_plus_plus_advantages(
    rewards: Tensor,
    loss_masks: Sequence[Tensor],
    *,
    gamma: float = 1.0,
    kl: Sequence[Tensor] | None = None,
    kl_coef: float = 0.0,
    group: dist.ProcessGroup | None = None,
) -> Ragged:
    """REINFORCE++: token returns, whitened over the whole batch."""
    returns = reinforce_plus_plus_returns(rewards, loss_masks, gamma=gamma, kl=kl, kl_coef=kl_coef)
    return whiten(returns, loss_masks, group=group)


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor,
    group_index: Tensor,
    loss_masks: Sequence[Tensor],
    *,
    group: dist.ProcessGroup | None = None,
) -> Ragged:
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
) -> tuple[Ragged, Ragged]:
    """Generalized advantage estimation; returns (advantages, returns), one tensor per sample.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum_k (gamma lambda)^k delta_{t+k}, V = 0 at the end.
    """
    _check_count("loss_masks", loss_masks, rewards)
    _check_lengths("values", values, loss_masks)
    steps, joined = _Steps.of(loss_masks), Ragged.of(values).values
    dtype = _result_dtype(rewards, joined)
    step_values = joined.double()[steps.places]
    next_values = torch.cat([step_values[1:], step_values.new_zeros(min(1, len(step_values)))])
    next_values[steps.last] = 0.0
    delta = gamma * next_values - step_values + steps.at_last(rewards)
    step_advantages = discounted_suffix_sums(delta, gamma * lambd, steps.counts)
    return steps.spread(step_advantages, dtype), steps.spread(step_advantages + step_values, dtype)


#: The estimators of `--advantage-estimator` that need one reward per response and no value model,
#: see `ESTIMATOR_TRAITS`.
ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda rewards, groups, masks, config: spread_over_tokens(
        grpo_advantages(rewards, groups, std_normalization=config.grpo_std_normalization), masks
    ),
    "dr_grpo": lambda rewards, groups, masks, config: spread_over_tokens(
        grpo_advantages(rewards, groups, std_normalization=False), masks
    ),
    "rloo": lambda rewards, groups, masks, config: spread_over_tokens(
        rloo_advantages(rewards, groups, std=config.rloo_std), masks
    ),
    "opo": lambda rewards, groups, masks, config: spread_over_tokens(
        opo_advantages(rewards, groups, torch.from_numpy(_Steps.of(masks).counts)), masks
    ),
    "maxrl": lambda rewards, groups, masks, config: spread_over_tokens(
        maxrl_advantages(rewards, groups), masks
    ),
    "best_of_group": lambda rewards, groups, masks, config: spread_over_tokens(
        best_of_group_advantages(rewards, groups, std_normalization=config.grpo_std_normalization),
        masks,
    ),
    "reinforce_plus_plus": lambda rewards, groups, masks, config: reinforce_plus_plus_advantages(
        rewards, masks, gamma=config.gamma
    ),
    "reinforce_plus_plus_baseline": lambda rewards, groups, masks, config: (
        reinforce_plus_plus_baseline_advantages(rewards, groups, masks)
    ),
    # A teacher, not rewards, says what is learned.
    "none": lambda rewards, groups, masks, config: spread_over_tokens(
        torch.zeros_like(rewards), masks
    ),
}


def estimator_of(name: str) -> Estimator:
    """The built-in estimator `name`, or the user's own at an import path."""
    return ESTIMATORS.get(name) or load_function(name)


def spread_over_tokens(per_sample: Tensor, loss_masks: Sequence[Tensor]) -> Ragged:
    """Every unmasked token of sample i gets `per_sample[i]`, masked tokens 0."""
    _check_count("loss_masks", loss_masks, per_sample)
    masks = Ragged.of(loss_masks)
    samples = torch.from_numpy(masks.sample_index).to(per_sample.device)
    return masks.like(torch.where(masks.values != 0, per_sample[samples], 0.0))


def whiten(
    values: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    *,
    shift_mean: bool = True,
    group: dist.ProcessGroup | None = None,
    epsilon: float = 1e-8,
) -> Ragged:
    """Zero mean and unit variance over all unmasked tokens, of every rank of `group` if given.

    The variance is unbiased. Masked tokens become 0. `shift_mean=False` keeps the mean.
    """
    _check_lengths("values", values, loss_masks)
    joined, mask = Ragged.of(values), Ragged.of(loss_masks).values != 0
    exact = joined.values.double()
    flat = exact[mask]
    # Two rounds, mean first: a sum of squares of uncentered values cancels.
    total, count = _reduced(torch.stack([flat.sum(), flat.new_tensor(flat.numel())]), group)
    mean = total / count.clamp(min=1)
    squares = _reduced((flat - mean).square().sum(), group)
    scale = (squares / (count - 1).clamp(min=1) + epsilon).rsqrt()
    offset = 0.0 if shift_mean else mean
    white = ((exact - mean) * scale + offset).to(_result_dtype(joined.values))
    return joined.like(torch.where(mask, white, 0.0))


def discounted_suffix_sums(
    values: Tensor, discount: float, lengths: Integers | None = None
) -> Tensor:
    """y_t = sum over k >= t of discount^(k - t) * values_k [L] float64, within each sequence.

    lengths: of the sequences that lie end to end in `values`; None = one. Sums of 1, 2, 4, ...
    terms are joined to sums of twice as many.
    """
    result = values.double()
    counts = np.array([len(values)]) if lengths is None else lengths
    # How many values of its sequence follow each one.
    ends = np.repeat(np.cumsum(counts), counts)
    after = torch.from_numpy(ends - np.arange(len(values)) - 1).to(values.device)
    reach = 1
    while reach < counts.max(initial=0):
        beyond = torch.where(after[:-reach] >= reach, result[reach:], 0.0)
        result = torch.cat([result[:-reach] + discount**reach * beyond, result[-reach:]])
        reach *= 2
    return result


@dataclass(frozen=True)
class _Steps:
    """The unmasked tokens of a batch: what the policy chose.

    places: [S] int64, where they are among all tokens; counts: [N] of each sample
    last: [samples with a step] int64, which of the S steps is the last of its sample
    """

    masks: Ragged
    places: Tensor
    counts: Integers
    last: Tensor
    has_steps: Tensor

    @classmethod
    def of(cls, loss_masks: Sequence[Tensor]) -> _Steps:
        masks = Ragged.of(loss_masks)
        places = (masks.values != 0).nonzero()[:, 0]
        samples = masks.sample_index[places.numpy(force=True)]
        counts = np.bincount(samples, minlength=len(masks))
        last = np.cumsum(counts)[counts > 0] - 1
        device = places.device
        return cls(
            masks,
            places,
            counts,
            torch.from_numpy(last).to(device),
            torch.from_numpy(counts > 0).to(device),
        )

    def at_last(self, rewards: Tensor) -> Tensor:
        """[S] float64: every sample's reward at its last step, 0 elsewhere."""
        values = torch.zeros(len(self.places), dtype=torch.float64, device=self.places.device)
        values[self.last] = rewards.double()[self.has_steps]
        return values

    def spread(self, step_values: Tensor, dtype: torch.dtype) -> Ragged:
        """Values [S] at their tokens, 0 where masked."""
        full = torch.zeros(len(self.masks.values), dtype=dtype, device=step_values.device)
        full[self.places] = step_values.to(dtype)
        return self.masks.like(full)


def _group_sum(values: Tensor, group_index: Tensor) -> Tensor:
    # Indices are names, not positions: they may be sparse, huge or negative. Sorting them takes a
    # twentieth of the time of `torch.unique`.
    ordered, order = group_index.sort(stable=True)
    position = torch.zeros_like(order)
    position[order[1:]] = (ordered.diff() != 0).cumsum(0)
    return torch.zeros_like(values).index_add_(0, position, values)[position]


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


def _result_dtype(*inputs: Tensor) -> torch.dtype:
    has_double = any(tensor.dtype == torch.float64 for tensor in inputs)
    return torch.float64 if has_double else torch.float32


def _check_count(name: str, per_sample: Sequence[Tensor], rewards: Tensor) -> None:
    if len(per_sample) != rewards.numel():
        raise BatchError(
            f"{len(per_sample)} {name} for {rewards.numel()} rewards; give one per sample"
        )


def _check_lengths(name: str, per_token: Sequence[Tensor], loss_masks: Sequence[Tensor]) -> None:
    lengths, expected = (Ragged.of(values).lengths.tolist() for values in (per_token, loss_masks))
    if lengths != expected:
        raise BatchError(
            f"{name} have lengths {lengths} but the loss masks {expected}; give one tensor per "
            "sample, as long as its response"
        )


def _reduced(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(value, group=group)
    return value
