"""What must not change the loss, its gradient or a metric: order, cuts, and anything that is masked."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plugin.config import LossConfig
from plugin.loss import policy_loss_function
from plugin.loss.normalization import token_weights, weighted_sum
from plugin.ppo_utils import ParallelContext, SequenceShards, use_parallel_context
from tests.unit.loss.sample_batches import CONFIGS, GARBAGE, PER_TOKEN, random_batch, run

MASKS = st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=4)
NAMES = st.sampled_from(sorted(CONFIGS))
SEEDS = st.integers(0, 2**31)


def rows_of(batch: dict[str, Any], index: int) -> slice:
    start = sum(batch["total_lengths"][:index])
    return slice(start, start + batch["total_lengths"][index])


def selected(
    batch: dict[str, Any], logits: Tensor, indices: list[int]
) -> tuple[dict[str, Any], Tensor]:
    """The samples at `indices` with their rows of the logits."""
    part = {name: [values[i] for i in indices] for name, values in batch.items()}
    rows = [logits[:, rows_of(batch, i)] for i in indices]
    return part, torch.cat([*rows, logits[:, -1:]], dim=1)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@given(MASKS, NAMES, SEEDS)
def test_the_order_of_samples_does_not_matter(masks: list[list[int]], name: str, seed: int) -> None:
    config = LossConfig(**CONFIGS[name])
    batch, logits = random_batch(masks, seed=seed)
    order = random.Random(seed).sample(range(len(masks)), len(masks))
    loss, gradient, metrics = run(config, batch, logits)
    permuted_loss, permuted_gradient, permuted_metrics = run(
        config, *selected(batch, logits, order)
    )
    close(permuted_loss, loss)
    close(permuted_metrics, metrics)
    close(permuted_gradient, selected(batch, gradient, order)[1])


@given(MASKS, NAMES, SEEDS, st.integers(1, 3))
def test_cutting_a_batch_into_microbatches_adds_up(
    masks: list[list[int]], name: str, seed: int, size: int
) -> None:
    config = LossConfig(**CONFIGS[name])
    batch, logits = random_batch(masks, seed=seed)
    loss, gradient, metrics = run(config, batch, logits)
    indices = list(range(len(masks)))
    cuts = [indices[i : i + size] for i in range(0, len(indices), size)] + [[]]
    parts = [run(config, *selected(batch, logits, cut)) for cut in cuts]
    close(sum(part[0] for part in parts), loss)
    for key in metrics:
        close(sum(part[2][key] for part in parts), metrics[key])
    joined = torch.cat([part[1][:, :-1] for part in parts], dim=1)
    close(joined, gradient[:, :-1])


def with_garbage(batch: dict[str, Any], logits: Tensor, seed: int) -> tuple[dict[str, Any], Tensor]:
    """NaN, infinities and 1e30 wherever a mask is 0: in every field, in token ids, in the logits' rows."""
    draw = random.Random(seed)
    dirty = {name: [v.clone() if isinstance(v, Tensor) else v for v in values] for name, values in batch.items()}  # fmt: skip
    logits = logits.clone()
    predicting = set()
    for i, mask in enumerate(batch["loss_masks"]):
        prompt = batch["total_lengths"][i] - batch["response_lengths"][i]
        first_row = rows_of(batch, i).start + prompt - 1
        for position, live in enumerate(mask.tolist()):
            if live:
                predicting.add(first_row + position)
                continue
            for name in PER_TOKEN:
                dirty[name][i][position] = draw.choice(GARBAGE)
            dirty["unconcat_tokens"][i][prompt + position] = draw.choice([-1, 10**9, 0])
    for row in set(range(logits.shape[1])) - predicting:
        logits[0, row] = draw.choice(GARBAGE)
        logits[0, row, 0] = draw.choice(GARBAGE)
    return dirty, logits


@given(MASKS, NAMES, SEEDS)
def test_masked_garbage_is_invisible_bit_for_bit(
    masks: list[list[int]], name: str, seed: int
) -> None:
    config = LossConfig(**CONFIGS[name])
    batch, logits = random_batch(masks, seed=seed)
    loss, gradient, metrics = run(config, batch, logits)
    dirty = run(config, *with_garbage(batch, logits, seed))
    assert torch.equal(dirty[0], loss) and bool(loss.isfinite())
    assert torch.equal(dirty[1], gradient) and bool(gradient.isfinite().all())
    assert dirty[2].keys() == metrics.keys()
    assert all(torch.equal(dirty[2][key], metrics[key]) for key in metrics)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_configuration_ignores_masked_garbage(name: str) -> None:
    config = LossConfig(**CONFIGS[name])
    batch, logits = random_batch([[1, 0, 1], [0, 0], [0, 1, 1, 0]], seed=4)
    loss, gradient, metrics = run(config, batch, logits)
    for seed in range(5):
        dirty = run(config, *with_garbage(batch, logits, seed))
        assert torch.equal(dirty[0], loss) and torch.equal(dirty[1], gradient)
        assert all(torch.equal(dirty[2][key], metrics[key]) for key in metrics)


