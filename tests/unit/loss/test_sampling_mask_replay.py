"""Truncated sampling: with the kept ids the expected gradient is exact, without them it is not; slime's fields."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import LossConfig
from plugin.engines.protocol import SamplingParameters
from plugin.engines.transformers.sampling import kept_ids, sampling_log_probs
from plugin.errors import BatchError
from plugin.loss import policy_loss_function
from plugin.ragged import Ragged
from tests.unit.config.test_slime_flags import slime
from tests.unit.loss.sample_batches import VOCABULARY, random_batch
from tests.unit.loss.test_bandit_expectation import UNBIASED, UNBOUNDED, correction

CUR = torch.tensor([0.5, -0.3, 0.2, -0.6, 0.9, -0.2])
TRAIN = torch.tensor([0.1, 0.4, -0.2, 0.3, 0.5, 0.0])
ROLLOUT = torch.tensor([0.3, 0.1, -0.9, 0.6, 1.4, -0.5])
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0, 0.3, -1.0, 4.0])
TRUNCATIONS = {
    "top-k 3": SamplingParameters(top_k=3),
    "top-p 0.8": SamplingParameters(top_p=0.8),
    "both": SamplingParameters(top_p=0.85, top_k=5),
}


def bandit(parameters: SamplingParameters, *, replay: bool, **flags: Any) -> tuple[Tensor, Tensor]:
    """Expected gradient over all actions that the engine can sample, and the exact one.

    The truncated policy of theta is softmax over the engine's kept ids S, and J = sum over S of p(a) A(a), so
    dJ/dtheta_k = p(k) (A(k) - J) for k in S and 0 elsewhere.
    """
    behavior = sampling_log_probs(ROLLOUT[None], parameters)[0]
    [kept] = kept_ids(behavior[None])
    actions = kept.tolist()
    assert 1 < len(actions) < len(CUR)
    policy = CUR.double()[actions].softmax(-1)
    true = torch.zeros(len(CUR), dtype=torch.float64)
    advantages = ADVANTAGES.double()[actions]
    true[actions] = policy * (advantages - (policy * advantages).sum())
    # What the trainer's own pass reports as old log-probs is of the same ids as its current ones.
    old = TRAIN[actions].log_softmax(-1) if replay else TRAIN.log_softmax(-1)[actions]
    batch: dict[str, Any] = {
        "unconcat_tokens": [torch.tensor([0, a]) for a in actions],
        "total_lengths": [2 for _ in actions],
        "response_lengths": [1 for _ in actions],
        "loss_masks": [torch.ones(1) for _ in actions],
        "advantages": list(ADVANTAGES[actions].split(1)),
        "log_probs": list(old.split(1)),
        "rollout_log_probs": list(behavior[actions].split(1)),
    }
    if replay:
        batch["rollout_kept_ids"] = [kept for _ in actions]
        batch["rollout_kept_counts"] = [torch.tensor([len(kept)]) for _ in actions]
    theta = CUR.clone().requires_grad_()
    logits = theta.expand(2 * len(actions), -1)[None]
    config = LossConfig(**{**UNBOUNDED, **flags})
    weights = behavior[actions].exp()
    loss, _ = policy_loss_function(config, batch, logits, lambda x: (x * weights).sum())
    loss.backward()
    assert theta.grad is not None
    return -theta.grad.double(), true


def relative_error(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


@pytest.mark.parametrize("base, hook", UNBIASED)
@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_replay_makes_every_correction_exact_under_truncation(
    base: str, hook: str | None, truncation: str
) -> None:
    flags = {"policy_loss": base, **correction(hook)}
    parameters = TRUNCATIONS[truncation]
    assert relative_error(*bandit(parameters, replay=True, **flags)) < 1e-6
    assert relative_error(*bandit(parameters, replay=False, **flags)) > 0.05


def two_steps(*, replay: bool) -> tuple[Tensor, Tensor]:
    """A policy of two tokens whose second distribution depends on the first; every pair is enumerated.

    On-policy, so the exact gradient is that of J = sum over pairs of p(a) p(b | a) R(a, b) over kept ids.
    """
    generator = torch.Generator().manual_seed(4)
    table = torch.randn(6, 5, generator=generator)  # row 0: first token; row 1 + a: second after a
    rewards = torch.randn(5, 5, generator=generator)
    behavior = sampling_log_probs(table, SamplingParameters(top_p=0.8, top_k=4))
    sets = kept_ids(behavior)
    exact = table.double().requires_grad_()
    drop = behavior.isneginf()
    log_probs = exact.masked_fill(drop, -torch.inf).log_softmax(-1)
    pairs = [(a, b) for a in sets[0].tolist() for b in sets[1 + a].tolist()]
    chances = torch.stack([log_probs[0, a] + log_probs[1 + a, b] for a, b in pairs]).exp()
    (chances * torch.tensor([rewards[pair] for pair in pairs])).sum().backward()
    theta = table.clone().requires_grad_()
    batch: dict[str, Any] = {
        "unconcat_tokens": [torch.tensor([0, a, b]) for a, b in pairs],
        "total_lengths": [3 for _ in pairs],
        "response_lengths": [2 for _ in pairs],
        "loss_masks": [torch.ones(2) for _ in pairs],
        "advantages": [rewards[pair].repeat(2) for pair in pairs],
        "rollout_log_probs": [behavior[[0, 1 + a], [a, b]] for a, b in pairs],
    }
    if replay:
        rows = [(sets[0], sets[1 + a]) for a, _ in pairs]
        batch["rollout_kept_ids"] = [torch.cat(row) for row in rows]
        batch["rollout_kept_counts"] = [torch.tensor([*map(len, row)]) for row in rows]
    logits = torch.cat([theta[[0, 1 + a, 0]] for a, _ in pairs])
    weights = chances.detach().float().repeat_interleave(2)
    loss, _ = policy_loss_function(
        LossConfig(policy_loss="reinforce"), batch, logits, lambda x: (x * weights).sum()
    )
    loss.backward()
    assert theta.grad is not None and exact.grad is not None
    return -theta.grad.double(), exact.grad


def test_a_sequence_policy_gets_its_exact_gradient_with_replay_only() -> None:
    assert relative_error(*two_steps(replay=True)) < 1e-6
    assert relative_error(*two_steps(replay=False)) > 0.05


MASKS = [[1, 1, 1], [0, 1], [1, 1, 0, 1]]


def slime_batch(seed: int = 3) -> tuple[dict[str, Any], Tensor, Tensor]:
    """slime's batch with a nucleus of 3 of 7 ids per token, and which logits [1, T, V] it drops.

    Ids come in the engine's order, here descending; masked tokens have none.
    """
    batch, logits = random_batch(MASKS, seed=seed)
    drop = torch.zeros_like(logits, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    ids, offsets, start = [], [], 0
    for tokens, total, mask in zip(
        batch["unconcat_tokens"], batch["total_lengths"], MASKS, strict=True
    ):
        own, ends = [], [0]
        for position, used in enumerate(mask):
            token = int(tokens[total - len(mask) + position])
            others = [
                i for i in torch.randperm(VOCABULARY, generator=generator).tolist() if i != token
            ]
            row = sorted([token, *others[:2]], reverse=True) if used else []
            own += row
            ends.append(len(own))
            if used:
                drop[0, start + total - len(mask) + position - 1] = True
                drop[0, start + total - len(mask) + position - 1, row] = False
        ids.append(torch.tensor(own, dtype=torch.int32))
        offsets.append(torch.tensor(ends, dtype=torch.int32))
        start += total
    batch |= {"rollout_top_p_token_ids": ids, "rollout_top_p_token_offsets": offsets}
    return batch, logits, drop


def run(args: Namespace, batch: dict[str, Any], logits: Tensor) -> tuple[Tensor, Tensor, Any]:
    source = logits.clone().requires_grad_()
    loss, metrics = policy_loss_function(args, batch, source, torch.sum)
    return loss.detach(), torch.autograd.grad(loss, source)[0], metrics


@pytest.mark.parametrize("changes", [{}, {"use_tis": True}, {"rollout_temperature": 0.7}])
def test_slime_gets_log_probs_of_its_nucleus_and_the_entropy_of_everything(
    changes: dict[str, Any],
) -> None:
    batch, logits, drop = slime_batch()
    loss, gradient, metrics = run(slime(rollout_top_p=0.9, **changes), batch, logits)
    # What slime does: the dropped logits are -inf for the log-probs, and not for the entropy.
    wanted, by_hand, _ = run(slime(**changes), batch, logits.masked_fill(drop, -torch.inf))
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradient, by_hand)
    full, _, of_all = run(slime(**changes), batch, logits)
    torch.testing.assert_close(metrics["entropy_loss"], of_all["entropy_loss"])
    # rollout_top_p 1 does not look at the fields, as in slime.
    assert not torch.allclose(full, wanted)


def test_our_own_fields_say_the_same() -> None:
    batch, logits, _ = slime_batch()
    wanted, gradient, _ = run(slime(rollout_top_p=0.9), batch, logits)
    ids, offsets = batch.pop("rollout_top_p_token_ids"), batch.pop("rollout_top_p_token_offsets")
    counts = [ends.diff() for ends in offsets]
    rows = [Ragged(own, count) for own, count in zip(ids, counts, strict=True)]
    batch["rollout_kept_ids"] = [torch.cat([r.sort().values for r in row]) for row in rows]
    batch["rollout_kept_counts"] = counts
    loss, same, _ = run(Namespace(policy_loss="ppo", calculate_per_token_loss=False), batch, logits)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(same, gradient)


def spoiled(change: str) -> dict[str, Any]:
    batch, _, _ = slime_batch()
    ids, offsets = batch["rollout_top_p_token_ids"], batch["rollout_top_p_token_offsets"]
    if change == "no field":
        del batch["rollout_top_p_token_offsets"]
    elif change == "missing row":
        offsets[1] = offsets[1][:-1]
    elif change == "none of a sample":
        ids[1] = offsets[1] = None
    elif change == "backwards":
        offsets[1] = torch.tensor([0, 5, 3], dtype=torch.int32)
    elif change == "empty row":
        ids[1], offsets[1] = ids[1][:0], torch.zeros(3, dtype=torch.int32)
    elif change == "not kept":
        ids[1][ids[1] == batch["unconcat_tokens"][1][-1]] = max(set(range(7)) - {*ids[1].tolist()})
    else:
        ids[1][0] = {"twice": int(ids[1][1]), "too large": VOCABULARY, "negative": -1}[change]
    return batch


@pytest.mark.parametrize(
    "change, message",
    [
        ("no field", "--rollout-top-p is below 1 and the batch has no rollout_top_p_token_offsets"),
        ("missing row", r"rollout_top_p_token_offsets of sample 1 are \[0, 0\]; .* needs 3"),
        ("none of a sample", r"offsets of sample 1 are \[\]; a response of 2 tokens"),
        ("backwards", r"sample 1 are \[0, 5, 3\]; .* that ascend from 0 to 3"),
        ("empty row", "position 1 of sample 1 has no kept ids"),
        ("not kept", "position 1 of sample 1 was sampled as .* not among its 3 kept ids"),
        ("twice", "position 1 of sample 1 keeps the id . twice"),
        ("too large", "position 1 of sample 1 keeps the id 7, which is not in the vocabulary of 7"),
        ("negative", "position 1 of sample 1 keeps the id -1"),
    ],
)
def test_wrong_fields_are_errors_that_name_sample_and_position(change: str, message: str) -> None:
    _, logits, _ = slime_batch()
    with pytest.raises(BatchError, match=message):
        run(slime(rollout_top_p=0.9), spoiled(change), logits)
