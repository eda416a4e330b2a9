"""The least that a rank holds, from shapes alone; `train` refuses what cannot fit before it starts anything."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.controller.preflight.resource_checks import (
    LeastBytes,
    count_weights,
    least_bytes,
    refuse_two_models,
    refuse_what_cannot_fit,
)
from plugin.errors import ConfigError

SHAPES = {
    "model.embed_tokens.weight": [100, 10],  # 1,000
    "model.layers.0.mlp.experts.0.up_proj.weight": [40, 100],  # 4,000
}


def job(**flags: Any) -> JobConfig:
    return JobConfig.from_sources({"hf_checkpoint": "model", **flags})


def test_dense_weights_are_cut_by_tensor_ranks_and_experts_by_expert_ranks() -> None:
    config = job(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_model_parallel_size=4,
        train_dtype="bfloat16",
        use_distributed_optimizer=True,
        num_gpus_per_node=8,
    )
    # 1,000 / 2 + 4,000 / 4 = 1,500 numbers; the state of 500 over 4 ranks, that of 1,000 over 2:
    # 12 * (125 + 500) = 7,500
    assert least_bytes(count_weights(SHAPES), config, on_cuda=False) == LeastBytes(3000, 6000, 7500)


def test_float32_has_no_main_weights_and_unsharded_state_is_whole() -> None:
    # 5,000 numbers: 4 bytes of weight, 4 of gradient, 8 of moments
    assert least_bytes(count_weights(SHAPES), job(), on_cuda=False) == LeastBytes(
        20000, 20000, 40000
    )


def test_the_bound_is_below_what_a_plan_finds(capsys: Any, tmp_path: Path) -> None:
    from plugin.cli import main
    from plugin.tools.plan.checkpoint_coverage import read_hf_config
    from tests.unit.tools.plan.model_facts import MODELS

    small = MODELS["Qwen3-8B"] | {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 1000}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(small))
    main(["plan", "--json", "--hf-config", str(file)])
    planned = json.loads(capsys.readouterr().out)["ranks"][0]["bytes"]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(read_hf_config(file))
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    bound = least_bytes(count_weights(shapes), job(), on_cuda=True)
    parts = ("parameters", "gradients", "main_parameters", "optimizer")
    held = sum(planned[part] for part in parts)
    assert 0.98 * held < bound.total <= held


def test_the_refusal_has_the_numbers() -> None:
    gib = 1 << 30
    least = LeastBytes(16 * gib, 32 * gib, 96 * gib)
    refuse_what_cannot_fit(least, 144 * gib, "on its GPU")
    with pytest.raises(
        ConfigError, match=r"at least 144.0 GiB \(16.0 of weights, 32.0 of grad.*143.0 GiB on its"
    ):
        refuse_what_cannot_fit(least, 143 * gib, "on its GPU")


def test_two_models_on_a_gpu_are_refused_with_the_numbers() -> None:
    # 30 of the rank, 40 of the engine, 0.25 of buffers and 4 of CUDA and NCCL; its gradients and
    # optimizer are elsewhere then.
    gib = 1 << 30
    least = LeastBytes(30 * gib, 60 * gib, 180 * gib)
    refuse_two_models(least, 40 * gib, 75 * gib)
    with pytest.raises(
        ConfigError,
        match=r"rank \(30.0 GiB\) and of the engine \(40.0 GiB\).*and it has 74.0 GiB; raise",
    ):
        refuse_two_models(least, 40 * gib, 74 * gib)


def test_a_job_that_cannot_fit_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    import torch
    from safetensors.torch import save_file

    from plugin.cluster.model_source import ModelSource
    from plugin.controller.preflight.resource_checks import check_memory

    save_file({"model.norm.weight": torch.zeros(1000)}, tmp_path / "model.safetensors")
    source = ModelSource({}, directory=str(tmp_path))
    began = time.process_time()
    check_memory(job(), source)
    assert time.process_time() - began < 1
    monkeypatch.setattr(
        os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 15999}[name]
    )
    with pytest.raises(ConfigError, match=r"a rank holds at least 0.0 GiB"):
        check_memory(job(), source)  # 16,000 bytes
    check_memory(job(address="127.0.0.1:6379"), source)


def test_tensors_that_no_rank_holds_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    import torch
    from safetensors.torch import save_file

    from plugin.cluster.model_source import ModelSource
    from plugin.controller.preflight.resource_checks import check_memory

    # Besides 1,000 numbers a tied LM head and a layer for multi-token prediction.
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.2.mlp.up_proj.weight")
    save_file({name: torch.zeros(1000) for name in names}, tmp_path / "model.safetensors")
    model = {"tie_word_embeddings": True, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 16000}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    check_memory(job(), ModelSource(model, directory=str(tmp_path)))
    with pytest.raises(ConfigError, match="a rank holds at least"):
        check_memory(
            job(), ModelSource(model | {"tie_word_embeddings": False}, directory=str(tmp_path))
        )
