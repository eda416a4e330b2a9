"""Megatron's fused RoPE of latent attention with YaRN against its plain one, in Triton's interpreter: packed rows, values and
gradients, also of a context parallel rank's share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.fusions import fused_mla_yarn_rope_apply as fused
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.megatron_backend import cpu_runtime
from tests.parallel import tiny_models
from tests.te.te_models import built

HEADS, PLAIN, ROTATED, VALUES = 4, 8, 8, 16
LENGTHS = (8, 4, 12)


@pytest.fixture(autouse=True)
def without_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """One size of blocks: trying several needs a device's clock."""
    cpu_runtime.activate()
    for name in ("fwd_q", "bwd_q", "fwd_kv", "bwd_kv"):
        kernel = getattr(fused, f"rotary_{name}_kernel")
        monkeypatch.setattr(kernel, "configs", [kernel.configs[2]])


class Group:
    """Of context parallel ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def angles() -> YarnRotaryEmbedding:
    return YarnRotaryEmbedding(
        ROTATED,
        rotary_base=1e4,
        scaling_factor=4.0,
        original_max_position_embeddings=8,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=0.5,  # so that the factor is not 1
        use_cpu_initialization=True,
        cp_group=Group(0, 1),
    )


def plainly(x: Tensor, ends: Tensor, group: Group) -> Tensor:
    """[tokens, heads, ROTATED] turned by the unfused functions."""
    emb, factor = angles()(max(LENGTHS), packed_seq=True)
    config: Any = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=True
    )
    return apply_rotary_pos_emb(
        x, emb, config=config, cu_seqlens=ends, mscale=factor, cp_group=group
    )


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_fused_rope_of_packed_rows_is_the_plain_one(rank: int, size: int) -> None:
    group, generator = Group(rank, size), torch.Generator().manual_seed(0)
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    tokens = sum(LENGTHS) // size
    q = torch.randn(tokens, HEADS, PLAIN + ROTATED, generator=generator)
    kv = torch.randn(tokens, HEADS, PLAIN + VALUES, generator=generator)
    shared = torch.randn(tokens, 1, ROTATED, generator=generator)
    leaves = [x.clone().requires_grad_() for x in (q, kv, shared)]
    query = torch.cat(
        [leaves[0][..., :PLAIN], plainly(leaves[0][..., PLAIN:], ends, group)], dim=-1
    )
    turned = plainly(leaves[2], ends, group).expand(-1, HEADS, -1)
    key, value = torch.cat([leaves[1][..., :PLAIN], turned], dim=-1), leaves[1][..., PLAIN:]
    wanted = (query, key, value)
    own = [x.clone().requires_grad_() for x in (q, kv, shared)]
    cos, sin = angles().get_cached_cos_sin(max(LENGTHS), dtype=torch.float32, packed_seq=True)
    # The kernel writes where it reads.
    found_query = fused.fused_apply_mla_rope_for_q(
        own[0] * 1.0, cos, sin, PLAIN, ROTATED, ends, rank, size
    )
    found = (
        found_query,
        *fused.fused_apply_mla_rope_for_kv(
            own[1] * 1.0, own[2] * 1.0, cos, sin, ROTATED, PLAIN, VALUES, ends, rank, size
        ),
    )
    weights = [torch.randn(x.shape, generator=generator) for x in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    sum((x * w).sum() for x, w in zip(wanted, weights, strict=True)).backward()
    sum((x * w).sum() for x, w in zip(found, weights, strict=True)).backward()
    for mine, theirs in zip(own, leaves, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "fuses"),
    [
        (tiny_models.tiny_deepseek_v3(v_head_dim=16), True),
        (tiny_models.tiny_deepseek_v3(v_head_dim=12), False),  # no power of two
        (tiny_models.tiny_moonlight(v_head_dim=16), False),  # no YaRN
        (tiny_models.tiny_qwen3(), True),
    ],
    ids=["YaRN", "YaRN, odd heads", "plain latent attention", "plain"],
)
def test_rope_is_fused_where_a_kernel_computes_it(model: Any, fuses: bool) -> None:
    with built(model, TrainerConfig()) as (built_model, _):
        assert built_model.config.apply_rope_fusion is fuses