@pytest.mark.parametrize("masks", [[], [[]], [[], []], [[0, 0]], [[0], [0, 0], []]])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_nothing_to_learn_from_gives_zero_with_a_graph(name: str, masks: list[list[int]]) -> None:
    config = LossConfig(**CONFIGS[name])
    batch, logits = random_batch(masks)
    logits.fill_(float("nan")).requires_grad_()
    loss, metrics = policy_loss_function(config, batch, logits, lambda x: x.sum())
    assert loss.requires_grad and loss.item() == 0.0
    loss.backward()
    assert logits.grad is not None and not logits.grad.any()
    assert all(value.item() == 0.0 for value in metrics.values())


def test_logits_without_a_single_row_are_fine() -> None:
    batch, _ = random_batch([])
    logits = torch.zeros(1, 0, 7, requires_grad=True)
    loss, _ = policy_loss_function(LossConfig(), batch, logits, lambda x: x.sum())
    loss.backward()
    assert loss.item() == 0.0 and logits.grad is not None


@pytest.mark.parametrize("cp_size", [2, 3])
@pytest.mark.parametrize(
    "name", ["ppo", "reinforce", "cispo", "icepop", "dppo", "vanilla_tis", "off_policy_is"]
)
def test_context_parallel_ranks_add_up_to_the_whole(name: str, cp_size: int) -> None:
    config = LossConfig(**CONFIGS[name])
    batch, logits = random_batch(
        [[1, 0, 1, 1, 1], [1, 1], [], [0], [1] * 9], seed=2, prompts=[3, 1, 2, 5, 1]
    )
    loss, gradient, metrics = run(config, batch, logits)
    total, summed, rebuilt = torch.zeros(()), dict.fromkeys(metrics, 0.0), torch.zeros_like(logits)
    for rank in range(cp_size):
        with use_parallel_context(ParallelContext(cp_rank=rank, cp_size=cp_size)):
            local, rows = context_parallel_part(batch, logits, rank, cp_size)
            weights = token_weights(
                (shards := shards_of(batch)),
                shards.local_mask(batch["loss_masks"]),
                batch["loss_masks"],
                per_token=config.per_token,
            )
            local_logits = local.pop("logits").requires_grad_()
            rank_loss, rank_metrics = policy_loss_function(
                config, local, local_logits, weighted_sum(weights)
            )
            rank_loss.backward()
        total += rank_loss.detach()
        for key, value in rank_metrics.items():
            summed[key] += float(value)
        for local_row, row in enumerate(rows):
            if row is not None:
                rebuilt[0, row] += local_logits.grad[0, local_row]
    close(total, loss)
    close(rebuilt, gradient)
    for key in metrics:
        assert summed[key] == pytest.approx(float(metrics[key]), rel=1e-4, abs=1e-5), key


def shards_of(batch: dict[str, Any]) -> SequenceShards:
    return SequenceShards.of(batch["total_lengths"], batch["response_lengths"], torch.device("cpu"))


def context_parallel_part(
    batch: dict[str, Any], logits: Tensor, rank: int, cp_size: int
) -> tuple[dict[str, Any], list[int | None]]:
    """What rank `rank` is given, built from the definition: chunks r and 2 cp - 1 - r of every padded sample.

    Rows of padding hold NaN. Returns the batch (with `logits`) and the global row of every local row.
    """
    rows: list[int | None] = []
    columns: dict[str, list[Tensor]] = {name: [] for name in PER_TOKEN}
    for i, total in enumerate(batch["total_lengths"]):
        chunk = (total + 2 * cp_size - 1) // (2 * cp_size)
        positions = [
            position
            for index in (rank, 2 * cp_size - 1 - rank)
            for position in range(index * chunk, (index + 1) * chunk)
        ]
        start, prompt = rows_of(batch, i).start, total - batch["response_lengths"][i]
        rows += [start + p if p < total else None for p in positions]
        mine = [p + 1 - prompt for p in positions if prompt <= p + 1 < total]
        for name in PER_TOKEN:
            columns[name].append(batch[name][i][torch.tensor(mine, dtype=torch.int64)])
    local_logits = torch.stack(
        [logits[0, row] if row is not None else torch.full((7,), torch.nan) for row in rows]
    )
    return {**batch, **columns, "logits": local_logits[None]}, rows
