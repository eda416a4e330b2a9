"""The C++ kernels: built once, kept across processes, optional."""

from __future__ import annotations

import random
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch

from plugin.logprobs import kernels
from plugin.logprobs.kernels import blocked_torch, cpu_extension
from plugin.logprobs.kernels.row_statistics import RowNormalizer
from plugin.logprobs.vocab_parallel import log_probs_and_entropy

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, cpu_extension.COMPILERS)), reason="no C++ compiler"
)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_extension.load_library.cache_clear()
    yield tmp_path / "megatron-tis"
    cpu_extension.load_library.cache_clear()


@needs_compiler
def test_fifty_lengths_and_a_second_process_compile_once(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilations = []
    real_run = subprocess.run

    def counting_run(command: list[str], **options: object) -> object:
        compilations.append(command)
        return real_run(command, **options)

    monkeypatch.setattr(subprocess, "run", counting_run)
    lengths = random.Random(3).sample(range(1, 400), 50)
    for length in lengths:
        logits = torch.randn(length, 100, requires_grad=True)
        log_probs_and_entropy(logits, torch.zeros(length, dtype=torch.int64))[0].sum().backward()
    assert len(compilations) == 1
    cpu_extension.load_library.cache_clear()  # what a new process starts with
    assert kernels.row_kernels_for(logits) is cpu_extension
    assert len(compilations) == 1
    assert [path.suffix for path in empty_cache.iterdir()] == [".so"]


def test_without_a_compiler_everything_still_runs_after_one_warning(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_extension, "COMPILERS", ("a-compiler-nobody-has",))
    logits, tokens = torch.tensor([[0.0, 0.0]]), torch.tensor([1])
    with pytest.warns(RuntimeWarning, match="Install a C") as caught:
        assert kernels.row_kernels_for(logits) is blocked_torch
        log_probs, _ = log_probs_and_entropy(logits, tokens)
    assert len(caught) == 1
    torch.testing.assert_close(log_probs, torch.tensor([0.5]).log())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log_probs_and_entropy(logits, tokens)


@needs_compiler
def test_a_compiler_that_fails_is_reported_with_what_it_said(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_extension, "FLAGS", ("--no-such-flag-exists",))
    with pytest.warns(RuntimeWarning, match="no-such-flag-exists"):
        assert cpu_extension.load_library() is None
    assert not any(empty_cache.iterdir())


@needs_compiler
def test_a_damaged_cached_library_falls_back_instead_of_crashing(empty_cache: Path) -> None:
    assert cpu_extension.load_library() is not None
    (library,) = empty_cache.iterdir()
    library.unlink()
    library.write_bytes(b"not a library")
    cpu_extension.load_library.cache_clear()
    assert cpu_extension.load_library() is not None, "a damaged file is built again"


@needs_compiler
@pytest.mark.parametrize("dtype", cpu_extension.DTYPES)
@pytest.mark.parametrize("columns", [1, 15, 16, 2047, 2048, 2063, 6000])
@pytest.mark.parametrize("with_mask", [False, True])
def test_both_passes_agree_with_plain_torch_for_every_tail(
    dtype: torch.dtype, columns: int, with_mask: bool
) -> None:
    generator = torch.Generator().manual_seed(columns)
    logits = (torch.randn(6, columns, generator=generator) * 5).to(dtype)
    targets = torch.randint(columns, (6,), generator=generator)
    targets[2] = -1
    if with_mask:
        keep = torch.rand(6, columns, generator=generator) < 0.5
        keep[torch.arange(6), targets] = True
        logits = logits.masked_fill(~keep, -torch.inf)
    slow, fast = (
        module.forward_blocks(logits, targets, scale=1.3, with_entropy=True)
        for module in (blocked_torch, cpu_extension)
    )
    torch.testing.assert_close(fast, slow, rtol=2e-6, atol=2e-6)
    assert slow.weighted_sum is not None
    entropy = slow.sum_exp.log() - slow.weighted_sum / slow.sum_exp
    rows = RowNormalizer(slow.maximum, slow.sum_exp, entropy)
    grads = torch.randn(2, 6, generator=generator)
    grads[:, 4] = 0
    results = []
    for module in (blocked_torch, cpu_extension):
        out = torch.full_like(logits, 7.0)
        module.backward_blocks(logits, targets, rows, grads[0], grads[1], scale=1.3, out=out)
        results.append(out)
    torch.testing.assert_close(
        results[1], results[0], rtol=1e-2 if dtype != torch.float32 else 2e-5, atol=1e-6
    )


@needs_compiler
@pytest.mark.skipif("avx2" not in cpu_extension._processor_features(), reason="no AVX2")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3"])
def test_processors_with_narrower_registers_compute_the_same(
    processor: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = tuple(
        f"-march={processor}" if "march" in flag else flag for flag in cpu_extension.FLAGS
    )
    monkeypatch.setattr(cpu_extension, "FLAGS", flags)
    for dtype in filter(cpu_extension.runs, cpu_extension.DTYPES):
        test_both_passes_agree_with_plain_torch_for_every_tail(dtype, 2063, True)


@needs_compiler
@pytest.mark.parametrize("dtype", cpu_extension.DTYPES)
def test_rows_whose_maximum_rises_chunk_by_chunk_lose_nothing(dtype: torch.dtype) -> None:
    logits = torch.linspace(-90, 8, 3 * 2048 + 5).to(dtype).repeat(3, 1)
    logits[1, :4000] = -torch.inf
    logits[2] = logits[2].flip(0)
    targets = torch.tensor([0, 6000, 6000])
    found = cpu_extension.forward_blocks(logits, targets, scale=0.7, with_entropy=True)
    exponent = (logits.double() - logits.double().amax(1, keepdim=True)) * 0.7
    weight = exponent.exp()
    assert found.maximum.tolist() == logits.float().amax(1).tolist()
    torch.testing.assert_close(found.sum_exp.double(), weight.sum(1), rtol=5e-7, atol=0)
    weighted = (weight * exponent.clamp(min=-1e4)).sum(1)
    assert found.weighted_sum is not None
    torch.testing.assert_close(found.weighted_sum.double(), weighted, rtol=1e-6, atol=0)
