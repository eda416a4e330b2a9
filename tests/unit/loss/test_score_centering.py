"""Score centering: no drift with the whole distribution, less with more of it, and nothing masked is computed with.

The policies are softmax over a few actions, so every expectation is a sum over all of them: nothing is sampled.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.config.other_frameworks import loss_config_of
from plugin.engines.protocol import SamplingParameters
from plugin.engines.transformers.sampling import kept_ids, sampling_log_probs
from plugin.errors import BatchError, ConfigError
from plugin.loss import policy_loss_function
from plugin.loss.interfaces import Head
from plugin.loss.score_centering import Tails, centering_term
from plugin.vocabulary_ids import SamplerHead
from tests.unit.config.test_slime_flags import slime
from tests.unit.loss.sample_batches import GARBAGE, random_batch, run
from tests.unit.loss.test_bandit_expectation import correction

ACTIONS = 8
CUR = torch.tensor([0.5, -0.3, 0.2, -0.6, 0.9, -0.2, -1.1, 0.05])
ROLLOUT = torch.tensor([0.3, 0.1, -0.9, 0.6, 1.4, -0.5, -0.7, -1.3])
MASKS = [[1, 0, 1, 1], [1], [0, 0], [], [1, 1, 0]]

#: What is weighted by the current policy over the one that sampled, or not at all.
ANY_UPDATE: dict[str, dict[str, Any]] = {
    "reinforce": {"policy_loss": "reinforce"},
    "off_policy_is": {
        "policy_loss": "reinforce",
        "eps_clip": 0.6,
        "eps_clip_high": 0.3,
        **correction("off_policy_is_function"),
    },
    "icepop": {"policy_loss": "icepop", "icepop_ratio_low": 0.7, "icepop_ratio_high": 1.4},
    "dppo_tv": {"policy_loss": "dppo_tv", "dppo_diff_low": 0.03, "dppo_diff_high": 0.1},
    "dppo": {"policy_loss": "dppo", "dppo_mask_low": 0.03, "dppo_mask_high": 0.05, "kl_tau": 0.0},
    "dppo_kl": {"policy_loss": "dppo_kl", "dppo_kl_threshold": 0.01},
    "ipo_tv": {"policy_loss": "ipo_tv", "ipo_threshold": 0.05, "kl_tau": 0.0},
    "ppo against rollout": {"policy_loss": "ppo", "train_log_probs": "rollout", "eps_clip": 0.3},
    "dppo_tv_mask": {
        "policy_loss": "reinforce",
        "dppo_diff_low": 0.03,
        "dppo_diff_high": 0.1,
        **correction("dppo_tv_mask_function"),
    },
}
#: What is weighted by the old policy, which is the current one on the first update.
FIRST_UPDATE: dict[str, dict[str, Any]] = {
    "vanilla_tis": {"policy_loss": "ppo", "tis_clip": 1.2, **correction("vanilla_tis_function")},
    "icepop_hook": {
        "policy_loss": "reinforce",
        "tis_clip": 1.4,
        "tis_clip_low": 0.7,
        **correction("icepop_function"),
    },
    "kpop": {"policy_loss": "cispo", "kpop_threshold": 0.01, **correction("kpop_function")},
    "sapo": {"policy_loss": "sapo"},
}


def plain_hook(args: Any, *, pg_loss: Tensor, loss_masks: Any, **_: Any) -> Any:
    return pg_loss, loss_masks, {}


def bandit(
    topk: int | None,
    *,
    advantages: Tensor | None = None,
    parameters: SamplingParameters | None = None,
    **flags: Any,
) -> Tensor:
    """-gradient of the expected loss over all actions, weighted by the policy that samples.

    advantages: of the actions; None = 1 for all, so that the whole update is drift
    parameters: of truncated sampling, whose kept ids are replayed
    """
    behavior = sampling_log_probs(ROLLOUT[None], parameters or SamplingParameters())[0]
    actions = behavior.isfinite().nonzero()[:, 0].tolist()
    head = SamplerHead.of(behavior[None], topk or 1)
    batch: dict[str, Any] = {
        "unconcat_tokens": [torch.tensor([0, a]) for a in actions],
        "total_lengths": [2 for _ in actions],
        "response_lengths": [1 for _ in actions],
        "loss_masks": [torch.ones(1) for _ in actions],
        "advantages": list((torch.ones(ACTIONS) if advantages is None else advantages)[actions].split(1)),
        "rollout_log_probs": list(behavior[actions].split(1)),
        "rollout_topk_token_ids": [head.ids for _ in actions],
        "rollout_topk_log_probs": [head.log_probs for _ in actions],
    }  # fmt: skip
    if parameters is not None:
        [kept] = kept_ids(behavior[None])
        batch["rollout_kept_ids"] = [kept for _ in actions]
        batch["rollout_kept_counts"] = [torch.tensor([len(kept)]) for _ in actions]
    theta = CUR.clone().requires_grad_()
    logits = theta.expand(2 * len(actions), -1)[None]
    config = LossConfig(**{**flags, "score_centering_topk": topk or 0})
    weights = behavior[actions].exp()
    loss, _ = policy_loss_function(config, batch, logits, lambda x: (x * weights).sum())
    loss.backward()
    assert theta.grad is not None
    return -theta.grad.double()


@pytest.mark.parametrize("name", [*ANY_UPDATE, *FIRST_UPDATE])
def test_the_drift_is_0_with_the_whole_distribution(name: str) -> None:
    # With the same advantage everywhere, E_q[A] E_q[w grad log p] is the whole update.
    flags = (ANY_UPDATE | FIRST_UPDATE)[name]
    assert float(bandit(None, **flags).norm()) > 0.02
    assert float(bandit(ACTIONS, **flags).norm()) < 1e-6
    assert float(bandit(ACTIONS, advantages=torch.full((ACTIONS,), -0.7), **flags).norm()) < 1e-6


@pytest.mark.parametrize("name", [*ANY_UPDATE, *FIRST_UPDATE])
def test_the_update_is_the_covariance_of_advantage_and_weighted_score(name: str) -> None:
    # E[A (w s - E[w s])]: centered with each action's own A, so an A that changes the loss's mask changes w as well.
    flags = (ANY_UPDATE | FIRST_UPDATE)[name]
    advantages = torch.tensor([1.0, 0.5, 2.0, 0.3, 1.2, 0.1, 0.7, 1.9])
    found = bandit(ACTIONS, advantages=advantages, **flags)
    q = ROLLOUT.double().softmax(-1)
    uncentered = bandit(None, advantages=advantages, **flags)
    drift = bandit(None, **flags)  # E[w s], for every positive A
    mean = float((q * advantages.double()).sum())
    torch.testing.assert_close(found, uncentered - mean * drift, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["reinforce", "icepop", "vanilla_tis", "icepop_hook"])
def test_the_drift_falls_with_the_head(name: str) -> None:
    flags = (ANY_UPDATE | FIRST_UPDATE)[name]
    drifts = [float(bandit(k, **flags).norm()) for k in (None, 1, 2, 4, 6, 7, 8)]
    assert drifts[0] > drifts[3] > drifts[4] >= drifts[5] - 1e-7 and drifts[6] < 1e-6
    # One token in the tail is known from its mass: nothing is left.
    assert drifts[5] < 1e-6


def test_what_remains_is_the_difference_of_the_tails_shapes() -> None:
    # mu - mu_hat = sum outside H of (q - rho p) s, of which s = e_v - p
    p, q = CUR.double().softmax(-1), ROLLOUT.double().softmax(-1)
    for k in (2, 4):
        tail = q.argsort(descending=True)[k:]
        rho = q[tail].sum() / p[tail].sum()
        rest = torch.zeros(ACTIONS, dtype=torch.float64)
        rest[tail] = q[tail] - rho * p[tail]
        expected = rest - p * rest.sum()
        torch.testing.assert_close(
            bandit(k, policy_loss="reinforce"), expected, rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize(
    "parameters", [SamplingParameters(top_k=4), SamplingParameters(top_p=0.8), SamplingParameters(top_p=0.9, top_k=5)]
)  # fmt: skip
@pytest.mark.parametrize("name", ["reinforce", "icepop", "off_policy_is", "vanilla_tis"])
def test_truncated_sampling_is_centered_over_the_kept_ids(
    name: str, parameters: SamplingParameters
) -> None:
    flags = {**(ANY_UPDATE | FIRST_UPDATE)[name], "parameters": parameters}
    whole = bandit(ACTIONS, **flags)
    assert float(bandit(None, **flags).norm()) > 0.01 and float(whole.norm()) < 1e-6
    two = bandit(2, **flags)  # the tail is that of the kept ids
    kept = sampling_log_probs(ROLLOUT[None], parameters)[0].isfinite()
    assert not two[~kept].any() and float(two.norm()) < float(bandit(None, **flags).norm())


def test_the_formula_by_hand() -> None:
    # H of two ids: p 0.5, 0.2 and 0.3 left; q 0.4, 0.4 and 0.2 left. rho = 0.2 / 0.3
    # min(p / q, 1.2): 1.2, 0.5 and for the tail min(1.5, 1.2); A = 2 in the weights
    # 2 * (0.4 * 1.2 - rho * 1.2 * 0.5) = 2 * (0.48 - 0.4) = 0.16
    # 2 * (0.4 * 0.5 - rho * 1.2 * 0.2) = 2 * (0.2 - 0.16) = 0.08
    found = torch.ones(1, 2, dtype=torch.bool)
    cur = torch.tensor([[0.5, 0.2]]).log().requires_grad_()
    head = Head(cur, torch.tensor([[0.4, 0.4]]).log(), found)
    weights = 2 * torch.tensor([[1.2, 0.5, 1.2]])
    term = centering_term(head, Tails.of(head), weights, torch.ones(1))
    term.loss.sum().backward()
    torch.testing.assert_close(cur.grad, torch.tensor([[0.16, 0.08]]))
    expected = torch.tensor([0.16 * math.log(0.5) + 0.08 * math.log(0.2)])
    torch.testing.assert_close(term.loss.detach(), expected)
    for name, value in (
        ("head_mass", 0.8), ("cur_head_mass", 0.7), ("tail_ratio", 2 / 3), ("size", 0.24)
    ):  # fmt: skip
        metric = term.metrics[f"score_centering/{name}"]
        torch.testing.assert_close(metric, torch.tensor([value]), rtol=1e-5, atol=1e-6)


def test_where_both_policies_agree_to_the_bit_it_is_exactly_0() -> None:
    log_probs = torch.randn(50, 9).log_softmax(-1)[:, :5]
    cur = log_probs.clone().requires_grad_()
    head = Head(cur, log_probs, torch.ones(50, 5, dtype=torch.bool))
    advantages = torch.randn(50, 1).expand(50, 6)
    term = centering_term(head, Tails.of(head), advantages, torch.ones(50))
    term.loss.sum().backward()
    assert cur.grad is not None and not cur.grad.any() and not term.loss.any()


def centered_batch(seed: int, k: int = 3, mismatch: float = 0.4) -> tuple[dict[str, Any], Tensor]:
    """A random batch whose sampler's logits are near the trainer's, with heads; and the logits."""
    batch, logits = random_batch(MASKS, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    sampler = logits[0] + mismatch * torch.randn(logits[0].shape, generator=generator)
    behavior, start = sampler.log_softmax(-1), 0
    columns: dict[str, list[Tensor]] = {"rollout_topk_token_ids": [], "rollout_topk_log_probs": []}
    log_probs = []
    for tokens, total, n in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    ):
        rows = behavior[start + total - n - 1 : start + total - 1]
        head = SamplerHead.of(rows, k)
        for column, values in zip(columns.values(), head, strict=True):
            column.append(values)
        log_probs.append(rows.gather(1, tokens[total - n :, None])[:, 0])
        start += total
    return {**batch, **columns, "rollout_log_probs": log_probs}, logits


def test_the_gradient_of_the_logits_is_that_of_finite_differences() -> None:
    batch, logits = centered_batch(2)
    band = {"policy_loss": "icepop", "icepop_ratio_low": 0.9, "icepop_ratio_high": 1.15}
    _, plain, _ = run(LossConfig(**band), batch, logits)
    _, gradient, _ = run(LossConfig(**band, score_centering_topk=3), batch, logits)
    flat = logits[0].double()

    # The coefficients are constants of the differentiation.
    def coefficients(rows: Tensor, i: int) -> Tensor:
        ids = batch["rollout_topk_token_ids"][i].long()
        p, q = rows.softmax(-1).gather(1, ids), batch["rollout_topk_log_probs"][i].double().exp()
        rho = (1 - q.sum(1)) / (1 - p.sum(1))
        ratio, tail = p / q, 1 / rho
        inside = (ratio >= 0.9) & (ratio <= 1.15)
        of_tail = torch.where((tail >= 0.9) & (tail <= 1.15), tail, 0.0)
        a = batch["advantages"][i].double()[:, None]
        return a * (torch.where(inside, p, 0.0) - (rho * of_tail)[:, None] * p)

    rows_of, start = [], 0
    for total, n in zip(batch["total_lengths"], batch["response_lengths"], strict=True):
        rows_of.append(slice(start + total - n - 1, start + total - 1))
        start += total
    fixed = [coefficients(flat[rows], i) for i, rows in enumerate(rows_of)]

    def value(flat: Tensor) -> Tensor:
        total = flat.new_zeros(())
        for i, rows in enumerate(rows_of):
            ids = batch["rollout_topk_token_ids"][i].long()
            log_p = flat[rows].log_softmax(-1).gather(1, ids)
            kept = torch.tensor(MASKS[i], dtype=torch.bool)
            total = total + (fixed[i] * log_p)[kept].sum()
        return total

    step, found = 1e-5, torch.zeros_like(flat)
    for row, column in torch.cartesian_prod(*(torch.arange(n) for n in flat.shape)).tolist():
        moved = torch.zeros_like(flat)
        moved[row, column] = step
        found[row, column] = (value(flat + moved) - value(flat - moved)) / (2 * step)
    torch.testing.assert_close((gradient - plain)[0].double(), found, rtol=1e-4, atol=1e-6)
    assert found.abs().max() > 1e-2


@pytest.mark.parametrize("loss", ["reinforce", "icepop", "ppo"])
def test_nothing_masked_or_absent_changes_anything(loss: str) -> None:
    batch, logits = centered_batch(3)
    band = {"icepop_ratio_low": 0.9, "icepop_ratio_high": 1.15}
    config = LossConfig(policy_loss=loss, score_centering_topk=3, **band)
    loss_value, gradient, metrics = run(config, batch, logits)
    assert metrics["score_centering/size"] > 1e-3
    for garbage in GARBAGE:
        ids, numbers = ([v.clone() for v in batch[f"rollout_topk_{n}"]] for n in ("token_ids", "log_probs"))  # fmt: skip
        numbers[0][1], numbers[4][2] = garbage, garbage
        ids[0][1], ids[2][:] = 10**6, -1
        spoiled = {**batch, "rollout_topk_token_ids": ids, "rollout_topk_log_probs": numbers}
        again = run(config, spoiled, logits)
        assert torch.equal(loss_value, again[0]) and torch.equal(gradient, again[1])
        assert all(torch.equal(value, again[2][name]) for name, value in metrics.items())
        # A head with a free place: an id of -1, whatever its log-prob.
        wider = {
            "rollout_topk_token_ids": [torch.cat([v, torch.full((len(v), 1), -1).int()], 1) for v in ids],
            "rollout_topk_log_probs": [torch.cat([v, torch.full((len(v), 1), garbage)], 1) for v in numbers],
        }  # fmt: skip
        again = run(config, {**spoiled, **wider}, logits)
        torch.testing.assert_close(gradient, again[1], rtol=1e-6, atol=1e-8)
    numbers[0][2, 1] = math.nan
    ids[0][2] = torch.tensor([1, 2, 3]).int()
    with pytest.raises(BatchError, match=r"rollout_topk_log_probs .* at sample 0, position 2"):
        run(config, {**spoiled, "rollout_topk_log_probs": numbers}, logits)


def test_a_dropped_sequence_loses_its_term_and_a_dropped_token_keeps_it() -> None:
    batch, logits = centered_batch(5, mismatch=0.8)
    batch["log_probs"] = None  # the first update: the old policy is the current one
    centered = {"policy_loss": "reinforce", "score_centering_topk": 3}

    def terms(**flags: Any) -> Tensor:
        """What centering adds to the gradient of every row."""
        with_it = run(LossConfig(**centered, **flags), batch, logits)[1]
        return (with_it - run(LossConfig(policy_loss="reinforce", **flags), batch, logits)[1])[0]

    alone = terms()
    rows, ratios, means = [], [], []
    for i in (0, 1, 4):
        start = sum(batch["total_lengths"][:i])
        total, n = batch["total_lengths"][i], batch["response_lengths"][i]
        first = start + total - n - 1
        cur = logits[0].log_softmax(-1)[first : first + n]
        cur = cur.gather(1, batch["unconcat_tokens"][i][total - n :, None])[:, 0]
        keep = torch.tensor(MASKS[i], dtype=torch.bool)
        log_r = (cur - batch["rollout_log_probs"][i])[keep]
        rows += (first + keep.nonzero()[:, 0]).tolist()
        ratios += log_r.exp().tolist()
        means.append(float(log_r.mean().exp()))
    assert alone[rows].any(1).all()
    # One of the three samples is outside of the band.
    low, high = sorted(means)[:2]
    dropped = [i for i, mean in zip((0, 1, 4), means, strict=True) if mean == low]
    sequence = {
        **correction("geometric_mask_function"),
        "geometric_mask_low": (low + high) / 2,
        "geometric_mask_high": 100.0,
    }
    of_sequences = terms(**sequence)
    starts = [sum(batch["total_lengths"][:i]) for i in range(5)]
    for i in (0, 1, 4):
        rows_of = slice(starts[i], starts[i] + batch["total_lengths"][i])
        if i in dropped:
            assert not of_sequences[rows_of].any()
        else:
            assert torch.equal(of_sequences[rows_of], alone[rows_of])
    # A token whose own ratio leaves the band keeps the expectation over the ids inside of it.
    low, high = sorted(ratios)[2:4]
    band = {**correction("icepop_function"), "tis_clip_low": low, "tis_clip": high}
    outside = [row for row, ratio in zip(rows, ratios, strict=True) if not low <= ratio <= high]
    assert outside and terms(**band)[outside].any(1).all()


def test_metrics_are_over_unmasked_tokens() -> None:
    batch, logits = centered_batch(6)
    config = LossConfig(policy_loss="icepop", score_centering_topk=3)
    _, _, metrics = run(config, batch, logits)
    masses = [values.exp().sum(1)[torch.tensor(mask, dtype=torch.bool)] for values, mask in zip(batch["rollout_topk_log_probs"], MASKS, strict=True)]  # fmt: skip
    torch.testing.assert_close(metrics["score_centering/head_mass"], torch.cat(masses).sum())


@pytest.mark.parametrize("flags, message", [
    ({"policy_loss": "gspo"}, "weights a token by its whole sequence"),
    ({"policy_loss": "ipo_kl"}, "mixes a penalty into the loss"),
    ({"distill_topk": 3}, "one set of ids per token"),
    ({"train_log_probs": "approximate"}, "not known for tokens that were not sampled"),
    ({"use_tis": True, "custom_tis_function_path": "tests.unit.loss.test_score_centering.plain_hook"},
     "write it as a function of tokens"),
])  # fmt: skip
def test_what_cannot_be_centered_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossConfig(score_centering_topk=4, **flags)


def test_a_batch_without_heads_is_refused() -> None:
    batch, logits = random_batch(MASKS)
    config = LossConfig(policy_loss="reinforce", score_centering_topk=3)
    with pytest.raises(ConfigError, match="lacks rollout_topk_token_ids or rollout_topk_log_probs"):
        run(config, batch, logits)


def test_slimes_switch_turns_it_on_with_the_fields_that_slime_records() -> None:
    args = slime(use_score_centering=True, score_centering_top_k=3, pg_loss_type="reinforce")
    config = loss_config_of(args)
    assert config.score_centering_topk == 3 and config.policy_loss == "reinforce"
    batch, logits = centered_batch(7)
    ours = LossConfig(policy_loss="reinforce", score_centering_topk=3)
    reducer = torch.sum
    found, _ = policy_loss_function(args, batch, logits, reducer)
    expected, _ = policy_loss_function(ours, batch, logits, reducer)
    assert torch.equal(found, expected)
    assert loss_config_of(slime(use_score_centering=True)).score_centering_topk == 128
