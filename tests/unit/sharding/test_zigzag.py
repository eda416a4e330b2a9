"""The chunks and positions of a context parallel rank, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from plugin.errors import BatchError
from plugin.sharding.zigzag import chunk_starts, local_positions, padded_length


def test_a_sample_is_padded_to_equal_chunks_only_where_it_is_cut() -> None:
    # cp 2: 4 chunks; cp 3: 6 chunks
    assert [padded_length(5, size) for size in (1, 2, 3)] == [5, 8, 6]
    assert padded_length(8, 2) == 8


def test_a_rank_holds_an_early_and_a_late_chunk() -> None:
    # 7 tokens, cp 2: padded to 8, chunks of 2
    expected = {(0, 2): ([[0, 6]], 2), (1, 2): ([[2, 4]], 2), (0, 1): ([[0]], 7)}
    for (rank, size), (starts, length) in expected.items():
        found, chunk = chunk_starts(np.array([7]), rank, size)
        assert (found.tolist(), chunk.tolist()) == (starts, [length])


def test_every_position_is_on_exactly_one_context_parallel_rank() -> None:
    held = np.concatenate([local_positions(np.array([24]), rank, 3) for rank in range(3)])
    assert sorted(held.tolist()) == list(range(24))
    assert local_positions(np.array([5]), 0, 1).tolist() == [0, 1, 2, 3, 4]


def test_a_length_that_cannot_be_cut_is_refused_with_the_numbers() -> None:
    with pytest.raises(BatchError, match=r"6 tokens .* 4 equal chunks"):
        local_positions(np.array([6]), 0, 2)
