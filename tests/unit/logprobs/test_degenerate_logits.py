"""Rows of logits that no model should give: one answer for all kernels, or an error."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from plugin.errors import BatchError
from plugin.logprobs.fused_lm_head import fused_log_probs_and_entropy
from plugin.logprobs.kernels import blocked_torch, cpu_extension
from plugin.logprobs.vocab_parallel import log_probs_and_entropy
from plugin.logprobs.vocab_shards import combine_shards, locate_targets

pytestmark = pytest.mark.hostile


def needs(module: ModuleType) -> None:
    if module is cpu_extension and cpu_extension.load_library() is None:
        pytest.skip("no compiler")


@pytest.mark.parametrize("module", [blocked_torch, cpu_extension])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("columns", [3, 5000])
def test_a_row_of_minus_infinity_never_has_the_entropy_of_a_uniform_one(
    module: ModuleType, masked: bool, columns: int
) -> None:
    needs(module)
    logits, tokens = torch.zeros(3, columns), torch.zeros(3, dtype=torch.int64)
    logits[1] = -torch.inf
    targets, absent = locate_targets(tokens, columns, group=None)
    if masked:  # as where another shard holds what is kept
        targets[1], absent[1] = -1, True
    found = module.forward_blocks(logits, targets, scale=1.0, with_entropy=True)
    assert [float(values[1]) for values in found[:3]] == [-torch.inf, 0.0, 0.0]
    _, rows = combine_shards(found, targets, absent, columns=columns, scale=1.0, group=None)
    uniform = torch.tensor(float(columns)).log()
    expected = torch.stack([uniform, torch.tensor(torch.nan), uniform])
    torch.testing.assert_close(rows.entropy, expected, equal_nan=True)


@pytest.mark.parametrize("module", [blocked_torch, cpu_extension])
def test_a_nan_beside_minus_infinity_is_never_swallowed(module: ModuleType) -> None:
    needs(module)
    logits = torch.full((1, 40), -torch.inf)
    logits[0, 7] = torch.nan
    found = module.forward_blocks(logits, torch.tensor([-1]), scale=1.0, with_entropy=True)
    assert bool(found.sum_exp.isnan())


def test_the_heads_agree_on_a_row_of_minus_infinity() -> None:
    # Hidden state 1 and a weight of -inf make a row of -inf logits.
    hidden, weight, tokens = torch.ones(1, 1), torch.full((6, 1), -torch.inf), torch.tensor([0])
    plain = log_probs_and_entropy(hidden @ weight.t(), tokens)
    fused = fused_log_probs_and_entropy(hidden, weight, tokens, memory_budget_bytes=8)
    assert all(bool(value.isnan().all()) for value in (*plain, *fused) if value is not None)


def test_a_sampled_token_that_the_mask_drops_is_never_minus_infinity() -> None:
    logits, keep = torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool)
    keep[2, 1] = False
    with pytest.raises(BatchError, match="token 1 of row 2 has probability 0 under keep_mask"):
        log_probs_and_entropy(logits, torch.tensor([0, 1, 1]), keep_mask=keep)
    log_probs, _ = log_probs_and_entropy(logits, torch.tensor([0, 1, -1]), keep_mask=keep)
    assert log_probs.isneginf().tolist() == [False, False, True]
