"""On-policy distillation: the teacher in the advantage of any loss, and the reverse KL over its likeliest ids."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.config.loss.policy_loss import COVARIANCE_LOSSES
from plugin.errors import BatchError, ConfigError
from plugin.logprobs.vocab_parallel import log_probs_of_ids
from plugin.loss.distillation import topk_reverse_kl
from plugin.loss.policy_losses import POLICY_LOSSES
from tests.unit.loss.sample_batches import random_batch, run

MASKS = [[1, 0, 1, 1], [1], [0, 0], [], [1, 1, 0]]
K = 3


def with_teacher(
    batch: dict[str, Any], logits: Tensor, teacher_logits: Tensor, k: int = K
) -> dict[str, Any]:
    """The batch with what a teacher with these logits says of its tokens."""
    log_probs = torch.log_softmax(teacher_logits.reshape(-1, teacher_logits.shape[-1]), -1)
    own, ids, numbers, start = [], [], [], 0
    for tokens, total, response in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    ):
        rows = log_probs[start + total - response - 1 : start + total - 1]
        own.append(rows.gather(1, tokens[total - response :, None])[:, 0])
        best = rows.topk(k, dim=1)
        ids.append(best.indices.int())
        numbers.append(best.values)
        start += total
    return {
        **batch,
        "teacher_log_probs": own,
        "teacher_topk_ids": ids,
        "teacher_topk_log_probs": numbers,
    }


@pytest.mark.parametrize("loss", COVARIANCE_LOSSES)
def test_a_teacher_is_refused_where_advantages_choose_tokens(loss: str) -> None:
    with pytest.raises(ConfigError, match=f"--teacher-tau 2.0 with --policy-loss {loss}"):
        LossConfig(policy_loss=loss, teacher_tau=2.0)


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES.keys() - set(COVARIANCE_LOSSES)))
def test_a_teacher_joins_the_advantage_of_every_policy_loss(loss: str) -> None:
    # The same step as with the joined advantages given: A := 0.5 A + 2 (teacher - cur)
    batch, logits = random_batch(MASKS, seed=5)
    batch = with_teacher(batch, logits, logits + torch.randn_like(logits))
    _, _, metrics = run(LossConfig(policy_loss=loss), batch, logits)
    guided = LossConfig(policy_loss=loss, adv_tau=0.5, teacher_tau=2.0)
    loss_value, gradient, taught = run(guided, batch, logits)
    log_probs = torch.log_softmax(logits.reshape(-1, logits.shape[-1]), -1)
    joined, start = [], 0
    for i, (tokens, total, response) in enumerate(
        zip(
            batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
        )
    ):
        rows = log_probs[start + total - response - 1 : start + total - 1]
        cur = rows.gather(1, tokens[total - response :, None])[:, 0]
        joined.append(0.5 * batch["advantages"][i] + 2 * (batch["teacher_log_probs"][i] - cur))
        start += total
    expected = run(LossConfig(policy_loss=loss), {**batch, "advantages": joined}, logits)
    torch.testing.assert_close(loss_value, expected[0])
    torch.testing.assert_close(gradient, expected[1])
    torch.testing.assert_close(taught["teacher_kl"], metrics["teacher_kl"])
    assert gradient.any()


def test_the_kl_over_two_of_four_ids_is_that_of_three_buckets() -> None:
    # policy 0.5, 0.2 and 0.3 left; teacher 0.6, 0.3 and 0.1 left:
    # 0.5 log(0.5/0.6) + 0.2 log(0.2/0.3) + 0.3 log(0.3/0.1) = -0.0911608 - 0.0810930 + 0.3295837
    cur = torch.tensor([[0.5, 0.2]]).log().requires_grad_()
    teacher = torch.tensor([[0.6, 0.3]]).log()
    kl = topk_reverse_kl(cur, teacher, torch.tensor([True]))
    torch.testing.assert_close(kl, torch.tensor([0.1573299]))
    kl.backward()
    # p_i (log(p_i/q_i) - log(p_rest/q_rest)): 0.5 (-0.1823216 - 1.0986123), 0.2 (-0.4054651 - 1.0986123)
    torch.testing.assert_close(cur.grad, torch.tensor([[-0.6404669, -0.3008155]]))


def test_the_kl_is_a_lower_bound_that_all_ids_reach() -> None:
    generator = torch.Generator().manual_seed(1)
    cur, teacher = (
        torch.log_softmax(2 * torch.randn(50, 9, generator=generator), -1) for _ in range(2)
    )
    whole = (cur.exp() * (cur - teacher)).sum(1)
    mask = torch.ones(50, dtype=torch.bool)
    before = torch.zeros(50)
    for k in range(1, 10):
        ids = teacher.topk(k, dim=1).indices
        found = topk_reverse_kl(cur.gather(1, ids), teacher.gather(1, ids), mask)
        assert bool((found <= whole + 1e-5).all()) and bool((found >= before - 1e-5).all()), k
        before = found
    torch.testing.assert_close(before, whole, rtol=1e-4, atol=1e-5)


def reference_kl(logits: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """The formula in float64, written over the logits, with autograd's own gradient."""
    p = torch.softmax(logits, -1).gather(1, ids)
    q = teacher.double().exp()
    rest = 1 - p.sum(1), 1 - q.sum(1)
    return (p * (p / q).log()).sum(1) + rest[0] * (rest[0] / rest[1]).log()


