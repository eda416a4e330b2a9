"""Where tokens are put and where their predictions come out, by hand for two samples.

A: prompt 5 6, response 7 8 9. B: prompt 1, response 2 3. The token at position p is predicted at p - 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from plugin.batch_types import Microbatch, RolloutBatch
from plugin.errors import ConfigError
from plugin.megatron_backend.model.packed_attention import PackedLayout
from plugin.megatron_backend.step.sequence_packing import model_inputs, row_length, thd_params
from tests.unit.megatron_backend.rank_places import place


def two_samples() -> RolloutBatch:
    return RolloutBatch(
        {
            "unconcat_tokens": [torch.tensor([5, 6, 7, 8, 9]), torch.tensor([1, 2, 3])],
            "total_lengths": [5, 3],
            "response_lengths": [3, 2],
            "loss_masks": [torch.ones(3), torch.ones(2)],
        }
    )


def test_packed_samples_follow_each_other_with_positions_of_their_own() -> None:
    inputs = model_inputs(two_samples(), place())
    assert inputs.tokens.tolist() == [[5, 6, 7, 8, 9, 1, 2, 3]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert inputs.sample_ids.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert inputs.rows.tolist() == [1, 2, 3, 5, 6]
    assert inputs.targets.tolist() == [7, 8, 9, 2, 3]


def test_packed_samples_do_not_see_each_other() -> None:
    layout = model_inputs(two_samples(), place()).packed_seq_params
    assert isinstance(layout, PackedLayout)
    row = torch.randn(8, 1, 4)
    other = torch.cat([torch.randn(5, 1, 4), row[5:]])  # another sample A
    of_row, of_other = (
        layout.batches.attend(x, x, x, F.scaled_dot_product_attention) for x in (row, other)
    )
    assert torch.equal(of_row[5:], of_other[5:]) and not torch.equal(of_row[:5], of_other[:5])
    # The first token of each sample sees itself alone.
    assert torch.equal(of_row[[0, 5]], row[[0, 5]])


def test_padded_rows_hold_one_sample_each() -> None:
    inputs = model_inputs(two_samples(), place(), layout="padded")
    assert inputs.tokens.tolist() == [[5, 6, 7, 8, 9], [1, 2, 3, 0, 0]]
    assert inputs.sample_ids.tolist() == [[0, 0, 0, 0, 0], [1, 1, 1, -1, -1]]
    # The second row starts at 5 in the flattened output.
    assert inputs.rows.tolist() == [1, 2, 3, 5, 6]
    assert inputs.targets.tolist() == [7, 8, 9, 2, 3]
    assert inputs.packed_seq_params is None


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_sequence_parallel_rows_are_filled_up_to_a_multiple_of_the_ranks(layout: Any) -> None:
    groups = place(tp_size=3)
    inputs = model_inputs(two_samples(), groups, layout=layout, sequence_parallel=True)
    # Packed 8 -> 9, padded 5 -> 6; what was filled in belongs to no sample and predicts nothing.
    length = {"packed": 9, "padded": 6}[layout]
    assert inputs.tokens.shape[1] == length
    assert row_length(two_samples(), groups, layout, True) == length
    assert int(inputs.sample_ids[0, -1]) == -1
    assert inputs.targets.tolist() == [7, 8, 9, 2, 3]


def test_a_context_parallel_rank_holds_two_of_four_chunks_of_every_sample() -> None:
    # A filled to 8 in chunks of 2: [5 6][7 8][9 0][0 0]; B filled to 4 in chunks of 1: [1][2][3][0].
    first, second = (model_inputs(two_samples(), place(cp_size=2, cp_rank=rank)) for rank in (0, 1))
    assert first.tokens.tolist() == [[5, 6, 0, 0, 1, 0]]
    assert first.position_ids.tolist() == [[0, 1, 6, 7, 0, 3]]
    assert first.sample_ids.tolist() == [[0, 0, -1, -1, 1, -1]]
    assert (first.rows.tolist(), first.targets.tolist()) == ([1, 4], [7, 2])
    assert second.tokens.tolist() == [[7, 8, 9, 0, 2, 3]]
    assert (second.rows.tolist(), second.targets.tolist()) == ([0, 1, 4], [8, 9, 3])


def test_rows_can_be_made_longer_than_their_samples() -> None:
    inputs = model_inputs(two_samples(), place(), at_least=11)
    assert inputs.tokens.shape == (1, 11)
    assert inputs.sample_ids.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, -1, -1, -1]]
    assert inputs.rows.tolist() == [1, 2, 3, 5, 6]


def test_padded_rows_under_context_parallelism_are_refused() -> None:
    with pytest.raises(ConfigError, match="use packed"):
        model_inputs(two_samples(), place(cp_size=2), layout="padded")


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_padding_microbatch_has_one_row_to_predict_its_one_masked_token(layout: Any) -> None:
    padding = Microbatch.padding_like(two_samples())
    inputs = model_inputs(padding.batch, place(), layout=layout)
    assert inputs.tokens.shape == (1, 2)
    assert inputs.rows.tolist() == [0] and inputs.targets.tolist() == [0]


def test_a_sample_without_a_response_takes_part_and_predicts_nothing() -> None:
    batch = RolloutBatch(
        {
            "unconcat_tokens": [torch.tensor([5, 6]), torch.tensor([1, 2])],
            "total_lengths": [2, 2],
            "response_lengths": [0, 1],
            "loss_masks": [torch.zeros(0), torch.ones(1)],
        }
    )
    inputs = model_inputs(batch, place())
    assert inputs.rows.tolist() == [2] and inputs.targets.tolist() == [2]


def test_transformer_engines_packing_has_padded_ends_only_under_context_parallelism() -> None:
    # Samples of 4 and 8 tokens in a row of 16: ends at 4, 12 and, of tail padding, 16.
    plain, split = (thd_params([4, 8], 16, cp_size=size) for size in (1, 2))
    for params in (plain, split):
        assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 4, 12, 16]
        assert params.qkv_format == "thd" and params.max_seqlen_q == params.max_seqlen_kv == 8
    assert plain.cu_seqlens_q_padded is None and plain.cu_seqlens_kv_padded is None
    assert split.cu_seqlens_q_padded is split.cu_seqlens_kv_padded is split.cu_seqlens_q


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel", "expected"),
    [
        ({}, False, 16),  # 8 tokens: the next multiple of 16
        ({"tp_size": 2}, True, 32),  # two ranks hold 16 tokens of a row each
        ({"cp_size": 2}, False, 32),  # likewise
        ({"cp_size": 3}, False, 48),  # 3 x 16 is also a multiple of the 6 pieces of the zigzag
    ],
)
def test_rows_are_aligned_on_every_rank_that_holds_a_part_of_them(
    sizes: dict[str, int], sequence_parallel: bool, expected: int
) -> None:
    batch = two_samples()
    assert row_length(batch, place(**sizes), "packed", sequence_parallel, alignment=16) == expected
