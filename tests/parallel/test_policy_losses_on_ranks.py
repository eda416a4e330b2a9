"""Every policy loss, estimator and correction gives on ranks what it gives in one process, and what transformers gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.loss.policy_losses import POLICY_LOSSES
from plugin.megatron_backend.parallel_groups import ParallelGroups
from tests.parallel import tiny_models
from tests.parallel.training_jobs import (
    Case,
    Layout,
    RunRanks,
    Start,
    differences,
    new_trainer,
    run_cases,
)

SMALL_BUDGET = {"max_tokens_per_gpu": 20}
HOOK = "plugin.ppo_utils."

#: Every policy loss, with bounds that cut something off in the batch, and between them every regularizer.
LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"eps_clip": 0.1, "eps_clip_high": 0.15, "eps_clip_c": 1.1, "entropy_coef": 0.02},
    "reinforce": {
        "use_tis": True,
        "custom_tis_function_path": f"{HOOK}off_policy_is_function",
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "use_unbiased_kl": True,
    },
    "cispo": {"use_tis": True, "tis_clip": 1.2, "calculate_per_token_loss": True},
    "gspo": {
        "eps_clip": 0.02,
        "use_tis": True,
        "custom_tis_function_path": f"{HOOK}sequence_tis_function,{HOOK}veto_function,{HOOK}opsm_function",
        "sequence_tis_level": "geometric",
        "sequence_tis_clip": 1.1,
        "veto_threshold": 0.4,
        "opsm_delta": 0.01,
    },
    "icepop": {"icepop_ratio_low": 0.7, "icepop_ratio_high": 1.4, "teacher_tau": 0.2},
    "dppo_tv": {
        "dppo_diff_low": 0.005,
        "dppo_diff_high": 0.005,
        "dppo_ratio_cap": 1.5,
        "use_rollout_kl_loss": True,
        "rollout_kl_loss_coef": 0.3,
        "rollout_kl_scope": "kept",
    },
    "dppo": {"dppo_mask_low": 0.005, "dppo_mask_high": 0.005, "kl_tau": 0.1},
    "ipo_kl": {"ipo_ratio_low": 0.7, "ipo_ratio_high": 1.4, "kl_tau": 0.1, "teacher_tau": 0.1},
    "dppo_kl": {"dppo_kl_threshold": 1e-4, "dppo_ratio_cap": 1.5, "teacher_tau": 0.1},
    # Layouts round log-probs differently, by 2e-6 in the log-ratio of a sequence, and the weight multiplies that by
    # |k - lambda w|: about 5 at a ratio of 2.4 with the default exponents, whose second step then differs by 1.4e-5.
    "vespo": {
        "vespo_k_pos": 1.0,
        "vespo_lambda_pos": 0.5,
        "vespo_k_neg": 1.0,
        "vespo_lambda_neg": 0.5,
        "entropy_coef": 0.02,
        "use_rollout_kl_loss": True,
        "rollout_kl_loss_coef": 0.1,
    },
    "topr": {"calculate_per_token_loss": False},
    "dro": {"dro_beta": 0.5, "use_kl_loss": True, "kl_loss_coef": 0.1},
    "minpro": {"eps_clip_high": 0.1},
    "gmpo": {"eps_clip": 0.05, "eps_clip_high": 0.1, "use_tis": True, "tis_batch_normalize": True},
    "ipo_tv": {"ipo_threshold": 0.005, "kl_tau": 0.1, "positive_nll_coef": 0.1},
    "clip_cov": {
        "clip_cov_low": 0.0,
        "clip_cov_high": 50.0,
        "clip_cov_ratio": 0.2,
        "use_tis": True,
        "tis_clip": 1.2,
    },
    "kl_cov": {"kl_cov_ratio": 0.2, "kl_cov_coef": 0.5, "entropy_coef": 0.02},
    "sapo": {
        "use_tis": True,
        "custom_tis_function_path": f"{HOOK}icepop_function,{HOOK}geometric_mask_function",
        "geometric_mask_low": 0.8,
        "geometric_mask_high": 1.25,
        "get_mismatch_metrics": True,
        "use_rollout_kl_loss": True,
        "rollout_kl_loss_coef": 0.1,
        "rollout_kl_estimator_type": "k3",
    },
}


def cases(**settings: Any) -> dict[str, Case]:
    return {
        name: Case(settings={"policy_loss": name, **options, **settings})
        for name, options in LOSSES.items()
    }


def test_every_policy_loss_is_tried() -> None:
    assert LOSSES.keys() == POLICY_LOSSES.keys()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(2), id="DP2"),
        pytest.param(Layout(2, {"context_parallel_size": 2}), id="CP2", marks=pytest.mark.slow),
        pytest.param(
            Layout(4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
            id="TP2xPP2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_policy_loss_gives_the_step_of_one_process(
    run_ranks: RunRanks, layout: Layout
) -> None:
    expected = run_cases(run_ranks, Layout(), {n: c.uncut() for n, c in cases().items()})
    outcomes = run_cases(run_ranks, layout, cases(**SMALL_BUDGET))
    for name, outcome in outcomes.items():
        found = differences(outcome, expected[name], "qwen3")
        assert not found, f"{name}: {len(found)} differences: {found[:8]}"
    # Something is cut off by every loss that can, or its bounds were never tried.
    for name, outcome in outcomes.items():
        metrics = outcome.steps[0].metrics
        keys = ("pg_clipfrac", "is_masked", "kl_cov_pulled")
        cut = max(metrics.get(key, 0.0) for key in keys)
        assert name in ("reinforce", "sapo", "vespo", "dro") or cut > 0, name


def _with_an_entropy_bonus(groups: ParallelGroups, start: Start) -> list[dict[str, float]]:
    """A step whose bonus was set before it, and one whose configuration has it."""
    later, from_start = (new_trainer(groups, start, s) for s in ({}, {"entropy_coef": 0.3}))
    later.set_entropy_coef(0.3)
    return [trainer.train_step(start.batch_of(Case())).metrics for trainer in (later, from_start)]


def test_an_entropy_bonus_that_is_set_between_steps_acts_on_the_next(run_ranks: RunRanks) -> None:
    [(later, from_start)] = run_ranks(_with_an_entropy_bonus, 1, Start.of("qwen3"))
    assert later == from_start and later["loss"] != later["pg_loss"]


# --- An independent check: transformers and plain autograd, no code of this package between tokens and gradient. ---


def _model_terms(model: Any, start: Start, temperature: float) -> tuple[Tensor, ...]:
    """cur, entropy [T] with gradient, and mask, advantages, train, rollout, ref, sample index [T]."""
    columns = start.batch.columns
    cur, entropy, sample = [], [], []
    for i, (ids, response) in enumerate(
        zip(columns["unconcat_tokens"], columns["response_lengths"], strict=True)
    ):
        logits = model(ids[None]).logits[0, -response - 1 : -1] / temperature
        log_probs = torch.log_softmax(logits, -1)
        cur.append(log_probs.gather(-1, ids[-response:, None])[:, 0])
        entropy.append(-(log_probs.exp() * log_probs).sum(-1))
        sample.append(torch.full((response,), i))
    flat = [
        columns[name].values
        for name in ("loss_masks", "advantages", "log_probs", "rollout_log_probs", "ref_log_probs")
    ]
    return torch.cat(cur), torch.cat(entropy), *flat, torch.cat(sample)


def _ppo_by_hand(model: Any, start: Start) -> Tensor:
    """PPO, truncated importance sampling, reference KL (k3), rollout KL (k2) and entropy; mean of sample means."""
    cur, entropy, mask, advantages, train, rollout, ref, sample = _model_terms(model, start, 1.0)
    ratio = (cur - train).exp()
    policy = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
    weighted = (train - rollout).exp().clamp(max=1.3) * policy
    reference = (ref - cur).exp() - 1 - (ref - cur)
    per_token = weighted + 0.1 * reference + 0.2 * 0.5 * (cur - rollout).square() - 0.05 * entropy
    means = [
        per_token[(sample == i) & (mask != 0)].mean()
        for i in range(len(start.batch))
        if bool(((sample == i) & (mask != 0)).any())
    ]
    return torch.stack(means).mean()


def _icepop_by_hand(model: Any, start: Start) -> Tensor:
    """IcePop at temperature 0.8 with an entropy bonus, one mean over all tokens with loss."""
    cur, entropy, mask, advantages, _, rollout, _, _ = _model_terms(model, start, 0.8)
    ratio = (cur - rollout).exp()
    kept = (ratio >= 0.7) & (ratio <= 1.4)
    per_token = torch.where(kept, -advantages * ratio, 0.0) - 0.05 * entropy
    return per_token[mask != 0].mean()


BY_HAND = {
    "ppo": (
        _ppo_by_hand,
        {
            "policy_loss": "ppo",
            "use_tis": True,
            "tis_clip": 1.3,
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "kl_loss_type": "k3",
            "use_rollout_kl_loss": True,
            "rollout_kl_loss_coef": 0.2,
            "entropy_coef": 0.05,
        },
    ),
    "icepop": (
        _icepop_by_hand,
        {
            "policy_loss": "icepop",
            "icepop_ratio_low": 0.7,
            "icepop_ratio_high": 1.4,
            "entropy_coef": 0.05,
            "rollout_temperature": 0.8,
        },
    ),
}


def test_loss_and_gradient_norm_are_those_of_transformers_and_plain_autograd(
    run_ranks: RunRanks,
) -> None:
    wanted = {
        f"{loss} {family}": Case(family, settings={**settings, **SMALL_BUDGET}, steps=1)
        for loss, (_, settings) in BY_HAND.items()
        for family in ("qwen3", "qwen3_moe")
    }
    outcomes = run_cases(run_ranks, Layout(), wanted)
    for name, case in wanted.items():
        model = tiny_models.hf_model(tiny_models.FAMILIES[case.family]())
        loss = BY_HAND[name.split()[0]][0](model, Start.of(case.family))
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g) for g in gradients])
        )
        metrics = outcomes[name].steps[0].metrics
        # The mean of terms of order 1 that cancel: float32 gives its last digit, 1e-7, to each.
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=2e-7), name
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5), name
