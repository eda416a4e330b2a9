"""The LM head fused with a separable loss equals logits followed by the loss, in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.errors import ConfigError
from plugin.logprobs.separable_lm_head import separable_lm_head
from plugin.logprobs.vocab_parallel import log_probs_and_entropy
from tests.unit.logprobs.test_fused_lm_head import LargestTensor, problem

# One block of all 11 rows of 1500 columns, blocks of a single row, and three blocks of four rows or less.
BUDGETS = {"one block": 1 << 24, "tiny": 1, "three": 4 * 1500 * 4}


def losses(number: Tensor, log_probs: Tensor, entropy: Tensor) -> Tensor:
    """A loss with a different gradient in every row: row i weighs i + 1."""
    return (1.0 + number) * ((log_probs + 1 + number / 10).exp() - 0.3 * entropy)


def head_of(hidden: Tensor, weight: Tensor, tokens: Tensor, **options: Any) -> Any:
    rows = options.get("rows")
    numbers = torch.arange(len(hidden)) if rows is None else rows
    tokens = tokens if rows is None else tokens[rows]
    return separable_lm_head(
        hidden, weight, tokens, lambda block, *values: losses(numbers[block], *values), **options
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS.keys())
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_materialized_path(dtype: torch.dtype, budget: int, masked: bool) -> None:
    hidden, weight, tokens = problem(dtype=dtype)
    row_mask = torch.arange(11) % 3 != 0 if masked else torch.ones(11, dtype=torch.bool)
    rows = row_mask.nonzero()[:, 0]

    plain = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        plain[0] @ plain[1].t(), tokens, temperature=1.5, entropy_grad=True
    )
    assert entropy is not None
    (0.25 * losses(torch.arange(11), log_probs, entropy)[rows].sum()).backward()

    fused = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    if masked:
        with torch.no_grad():
            fused[0][~row_mask] = torch.nan  # rows without loss are never read
    got = head_of(
        *fused,
        tokens,
        rows=rows if masked else None,
        memory_budget_bytes=budget,
        temperature=1.5,
        expected_gradient=0.25,
    )
    got[2].backward(torch.tensor(0.25))
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    want = (log_probs[rows], entropy[rows], torch.zeros(()), plain[0].grad, plain[1].grad)
    for mine, theirs in zip((*got, fused[0].grad, fused[1].grad), want, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


def test_strided_hidden_states_give_the_same_gradient() -> None:
    hidden, weight, tokens = problem()
    apart = hidden.repeat(1, 2)[:, : hidden.shape[1]].requires_grad_()
    plain = hidden.clone().requires_grad_()
    head_of(apart, weight, tokens)[2].backward()
    head_of(plain, weight, tokens)[2].backward()
    torch.testing.assert_close(apart.grad, plain.grad)


def test_hand_computed_gradients_of_hidden_and_weight() -> None:
    # The loss 2 log p_0. Hidden 1 and weights (0, log 3) give probabilities (1/4, 3/4) and
    # d log p_0 / d logits = (3/4, -3/4).
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [3.0]]).log().clamp(min=0).requires_grad_()
    log_probs, _, anchor = separable_lm_head(
        hidden, weight, torch.tensor([0]), lambda block, log_probs, entropy: 2 * log_probs
    )
    anchor.backward()
    torch.testing.assert_close(log_probs, torch.tensor([0.25]).log())
    torch.testing.assert_close(hidden.grad, torch.tensor([[-1.5]]) * torch.tensor(3.0).log())
    torch.testing.assert_close(weight.grad, torch.tensor([[1.5], [-1.5]]))


def test_three_products_and_nothing_of_the_size_of_the_logits() -> None:
    hidden, weight, tokens = problem(rows=64, columns=5000)
    with LargestTensor() as seen:
        head_of(
            hidden.requires_grad_(),
            weight.requires_grad_(),
            tokens,
            memory_budget_bytes=5000 * 4 * 4,
        )[2].backward()
    # 16 blocks of 4 rows; the largest tensor is the weight's gradient, where the logits would be 320,000 elements.
    assert seen.products == 3 * 16
    assert seen.elements == weight.numel() == 30_000


@pytest.mark.parametrize("arriving", [0.5, 0.0])
def test_a_factor_that_nobody_announced_still_reaches_the_gradients(arriving: float) -> None:
    hidden, weight, tokens = problem()
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    announced = torch.autograd.grad(head_of(*inputs, tokens)[2], inputs)
    anchor = head_of(*inputs, tokens)[2]
    found = torch.autograd.grad(anchor, inputs, torch.tensor(arriving))
    torch.testing.assert_close(found, tuple(arriving * grad for grad in announced))


@pytest.mark.parametrize("rows", [0, 11])
def test_no_row_with_loss_stays_attached_with_zero_gradient(rows: int) -> None:
    hidden, weight, tokens = problem(rows)
    none = torch.zeros(0, dtype=torch.int64)
    head_of(hidden.requires_grad_(), weight.requires_grad_(), tokens, rows=none)[2].backward()
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


def test_a_second_backward_pass_is_refused_and_only_wanted_gradients_are_computed() -> None:
    hidden, weight, tokens = problem()
    with LargestTensor() as seen:
        anchor = head_of(hidden.requires_grad_(), weight, tokens)[2]
        anchor.backward(retain_graph=True)
    assert seen.products == 2
    with pytest.raises(ConfigError, match="second backward pass"):
        anchor.backward()
