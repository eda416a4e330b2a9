"""Small batches for loss tests: hand-written tokens, or random samples with logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.loss import compute_loss, loss_inputs, policy_loss_function
from plugin.loss.interfaces import LossOutputs
from plugin.loss.normalization import token_weights, weighted_sum
from plugin.ppo_utils import SequenceShards

VOCABULARY = 7
GARBAGE = [math.nan, math.inf, -math.inf, 1e30, -1e30]


def logs(*values: float) -> Tensor:
    """log of each probability or ratio."""
    return torch.tensor([math.log(value) for value in values])


@dataclass
class TokenResult:
    """Per-token outcome of a loss on hand-written log-probs."""

    outputs: LossOutputs
    gradient: Tensor

    @property
    def loss(self) -> Tensor:
        return self.outputs.policy.loss.detach()

    @property
    def kept(self) -> list[bool]:
        return self.outputs.policy.kept.tolist()

    def metric(self, name: str) -> list[float]:
        metric = self.outputs.metrics[name]
        return torch.where(metric.over, metric.values, 0.0).tolist()


def token_loss(
    config: LossConfig,
    *,
    cur: Sequence[Tensor],
    advantages: Sequence[Tensor],
    masks: Sequence[Tensor] | None = None,
    with_weights: bool = False,
    **log_probs: Sequence[Tensor] | None,
) -> TokenResult:
    """The per-token policy loss and its gradient with respect to `cur`, a sum of everything."""
    masks = [torch.ones(len(c), dtype=torch.int64) for c in cur] if masks is None else masks
    lengths = [len(c) for c in cur]
    batch = {
        "response_lengths": lengths,
        "total_lengths": [length + 1 for length in lengths],
        "loss_masks": list(masks),
        "advantages": list(advantages),
        **log_probs,
    }
    flat = torch.cat([*cur, torch.zeros(0)]).float().requires_grad_()
    inputs = loss_inputs(config, batch, flat)
    outputs = compute_loss(config, inputs, with_weights=with_weights)
    outputs.policy.loss.sum().backward()
    assert flat.grad is not None
    return TokenResult(outputs, flat.grad)


def random_batch(
    masks: Sequence[Sequence[int]], *, seed: int = 0, prompts: Sequence[int] | None = None
) -> tuple[dict[str, Any], Tensor]:
    """A batch with every field and the packed logits [1, T, V] that its policies scatter around."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [1 + i % 3 for i in range(len(masks))] if prompts is None else prompts
    lengths = [len(mask) for mask in masks]
    totals = [p + n for p, n in zip(prompts, lengths, strict=True)]
    logits = torch.randn(1, sum(totals) + 1, VOCABULARY, generator=generator)
    tokens = [torch.randint(0, VOCABULARY, (total,), generator=generator) for total in totals]
    offsets = [sum(totals[:i]) for i in range(len(totals))]
    log_softmax = logits[0].log_softmax(-1)
    columns: dict[str, list[Tensor]] = {name: [] for name in PER_TOKEN}
    for offset, prompt, length, ids in zip(offsets, prompts, lengths, tokens, strict=True):
        rows = torch.arange(length) + offset + prompt - 1
        cur = log_softmax[rows, ids[prompt:]]
        for name in PER_TOKEN[1:]:
            noise = 0.4 * torch.randn(length, generator=generator)
            columns[name].append((cur + noise).clamp(max=-1e-3))
        columns["advantages"].append(torch.randn(length, generator=generator))
    batch = {
        "unconcat_tokens": tokens,
        "total_lengths": totals,
        "response_lengths": lengths,
        "loss_masks": [torch.tensor(mask, dtype=torch.int64) for mask in masks],
        **columns,
    }
    return batch, logits


PER_TOKEN = ("advantages", "rollout_log_probs", "log_probs", "ref_log_probs", "teacher_log_probs")


def reducer_of(config: LossConfig, batch: dict[str, Any]) -> Any:
    """sum_t w_t x_t of this microbatch; adding microbatches up gives the sum over the whole batch."""
    shards = SequenceShards.of(
        batch["total_lengths"], batch["response_lengths"], torch.device("cpu")
    )
    mask = shards.local_mask(batch["loss_masks"])
    return weighted_sum(
        token_weights(shards, mask, batch["loss_masks"], per_token=config.per_token)
    )


