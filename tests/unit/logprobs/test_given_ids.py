"""Log-probs of given ids beside that of the token: values and gradients against float64 autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.errors import BatchError
from plugin.logprobs.fused_lm_head import fused_log_probs_of_ids
from plugin.logprobs.row_ids import fused_top_ids, top_ids
from plugin.logprobs.vocab_parallel import log_probs_of_ids
from plugin.ragged import Ragged

ROWS, VOCAB, K, HIDDEN, TEMPERATURE = 6, 13, 4, 8, 0.7
Head = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def problem(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Hidden states, weight, tokens, ids (of rows 0 and 2 with the token) and arriving gradients."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:K] for _ in range(ROWS)])
    ids[0] = (tokens[0] + torch.tensor([2, 0, 1, 5])) % VOCAB
    # Tiles of 12 columns: id 12 is in the second one, and id 0 in the first column of the first.
    ids[1], tokens[1] = torch.tensor([3, 0, 7, 12]), 5
    ids[2], tokens[2] = torch.tensor([0, 5, 4, 12]), 0
    return {
        "hidden": torch.randn(ROWS, HIDDEN, generator=generator).to(dtype),
        "weight": torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype),
        "tokens": tokens,
        "ids": ids,
        "of_token": torch.randn(ROWS, generator=generator),
        "of_entropy": torch.randn(ROWS, generator=generator),
        "of_ids": torch.randn(ROWS, K, generator=generator),
    }


def results(p: dict[str, Tensor], head: Head, dtype: torch.dtype) -> list[Tensor]:
    hidden, weight = (p[name].to(dtype).requires_grad_() for name in ("hidden", "weight"))
    found = head(hidden, weight)
    arriving = (p["of_token"], p["of_entropy"], p["of_ids"])
    torch.autograd.backward(found, [a.to(f.dtype) for a, f in zip(arriving, found, strict=True)])
    assert hidden.grad is not None and weight.grad is not None
    return [*(f.detach() for f in found), hidden.grad, weight.grad]


def plain(p: dict[str, Tensor]) -> Head:
    def head(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_probs = torch.log_softmax(hidden @ weight.t() / TEMPERATURE, -1)
        of_token = log_probs.gather(1, p["tokens"][:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(1)
        return of_token, entropy, log_probs.gather(1, p["ids"])

    return head


HEADS: dict[str, dict[str, Any]] = {
    "logits": {},
    "logits in place": {"inplace_grad": True},
    "fused": {"fused": True},
    "fused in tiles": {"fused": True, "memory_budget_bytes": 48},
}


def ours(p: dict[str, Tensor], *, fused: bool = False, **options: Any) -> Head:
    options |= {"temperature": TEMPERATURE, "entropy_grad": True}

    def head(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if fused:
            found = fused_log_probs_of_ids(hidden, weight, p["tokens"], p["ids"], **options)
        else:
            found = log_probs_of_ids(hidden @ weight.t(), p["tokens"], p["ids"], **options)
        assert found[1] is not None
        return found[0], found[1], found[2]

    return head


@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients_are_those_of_autograd(name: str) -> None:
    p = problem()
    expected = results(p, plain(p), torch.float64)
    found = results(p, ours(p, **HEADS[name]), torch.float32)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_a_confident_row_keeps_a_small_gradient_in_bfloat16(name: str) -> None:
    # Id 0 has nearly all of the probability and gets a gradient of 1: what is left of it, 1 - p, is far below what
    # bfloat16 would keep of a sum of 1 and -p.
    p = problem(torch.bfloat16)
    p["ids"] = torch.arange(K).expand(ROWS, K).contiguous()
    p["tokens"][:] = 8
    p["hidden"] = torch.ones(ROWS, HIDDEN, dtype=torch.bfloat16)
    p["weight"] = torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)
    p["weight"][0] = 0.875
    p["of_token"], p["of_entropy"] = torch.zeros(ROWS), torch.zeros(ROWS)
    p["of_ids"] = torch.zeros(ROWS, K)
    p["of_ids"][:, 0] = 1.0
    # logits 7 / 0.7 = 10 and 0: 1 - p = 12 / (e^10 + 12) = 5.4e-4, times 1 / 0.7
    *_, of_weight = results(p, ours(p, **HEADS[name]), torch.bfloat16)
    expected = 12 / (torch.tensor(10.0).exp() + 12) / TEMPERATURE * ROWS
    torch.testing.assert_close(of_weight[0].float(), expected.expand(HIDDEN), rtol=0.02, atol=0)


@pytest.mark.parametrize("name", HEADS)
def test_a_row_without_gradient_gets_exactly_0_whatever_it_holds(name: str) -> None:
    p = problem()
    for arriving in ("of_token", "of_entropy", "of_ids"):
        p[arriving][2] = 0.0
    p["hidden"][2] = torch.nan
    *_, of_hidden, of_weight = results(p, ours(p, **HEADS[name]), torch.float32)
    if "fused" in name:  # the product with logits of its own is not ours to guard
        assert bool(of_weight.isfinite().all())
    logits = torch.randn(ROWS, VOCAB)
    logits[2] = torch.nan
    logits.requires_grad_()
    found = log_probs_of_ids(logits, p["tokens"], p["ids"], entropy_grad=True)
    arriving = [p[name] for name in ("of_token", "of_entropy", "of_ids")]
    torch.autograd.backward(found, arriving)
    assert logits.grad is not None
    assert not logits.grad[2].any() and bool(logits.grad.isfinite().all())
    assert not of_hidden[2].any() or "fused" not in name


@pytest.mark.parametrize("name", HEADS)
def test_ids_of_a_truncated_distribution_are_those_of_autograd(name: str) -> None:
    p = problem()
    kept = [torch.cat([p["ids"][row], p["tokens"][row, None]]).unique() for row in range(ROWS)]
    kept[3], kept[4] = kept[3][:0], torch.arange(VOCAB)  # both: the whole vocabulary
    p["ids"][5, 2:] = -1  # a head with free places
    p["of_ids"][5, 2:] = 0.0
    drop = torch.ones(ROWS, VOCAB, dtype=torch.bool)
    for row, ids in enumerate(kept):
        drop[row, ids if len(ids) else slice(None)] = False

    def plain_kept(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ weight.t() / TEMPERATURE
        log_probs = torch.log_softmax(logits.masked_fill(drop, -torch.inf), -1)
        full = torch.log_softmax(logits, -1)
        of_ids = log_probs.gather(1, p["ids"].clamp(min=0))
        return (
            log_probs.gather(1, p["tokens"][:, None])[:, 0],
            -(full.exp() * full).sum(1),
            of_ids.masked_fill(p["ids"] < 0, 0.0),
        )

    options = {**HEADS[name], "kept": Ragged.of(kept), "ids_of": "kept"}
    expected = results(p, plain_kept, torch.float64)
    found = results(p, ours(p, **options), torch.float32)
    found[2] = found[2].masked_fill(p["ids"] < 0, 0.0)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def test_ids_of_another_number_of_rows_are_refused() -> None:
    with pytest.raises(BatchError, match=r"given ids are \[2, 3\] for 4 tokens"):
        log_probs_of_ids(torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64), torch.zeros(2, 3))


def test_the_likeliest_ids_are_those_of_topk() -> None:
    p = problem()
    logits = p["hidden"] @ p["weight"].t()
    expected = logits.topk(5, dim=1).indices
    assert torch.equal(top_ids(logits, 5), expected)
    for size in (1, 10_000):
        found = fused_top_ids(p["hidden"], p["weight"], 5, block_bytes=size)
        assert torch.equal(found, expected)
    held = fused_top_ids(p["hidden"], p["weight"], 3, tokens_held=7)
    assert torch.equal(held, logits[:, :7].topk(3, dim=1).indices)
