"""Log-probs and entropy of unsharded logits: values, gradients, and what masked rows must not do."""

from __future__ import annotations

import math

import pytest
import torch

from plugin.errors import BatchError, ConfigError
from plugin.logprobs.kernels import blocked_torch, row_kernels_for
from plugin.logprobs.vocab_parallel import log_probs_and_entropy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["blocked_torch", "fastest"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every claim of this file holds for the plain implementation and for the one chosen on this machine."""
    if request.param == "blocked_torch":
        monkeypatch.setattr(
            "plugin.logprobs.row_gradients.row_kernels_for",
            lambda logits: blocked_torch,
        )
        # Small blocks, so that a few rows already span several of them.
        monkeypatch.setitem(blocked_torch._BLOCK_BYTES, "cpu", 4096)
        return "blocked_torch"
    return row_kernels_for(torch.zeros(1, 1)).name


def reference(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 log-probs and entropy by the plain formula."""
    log_probs = torch.log_softmax(logits.double() / temperature, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, tokens[:, None])[:, 0], entropy


def sample(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 7919 + columns)
    logits = (torch.randn(rows, columns, generator=generator) * 3).to(dtype)
    return logits, torch.randint(columns, (rows,), generator=generator)


def test_hand_computed_two_token_distribution() -> None:
    # softmax of (0, log 3) is (1/4, 3/4); entropy = 1/4 log 4 + 3/4 log(4/3).
    logits = torch.tensor([[0.0, math.log(3.0)]] * 2, requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([0, 1]), entropy_grad=True)
    assert entropy is not None
    expected_entropy = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    torch.testing.assert_close(log_probs, torch.tensor([math.log(0.25), math.log(0.75)]))
    torch.testing.assert_close(entropy, torch.full((2,), expected_entropy))
    # d log p_t / dx = [t] - p: (3/4, -3/4) for the first row, (-1/4, 1/4) for the second.
    (grad,) = torch.autograd.grad(log_probs.sum(), logits, retain_graph=True)
    torch.testing.assert_close(grad, torch.tensor([[0.75, -0.75], [-0.25, 0.25]]))
    # d entropy / dx_j = -p_j (log p_j + entropy).
    (grad,) = torch.autograd.grad(entropy.sum(), logits)
    by_hand = -0.25 * (math.log(0.25) + expected_entropy)
    torch.testing.assert_close(grad, torch.tensor([[by_hand, -by_hand]] * 2))


def test_temperature_divides_the_logits_once_and_leaves_the_callers_alone() -> None:
    # (0, 2 log 3) at temperature 2 is (0, log 3): probabilities 1/4 and 3/4; the gradient carries 1/2.
    logits = torch.tensor([[0.0, 2 * math.log(3.0)]], requires_grad=True)
    before = logits.detach().clone()
    log_probs, _ = log_probs_and_entropy(logits, torch.tensor([0]), temperature=2.0)
    torch.testing.assert_close(log_probs, torch.tensor([math.log(0.25)]))
    log_probs.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.375, -0.375]]))
    assert torch.equal(logits.detach(), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 1000), (17, 2049), (5, 20000)])
@pytest.mark.parametrize("inplace", [False, True])
def test_values_and_gradients_match_float64(
    dtype: torch.dtype, shape: tuple[int, int], inplace: bool
) -> None:
    logits, tokens = sample(*shape, dtype)
    exact = logits.double().requires_grad_()
    weights = torch.linspace(-1, 2, shape[0]), torch.linspace(0.5, -0.3, shape[0])
    lp64, h64 = reference(exact, tokens, 0.7)
    (lp64 @ weights[0].double() + h64 @ weights[1].double()).backward()

    source = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        source * 1, tokens, temperature=0.7, entropy_grad=True, inplace_grad=inplace
    )
    assert entropy is not None and log_probs.dtype == entropy.dtype == torch.float32
    (log_probs @ weights[0] + entropy @ weights[1]).backward()
    torch.testing.assert_close(log_probs.double(), lp64, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), h64, atol=1e-5, rtol=1e-5)
    assert source.grad is not None and exact.grad is not None and source.grad.dtype == dtype
    # One rounding to the logits' type is all that separates the gradient from the exact one.
    step = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11 * 1.01}[dtype]
    torch.testing.assert_close(source.grad.double(), exact.grad, rtol=step, atol=3e-7)


def test_entropy_carries_no_gradient_unless_asked() -> None:
    logits, tokens = sample(4, 9, torch.float32)
    log_probs, entropy = log_probs_and_entropy(logits.requires_grad_(), tokens)
    assert entropy is not None and not entropy.requires_grad and log_probs.requires_grad
    assert log_probs_and_entropy(logits, tokens, with_entropy=False)[1] is None
    _, entropy = log_probs_and_entropy(logits, tokens, entropy_grad=True)
    assert entropy is not None and entropy.requires_grad


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_incoming_gradient_stay_exactly_zero_even_with_nan_logits(
    bad: float, inplace: bool, dtype: torch.dtype
) -> None:
    logits, tokens = sample(6, 50, dtype)
    logits[1], logits[4, 3] = bad, bad
    source = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        source * 1, tokens, entropy_grad=True, inplace_grad=inplace
    )
    assert entropy is not None
    used = torch.tensor([True, False, True, True, False, True])
    (log_probs[used].sum() + entropy[used].sum()).backward()
    assert source.grad is not None
    assert torch.equal(source.grad[~used], torch.zeros(2, 50, dtype=dtype))
    assert torch.isfinite(source.grad).all() and (source.grad[used] != 0).any(-1).all()


