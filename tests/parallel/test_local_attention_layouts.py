"""Packed rows and context parallelism give every sample the logits and gradients it has on its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.errors import BatchError, ConfigError
from plugin.megatron_backend.model.packed_attention import PackedLayout
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.sharding.zigzag import local_positions
from tests.parallel.rank_pool import RankError
from tests.parallel.schedule_runs import loaded_model
from tests.parallel.tiny_models import (
    ALL_FAMILIES,
    VOCAB_SIZE,
    hf_model,
    hf_state_dict,
    tiny_qwen3,
)

TP, PP, CP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
LENGTHS = [16, 8, 24]  # multiples of 2 * cp for cp up to 4
ROW_LENGTH = 64  # 48 tokens of samples, 16 of tail padding


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def local_tokens(layout: PackedLayout, tokens: list[Tensor]) -> Tensor:
    """[1, S_local]: this rank's tokens, looked up by sample and position; 0 in the tail."""
    row = [
        tokens[sample][position] if sample >= 0 else torch.tensor(0)
        for sample, position in zip(layout.sample_ids, layout.positions, strict=True)
    ]
    return torch.stack(row)[None]


def logits_and_grads_on_rank(
    groups: ParallelGroups,
    config: Any,
    state: dict[str, Tensor],
    tokens: list[Tensor],
    settings: TrainerConfig,
) -> tuple[dict[tuple[int, int], Tensor], dict[str, Tensor]]:
    """Logits by (sample, position), and gradients of a sum over real tokens, summed over CP ranks."""
    (model,) = loaded_model(config, state, groups, settings)
    layout = PackedLayout.from_lengths(
        LENGTHS, row_length=ROW_LENGTH, cp_size=groups.cp_size, cp_rank=groups.cp_rank
    )
    row = local_tokens(layout, tokens)
    logits = model(
        row, layout.positions[None], None, packed_seq_params=layout, runtime_gather_output=True
    )[0]
    real = layout.sample_ids >= 0
    scalar_objective(logits, layout.positions)[real].sum().backward()
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=groups.cp_group)
        grads[name] = parameter.grad
    by_place = {
        (int(sample), int(position)): logits[index].detach()
        for index, (sample, position) in enumerate(
            zip(layout.sample_ids, layout.positions, strict=True)
        )
        if sample >= 0
    }
    return by_place, grads


def scalar_objective(logits: Tensor, positions: Tensor) -> Tensor:
    """[S]: a different smooth function of the logits at every position."""
    targets = positions * 7 % VOCAB_SIZE
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]


CP_SIZES = {"packed": 1, "CP2": 2, "CP4": 4}
DEFAULT_CASES = (
    *(("llama", "packed"), ("qwen3", "CP2"), ("qwen3_moe", "CP4")),
    # latent attention, whose layers compute their own RoPE; windows
    *(("deepseek_v3", "packed"), ("mistral", "CP2")),
    # states and convolutions that begin anew with every sample
    ("qwen3_next", "packed"),
)


@pytest.mark.parametrize(
    ("family", "ranks", "sizes"),
    [
        pytest.param(
            family,
            size,
            {CP: size},
            id=f"{name}-{family}",
            marks=() if (family, name) in DEFAULT_CASES else pytest.mark.slow,
        )
        for name, size in CP_SIZES.items()
        for family in ALL_FAMILIES
        # the gated delta rule is refused
        if (family, size) not in (("qwen3_next", 2), ("qwen3_next", 4))
    ],
)
def test_samples_packed_in_one_row_get_their_own_logits_and_gradients(
    run_ranks: Any, family: str, ranks: int, sizes: dict[str, int]
) -> None:
    config, tokens = ALL_FAMILIES[family](), samples()
    results = run_ranks(
        logits_and_grads_on_rank,
        ranks,
        config,
        hf_state_dict(config),
        tokens,
        TrainerConfig(),
        **sizes,
    )
    check_against_transformers(results, config, tokens)


def check_against_transformers(results: list[Any], config: Any, tokens: list[Tensor]) -> None:
    model = hf_model(config)
    total = torch.zeros(())
    expected = {}
    for sample, sample_tokens in enumerate(tokens):
        logits = model(sample_tokens[None]).logits[0]
        total = total + scalar_objective(logits, torch.arange(len(sample_tokens))).sum()
        expected |= {(sample, position): row for position, row in enumerate(logits.detach())}
    total.backward()
    found = {place: row for by_place, _ in results for place, row in by_place.items()}
    assert found.keys() == expected.keys()
    for place, row in found.items():
        torch.testing.assert_close(row, expected[place], rtol=0, atol=1e-4)
    first_layer = model.model.layers[0]
    twins = {
        "embedding.word_embeddings.weight": model.model.embed_tokens.weight,
        # its gradient passes through the gathered keys and values
        "decoder.layers.0.input_layernorm.weight": first_layer.input_layernorm.weight,
        "decoder.final_layernorm.weight": model.model.norm.weight,
    }
    attention = "decoder.layers.0.self_attention."
    if hasattr(first_layer, "linear_attn"):
        rule = first_layer.linear_attn
        twins |= {
            **{f"{attention}{name}": getattr(rule, name) for name in ("A_log", "dt_bias")},
            f"{attention}conv1d.weight": rule.conv1d.weight,
            f"{attention}out_norm.weight": rule.norm.weight,
            f"{attention}out_proj.weight": rule.out_proj.weight,
        }
    else:
        twins[f"{attention}linear_proj.weight"] = first_layer.self_attn.o_proj.weight
    for _, grads in results:
        for name, twin in twins.items():
            largest = float(twin.grad.abs().max().clamp(min=1.0))
            torch.testing.assert_close(grads[name], twin.grad, rtol=1e-4, atol=1e-4 * largest)


