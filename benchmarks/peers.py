"""Public implementations that can be imported here; an absent one is a line in the report, not an error.

Each loader returns candidates by name. They need Megatron's tensor parallel group, which the worker sets up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from benchmarks.measure import Candidate, Mode

Modes = Iterable[Mode]


def megatron_core() -> dict[str, tuple[Candidate, tuple[Mode, ...], bool]]:
    """Cross entropy, plain and fused. Both overwrite the caller's logits; neither knows the entropy."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    def plain(logits, tokens, group, mode):  # type: ignore[no-untyped-def]
        return -vocab_parallel_cross_entropy(logits[:, None].float(), tokens[:, None])[:, 0], None

    def fused(logits, tokens, group, mode):  # type: ignore[no-untyped-def]
        loss = fused_vocab_parallel_cross_entropy(logits[:, None].float(), tokens[:, None], group)
        return -loss[:, 0], None

    return {
        "Megatron-Core cross entropy": (plain, ("log_prob",), True),
        "Megatron-Core fused cross entropy": (fused, ("log_prob",), True),
    }


def verl() -> dict[str, tuple[Candidate, tuple[Mode, ...], bool]]:
    """The vocabulary-parallel functions, called in the order and with the clone of verl's Megatron actor."""
    from verl.utils.megatron.tensor_parallel import (
        vocab_parallel_entropy,
        vocab_parallel_log_probs_from_logits,
    )

    def parallel(logits, tokens, group, mode):  # type: ignore[no-untyped-def]
        if mode == "log_prob":
            return vocab_parallel_log_probs_from_logits(logits.float(), tokens), None
        with torch.set_grad_enabled(mode == "entropy_grad"):
            entropy = vocab_parallel_entropy(logits.float())
        return vocab_parallel_log_probs_from_logits(logits.float().clone(), tokens), entropy

    return {"verl vocab-parallel": (parallel, ("log_prob", "entropy_metric", "entropy_grad"), True)}


def trl() -> dict[str, tuple[Candidate, tuple[Mode, ...], bool]]:
    """The row-wise functions of TRL's trainers."""
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy

    def selective(logits, tokens, group, mode):  # type: ignore[no-untyped-def]
        if mode == "log_prob":
            return selective_log_softmax(logits, tokens), None
        return selective_log_softmax_and_entropy(logits, tokens, mode == "entropy_grad")

    return {"trl selective": (selective, ("log_prob", "entropy_metric", "entropy_grad"), False)}


def liger_kernel() -> dict[str, tuple[Candidate, tuple[Mode, ...], bool]]:
    """Its cross entropy is a Triton kernel, which needs a GPU; its chunked LM head is in `lm_head_bench`."""
    if not torch.cuda.is_available():
        raise ImportError("its cross entropy is a Triton kernel and needs a GPU")
    return {}


LOADERS: dict[str, Callable[[], dict[str, tuple[Candidate, tuple[Mode, ...], bool]]]] = {
    "megatron-core": megatron_core,
    "verl": verl,
    "trl": trl,
    "liger-kernel": liger_kernel,
}


def load_peers() -> tuple[dict[str, tuple[Candidate, tuple[Mode, ...], bool]], list[str]]:
    """All peers that import, as name -> (candidate, modes, whether it shards); and why others are absent."""
    found: dict[str, tuple[Candidate, tuple[Mode, ...], bool]] = {}
    absent: list[str] = []
    for name, loader in LOADERS.items():
        try:
            found.update(loader())
        except Exception as error:  # a peer may fail to import in any way; it must not stop the run
            absent.append(f"{name}: {error}")
    return found, absent
