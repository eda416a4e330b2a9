"""Runs of a flattened tensor as rectangles of it."""

from __future__ import annotations

import itertools

import pytest
import torch

from plugin.megatron_backend.checkpoint.optimizer_shards import rectangles


def test_a_run_of_a_matrix_is_the_end_of_a_row_whole_rows_and_the_beginning_of_a_row() -> None:
    # Of [4, 3]: elements 2 | 3..8 | 9
    assert list(rectangles((4, 3), 2, 10)) == [
        ((0, 2), (1, 1)),
        ((1, 0), (2, 3)),
        ((3, 0), (1, 1)),
    ]
    assert list(rectangles((4, 3), 4, 5)) == [((1, 1), (1, 1))]  # inside a row
    assert list(rectangles((4, 3), 3, 9)) == [((1, 0), (2, 3))]  # whole rows only
    assert list(rectangles((7,), 2, 5)) == [((2,), (3,))]
    assert list(rectangles((4, 3), 5, 5)) == []


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (2, 1, 3, 2)])
def test_the_rectangles_of_every_run_hold_exactly_its_elements_in_order(
    shape: tuple[int, ...],
) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, end in itertools.combinations(range(whole.numel() + 1), 2):
        found = []
        for offset, size in rectangles(shape, start, end):
            part = whole
            for axis, (begin, length) in enumerate(zip(offset, size, strict=True)):
                part = part.narrow(axis, begin, length)
            found += part.flatten().tolist()
        assert found == list(range(start, end))
