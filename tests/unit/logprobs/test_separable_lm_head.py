"""The LM head fused with a separable loss equals logits followed by separable_log_probs, in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.errors import ConfigError
from plugin.logprobs.separable_lm_head import separable_lm_head
from plugin.logprobs.separable_logprobs import separable_log_probs
from plugin.loss.token_program import TokenProgram
from tests.unit.logprobs.test_fused_lm_head import LargestTensor, problem
from tests.unit.megatron_backend.step.test_separable_path import program_and_fields

# One block of all 11 rows of 1500 columns, blocks of a single row, and three blocks of four rows or less.
BUDGETS = {"one block": 1 << 24, "tiny": 1, "three": 4 * 1500 * 4}


def head_of(hidden: Tensor, weight: Tensor, tokens: Tensor, **options: Any) -> Any:
    program, fields = program_and_fields(len(tokens))
    everything = torch.ones(len(tokens), dtype=torch.bool)
    return separable_lm_head(
        hidden, weight, tokens, program, fields, **{"row_mask": everything, **options}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS.keys())
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_materialized_path(dtype: torch.dtype, budget: int, masked: bool) -> None:
    hidden, weight, tokens = problem(dtype=dtype)
    row_mask = torch.arange(11) % 3 != 0 if masked else torch.ones(11, dtype=torch.bool)
    program, fields = program_and_fields(11)
    fields["weights"] = fields["weights"] * row_mask
    options = {"temperature": 1.5, "expected_gradient": 0.25}

    plain = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    want = separable_log_probs(plain[0] @ plain[1].t(), tokens, program, fields, **options)
    want[2].backward(torch.tensor(0.25))

    fused = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    if masked:
        with torch.no_grad():
            fused[0][~row_mask] = torch.nan  # rows without loss are never read
    got = separable_lm_head(
        *fused, tokens, program, fields, row_mask=row_mask, memory_budget_bytes=budget, **options
    )
    got[2].backward(torch.tensor(0.25))
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for mine, theirs in zip(
        (*got, fused[0].grad, fused[1].grad), (*want, plain[0].grad, plain[1].grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **tolerance)


def test_hand_computed_gradients_of_hidden_and_weight() -> None:
    # The loss 2 log p_0 as a program: d/d log-prob = weights = 2, d/d entropy = 0. Hidden 1 and weights (0, log 3)
    # give probabilities (1/4, 3/4) and d log p_0 / d logits = (3/4, -3/4).
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [3.0]]).log().clamp(min=0).requires_grad_()
    program = TokenProgram(("weights",), (0.0,), (), (0, 1))
    log_probs, _, anchor = separable_lm_head(
        hidden,
        weight,
        torch.tensor([0]),
        program,
        {"weights": torch.tensor([2.0])},
        row_mask=torch.tensor([True]),
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
    none = torch.zeros(rows, dtype=torch.bool)
    head_of(hidden.requires_grad_(), weight.requires_grad_(), tokens, row_mask=none)[2].backward()
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
