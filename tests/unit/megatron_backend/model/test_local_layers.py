"""Positions, visibility and the norm of the local layers, computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from plugin.errors import BatchError, ConfigError
from plugin.megatron_backend.model.local_layers import LocalCoreAttention, SequenceParallelRMSNorm
from plugin.megatron_backend.model.packed_attention import PackedLayout, attend_in_blocks


def seen(layout: PackedLayout, window: int | None = None) -> list[list[int]]:
    """1 where a query of this rank gives a key weight; keys by sample and position."""
    keys = int(layout.lengths.sum())
    query, key = torch.zeros(len(layout.positions), 1, 1, keys), torch.zeros(keys, 1, 1, keys)
    value = torch.eye(keys)[:, None, None]
    weights = attend_in_blocks(
        *(query, key, value, layout, F.scaled_dot_product_attention), window=window
    )
    return (weights[:, 0, 0] > 0).int().tolist()


def test_packed_samples_see_only_their_own_past() -> None:
    layout = PackedLayout.from_lengths([3, 2], row_length=6)
    assert layout.positions.tolist() == [0, 1, 2, 0, 1, 0]
    assert layout.sample_ids.tolist() == [0, 0, 0, 1, 1, -1]
    assert seen(layout) == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],  # tail padding sees itself, so that no row of the softmax is empty
    ]


def test_context_parallel_ranks_hold_an_early_and_a_late_chunk_of_every_sample() -> None:
    # cp 2: 4 chunks per sample; 8 tokens -> chunks of 2, 4 tokens -> chunks of 1
    first = PackedLayout.from_lengths([8, 4], cp_size=2, cp_rank=0)
    second = PackedLayout.from_lengths([8, 4], cp_size=2, cp_rank=1)
    assert first.positions.tolist() == [0, 1, 6, 7, 0, 3]
    assert second.positions.tolist() == [2, 3, 4, 5, 1, 2]
    assert first.sample_ids.tolist() == second.sample_ids.tolist() == [0, 0, 0, 0, 1, 1]
    # Gathered: positions 0 1 6 7 of the first sample, 0 3 of the second, then 2 3 4 5 and 1 2.
    for layout in (first, second):
        assert layout.key_order.tolist() == [0, 1, 6, 7, 8, 9, 2, 3, 4, 10, 11, 5]


def test_visibility_across_context_parallel_ranks_is_causal_in_global_positions() -> None:
    layout = PackedLayout.from_lengths([4], cp_size=2, cp_rank=1)
    # rank 0 holds positions 0 and 3, rank 1 positions 1 and 2
    assert seen(layout) == [
        [1, 1, 0, 0],  # position 1 sees 0 and 1
        [1, 1, 1, 0],  # position 2 sees 0, 1 and 2
    ]


def test_a_window_leaves_the_last_tokens_of_the_same_sample() -> None:
    layout = PackedLayout.from_lengths([4, 2])
    assert seen(layout, 2) == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    # rank 0 holds positions 0 and 3, rank 1 positions 1 and 2
    late = PackedLayout.from_lengths([4], cp_size=2, cp_rank=1)
    assert seen(late, 2) == [[1, 1, 0, 0], [0, 1, 1, 0]]


def test_samples_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(BatchError, match=r"6 tokens .* 4 equal chunks"):
        PackedLayout.from_lengths([6], cp_size=2)
    with pytest.raises(BatchError, match=r"need 9 positions but the row has 8"):
        PackedLayout.from_lengths([4, 5], row_length=8)


@pytest.mark.parametrize("sizes", [(8, 8), (8, 5), (5, 8)])
def test_keys_and_values_may_differ_in_size_either_way(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    key_size, value_size = sizes
    alone = SimpleNamespace(size=lambda: 1)
    attention = LocalCoreAttention(
        SimpleNamespace(
            kv_channels=key_size,
            attention_dropout=0.0,
            window_size=None,
            window_attn_skip_freq=None,
            softmax_type="vanilla",
        ),  # type: ignore[arg-type]
        1,
        pg_collection=SimpleNamespace(tp=alone, cp=alone),  # type: ignore[arg-type]
    )
    kernel = F.scaled_dot_product_attention

    def without_scores(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object
    ) -> torch.Tensor:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        return kernel(q, k, v, **options)  # type: ignore[arg-type]

    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(7, 1, 2, size, generator=draw, dtype=torch.float64, requires_grad=True)
        for size in (key_size, key_size, value_size)
    )
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / key_size**0.5
    weights = scores.masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(2)
    monkeypatch.setattr(F, "scaled_dot_product_attention", without_scores)
    found = attention(q, k, v, None, packed_seq_params=PackedLayout.from_lengths([7]))
    torch.testing.assert_close(found, expected)
    along = torch.randn(found.shape, generator=draw, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad(found, (q, k, v), along),
        torch.autograd.grad(expected, (q, k, v), along),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def norm_config(**changes: object) -> SimpleNamespace:
    defaults = {
        "normalization": "RMSNorm",
        "params_dtype": torch.float32,
        "sequence_parallel": True,
    }
    return SimpleNamespace(**(defaults | changes))


def test_the_norm_divides_by_the_root_mean_square_and_keeps_the_dtype() -> None:
    norm = SequenceParallelRMSNorm(norm_config(), 2, eps=0.0)  # type: ignore[arg-type]
    norm.weight.data = torch.tensor([1.0, 10.0])
    # rms of (3, 4) = sqrt(25 / 2) = 3.5355; 3 / 3.5355 = 0.8485, 4 / 3.5355 = 1.1314
    out = norm(torch.tensor([[3.0, 4.0]]))
    torch.testing.assert_close(out, torch.tensor([[0.84853, 11.31371]]), rtol=1e-5, atol=1e-5)
    half = SequenceParallelRMSNorm(norm_config(params_dtype=torch.bfloat16), 2)  # type: ignore[arg-type]
    assert half(torch.ones(1, 2, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_the_norm_marks_its_weight_only_under_sequence_parallelism() -> None:
    for flag in (True, False):
        norm = SequenceParallelRMSNorm(norm_config(sequence_parallel=flag), 2)  # type: ignore[arg-type]
        assert norm.weight.sequence_parallel is flag  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="LayerNorm"):
        SequenceParallelRMSNorm(norm_config(normalization="LayerNorm"), 2)  # type: ignore[arg-type]