def test_the_gradient_of_the_logits_is_that_of_finite_differences() -> None:
    batch, logits = random_batch(MASKS, seed=2)
    batch = with_teacher(batch, logits, logits + torch.randn_like(logits))
    config = LossConfig(policy_loss="reinforce", distill_topk=K, distill_coef=0.7, adv_tau=0.0)
    loss, gradient, metrics = run(config, batch, logits)
    flat = logits.reshape(-1, logits.shape[-1]).double()

    def value(flat: Tensor) -> Tensor:
        total, start = flat.new_zeros(()), 0
        for i, mask in enumerate(MASKS):
            response, length = len(mask), int(batch["total_lengths"][i])
            rows = flat[start + length - response - 1 : start + length - 1]
            kept = torch.tensor(mask, dtype=torch.bool)
            kl = reference_kl(rows, batch["teacher_topk_ids"][i].long(), batch["teacher_topk_log_probs"][i])  # fmt: skip
            # a sample's mean over its unmasked tokens
            total = total + kl[kept].sum() / max(1, int(kept.sum()))
            start += length
        return 0.7 * total

    torch.testing.assert_close(loss.double(), value(flat), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics["distill_kl"].double() * 0.7, value(flat), rtol=1e-5, atol=1e-6)  # fmt: skip
    step, found = 1e-5, torch.zeros_like(flat)
    for row, column in torch.cartesian_prod(*(torch.arange(n) for n in flat.shape)).tolist():
        moved = torch.zeros_like(flat)
        moved[row, column] = step
        found[row, column] = (value(flat + moved) - value(flat - moved)) / (2 * step)
    torch.testing.assert_close(gradient.reshape(flat.shape).double(), found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("k", [1, 3, None])
def test_a_teacher_that_is_the_policy_gives_exactly_nothing(k: int | None) -> None:
    _, logits = random_batch(MASKS, seed=4)
    k = logits.shape[-1] if k is None else k
    rows = logits.reshape(-1, logits.shape[-1])
    tokens = torch.zeros(len(rows), dtype=torch.int64)
    ids = rows.topk(k, dim=1).indices
    _, _, same = log_probs_of_ids(rows.clone().requires_grad_(), tokens, ids)
    leaf = rows.clone().requires_grad_()
    _, _, cur = log_probs_of_ids(leaf, tokens, ids)
    kl = topk_reverse_kl(cur, same.detach(), torch.ones(len(rows), dtype=torch.bool))
    kl.sum().backward()
    assert leaf.grad is not None
    assert not kl.any() and not leaf.grad.any()


def test_nothing_masked_changes_the_kl_and_a_bad_unmasked_value_is_named() -> None:
    batch, logits = random_batch(MASKS, seed=6)
    batch = with_teacher(batch, logits, logits + torch.randn_like(logits))
    config = LossConfig(policy_loss="ppo", distill_topk=K, teacher_tau=0.5)
    loss, gradient, metrics = run(config, batch, logits)
    for garbage in (math.nan, -math.inf, math.inf, 1e30):
        spoiled = [values.clone() for values in batch["teacher_topk_log_probs"]]
        spoiled[0][1], spoiled[4][2] = garbage, garbage
        again = run(config, {**batch, "teacher_topk_log_probs": spoiled}, logits)
        assert torch.equal(loss, again[0]) and torch.equal(gradient, again[1])
        assert all(torch.equal(value, again[2][name]) for name, value in metrics.items())
    spoiled[0][2, 1] = math.nan
    with pytest.raises(BatchError, match=r"teacher_topk_log_probs .* at sample 0, position 2"):
        run(config, {**batch, "teacher_topk_log_probs": spoiled}, logits)


def test_a_batch_without_what_the_teacher_says_is_refused() -> None:
    batch, logits = random_batch(MASKS)
    with pytest.raises(ConfigError, match="--distill-topk is 3 but the batch lacks teacher_topk"):
        run(LossConfig(distill_topk=3), batch, logits)
    without = {name: v for name, v in batch.items() if name != "teacher_log_probs"}
    with pytest.raises(ConfigError, match=r"--teacher-tau is 1.0 but the batch has no teacher_log"):
        run(LossConfig(teacher_tau=1.0), without, logits)
