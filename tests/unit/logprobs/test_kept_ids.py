"""Log-probs over kept ids: float64 references for values and gradients, in every way to compute them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plugin.errors import BatchError, ConfigError
from plugin.logprobs.fused_lm_head import fused_log_probs_and_entropy
from plugin.logprobs.kernels import blocked_torch, cpu_extension
from plugin.logprobs.separable_lm_head import separable_lm_head
from plugin.logprobs.vocab_parallel import log_probs_and_entropy
from plugin.ragged import Ragged
from tests.unit.logprobs.test_fused_lm_head import LargestTensor

TEMPERATURE = 0.8


def reference(
    logits: Tensor, tokens: Tensor, kept: Ragged, entropy_of: str = "full"
) -> tuple[Tensor, Tensor]:
    """Float64 log-probs and entropy [T], by setting what is not kept to -inf."""
    scores = logits.double() / TEMPERATURE
    drop = torch.ones_like(scores, dtype=torch.bool)
    for row, ids in enumerate(kept):
        drop[row, ids.long() if len(ids) else slice(None)] = False
    narrow = scores.masked_fill(drop, -torch.inf).log_softmax(-1)
    of = narrow if entropy_of == "kept" else scores.log_softmax(-1)
    entropy = -(of.exp() * of.masked_fill(of == -torch.inf, 0.0)).sum(-1)
    return narrow.gather(-1, tokens[:, None])[:, 0], entropy


def problem(
    rows: int, columns: int, counts: list[int], dtype: torch.dtype = torch.float32, size: int = 6
) -> tuple[Tensor, Tensor, Tensor, Ragged]:
    """Hidden states, weight, tokens, and sorted kept ids that hold the token of every row."""
    generator = torch.Generator().manual_seed(rows * 31 + columns)
    hidden = torch.randn(rows, size, generator=generator).to(dtype)
    weight = torch.randn(columns, size, generator=generator).to(dtype)
    ids = [
        torch.randperm(columns, generator=generator)[: min(count, columns)].sort().values
        for count in counts
    ]
    tokens = torch.tensor(
        [int(row[len(row) // 2]) if len(row) else i % columns for i, row in enumerate(ids)]
    )
    return hidden, weight, tokens, Ragged.of([row.int() for row in ids])


def test_hand_computed_three_of_four_tokens() -> None:
    # Logits (0, log 3, log 4, 9), kept {0, 1, 2}: probabilities (1/8, 3/8, 1/2, -). The token 1 has log 3/8;
    # its gradient is [1] - p over the kept ids and 0 elsewhere: (-1/8, 5/8, -1/2, 0).
    logits = torch.tensor([[0.0, math.log(3), math.log(4), 9.0]], requires_grad=True)
    kept = Ragged.of([torch.tensor([0, 1, 2])])
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([1]), kept=kept)
    torch.testing.assert_close(log_probs, torch.tensor([math.log(3 / 8)]))
    log_probs.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-1 / 8, 5 / 8, -1 / 2, 0.0]]))
    # The entropy is that of all four by default, and of the three on request.
    assert entropy is not None and float(entropy) < 0.02
    _, of_kept = log_probs_and_entropy(logits, torch.tensor([1]), kept=kept, entropy_of="kept")
    by_hand = math.log(8) / 8 + 3 / 8 * math.log(8 / 3) + math.log(2) / 2
    torch.testing.assert_close(of_kept, torch.tensor([by_hand]))


def through_logits(hidden: Tensor, weight: Tensor, tokens: Tensor, **options: Any) -> Any:
    return log_probs_and_entropy(hidden @ weight.t(), tokens, inplace_grad=True, **options)


def through_tiles(hidden: Tensor, weight: Tensor, tokens: Tensor, **options: Any) -> Any:
    # Tiles of a few rows and columns; none can be kept.
    return fused_log_probs_and_entropy(hidden, weight, tokens, memory_budget_bytes=400, **options)


def through_some_rows(hidden: Tensor, weight: Tensor, tokens: Tensor, **options: Any) -> Any:
    # Two more rows that are not computed; their kept ids must not move those of the others.
    foreign = torch.full_like(hidden[:1].detach(), torch.nan)
    more = torch.cat([foreign, hidden, foreign])
    rows = torch.ones(len(more), dtype=torch.bool)
    rows[0] = rows[-1] = False
    kept = options.pop("kept")
    extra = Ragged(torch.zeros(1, dtype=torch.int32), [1])
    results = fused_log_probs_and_entropy(
        more,
        weight,
        torch.cat([tokens[:1], tokens, tokens[:1]]),
        row_mask=rows,
        kept=Ragged.concatenated([extra, kept, extra]),
        **options,
    )
    return [None if values is None else values[1:-1] for values in results]


@pytest.fixture(params=["blocked_torch", "cpu_extension"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"blocked_torch": blocked_torch, "cpu_extension": cpu_extension}[request.param]
    if module is cpu_extension and cpu_extension.load_library() is None:
        pytest.skip("no C++ compiler")
    for user in ("row_gradients", "lm_head_tiles"):
        monkeypatch.setattr(f"plugin.logprobs.{user}.row_kernels_for", lambda logits: module)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("way", [through_logits, through_tiles, through_some_rows])
@pytest.mark.parametrize("entropy_of", ["full", "kept"])
@pytest.mark.parametrize("counts", [[3, 0, 1, 20, 7], [2, 4, 1, 20, 300]], ids=["mixed", "all"])
def test_values_and_gradients_match_float64(
    way: Callable[..., Any], entropy_of: str, counts: list[int]
) -> None:
    hidden, weight, tokens, kept = problem(5, 300, counts)
    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    wanted = reference(exact[0] @ exact[1].t(), tokens, kept, entropy_of)
    scale = torch.linspace(-1, 2, 5), torch.linspace(0.5, -0.3, 5)
    (wanted[0] @ scale[0].double() + wanted[1] @ scale[1].double()).backward()
    inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = way(
        *inputs,
        tokens,
        kept=kept,
        entropy_of=entropy_of,
        entropy_grad=True,
        temperature=TEMPERATURE,
    )
    (found[0] @ scale[0] + found[1] @ scale[1]).backward()
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(inputs, exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=2e-5, rtol=1e-4)
    # Without an entropy the log-probs are the same, whether or not a row needs all columns.
    alone, nothing = way(*inputs, tokens, kept=kept, with_entropy=False, temperature=TEMPERATURE)
    assert nothing is None
    torch.testing.assert_close(alone, found[0])


@pytest.mark.parametrize("entropy_of", ["full", "kept"])
def test_the_separable_head_uses_the_rows_of_its_block(entropy_of: Any) -> None:
    hidden, weight, tokens, kept = problem(5, 300, [3, 0, 1, 20, 7])
    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    wanted = reference(exact[0] @ exact[1].t(), tokens, kept, entropy_of)
    (wanted[0].exp() - 0.3 * wanted[1]).sum().backward()
    inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy, anchor = separable_lm_head(
        *inputs,
        tokens,
        lambda block, lp, h: lp.exp() - 0.3 * h,
        temperature=TEMPERATURE,
        memory_budget_bytes=2 * 300 * 4,  # blocks of two rows
        kept=kept,
        entropy_of=entropy_of,
    )
    anchor.backward()
    torch.testing.assert_close(log_probs.double(), wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted[1], atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(inputs, exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=2e-5, rtol=1e-4)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(1, 9),
    st.sampled_from(["full", "kept"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0.0, 30.0, 1e4, -math.inf]),
)
@settings(max_examples=60, deadline=None)
def test_ragged_rows_of_any_shape_match_float64(
    counts: list[int], columns: int, entropy_of: Any, dtype: torch.dtype, extreme: float
) -> None:
    hidden, weight, tokens, kept = problem(len(counts), columns, counts, dtype)
    logits = hidden @ weight.t()
    if columns > 1:
        # Far above or below the others, and not the token: -inf is a column that is never sampled.
        logits[0, (int(tokens[0]) + 1) % columns] = extreme
    exact = logits.double().requires_grad_()
    wanted, _ = reference(exact, tokens, kept)
    (wanted * torch.arange(1, len(counts) + 1)).sum().backward()
    source = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        source, tokens, temperature=TEMPERATURE, kept=kept, entropy_of=entropy_of
    )
    torch.testing.assert_close(log_probs.double(), wanted, atol=1e-4, rtol=1e-5)
    assert entropy is not None and bool((entropy > -1e-5).all())
    (log_probs * torch.arange(1, len(counts) + 1)).sum().backward()
    assert source.grad is not None and exact.grad is not None
    step = 2e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(source.grad.double(), exact.grad, atol=2e-5, rtol=step)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("inplace", [False, True])
def test_rows_without_incoming_gradient_stay_zero_whatever_they_hold(
    bad: float, inplace: bool
) -> None:
    hidden, weight, tokens, kept = problem(4, 50, [3, 5, 0, 2])
    logits = hidden @ weight.t()
    logits[1] = bad
    # A row that nobody sampled may keep ids that do not exist.
    kept.values[3:8] = torch.tensor([-7, 2, 2, 51, 2**31 - 1], dtype=torch.int32)
    source = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        source * 1, tokens, entropy_grad=True, inplace_grad=inplace, kept=kept
    )
    assert entropy is not None
    (log_probs[[0, 2, 3]].sum() + entropy[[0, 2, 3]].sum()).backward()
    assert source.grad is not None
    assert torch.equal(source.grad[1], torch.zeros(50)) and bool(source.grad.isfinite().all())


def test_a_token_that_is_not_kept_has_probability_zero() -> None:
    kept = Ragged.of([torch.tensor([1, 2]), torch.tensor([0])])
    log_probs, _ = log_probs_and_entropy(torch.zeros(2, 4), torch.tensor([3, 0]), kept=kept)
    assert log_probs.tolist() == [-math.inf, 0.0]


def test_nothing_of_the_size_of_the_logits_is_made_for_the_kept_ids() -> None:
    hidden, weight, tokens, kept = problem(64, 5000, [20] * 64)
    logits = hidden @ weight.t()
    with LargestTensor() as seen, torch.no_grad():
        log_probs_and_entropy(logits, tokens, kept=kept, with_entropy=False)
    assert seen.elements <= 64 * 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_without_gradient_and_entropy_needs_no_product_of_matrices(
    dtype: torch.dtype,
) -> None:
    hidden, weight, tokens, kept = problem(64, 5000, [20] * 64, dtype)
    options: dict[str, Any] = {"kept": kept, "temperature": TEMPERATURE, "with_entropy": False}
    wanted, _ = fused_log_probs_and_entropy(hidden, weight.requires_grad_(), tokens, **options)
    with LargestTensor() as seen, torch.no_grad():
        found, _ = fused_log_probs_and_entropy(hidden, weight, tokens, **options)
    assert seen.products == 0 and seen.elements <= max(64 * 20 * 6, weight.numel())
    # A product in another order may round to the next bfloat16.
    torch.testing.assert_close(found, wanted, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0)


def test_kept_ids_of_another_number_of_rows_or_said_twice_are_refused() -> None:
    logits, tokens = torch.zeros(2, 4), torch.tensor([0, 1])
    with pytest.raises(BatchError, match="kept ids of 1 rows for 2 tokens"):
        log_probs_and_entropy(logits, tokens, kept=Ragged.of([torch.tensor([0])]))
    with pytest.raises(ConfigError, match="pass one of them"):
        log_probs_and_entropy(
            logits,
            tokens,
            kept=Ragged.of([tokens, tokens]),
            keep_mask=torch.ones(2, 4, dtype=torch.bool),
        )
