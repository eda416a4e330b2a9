"""LoRA adapters in vLLM: the base once, then adapters alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from plugin.engines.vllm.startup import AdapterShape
from plugin.errors import EngineError
from plugin.weights.broadcast import BroadcastSender
from plugin.weights.group import Membership, WeightGroup, open_store
from plugin.weights.manifest import Manifest
from tests.parallel.tiny_models import hf_model, hf_state_dict
from tests.unit.engines.tiny_engines import PARAMETERS, REQUESTS, reference_log_probs
from tests.vllm_rollouts.small_job import check_steps, train
from tests.vllm_rollouts.small_model import vllm_config, vllm_engine
from tests.vllm_rollouts.test_broadcast import _in_a_process

pytestmark = pytest.mark.timeout(1800)
SHAPE = AdapterShape(rank=4, alpha=8.0)


def _adapters(model: torch.nn.Module, version: int) -> dict[str, torch.Tensor]:
    """Random adapters of all linear layers but the head, by PEFT's names; `model` gets them merged."""
    draws, found = torch.Generator().manual_seed(version), {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and ".layers." in name:
            low = 0.3 * torch.randn(SHAPE.rank, layer.in_features, generator=draws)
            high = 0.3 * torch.randn(layer.out_features, SHAPE.rank, generator=draws)
            found[f"base_model.model.{name}.lora_A.weight"] = low
            found[f"base_model.model.{name}.lora_B.weight"] = high
            layer.weight.data += SHAPE.alpha / SHAPE.rank * high @ low
    return found


def _versions_of_adapters() -> Any:
    """Log-probs against a merged model; the base comes with versions 0 and 2."""

    config = vllm_config(tie_word_embeddings=True)
    store, member = open_store("127.0.0.1"), Membership()
    engine = vllm_engine(
        config,
        rollout_max_batch=16,
        rollout_num_gpus_per_engine=2,
        vllm_args=("block_size=32",),
        lora_rank=SHAPE.rank,
        lora_alpha=SHAPE.alpha,
        lora_sync="adapter",
    )
    group = WeightGroup(store.host, store.port, "adapters", 1, 2, timeout=300.0)

    def send(version: int, tensors: dict[str, torch.Tensor]) -> None:
        with member.of(group, lambda: BroadcastSender(group, 0)) as sender:
            part = [*tensors.items(), None]
            sender.send(version, part, Manifest.of(part, 1 << 16))

    found: dict[str, Any] = {"log_probs": []}
    for version in range(3):
        model = hf_model(config)
        base = hf_state_dict(config) if version != 1 else {}
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send, version, {**base, **_adapters(model, version)})
            engine.receive_weights(version, group, 0)
            sent.result()
        for request, answers in zip(REQUESTS, engine.generate(REQUESTS, PARAMETERS), strict=True):
            for answer in answers:
                expected = reference_log_probs(model, request, answer, PARAMETERS)
                found["log_probs"].append((answer.log_probs.tolist(), expected.tolist()))
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, 3, hf_state_dict(config))
        try:
            engine.receive_weights(3, group, 0)
        except Exception as error:
            found["without"] = (type(error).__name__, str(error))
        sent.result()
    try:
        engine.generate(REQUESTS, PARAMETERS)
    except EngineError as error:
        found["half"] = str(error)
    return found


def test_every_version_of_adapters_is_computed_with_as_if_merged() -> None:
    found = _in_a_process(_versions_of_adapters)
    assert len(found["log_probs"]) == 3 * sum(len(request.seeds) for request in REQUESTS)
    for reported, expected in found["log_probs"]:
        assert reported == pytest.approx(expected, abs=5e-5)
    assert found["without"][0] == "WeightError" and "lora_A" in found["without"][1]
    assert "half of a new version" in found["half"]


def test_a_job_sends_the_base_once_and_vllm_computes_what_the_trainer_does(tmp_path: Path) -> None:
    flags = ("--rollout-engine", "vllm", "--vllm-args", "block_size=32")
    lines = train(tmp_path / "run", *flags, "--lora-rank", "4", "--lora-sync", "adapter")
    check_steps(lines)
    assert all(line["mismatch_kl"] < 1e-6 for line in lines)
    first, *later = [line["weight_sync_bytes"] for line in lines]
    assert all(size < first / 2 for size in later)
