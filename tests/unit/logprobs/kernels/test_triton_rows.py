"""The Triton kernels agree with plain torch; Triton's interpreter runs them where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from benchmarks import gpu_kernels
from plugin.logprobs.kernels import blocked_torch
from plugin.logprobs.kernels.row_statistics import RowNormalizer

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="runs in the process that the first test starts"
)


@pytest.mark.skipif(INTERPRETED, reason="starts the process that runs the others")
def test_the_other_tests_of_this_file_pass_in_the_interpreter() -> None:
    # Triton decides when it is imported whether kernels are interpreted, so this takes a process of its own.
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert " passed" in result.stdout


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("capability", gpu_kernels.ARCHITECTURES)
def test_every_kernel_compiles_for_a_gpu_that_is_not_here_and_spills_nothing(
    capability: int,
) -> None:
    names = set()
    for kernel, dtype, constants in gpu_kernels.variants():
        binary = gpu_kernels.compiled(kernel, dtype, constants, capability)
        needed = gpu_kernels.resources(binary)
        # 256 threads of 128 registers or fewer: two or more rows at a time on a multiprocessor of 65,536.
        assert needed["spilled"] == 0 and needed["registers"] <= 128, (kernel, dtype, needed)
        assert f".target sm_{capability}" in binary.asm["ptx"]
        names.add(kernel.fn.__name__)
    # A kernel that nobody compiles here would be noticed on the first GPU.
    from plugin.logprobs.kernels import triton_rows

    launched = {name for name in vars(triton_rows) if name.endswith("_kernel")}
    assert names == launched


@pytest.fixture
def triton_rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from plugin.logprobs.kernels import triton_rows

    monkeypatch.setattr(
        triton_rows, "_BLOCK", 64
    )  # so that a short row already spans several blocks
    return triton_rows


@interpreted
def test_a_row_of_minus_infinity_has_sums_of_zero(triton_rows: ModuleType) -> None:
    logits = torch.full((1, 70), -torch.inf)
    found = triton_rows.forward_blocks(logits, torch.tensor([-1]), scale=1.0, with_entropy=True)
    assert [float(value) for value in found] == [-torch.inf, 0.0, 0.0, 0.0]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [5, 300])
@pytest.mark.parametrize("with_mask", [False, True])
def test_both_passes_agree_with_plain_torch(
    triton_rows: ModuleType, dtype: torch.dtype, columns: int, with_mask: bool
) -> None:
    generator = torch.Generator().manual_seed(columns)
    logits = (torch.randn(6, columns, generator=generator) * 5).to(dtype)
    logits[1, 0] = -torch.inf
    targets = torch.randint(columns, (6,), generator=generator)
    targets[2] = -1
    if with_mask:
        keep = torch.rand(6, columns, generator=generator) < 0.5
        keep[torch.arange(6), targets] = True
        logits = logits.masked_fill(~keep, -torch.inf)
    slow, fast = (
        module.forward_blocks(logits, targets, scale=1.3, with_entropy=True)
        for module in (blocked_torch, triton_rows)
    )
    torch.testing.assert_close(tuple(fast), tuple(slow), rtol=2e-6, atol=2e-6)
    assert slow.weighted_sum is not None
    entropy = slow.sum_exp.log() - slow.weighted_sum / slow.sum_exp
    rows = RowNormalizer(slow.maximum, slow.sum_exp, entropy)
    grads = torch.randn(2, 6, generator=generator)
    grads[:, 4] = 0
    for grad_log_probs, grad_entropy in [(grads[0], grads[1]), (grads[0], None), (None, grads[1])]:
        expected, actual = torch.full_like(logits, 7.0), logits.clone()
        blocked_torch.backward_blocks(
            logits,
            targets,
            rows,
            grad_log_probs,
            grad_entropy,
            scale=1.3,
            out=expected,
        )
        triton_rows.backward_blocks(
            actual,
            targets,
            rows,
            grad_log_probs,
            grad_entropy,
            scale=1.3,
            out=actual,
        )
        tolerance = {"rtol": 2e-5, "atol": 1e-6} if dtype == torch.float32 else {}
        torch.testing.assert_close(actual, expected, **tolerance)


@interpreted
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_row_is_nan_forward_and_exactly_zero_backward_without_gradient(
    triton_rows: ModuleType, bad: float
) -> None:
    logits = torch.randn(3, 100)
    logits[1, 70] = bad
    targets = torch.tensor([0, 1, 2])
    found = triton_rows.forward_blocks(logits, targets, scale=1.0, with_entropy=False)
    assert found.weighted_sum is None
    assert torch.equal(found.sum_exp.isnan(), torch.tensor([False, True, False]))
    grad = torch.tensor([1.0, 0.0, 1.0])
    rows = RowNormalizer(found.maximum, found.sum_exp, None)
    triton_rows.backward_blocks(logits, targets, rows, grad, None, scale=1.0, out=logits)
    assert torch.equal(logits[1], torch.zeros(100))
    assert torch.isfinite(logits).all() and (logits[0] != 0).any()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_scaled_by_what_the_device_holds_and_left_alone_by_one(
    triton_rows: ModuleType, dtype: torch.dtype
) -> None:
    values = torch.randn(3, 150).to(dtype)
    for factor, expected in ((1.0, values), (1.0 + 1e-7, values), (0.5, values / 2)):
        scaled = values.clone()
        triton_rows.scale_unless_one(scaled, torch.tensor(factor), 1e-6)
        assert torch.equal(scaled, expected)
    values[1, 2] = torch.nan
    triton_rows.scale_unless_one(values, torch.tensor(0.0), 1e-6)
    assert not values.any()  # a loss that failed has no gradient, not NaN


@interpreted
def test_the_separable_head_on_these_kernels_gives_what_it_gives_on_torch_operations(
    triton_rows: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plugin.logprobs import row_gradients, separable_lm_head

    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(5, 7, generator=generator),
        torch.randn(130, 7, generator=generator),
    )
    tokens = torch.randint(130, (5,), generator=generator)
    scale = torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0])
    results = []
    for kernels in (blocked_torch, triton_rows):
        monkeypatch.setattr(row_gradients, "row_kernels_for", lambda _, kernels=kernels: kernels)
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        *values, anchor = separable_lm_head.separable_lm_head(
            *leaves,
            tokens,
            lambda block, log_probs, entropy: scale[block] * (log_probs.exp() - 0.1 * entropy),
        )
        results.append([*values, *torch.autograd.grad(anchor, leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=1e-6)


@interpreted
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 200])
def test_rows_of_a_wider_buffer_are_read_and_written_in_place(
    triton_rows: ModuleType, rows: int, columns: int
) -> None:
    # Tiles and vocabulary shards are parts of larger buffers: what lies beside a row must stay as it is.
    buffer = torch.full((rows, columns + 9), 5.0)
    logits = buffer[:, 4 : columns + 4]
    logits.copy_(torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)))
    targets = torch.arange(rows) % columns
    plain = blocked_torch.forward_blocks(logits.clone(), targets, scale=0.7, with_entropy=True)
    found = triton_rows.forward_blocks(logits, targets, scale=0.7, with_entropy=True)
    torch.testing.assert_close(tuple(found), tuple(plain), rtol=2e-6, atol=2e-6)
    normalizer = RowNormalizer(plain.maximum, plain.sum_exp, None)
    gradient, expected = torch.linspace(-1, 1, rows), torch.empty(rows, columns)
    arguments = targets, normalizer, gradient, None
    blocked_torch.backward_blocks(logits.clone(), *arguments, scale=0.7, out=expected)
    triton_rows.backward_blocks(logits, *arguments, scale=0.7, out=logits)
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=1e-6)
    assert (buffer[:, :4] == 5.0).all() and (buffer[:, columns + 4 :] == 5.0).all()


@interpreted
def test_a_target_of_another_rank_adds_nothing_and_gets_no_gradient_of_its_own(
    triton_rows: ModuleType,
) -> None:
    logits, targets = torch.randn(2, 90), torch.tensor([-1, 3])
    found = triton_rows.forward_blocks(logits, targets, scale=1.0, with_entropy=False)
    assert found.target_logit.tolist() == [0.0, float(logits[1, 3])]
    out = torch.empty_like(logits)
    rows = RowNormalizer(found.maximum, found.sum_exp, None)
    triton_rows.backward_blocks(logits, targets, rows, torch.ones(2), None, scale=1.0, out=out)
    # Row 0 is -softmax everywhere; row 1 is 1 - softmax at its target.
    expected = -logits.softmax(-1)
    expected[1, 3] += 1.0
    torch.testing.assert_close(out, expected)


@interpreted
@pytest.mark.parametrize("with_mask", [False, True])
def test_rows_of_minus_infinity_and_nan_are_those_of_plain_torch(
    triton_rows: ModuleType, with_mask: bool
) -> None:
    logits = torch.randn(4, 130)
    logits[0], logits[1, 100], logits[2, :64] = -torch.inf, torch.nan, -torch.inf
    if with_mask:
        logits[3] = -torch.inf  # a rank that holds none of the kept ids
    targets = torch.tensor([5, 6, 70, -1])
    slow, fast = (
        module.forward_blocks(logits, targets, scale=1.1, with_entropy=True)
        for module in (blocked_torch, triton_rows)
    )
    torch.testing.assert_close(
        tuple(fast)[1:], tuple(slow)[1:], rtol=2e-6, atol=2e-6, equal_nan=True
    )
    sound = torch.tensor([True, False, True, True])  # the maximum of a row with NaN is undefined
    torch.testing.assert_close(fast.maximum[sound], slow.maximum[sound])
