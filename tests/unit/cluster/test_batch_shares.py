"""Each rank is given its own samples, the layers of its stage, and nothing of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from plugin.batch_types import RolloutBatch
from plugin.cluster.array_transport import from_arrays, to_arrays
from plugin.config import TrainerConfig
from plugin.errors import BatchError
from plugin.megatron_backend.step.batch_share import (
    BatchShare,
    cut_share,
    plan_batch,
    with_stage_routes,
)
from plugin.megatron_backend.step.loss_scaling import total_weight

LAYERS = 6


def routed_batch(samples: int) -> RolloutBatch:
    """Samples of 4 to 9 tokens, the last half of them response, with routes of 6 layers."""
    totals = [4 + i % 6 for i in range(samples)]
    responses = [total // 2 for total in totals]
    return RolloutBatch(
        {
            "unconcat_tokens": [torch.full((total,), i) for i, total in enumerate(totals)],
            "total_lengths": totals,
            "response_lengths": responses,
            "loss_masks": [torch.ones(n, dtype=torch.int64) for n in responses],
            "rollout_log_probs": [torch.full((n,), -0.5) for n in responses],
            "rollout_routed_experts": [
                torch.arange(LAYERS)[:, None].expand(total, LAYERS, 2).to(torch.int8)
                for total in totals
            ],
        }
    )


def shares(batch: RolloutBatch, dp_size: int, **settings: Any) -> list[BatchShare]:
    config = TrainerConfig(**{"micro_batch_size": 4, **settings})
    plan = plan_batch(
        batch, config, dp_size=dp_size, cp_size=1, round_size=1, hidden_size=64, longest=100
    )
    weight = total_weight(batch, per_token=config.per_token)
    return [cut_share(batch, plan, rank, weight=weight) for rank in range(dp_size)]


def test_the_shares_together_are_the_batch_and_apart_have_nothing_in_common() -> None:
    batch = routed_batch(50)
    parts = shares(batch, 4)
    assert sorted(np.concatenate([part.samples for part in parts])) == list(range(50))
    for part in parts:
        ids = [tokens[0].item() for tokens in part.batch.columns["unconcat_tokens"]]
        assert ids == part.samples.tolist() and len(part.counts) == len(parts[0].counts)
        assert part.total_weight == parts[0].total_weight == total_weight(batch, per_token=False)


def test_pipeline_stages_get_enough_microbatches_to_hide_their_bubble() -> None:
    batch = routed_batch(50)
    lengths = batch.columns["total_lengths"]
    config = TrainerConfig(max_tokens_per_gpu=10**6)
    sizes: dict[str, Any] = {"dp_size": 2, "cp_size": 1, "round_size": 1}
    sizes |= {"hidden_size": 64, "longest": 100}
    assert plan_batch(batch, config, **sizes).num_microbatches == 1
    assert plan_batch(batch, config, **sizes, fewest=4).num_microbatches in (4, 5)
    # The longest sample is never cut off from the others by a budget below it.
    many = plan_batch(batch, config, **sizes, fewest=10**6)
    assert not many.oversize and many.num_microbatches <= len(lengths)


def test_a_rank_gets_fewer_bytes_the_more_ranks_there_are() -> None:
    batch = routed_batch(240)
    whole = sum(array.nbytes for array in to_arrays(shares(batch, 1)[0]).values())
    for dp_size in (2, 4, 8):
        sizes = [
            sum(array.nbytes for array in to_arrays(share).values())
            for share in shares(batch, dp_size)
        ]
        # `watched`, the lengths of the first samples, is the only thing that all ranks get.
        assert max(sizes) < 1.1 * whole / dp_size + 8 * 240


def test_a_stage_gets_the_routes_of_its_layers() -> None:
    batch = routed_batch(8)
    stage = with_stage_routes(batch, [2, 5])
    routes = stage.columns["rollout_routed_experts"]
    assert routes.values.shape[1:] == (2, 2) and routes.values[0, :, 0].tolist() == [2, 5]
    assert with_stage_routes(batch, range(LAYERS)) is batch
    weights = routes.like(routes.values.float() + 0.5)
    both = with_stage_routes(stage.with_column("rollout_routed_weights", weights), [1])
    assert both.columns["rollout_routed_weights"].values[0].tolist() == [[5.5, 5.5]]


def test_a_share_that_arrives_is_a_view_of_the_arrays() -> None:
    (share,) = shares(routed_batch(9), 1)
    arrays = to_arrays(share)
    for array in arrays.values():
        array.setflags(write=False)  # as the object store gives them
    arrived = from_arrays(BatchShare, arrays)
    assert arrived.counts.tolist() == share.counts.tolist() == [3, 3, 3]
    assert arrived.total_weight == share.total_weight and arrived.oversize == 0
    tokens = arrived.batch.columns["unconcat_tokens"].values
    assert np.shares_memory(tokens.numpy(), arrays["unconcat_tokens"])
    first = arrived.microbatches()[0].batch.columns["unconcat_tokens"].values
    assert np.shares_memory(first.numpy(), arrays["unconcat_tokens"])


def test_a_rank_without_samples_has_only_padding_microbatches() -> None:
    parts = shares(routed_batch(3), 4, micro_batch_size=1)
    empty = next(part for part in parts if not len(part.samples))
    (microbatch,) = from_arrays(BatchShare, to_arrays(empty)).microbatches()
    assert microbatch.is_padding
    assert microbatch.batch.columns["rollout_routed_experts"].values.dtype == torch.int8


def test_errors_of_a_share_number_samples_in_the_global_batch() -> None:
    batch = routed_batch(6)
    log_probs = batch.columns["rollout_log_probs"]
    broken = log_probs.like(log_probs.values.clone())
    broken[4][0] = float("nan")
    part = next(
        p for p in shares(batch.with_column("rollout_log_probs", broken), 2) if 4 in p.samples
    )
    with pytest.raises(BatchError, match="rollout_log_probs of sample 4 is nan at position 0"):
        part.batch.check(part.samples)
