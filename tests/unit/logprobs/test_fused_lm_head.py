"""The fused LM head equals logits followed by log_probs_and_entropy, in bounded memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plugin.errors import BatchError, ConfigError
from plugin.logprobs.fused_lm_head import (
    fused_lm_head_pays,
    fused_log_probs_and_entropy,
)
from plugin.logprobs.lm_head_tiles import HeadSettings, Tiles, plan_tiles
from plugin.logprobs.row_gradients import RowPlaces, RowSettings
from plugin.logprobs.vocab_parallel import log_probs_and_entropy

# One tile, many tiles none of which can be kept, and many tiles about half of which are kept.
BUDGETS = {"one tile": 1 << 24, "tiny": 2000, "half": 24_000}


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation returned in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def problem(
    rows: int = 11, columns: int = 1500, size: int = 6, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, size, generator=generator).to(dtype)
    weight = torch.randn(columns, size, generator=generator).to(dtype)
    return hidden, weight, torch.randint(columns, (rows,), generator=generator)


def test_hand_computed_gradients_of_hidden_and_weight() -> None:
    # hidden 1 and weights (0, log 3) give probabilities (1/4, 3/4); d log p_0 / d logits = (3/4, -3/4), so
    # d/d hidden = 3/4 * 0 - 3/4 * log 3, and d/d weight = (3/4, -3/4) * hidden.
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(3.0)]], requires_grad=True)
    log_probs, entropy = fused_log_probs_and_entropy(hidden, weight, torch.tensor([0]))
    assert entropy is not None and not entropy.requires_grad
    torch.testing.assert_close(log_probs, torch.tensor([math.log(0.25)]))
    log_probs.sum().backward()
    torch.testing.assert_close(hidden.grad, torch.tensor([[-0.75 * math.log(3.0)]]))
    torch.testing.assert_close(weight.grad, torch.tensor([[0.75], [-0.75]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS.keys())
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_materialized_path(dtype: torch.dtype, budget: int, masked: bool) -> None:
    hidden, weight, tokens = problem(dtype=dtype)
    row_mask = torch.arange(11) % 3 != 0 if masked else None
    used = torch.ones(11, dtype=torch.bool) if row_mask is None else row_mask
    weights = torch.linspace(-1, 2, 11), torch.linspace(1, -1, 11)

    plain = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    lp, h = log_probs_and_entropy(
        plain[0] @ plain[1].t(), tokens, temperature=1.5, entropy_grad=True
    )
    assert h is not None
    (lp[used] @ weights[0][used] + h[used] @ weights[1][used]).backward()

    fused = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    flp, fh = fused_log_probs_and_entropy(
        fused[0],
        fused[1],
        tokens,
        temperature=1.5,
        entropy_grad=True,
        row_mask=row_mask,
        memory_budget_bytes=budget,
    )
    assert fh is not None
    (flp @ weights[0] + fh @ weights[1]).backward()
    torch.testing.assert_close(flp, lp.detach().masked_fill(~used, 0))
    torch.testing.assert_close(fh, h.detach().masked_fill(~used, 0))
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(fused[0].grad, plain[0].grad, **tolerance)
    torch.testing.assert_close(fused[1].grad, plain[1].grad, **tolerance)


def test_a_second_backward_pass_gives_the_same_gradients() -> None:
    hidden, weight, tokens = problem()
    total = fused_log_probs_and_entropy(
        hidden.requires_grad_(), weight.requires_grad_(), tokens, memory_budget_bytes=24_000
    )[0].sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight))
    torch.testing.assert_close(first, second)


def test_nothing_of_the_size_of_the_logits_is_allocated() -> None:
    hidden, weight, tokens = problem(rows=64, columns=5000)
    with LargestTensor() as seen:
        log_probs, entropy = fused_log_probs_and_entropy(
            hidden.requires_grad_(),
            weight.requires_grad_(),
            tokens,
            entropy_grad=True,
            memory_budget_bytes=80_000,
        )
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    # 64 x 5000 logits would be 320,000 elements; the largest tensor is the weight's gradient.
    assert seen.elements == weight.numel() == 30_000


@pytest.mark.parametrize(("budget", "products"), [(1 << 24, 3), (1500 * 11 * 4, 4)])
def test_tiles_inside_the_budget_are_not_computed_twice(budget: int, products: int) -> None:
    hidden, weight, tokens = problem()
    with LargestTensor() as seen:
        fused_log_probs_and_entropy(
            hidden.requires_grad_(), weight.requires_grad_(), tokens, memory_budget_bytes=budget
        )[0].sum().backward()
    assert seen.products == products


def test_masked_rows_are_never_read_and_idle_rows_never_poison() -> None:
    hidden, weight, tokens = problem()
    hidden[2], hidden[5], tokens[2] = torch.nan, torch.inf, -7
    row_mask = torch.ones(11, dtype=torch.bool)
    row_mask[2] = False
    log_probs, entropy = fused_log_probs_and_entropy(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        tokens,
        row_mask=row_mask,
        entropy_grad=True,
    )
    assert entropy is not None and log_probs[2] == 0 and entropy[2] == 0
    chosen = torch.arange(11) != 5  # row 5 is computed, but nobody uses it
    (log_probs[chosen].sum() + entropy[chosen].sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    assert torch.isfinite(weight.grad).all() and torch.isfinite(hidden.grad).all()
    assert torch.equal(hidden.grad[[2, 5]], torch.zeros(2, 6))


@pytest.mark.parametrize("rows", [0, 5])
def test_no_row_with_loss_stays_attached_with_zero_gradient(rows: int) -> None:
    hidden, weight, tokens = problem(rows=rows)
    log_probs, _ = fused_log_probs_and_entropy(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        tokens,
        row_mask=torch.zeros(rows, dtype=torch.bool),
    )
    assert torch.equal(log_probs, torch.zeros(rows))
    log_probs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_only_wanted_gradients_are_computed() -> None:
    hidden, weight, tokens = problem()
    fused_log_probs_and_entropy(hidden.requires_grad_(), weight, tokens)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None
    with torch.no_grad():
        assert not fused_log_probs_and_entropy(hidden, weight, tokens)[0].requires_grad


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("columns", [1, 1023, 3000])
@pytest.mark.parametrize("tile_bytes", [1000, 4096, 1 << 20])
def test_tiles_cover_everything_once_within_the_budget(
    rows: int, columns: int, tile_bytes: int
) -> None:
    covered = torch.zeros(rows, columns, dtype=torch.int8)
    for tile in plan_tiles(rows, columns, 4, tile_bytes):
        area = covered[tile.row : tile.row_end, tile.column : tile.column_end]
        assert 4 * area.numel() <= max(4, tile_bytes)
        area += 1
    assert (covered == 1).all()


def test_it_pays_when_a_quarter_of_the_rows_carries_no_loss_or_memory_runs_out() -> None:
    options = {"element_size": 4, "logits_limit_bytes": 10**6, "training": True}
    assert fused_lm_head_pays(100, 75, 1000, **options)
    assert not fused_lm_head_pays(100, 76, 1000, **options)
    assert fused_lm_head_pays(1000, 1000, 1000, **options)  # 4 MB of logits
    assert fused_lm_head_pays(100, 100, 1000, **{**options, "training": False})
    assert fused_lm_head_pays(100, 100, 1000, **options, separable=True)


def test_wrong_arguments_are_refused_with_the_fix() -> None:
    hidden, weight, tokens = problem()
    with pytest.raises(BatchError, match="same H"):
        fused_log_probs_and_entropy(hidden[:, :3], weight, tokens)
    with pytest.raises(BatchError, match="Cast one"):
        fused_log_probs_and_entropy(hidden.bfloat16(), weight, tokens)
    with pytest.raises(BatchError, match=r"int64 \[11\]"):
        fused_log_probs_and_entropy(hidden, weight, tokens[:4])
    with pytest.raises(BatchError, match="row_mask"):
        fused_log_probs_and_entropy(hidden, weight, tokens, row_mask=torch.ones(11))
    with pytest.raises(ConfigError, match="temperature"):
        fused_log_probs_and_entropy(hidden, weight, tokens, temperature=-1.0)


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_padding_rows_of_the_weight_are_never_computed_with(budget: int) -> None:
    hidden, weight, tokens = problem()
    tokens = tokens.clamp(max=1399)
    tokens[3] = 1450  # an id of padding
    weight[1400:] = torch.nan
    results = []
    for rows in (weight, weight[:1400].clone()):
        leaves = hidden.clone().requires_grad_(), rows.clone().requires_grad_()
        log_probs, entropy = fused_log_probs_and_entropy(
            *leaves, tokens, entropy_grad=True, memory_budget_bytes=budget, vocab_rows=1400
        )
        assert entropy is not None and log_probs[3] == -torch.inf
        usable = torch.arange(len(tokens)) != 3
        (log_probs[usable].sum() + entropy.sum()).backward()
        results.append((log_probs.detach(), entropy.detach(), leaves[0].grad, leaves[1].grad))
    (*padded, grad), (*plain, plain_grad) = results
    for mine, theirs in zip(padded, plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(grad[:1400], plain_grad)
    assert not grad[1400:].any()


def test_a_rank_that_holds_nothing_but_padding_adds_nothing_to_the_sums_of_the_others() -> None:
    hidden, weight, tokens = problem(rows=2, columns=4)
    settings = HeadSettings(RowSettings(None, 1.0, True, False, "full"), 1 << 20, 0, True)
    places = RowPlaces.of(torch.full_like(tokens, -1), None, None, 4, None)
    dense, few, _ = Tiles(hidden, weight, settings).statistics(places)
    assert dense is not None and few is None
    maximum, *sums = (values.tolist() for values in dense if values is not None)
    assert maximum == [-torch.inf] * 2 and sums == [[0.0, 0.0]] * 3
