"""Deltas from real ranks: an engine that got deltas has the bits of one that read the saved model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import TrainerConfig
from plugin.engines.transformers.engine import TransformersEngine
from plugin.megatron_backend.hf_weights.export import (
    export_own_part,
    save_hf_checkpoint,
    sends_own_part,
)
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.weights.broadcast import BroadcastSender
from plugin.weights.delta import CHUNK_BYTES, SentCopy
from plugin.weights.group import WeightGroup, open_store
from plugin.weights.manifest import Manifest
from tests.parallel.schedule_runs import loaded_model
from tests.parallel.test_sent_parts import engine_with
from tests.parallel.tiny_models import hf_state_dict, tiny_qwen3, tiny_qwen3_moe

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
VERSIONS, FULL_EVERY = 20, 8


def change(chunks: Any, version: int) -> None:
    """Change some elements of every parameter; the same ones on ranks that have the same shard."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            draw = torch.Generator().manual_seed(version * 1000 + len(name))
            hit = torch.rand(parameter.shape, generator=draw) < (0.01, 0.2, 0.0)[version % 3]
            with torch.no_grad():
                parameter[hit] += 0.125 * torch.randn(int(hit.sum()), generator=draw)


def send_on_rank(
    groups: ParallelGroups,
    config: Any,
    state: dict[str, Tensor],
    settings: TrainerConfig,
    group: WeightGroup,
    directory: str,
    dtype: torch.dtype,
) -> list[tuple[int, int]]:
    """Bytes of every version, and how many elements a delta has changed."""
    chunks = loaded_model(config, state, groups, settings)
    manifest = Manifest.of(export_own_part(chunks, groups, round_bytes=1, described=True), 20_000)
    sender = None
    if sends_own_part(groups):
        sender = BroadcastSender(group, groups.pp_rank * groups.ep_size + groups.ep_rank)
    copy, sent = SentCopy(dtype), []
    for version in range(VERSIONS):
        part = export_own_part(chunks, groups, round_bytes=1)
        if sender is None:
            assert list(filter(None, part)) == []
        elif version % FULL_EVERY == 0:
            nbytes, _ = sender.send(version, copy.remembered(version, part), manifest)
            sent.append((nbytes, 0))
        else:
            delta = copy.delta(version, version - 1, part)
            nbytes, _ = sender.send(version, delta, Manifest.of(delta, CHUNK_BYTES))
            sent.append((nbytes, copy.changes.changed))
        if version < VERSIONS - 1:
            change(chunks, version)
    save_hf_checkpoint(directory, chunks, groups)
    return sent


LAYOUTS: dict[str, tuple[int, dict[str, int], bool]] = {
    "TP2 x PP2, tied head": (4, {TP: 2, PP: 2}, False),
    "EP2 x PP2, experts": (4, {EP: 2, PP: 2}, False),
    "EP2 x TP2, experts cut, one lane": (4, {EP: 2, TP: 2, ETP: 2}, True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_has_the_bits_of_the_saved_model_after_twenty_versions(
    run_ranks: Any, tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    ranks, sizes, shares = LAYOUTS[layout]
    is_moe = EP in sizes
    config = tiny_qwen3_moe() if is_moe else tiny_qwen3(tie_word_embeddings=True)
    state, store = hf_state_dict(config, 5), open_store("127.0.0.1")
    settings = TrainerConfig(
        sequence_parallel=is_moe and TP in sizes, tensor_model_parallel_size=sizes.get(TP, 1)
    )
    experts = sizes.get(EP, 1)
    group = WeightGroup(
        *(store.host, store.port, f"deltas of {layout}, {dtype}"),
        senders=sizes.get(PP, 1) * experts,
        receivers=1,
        timeout=60.0,
        per_stage=experts,
        per_lane=experts if shares else 1,
    )
    name: Any = str(dtype).split(".")[-1]
    engine, directory = TransformersEngine(config.to_dict(), dtype=name), str(tmp_path / "saved")

    def receive() -> None:
        for version in range(VERSIONS):
            engine.receive_weights(version, group, 0)

    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive)
        results = run_ranks(
            send_on_rank, ranks, config, state, settings, group, directory, dtype, **sizes
        )
        received.result(timeout=60)
    expected = engine_with(config, directory).model.to(dtype).state_dict()
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert engine.health().weight_version == VERSIONS - 1
    whole, changed = 0, 0
    for sent in filter(None, results):
        whole += sent[0][0]
        changed += sum(count for _, count in sent)
        # A step that changes nothing sends names and checksums only.
        assert sent[3][1] == 0 and sent[3][0] < sent[1][0] < sent[2][0]
    assert whole == sum(tensor.nbytes for tensor in state.values()) and changed