def test_a_vocabulary_entry_at_minus_infinity_counts_for_nothing() -> None:
    logits = torch.tensor([[0.0, -math.inf, math.log(3.0)]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([0]), entropy_grad=True)
    assert entropy is not None
    torch.testing.assert_close(log_probs, torch.tensor([math.log(0.25)]))
    torch.testing.assert_close(entropy, torch.tensor([0.25 * math.log(4) + 0.75 * math.log(4 / 3)]))
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad is not None and logits.grad[0, 1] == 0
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_keep_mask_equals_setting_the_other_logits_to_minus_infinity(
    dtype: torch.dtype, entropy_grad: bool
) -> None:
    logits, tokens = sample(5, 300, dtype)
    keep = torch.rand(5, 300, generator=torch.Generator().manual_seed(1)) < 0.3
    keep[torch.arange(5), tokens] = True
    tokens[3] = -1  # no sampled token
    results = []
    for source, mask in [
        (logits.clone(), keep),
        (logits.masked_fill(~keep, -torch.inf), None),
    ]:
        source.requires_grad_()
        log_probs, entropy = log_probs_and_entropy(
            source, tokens, entropy_grad=entropy_grad, keep_mask=mask
        )
        assert entropy is not None
        total = log_probs[:3].sum() + (entropy.sum() if entropy_grad else 0)
        total.backward()
        results.append((log_probs.detach(), entropy.detach(), source.grad))
    (lp_mask, h_mask, g_mask), (lp_inf, h_inf, g_inf) = results
    assert lp_mask[3] == -torch.inf
    torch.testing.assert_close(lp_mask, lp_inf)
    torch.testing.assert_close(h_mask, h_inf)
    torch.testing.assert_close(g_mask, g_inf)


def test_token_ids_outside_the_vocabulary_never_index() -> None:
    logits, _ = sample(4, 10, torch.float32)
    tokens = torch.tensor([-100, 3, 10, 2**40])
    log_probs, _ = log_probs_and_entropy(logits.requires_grad_(), tokens)
    assert torch.equal(log_probs.isneginf(), torch.tensor([True, False, True, True]))
    log_probs[1].backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad[[0, 2, 3]], torch.zeros(3, 10))


def test_no_rows_stays_attached_to_the_graph() -> None:
    weight = torch.ones(3, 8, requires_grad=True)
    logits = torch.zeros(0, 3) @ weight
    log_probs, entropy = log_probs_and_entropy(
        logits, torch.zeros(0, dtype=torch.int64), entropy_grad=True
    )
    assert entropy is not None and log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros(3, 8))


@pytest.mark.parametrize("inplace", [False, True])
def test_inplace_gradient_reuses_the_storage_of_the_logits(inplace: bool) -> None:
    source = torch.randn(4, 33, requires_grad=True)
    logits = source * 1
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    log_probs_and_entropy(logits, torch.arange(4), inplace_grad=inplace)[0].sum().backward()
    assert (seen == [logits.data_ptr()]) == inplace


def test_a_second_backward_pass_after_an_inplace_gradient_is_an_error() -> None:
    logits = torch.randn(4, 33, requires_grad=True) * 1
    total = log_probs_and_entropy(logits, torch.arange(4), inplace_grad=True)[0].sum()
    total.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="inplace_grad=False"):
        total.backward()


def test_another_user_of_overwritten_logits_fails_instead_of_reading_the_gradient() -> None:
    logits = torch.randn(4, 33, requires_grad=True) * 1
    other = logits.pow(2).sum()
    log_probs_and_entropy(logits, torch.arange(4), inplace_grad=True)[0].sum().backward(
        retain_graph=True
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.parametrize("layout", ["rows of a wider tensor", "transposed", "every other row"])
@pytest.mark.parametrize("inplace", [False, True])
def test_strided_logits_give_the_same_results(layout: str, inplace: bool) -> None:
    base = torch.randn(8, 60, requires_grad=True)
    views = {
        "rows of a wider tensor": lambda x: x[:, 5:45],
        "transposed": lambda x: x.t()[:, :8],
        "every other row": lambda x: x[::2],
    }
    results = []
    for owned in [lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x]:
        logits = owned(views[layout](base * 1))
        tokens = torch.arange(logits.shape[0]) % logits.shape[1]
        log_probs, _ = log_probs_and_entropy(logits, tokens, inplace_grad=inplace)
        results.append((log_probs, *torch.autograd.grad(log_probs.sum(), base)))
    torch.testing.assert_close(results[0], results[1])


def test_large_logits_do_not_lose_the_low_bits() -> None:
    # Shifting all logits by 4096 changes no probability, and a float32 spacing of 2**-11 there leaves room.
    logits = torch.tensor([[0.0, 0.5, 2.0]]) + 4096
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([1]))
    lp64, h64 = reference(logits - 4096, torch.tensor([1]))
    torch.testing.assert_close(log_probs.double(), lp64, atol=1e-6, rtol=0)
    assert entropy is not None
    torch.testing.assert_close(entropy.double(), h64, atol=1e-6, rtol=0)


def test_wrong_shapes_and_settings_are_refused_with_the_fix() -> None:
    logits, tokens = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(BatchError, match=r"int64 \[4\]"):
        log_probs_and_entropy(logits, tokens[:3])
    with pytest.raises(BatchError, match="Flatten"):
        log_probs_and_entropy(logits[None], tokens)
    with pytest.raises(BatchError, match="keep_mask"):
        log_probs_and_entropy(logits, tokens, keep_mask=torch.ones(4, 2, dtype=torch.bool))
    with pytest.raises(ConfigError, match="temperature is 0"):
        log_probs_and_entropy(logits, tokens, temperature=0.0)
    with pytest.raises(ConfigError, match="with_entropy=True"):
        log_probs_and_entropy(logits, tokens, with_entropy=False, entropy_grad=True)