def run(
    config: LossConfig, batch: dict[str, Any], logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, gradient of the logits and metrics of one microbatch."""
    logits = logits.detach().clone().requires_grad_()
    loss, metrics = policy_loss_function(config, batch, logits, reducer_of(config, batch))
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad, metrics


_ALL_TERMS: dict[str, Any] = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "k3",
    "use_rollout_kl_loss": True,
    "rollout_kl_loss_coef": 0.2,
    "entropy_coef": 0.05,
}
_HOOK = "plugin.ppo_utils."

#: One configuration per loss, per correction and per way of normalizing.
CONFIGS: dict[str, dict[str, Any]] = {
    "ppo": {"policy_loss": "ppo", **_ALL_TERMS},
    "ppo_dual_clip": {"policy_loss": "ppo", "eps_clip_c": 1.2, "entropy_coef": 0.1},
    "reinforce": {"policy_loss": "reinforce", **_ALL_TERMS, "rollout_kl_estimator_type": "abs"},
    "cispo": {"policy_loss": "cispo", **_ALL_TERMS, "use_unbiased_kl": True},
    "gspo": {"policy_loss": "gspo", **_ALL_TERMS, "calculate_per_token_loss": True},
    "sapo": {"policy_loss": "sapo", "use_rollout_logprobs": True},
    "icepop": {
        "policy_loss": "icepop",
        **_ALL_TERMS,
        "icepop_ratio_low": 0.7,
        "icepop_ratio_high": 1.3,
        "rollout_kl_scope": "kept",
    },
    "dppo_tv": {
        "policy_loss": "dppo_tv",
        "dppo_diff_low": 0.03,
        "dppo_diff_high": 0.03,
        "dppo_ratio_cap": 1.1,
        "teacher_tau": 0.5,
        "adv_tau": 0.7,
    },
    "dppo": {
        "policy_loss": "dppo",
        "dppo_mask_low": 0.03,
        "dppo_mask_high": 0.03,
        "kl_tau": 0.3,
        "calculate_per_token_loss": False,
    },
    "ipo_kl": {"policy_loss": "ipo_kl", "ipo_ratio_low": 0.8, "ipo_ratio_high": 1.2, "kl_tau": 0.3},
    "dppo_kl": {"policy_loss": "dppo_kl", "dppo_kl_threshold": 0.002, "dppo_ratio_cap": 1.2},
    "vespo": {"policy_loss": "vespo", "vespo_k_pos": 1.5, "teacher_tau": 0.3, **_ALL_TERMS},
    "topr": {"policy_loss": "topr", "calculate_per_token_loss": False, **_ALL_TERMS},
    "dro": {"policy_loss": "dro", "dro_beta": 0.7, "adv_tau": 0.8},
    "minpro": {"policy_loss": "minpro", "eps_clip_high": 0.1, "entropy_coef": 0.05},
    "gmpo": {"policy_loss": "gmpo", "eps_clip": 0.1, "eps_clip_high": 0.15, **_ALL_TERMS},
    "ipo_tv": {"policy_loss": "ipo_tv", "ipo_threshold": 0.03, "kl_tau": 0.3},
    "kl against rollout and nll": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.3,
        "kl_loss_type": "k3",
        "use_unbiased_kl": True,
        "unbiased_kl_against": "rollout",
        "positive_nll_coef": 0.2,
    },
    "icepop_and_mask": {
        "policy_loss": "icepop",
        "use_tis": True,
        "geometric_mask_low": 0.7,
        "geometric_mask_high": 1.1,
        "custom_tis_function_path": _HOOK + "geometric_mask_function",
    },
    "vanilla_tis": {"use_tis": True, "tis_clip": 1.2, "tis_clip_low": 0.8, **_ALL_TERMS},
    "icepop_hook": {
        "use_tis": True,
        "tis_clip": 1.2,
        "tis_clip_low": 0.8,
        "custom_tis_function_path": _HOOK + "icepop_function",
        "loss_denominator": "kept",
    },
    "off_policy_is": {
        "policy_loss": "reinforce",
        "use_tis": True,
        "custom_tis_function_path": _HOOK + "off_policy_is_function",
        **_ALL_TERMS,
    },
    "sequence_tis_geometric": {
        "use_tis": True,
        "sequence_tis_level": "geometric",
        "sequence_tis_clip": 1.1,
        "custom_tis_function_path": _HOOK + "sequence_tis_function",
    },
    "segment_tis": {
        "use_tis": True,
        "segment_tis_length": 2,
        "sequence_tis_clip": 1.05,
        "sequence_tis_clip_low": 0.8,
        "custom_tis_function_path": _HOOK + "segment_tis_function",
    },
    "kpop": {
        "use_tis": True,
        "kpop_threshold": 0.01,
        "custom_tis_function_path": _HOOK + "kpop_function",
    },
    "chain": {
        "use_tis": True,
        "rejection_rules": "token_ratio=0.7:1.5,max_k3=:0.2",
        "veto_threshold": 0.5,
        "opsm_delta": 0.05,
        "dppo_diff_low": 0.1,
        "dppo_diff_high": 0.1,
        "geometric_mask_low": 0.5,
        "geometric_mask_high": 1.5,
        "custom_tis_function_path": ",".join(
            _HOOK + name
            for name in (
                "rejection_function",
                "geometric_mask_function",
                "veto_function",
                "opsm_function",
                "dppo_tv_mask_function",
                "vanilla_tis_function",
            )
        ),
        "loss_denominator": "kept",
        **_ALL_TERMS,
        "rollout_kl_scope": "kept",
    },
    "mismatch_metrics": {"get_mismatch_metrics": True, **_ALL_TERMS, "kl_loss_coef": 0.0},
}
