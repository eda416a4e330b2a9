"""Loss and gradient of the logits against an independent scalar float64 implementation.

`reference_loss` is written token by token with the `math` module. What the formulas stop the gradient of is
computed from `frozen` logits, the rest from `live` ones, so that central differences over `live` give the
gradient that autograd must find.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import LossConfig
from tests.unit.loss.sample_batches import CONFIGS, random_batch, run

MASKS = [[1, 0, 1, 1], [1], [0, 0], [], [1, 1, 0]]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def kl(kind: str, d: float) -> float:
    return {"k1": d, "abs": abs(d), "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


def log_probs_and_entropy(rows: list[list[float]], token: int) -> tuple[float, float]:
    total = math.log(sum(math.exp(x) for x in rows))  # type: ignore[arg-type]
    logs = [x - total for x in rows]  # type: ignore[operator]
    return logs[token], -sum(math.exp(x) * x for x in logs)


def policy_token(
    c: LossConfig, live: float, frozen: float, train: float, rollout: float, a: float, s_log: float,
    teacher: float, sequence: float, smallest_before: float,
) -> tuple[float, bool]:  # fmt: skip
    """Loss of one token and whether it is kept.

    s_log: mean(cur - train) over the sequence, of gmpo each clipped
    sequence: sum(cur - rollout) over the sequence; smallest_before: of cur - rollout before the token, 0 at the first
    """
    low, high = max(0.0, 1 - c.eps_clip), 1 + c.clip_high
    a = guided = c.adv_tau * a + c.teacher_tau * (teacher - frozen)
    if c.policy_loss == "reinforce":
        return -a * live, True
    if c.policy_loss == "cispo":
        return -clip(math.exp(frozen - train), low, high) * a * live, True
    if c.policy_loss in ("ppo", "gspo"):
        r = math.exp(live - train if c.policy_loss == "ppo" else s_log + live - frozen)
        loss = max(-r * a, -clip(r, low, high) * a)
        if c.eps_clip_c is not None and a < 0:
            loss = min(loss, -c.eps_clip_c * a)
        return loss, True
    if c.policy_loss == "gmpo":
        return -a * math.exp(
            s_log + one_sided(c, live - train, a) - one_sided(c, frozen - train, a)
        ), True
    if c.policy_loss == "sapo":
        tau = c.sapo_tau_pos if a > 0 else c.sapo_tau_neg
        return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(live - train) - 1))), True
    r, r0 = math.exp(live - rollout), math.exp(frozen - rollout)
    difference = math.exp(frozen) - math.exp(rollout)
    if c.policy_loss == "icepop":
        keep = c.icepop_ratio_low <= r0 <= c.icepop_ratio_high
        return (-guided * r if keep else 0.0), keep
    if c.policy_loss == "dppo_tv":
        keep = -c.dppo_diff_low <= difference <= c.dppo_diff_high
        return (-guided * min(r, c.dppo_ratio_cap or math.inf) if keep else 0.0), keep
    if c.policy_loss == "ipo_tv":
        keep = abs(difference) <= c.ipo_threshold
        return (-guided * r if keep else 0.0) + c.kl_tau * (live - rollout) ** 2, keep
    if c.policy_loss == "dppo_kl":
        p, q = math.exp(rollout), math.exp(frozen)
        away = q > p if a > 0 else q < p
        keep = not (away and binary_kl(p, q) > c.dppo_kl_threshold)
        return (-guided * min(r, c.dppo_ratio_cap or math.inf) if keep else 0.0), keep
    if c.policy_loss == "vespo":
        k, rate = (c.vespo_k_pos, c.vespo_lambda_pos) if a >= 0 else (c.vespo_k_neg, c.vespo_lambda_neg)  # fmt: skip
        w = math.exp(sequence)
        return -math.exp(rate) * w**k * math.exp(-rate * w) * guided * live, True
    if c.policy_loss == "topr":
        return -(1.0 if a >= 0 else min(1.0, math.exp(sequence))) * guided * live, True
    if c.policy_loss == "dro":
        return -guided * live + c.dro_beta / 2 * (live - rollout) ** 2, True
    if c.policy_loss == "minpro":
        return -min(r0 * math.exp(smallest_before), high) * guided * live, True
    penalty = c.kl_tau * (live - rollout) ** 2
    if c.policy_loss == "dppo":
        keep = difference <= c.dppo_mask_high if a > 0 else difference >= -c.dppo_mask_low
        return (-guided * r if keep else 0.0) + penalty, keep
    assert c.policy_loss == "ipo_kl"
    keep = c.ipo_ratio_low <= r0 <= c.ipo_ratio_high
    return (-guided * r + penalty if keep else 0.0), keep


def one_sided(c: LossConfig, log_r: float, a: float) -> float:
    return min(log_r, c.clip_high) if a >= 0 else max(log_r, -c.eps_clip)


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def hook_weight(
    c: LossConfig, frozen: float, train: float, rollout: float, mean_log_r: float, segment: float
) -> float:
    if not c.use_tis:
        return 1.0
    name = (c.custom_tis_function_path or "vanilla_tis_function").rsplit(".", 1)[-1]
    r = math.exp(train - rollout)
    if name == "vanilla_tis_function":
        return clip(r, c.tis_clip_low, c.tis_clip)
    if name == "icepop_function":
        return r if c.tis_clip_low <= r <= c.tis_clip else 0.0
    if name == "off_policy_is_function":
        return clip(math.exp(frozen - rollout), 1 - c.eps_clip, 1 + c.clip_high)
    if name == "segment_tis_function":
        return clip(math.exp(segment), c.sequence_tis_clip_low, c.sequence_tis_clip)
    if name == "geometric_mask_function":
        return float(c.geometric_mask_low <= math.exp(mean_log_r) <= c.geometric_mask_high)
    if name == "kpop_function":
        p, q = math.exp(train), math.exp(rollout)
        return r if max(binary_kl(p, q), binary_kl(q, p)) <= c.kpop_threshold else 0.0
    assert name == "sequence_tis_function" and c.sequence_tis_level == "geometric"
    return clip(math.exp(mean_log_r), c.sequence_tis_clip_low, c.sequence_tis_clip)


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def reference_loss(c: LossConfig, batch: dict[str, Any], live: Any, frozen: Any) -> float:
    """sum over samples of (sum of token losses) / (tokens, or 1 with a global token denominator)."""
    total, offset = 0.0, 0
    for i, mask in enumerate(batch["loss_masks"]):
        length, ids = batch["response_lengths"][i], batch["unconcat_tokens"][i].tolist()
        first = batch["total_lengths"][i] - length
        columns = {n: batch[n][i].double().tolist() for n in batch if n.endswith("log_probs")}
        advantages = batch["advantages"][i].double().tolist()
        unmasked = [t for t in range(length) if mask[t]]
        scored = {
            t: (
                *log_probs_and_entropy(live[offset + first + t - 1], ids[first + t]),
                log_probs_and_entropy(frozen[offset + first + t - 1], ids[first + t])[0],
            )
            for t in unmasked
        }
        rollout = columns["rollout_log_probs"]
        train = rollout if c.train_log_probs == "rollout" else columns["log_probs"]
        s_log = mean([scored[t][2] - train[t] for t in unmasked])
        if c.policy_loss == "gmpo":
            s_log = mean([one_sided(c, scored[t][2] - train[t], advantages[t]) for t in unmasked])
        mean_log_r = mean([train[t] - rollout[t] for t in unmasked])
        policy, regular, kept_count = 0.0, 0.0, 0
        moved = {t: scored[t][2] - rollout[t] for t in unmasked}
        for t in unmasked:
            cur, entropy, fixed = scored[t]
            loss, keep = policy_token(
                c, cur, fixed, train[t], rollout[t], advantages[t], s_log,
                columns["teacher_log_probs"][t], sum(moved.values()),
                min((moved[i] for i in unmasked if i < t), default=0.0),
            )  # fmt: skip
            length = c.segment_tis_length
            segment = sum(train[i] - rollout[i] for i in unmasked if i // length == t // length)
            weight = hook_weight(c, fixed, train[t], rollout[t], mean_log_r, segment)
            keep = keep and (weight > 0 or not c.use_tis)
            kept_count += keep
            policy += loss * weight
            regular -= c.entropy_coef * entropy
            regular -= c.positive_nll_coef * cur if advantages[t] > 0 else 0.0
            if c.use_kl_loss:
                value = kl(c.kl_loss_type, cur - columns["ref_log_probs"][t])
                against = rollout[t] if c.unbiased_kl_against == "rollout" else train[t]
                value *= math.exp(cur - against) if c.use_unbiased_kl else 1.0
                regular += c.kl_loss_coef * value
            if c.use_rollout_kl_loss and (keep or c.rollout_kl_scope == "all"):
                regular += c.rollout_kl_loss_coef * kl(
                    c.rollout_kl_estimator_type, cur - rollout[t]
                )
        count = max(len(unmasked), 1)
        if c.loss_denominator == "kept":
            policy *= count / max(kept_count, 1)
        total += (policy + regular) / (1 if c.per_token else count)
        offset += batch["total_lengths"][i]
    return total


def central_differences(
    c: LossConfig, batch: dict[str, Any], logits: Tensor, step: float = 1e-5
) -> Tensor:
    frozen = logits.double().tolist()
    gradient = torch.zeros_like(logits, dtype=torch.float64)
    for row in range(logits.shape[0]):
        for column in range(logits.shape[1]):
            ends = []
            for sign in (1, -1):
                live = [list(values) for values in frozen]
                live[row][column] += sign * step
                ends.append(reference_loss(c, batch, live, frozen))
            gradient[row, column] = (ends[0] - ends[1]) / (2 * step)
    return gradient


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "chain"])
def test_loss_and_gradient_equal_a_scalar_float64_implementation(name: str) -> None:
    config = LossConfig(**CONFIGS[name])
    batch, logits = random_batch(MASKS, seed=11)
    loss, gradient, _ = run(config, batch, logits)
    rows = logits[0].double().tolist()
    assert loss.item() == pytest.approx(reference_loss(config, batch, rows, rows), rel=2e-5)
    expected = central_differences(config, batch, logits[0])
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(gradient[0].double(), expected, rtol=1e-3, atol=2e-5)


def test_the_configurations_exercise_rejected_and_clipped_tokens() -> None:
    batch, logits = random_batch(MASKS, seed=11)
    for name, metric in [
        ("ppo", "pg_clipfrac"),
        ("cispo", "pg_clipfrac"),
        ("icepop", "is_masked"),
        ("dppo_tv", "is_masked"),
        ("dppo", "is_masked"),
        ("ipo_kl", "is_masked"),
        ("dppo_kl", "is_masked"),
        ("minpro", "pg_clipfrac"),
        ("gmpo", "pg_clipfrac"),
        ("ipo_tv", "is_masked"),
        ("icepop_and_mask", "geometric_mask_function/is_masked"),
        ("vanilla_tis", "tis_clipfrac"),
        ("icepop_hook", "is_masked"),
        ("off_policy_is", "tis_clipfrac"),
        ("segment_tis", "tis_clipfrac"),
        ("kpop", "is_masked"),
        ("chain", "is_masked"),
    ]:
        config = LossConfig(**CONFIGS[name])
        _, _, metrics = run(config, batch, logits)
        ones = sum(1 for mask in MASKS if any(mask))
        limit = sum(map(sum, MASKS)) if config.per_token else ones
        assert 0 < metrics[metric].item() < limit, name


def test_entropy_has_a_gradient_only_with_a_coefficient() -> None:
    batch, logits = random_batch([[1, 1]], seed=3)
    batch["advantages"] = [torch.zeros(2)]
    _, gradient, metrics = run(LossConfig(), batch, logits)
    assert metrics["entropy_loss"].item() > 0
    assert gradient.abs().max().item() == 0.0
    _, gradient, _ = run(LossConfig(entropy_coef=0.1), batch, logits)
    assert gradient.abs().max().item() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["ppo", "icepop", "off_policy_is", "chain"])
def test_half_precision_batches_and_logits_are_computed_in_float32(
    name: str, dtype: torch.dtype
) -> None:
    config = LossConfig(**CONFIGS[name])
    batch, logits = random_batch(MASKS, seed=5)
    half = {
        key: [value.to(dtype) for value in values]
        if key.endswith("log_probs") or key == "advantages"
        else values
        for key, values in batch.items()
    }
    exact = {
        key: [value.float() for value in values]
        if key.endswith("log_probs") or key == "advantages"
        else values
        for key, values in half.items()
    }
    logits = logits.to(dtype)
    loss, gradient, metrics = run(config, half, logits)
    expected_loss, expected_gradient, expected_metrics = run(config, exact, logits.float())
    assert loss.dtype == torch.float32
    # float32 arithmetic throughout (half precision would be off by 1e-3); the gradient alone is rounded
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(metrics, expected_metrics, rtol=1e-6, atol=1e-6)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient.float(), expected_gradient, rtol=1e-2, atol=1e-3)
