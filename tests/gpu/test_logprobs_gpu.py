"""Log-probs on a GPU agree with the CPU. Needs CUDA."""

from __future__ import annotations

import pytest
import torch

from plugin.logprobs.fused_lm_head import fused_log_probs_and_entropy
from plugin.logprobs.kernels import row_kernels_for
from plugin.logprobs.vocab_parallel import log_probs_and_entropy
from plugin.ragged import Ragged

NUM_GPUS = 1

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("masked", ["all", "mask", "kept ids"])
def test_results_and_gradients_equal_those_of_the_cpu(
    dtype: torch.dtype, inplace: bool, masked: str
) -> None:
    logits = (torch.randn(33, 10_007) * 4).to(dtype)
    tokens = torch.randint(10_007, (33,))
    keep = torch.rand(33, 10_007) < 0.5
    keep[torch.arange(33), tokens] = True
    results = []
    for device in ("cpu", "cuda"):
        kept = (
            Ragged(keep.nonzero()[:, 1].to(device), keep.sum(1)) if masked == "kept ids" else None
        )
        source = logits.to(device).requires_grad_()
        log_probs, entropy = log_probs_and_entropy(
            source * 1,
            tokens.to(device),
            temperature=0.8,
            entropy_grad=True,
            inplace_grad=inplace,
            keep_mask=keep.to(device) if masked == "mask" else None,
            kept=kept,
        )
        assert entropy is not None
        (log_probs.sum() - entropy.sum()).backward()
        assert source.grad is not None
        results.append((log_probs.detach().cpu(), entropy.detach().cpu(), source.grad.cpu()))
    torch.testing.assert_close(results[1][:2], results[0][:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[1][2], results[0][2])
    assert row_kernels_for(logits.cuda()).name == "triton_rows"


def test_the_fused_head_equals_logits_followed_by_log_probs() -> None:
    hidden, weight = (
        torch.randn(64, 128, device="cuda"),
        torch.randn(9000, 128, device="cuda") * 0.1,
    )
    tokens = torch.randint(9000, (64,), device="cuda")
    expected, _ = log_probs_and_entropy(hidden @ weight.t(), tokens)
    actual, _ = fused_log_probs_and_entropy(hidden, weight, tokens, memory_budget_bytes=1 << 20)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
