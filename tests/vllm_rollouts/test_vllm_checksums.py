"""vLLM's workers report checksums of what they compute with, equal to those of what was sent."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.weights.buckets import pack_buckets
from plugin.weights.checksums import differing, with_checksums
from tests.parallel.tiny_models import hf_state_dict
from tests.vllm_rollouts.small_model import vllm_config, vllm_engine

pytestmark = pytest.mark.timeout(900)

#: Of each kind: a share of rows, of columns, of fused tensors, whole on every worker, and the LM head's.
WRONG = (
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.embed_tokens.weight",
)


def _sums(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, int]:
    sums: dict[str, int] = {}
    list(with_checksums(state.items(), dtype, sums))
    return sums


def _compared(workers: int, dtype: str) -> dict[str, Any]:
    """Names that differ after a right version, and after versions with one wrong element each."""
    config = vllm_config("qwen3", tie_word_embeddings=True)
    engine = vllm_engine(
        config,
        rollout_dtype=dtype,
        rollout_max_batch=16,
        rollout_num_gpus_per_engine=workers,
        vllm_args=("block_size=32",),
    )
    kind = getattr(torch, dtype)
    state = {name: tensor.to(kind) for name, tensor in hf_state_dict(config, 3).items()}
    found: dict[str, Any] = {}
    for version, wrong in enumerate((None, *WRONG, None)):
        sent = dict(state)
        if wrong is not None:
            sent[wrong] = state[wrong].clone()
            sent[wrong].view(-1)[-2] += 0.5
        buckets = list(pack_buckets(sent.items()))
        for number, bucket in enumerate(buckets):
            engine.load_weights(version, bucket, last=number == len(buckets) - 1)
        own = engine.weight_checksums()
        found[f"{version} {wrong}"] = differing(own, _sums(state, kind))
        found["reported"] = sorted(own)
    found["sent"] = sorted(state)
    return found


@pytest.mark.parametrize(("workers", "dtype"), [(1, "bfloat16"), (2, "float32")])
def test_one_wrong_element_is_found_in_the_tensor_that_has_it(workers: int, dtype: str) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(_compared, workers, dtype).result(timeout=800)
    assert found.pop("reported") == sorted([*found.pop("sent"), "lm_head.weight"])
    for case, names in found.items():
        wrong = case.partition(" ")[2]
        expected = [] if wrong == "None" else [wrong]
        if wrong == "model.embed_tokens.weight":
            expected = ["lm_head.weight", wrong]
        assert names == expected, case
