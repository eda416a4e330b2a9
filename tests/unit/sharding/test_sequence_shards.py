"""Which tokens a context parallel rank holds, and sums over whole sequences."""

import math

import pytest
import torch

from plugin.errors import BatchError
from plugin.ppo_utils import ParallelContext, SequenceShards, response_spans
from plugin.sharding.parallel_context import current_parallel_context, use_parallel_context

CPU = torch.device("cpu")


def shards(lengths: list[int], totals: list[int] | None = None, **context: int) -> SequenceShards:
    return SequenceShards.of(totals, lengths, CPU, ParallelContext(**context))


def test_without_context_parallelism_a_rank_holds_the_whole_response() -> None:
    assert response_spans(8, 5) == [(0, 5)]


def test_the_example_of_the_module_docstring() -> None:
    # total 8, response 5, cp 2: rank 0 predicts position 7 (the last), rank 1 positions 3..6
    assert response_spans(8, 5, 0, 2) == [(0, 0), (4, 5)]
    assert response_spans(8, 5, 1, 2) == [(0, 2), (2, 4)]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("total", [1, 2, 5, 8, 9, 17, 40])
def test_ranks_cover_every_response_token_exactly_once(cp_size: int, total: int) -> None:
    for response in range(total):
        covered = sorted(
            position
            for rank in range(cp_size)
            for start, end in response_spans(total, response, rank, cp_size)
            for position in range(start, end)
        )
        assert covered == list(range(response))


@pytest.mark.parametrize("cp_size", [2, 3])
def test_a_token_belongs_to_the_rank_that_holds_the_row_before_it(cp_size: int) -> None:
    total, response = 13, 9
    chunk = math.ceil(total / (2 * cp_size))
    for rank in range(cp_size):
        rows = {
            row
            for index in (rank, 2 * cp_size - 1 - rank)
            for row in range(index * chunk, (index + 1) * chunk)
        }
        for start, end in response_spans(total, response, rank, cp_size):
            assert all(total - response + p - 1 in rows for p in range(start, end))


def test_local_parts_of_all_ranks_together_are_the_whole() -> None:
    totals, lengths = [8, 7, 3], [5, 6, 0]
    full = [torch.arange(5.0), torch.arange(10.0, 16.0), torch.zeros(0)]
    parts = [
        shards(lengths, totals, cp_rank=rank, cp_size=2).local(full).tolist() for rank in (0, 1)
    ]
    assert sorted(parts[0] + parts[1]) == sorted(torch.cat(full).tolist())


def test_sample_index_follows_local_lengths() -> None:
    assert shards([2, 0, 3]).sample_index.tolist() == [0, 0, 2, 2, 2]
    assert shards([]).sample_index.tolist() == []
    assert shards([0, 0]).sample_index.tolist() == []


def test_positions_count_from_the_first_token_of_each_response() -> None:
    assert shards([2, 0, 3]).positions.tolist() == [0, 1, 0, 1, 2]
    # the example of the module docstring: rank 0 holds the last of 5 tokens, rank 1 the others
    assert shards([5], [8], cp_rank=0, cp_size=2).positions.tolist() == [4]
    assert shards([5], [8], cp_rank=1, cp_size=2).positions.tolist() == [0, 1, 2, 3]


def test_sequence_sums_add_each_sample_and_carry_no_gradient() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    first, second = shards([3, 0, 1]).sequence_sums(values, values > 1)
    assert first.tolist() == [7.0, 0.0, 8.0]
    assert second.tolist() == [2.0, 0.0, 1.0]
    assert not first.requires_grad


def test_sequence_max_ignores_masked_tokens() -> None:
    values = torch.tensor([1.0, math.nan, -3.0, 5.0])
    mask = torch.tensor([True, False, True, False])
    assert shards([2, 1, 1]).sequence_max(values, mask).tolist() == [1.0, -3.0, -math.inf]


def test_masks_are_zeroed_only_where_dropped_and_only_locally() -> None:
    # rank 1 of cp 2 holds positions 0..3 of the example; position 4 belongs to rank 0
    local = shards([5], [8], cp_rank=1, cp_size=2)
    mask = torch.tensor([1, 1, 0, 1, 1])
    (result,) = local.masks_and([mask], torch.tensor([True, False, True, False]))
    assert result.tolist() == [1, 0, 0, 0, 1]
    assert mask.tolist() == [1, 1, 0, 1, 1]


def test_sums_over_ranks_equal_the_sum_over_the_whole_sequence() -> None:
    totals, lengths = [9, 6], [7, 2]
    full = [torch.arange(1.0, 8.0), torch.tensor([10.0, 20.0])]
    per_rank = []
    for rank in range(2):
        local = shards(lengths, totals, cp_rank=rank, cp_size=2)
        per_rank.append(local.sequence_sums(local.local(full))[0])
    assert (per_rank[0] + per_rank[1]).tolist() == [28.0, 30.0]  # 1 + ... + 7, 10 + 20


def test_lengths_that_do_not_fit_are_batch_errors() -> None:
    with pytest.raises(BatchError, match="1 total_lengths for 2 response_lengths"):
        shards([1, 2], [3])
    with pytest.raises(BatchError, match=r"lengths \[3\] but the responses \[2\]"):
        shards([2]).local([torch.zeros(3)])
    with pytest.raises(BatchError, match=r"lengths \[2, 2\] but the responses \[2\]"):
        shards([2]).local_mask([torch.zeros(2), torch.zeros(2)])


def test_context_parallelism_without_total_lengths_is_refused() -> None:
    with pytest.raises(BatchError, match="total_lengths are missing with 2 context parallel"):
        shards([2], None, cp_rank=0, cp_size=2)


def test_the_active_context_is_the_current_one_only_inside_its_block() -> None:
    context = ParallelContext(cp_rank=1, cp_size=2)
    with use_parallel_context(context):
        assert current_parallel_context() is context
        assert SequenceShards.of([8], [5], CPU).local_lengths == [4]
    assert SequenceShards.of([8], [5], CPU).local_lengths == [5]
