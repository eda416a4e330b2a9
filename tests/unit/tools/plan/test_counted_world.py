"""A world of many ranks in one process, and operations on tensors without numbers."""

from __future__ import annotations

import torch
import torch.distributed as dist

from plugin.tools.plan.fake_world import Traffic, fake_world
from plugin.tools.plan.meta_mode import LiveMemory, MetaMode

SIZES = {
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
}


def test_a_thousand_ranks_have_megatrons_places() -> None:
    # Order of ranks: tensor, data, pipeline. 777 = 1 * 512 + 66 * 4 + 1.
    with fake_world(777, 1024, SIZES, Traffic()) as groups:
        assert (groups.tp_rank, groups.dp_rank, groups.pp_rank) == (1, 66, 1)
        assert (groups.dp_size, groups.ep_rank) == (128, 777 % 512 % 8)
    assert not dist.is_initialized()


def test_a_group_counts_bytes_and_answers_as_if_all_ranks_agreed() -> None:
    traffic = Traffic()
    with fake_world(0, 8, SIZES | {"expert_model_parallel_size": 4}, traffic) as groups:
        count = torch.tensor([3])
        dist.all_reduce(count, group=groups.tp_group)
        rows = torch.empty(8, dtype=torch.int64)
        dist.all_gather_into_tensor(rows, torch.tensor([5, 6]), group=groups.tp_group)
        dist.all_reduce(torch.empty(10, device="meta"), group=groups.tp_group)
    assert count.item() == 4 * 3
    assert rows.tolist() == [5, 6] * 4
    # 8 bytes of one integer and 40 of ten floats; 16 of two integers
    assert traffic.counts == {
        ("TENSOR_MODEL_PARALLEL_GROUP", "all_reduce"): [2, 48],
        ("TENSOR_MODEL_PARALLEL_GROUP", "all_gather"): [1, 16],
    }


def test_integers_stay_real_where_floats_have_a_shape_only() -> None:
    with MetaMode(LiveMemory()) as mode:
        with mode.meta_parameters():
            weight = torch.ones(6, 4)
            # What a model is built with may be an order of chunks, such as that of experts.
            order, halves = torch.arange(3), torch.arange(0, 1, 0.5)
            filled = torch.full((2,), 7)
        mask = torch.tensor([True, False, True, True, False, False])
        chosen = weight[mask] * 2.0
        picked = weight.masked_select(mask[:, None])
        counts = mask.to(torch.int64).cumsum(0)
        assert bool((weight.sum() > 0).item())
    assert weight.is_meta and halves.is_meta
    assert (order.tolist(), filled.tolist()) == ([0, 1, 2], [7, 7])
    assert chosen.shape == (3, 4)
    assert picked.shape == (12,)
    assert counts.tolist() == [1, 1, 2, 3, 3, 3]


def test_memory_is_counted_until_it_is_freed() -> None:
    memory = LiveMemory()
    with MetaMode(memory):
        kept = torch.empty(1000, device="meta")  # 4,000 bytes
        view = kept.view(10, 100)
        passing = kept * 2  # as many again
        del passing
        other = kept + 1
        del other
    assert memory.peak == {"activations": 8000}
    assert memory.live == {"activations": 4000}
    del kept, view
    assert memory.live == {"activations": 0}


def test_products_are_counted() -> None:
    with MetaMode(LiveMemory()) as mode:
        left = torch.empty(3, 5, device="meta", requires_grad=True)
        right = torch.empty(5, 7, device="meta")
        (left @ right).sum().backward()
    # forward 2 * 3 * 5 * 7, backward the same for the gradient of `left`
    assert mode.matmul_flops == 2 * 210