def test_context_and_sequence_parallelism_together_match_transformers(run_ranks: Any) -> None:
    config, tokens = tiny_qwen3(), samples()
    settings = TrainerConfig(sequence_parallel=True, **{TP: 2})
    results = run_ranks(
        logits_on_rank, 4, config, hf_state_dict(config), tokens, settings, **{TP: 2, CP: 2}
    )
    model = hf_model(config)
    found = {place: row for by_place in results for place, row in by_place.items()}
    assert len(found) == sum(LENGTHS)
    for (sample, position), row in found.items():
        with torch.no_grad():
            want = model(tokens[sample][None]).logits[0, position]
        torch.testing.assert_close(row, want, rtol=0, atol=1e-4)


def logits_on_rank(groups: ParallelGroups, *args: Any) -> dict[tuple[int, int], Tensor]:
    return logits_and_grads_on_rank(groups, *args)[0]


def unpacked_logits_on_rank(
    groups: ParallelGroups, config: Any, state: dict[str, Tensor], rows: Tensor
) -> Tensor:
    """[B, S_local, V] of whole rows [B, S], each cut zigzag, without a layout."""
    (model,) = loaded_model(config, state, groups)
    positions = torch.from_numpy(
        local_positions(np.array([rows.shape[1]]), groups.cp_rank, groups.cp_size)
    )
    with torch.no_grad():
        return model(rows[:, positions], positions.expand(rows.shape[0], -1), None)


def test_without_a_layout_each_row_is_one_causal_sequence_cut_zigzag(run_ranks: Any) -> None:
    config = tiny_qwen3()
    rows = torch.stack([torch.arange(16) % VOCAB_SIZE, torch.arange(50, 66) % VOCAB_SIZE])
    first, second = run_ranks(
        unpacked_logits_on_rank, 2, config, hf_state_dict(config), rows, **{CP: 2}
    )
    with torch.no_grad():
        want = hf_model(config)(rows).logits
    # 16 tokens in 4 chunks of 4: rank 0 holds chunks 0 and 3, rank 1 chunks 1 and 2.
    torch.testing.assert_close(first[:, :4], want[:, 0:4], rtol=0, atol=1e-4)
    torch.testing.assert_close(first[:, 4:], want[:, 12:16], rtol=0, atol=1e-4)
    torch.testing.assert_close(second, want[:, 4:12], rtol=0, atol=1e-4)


def masked_logits_on_rank(
    groups: ParallelGroups, config: Any, state: dict[str, Tensor], row: Tensor, mask: Tensor
) -> Tensor:
    (model,) = loaded_model(config, state, groups)
    with torch.no_grad():
        return model(row, torch.arange(row.shape[1])[None], mask)


def test_an_explicit_block_diagonal_mask_separates_samples_too(run_ranks: Any) -> None:
    config, tokens = tiny_qwen3(), samples()[:2]
    row = torch.cat(tokens)[None]
    sample_ids = torch.tensor([0] * 16 + [1] * 8)
    visible = (sample_ids[:, None] == sample_ids[None]) & torch.ones(24, 24).tril().bool()
    (logits,) = run_ranks(
        masked_logits_on_rank, 1, config, hf_state_dict(config), row, ~visible[None, None]
    )
    with torch.no_grad():
        second_alone = hf_model(config)(tokens[1][None]).logits[0]
    torch.testing.assert_close(logits[0, 16:], second_alone, rtol=0, atol=1e-4)


def packed_with_params_on_rank(groups: ParallelGroups, kind: str) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    config = tiny_qwen3()
    (model,) = loaded_model(config, hf_state_dict(config), groups)
    row, positions = torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None]
    if kind == "foreign":
        params = PackedSeqParams(qkv_format="sbhd", max_seqlen_q=4, max_seqlen_kv=4)
        model(row, positions, None, packed_seq_params=params)
    else:
        layout = PackedLayout.from_lengths([4])
        model(row, positions, torch.zeros(1, 1, 4, 4).bool(), packed_seq_params=layout)


@pytest.mark.parametrize(("kind", "error"), [("foreign", ConfigError), ("both", BatchError)])
def test_packing_that_the_local_attention_would_ignore_is_refused(
    run_ranks: Any, kind: str, error: type[Exception]
) -> None:
    with pytest.raises(RankError) as failure:
        run_ranks(packed_with_params_on_rank, 1, kind)
    assert isinstance(failure.value.__cause__, error)
