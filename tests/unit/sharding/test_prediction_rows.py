"""Which row of the packed logits predicts which token, with and without context parallelism."""

import pytest
import torch

from plugin.errors import BatchError
from plugin.ppo_utils import ParallelContext, SequenceShards


def shards(totals: list[int], lengths: list[int], rank: int = 0, size: int = 1) -> SequenceShards:
    context = ParallelContext(cp_rank=rank, cp_size=size)
    return SequenceShards.of(totals, lengths, torch.device("cpu"), context)


def test_a_token_is_predicted_by_the_row_before_it() -> None:
    # sample 0: rows 0..4, response at positions 2, 3, 4 -> rows 1, 2, 3; sample 1: rows 5..7, position 2 -> 6
    assert shards([5, 3], [3, 1]).rows().tolist() == [1, 2, 3, 6]


def test_samples_without_a_response_take_rows_but_predict_nothing() -> None:
    assert shards([2, 3], [0, 2]).rows().tolist() == [2, 3]
    assert shards([], []).rows().tolist() == []


def test_samples_may_start_at_rows_of_their_own() -> None:
    # rows of 6: sample 0 at 0, sample 1 at 6; positions 2, 3, 4 and 2 are predicted one row before
    assert shards([5, 3], [3, 1]).rows([0, 6]).tolist() == [1, 2, 3, 7]


def test_response_tokens_are_the_last_of_each_sample() -> None:
    ids = [torch.tensor([9, 8, 7, 6, 5]), torch.tensor([1, 2, 3])]
    assert shards([5, 3], [3, 1]).response_tokens(ids).tolist() == [7, 6, 5, 3]


def test_a_response_without_a_prompt_token_is_refused() -> None:
    with pytest.raises(BatchError, match="total length 3 and response length 3"):
        shards([3], [3]).rows()


def test_a_sample_shorter_than_its_response_is_refused() -> None:
    with pytest.raises(BatchError, match="sample 0 has 2 tokens but a response of 3"):
        shards([4], [3]).response_tokens([torch.tensor([1, 2])])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_under_context_parallelism_each_local_row_precedes_its_token(size: int) -> None:
    totals, lengths = [7, 12, 3, 9], [4, 11, 0, 1]
    ids = [torch.arange(total) + 100 * i for i, total in enumerate(totals)]
    seen = []
    for rank in range(size):
        local = shards(totals, lengths, rank, size)
        # the local input, from the definition: two chunks of every sample, padded to 2 * cp chunks
        layout: list[int] = []
        for i, total in enumerate(totals):
            chunk = -(-total // (2 * size))
            padded = [*ids[i].tolist(), *[-1] * (2 * size * chunk - total)]
            for index in (rank, 2 * size - 1 - rank):
                layout += padded[index * chunk : (index + 1) * chunk]
        rows = local.rows().tolist()
        tokens = local.response_tokens(ids).tolist()
        assert [layout[row] + 1 for row in rows] == tokens
        seen += tokens
    expected = [
        t for i, length in enumerate(lengths) for t in ids[i][len(ids[i]) - length :].tolist()
    ]
    assert sorted(seen) == expected
