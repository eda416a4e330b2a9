"""Every rank sends what it holds itself: no expert passes through a rank other than its own on the way to an engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
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
from plugin.weights.buckets import pack_buckets
from plugin.weights.group import WeightGroup, open_store
from plugin.weights.manifest import Manifest
from tests.parallel.schedule_runs import loaded_model
from tests.parallel.tiny_models import hf_state_dict, tiny_qwen3_moe

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
#: Every layer is a round of its own.
ROUND_BYTES = 1


@contextmanager
def gathers(groups: ParallelGroups) -> Iterator[list[tuple[str, int]]]:
    """The group and the received bytes of every gather of tensors in the body."""
    found: list[tuple[str, int]] = []
    names = {"tp": groups.tp_group, "etp": groups.etp_group, "ep": groups.ep_group}
    plain = dist.all_gather

    def counting(tensors: list[Tensor], tensor: Tensor, group: Any = None) -> Any:
        name = next((name for name, known in names.items() if known is group), "other")
        found.append((name, sum(part.nbytes for part in tensors)))
        return plain(tensors, tensor, group=group)

    dist.all_gather = counting
    try:
        yield found
    finally:
        dist.all_gather = plain


def send_on_rank(
    groups: ParallelGroups,
    config: Any,
    state: dict[str, Tensor],
    settings: TrainerConfig,
    group: WeightGroup,
    directory: str,
) -> dict[str, Any]:
    chunks = loaded_model(config, state, groups, settings)
    sent: dict[str, int] = {}
    with gathers(groups) as found:
        part = export_own_part(chunks, groups, round_bytes=ROUND_BYTES)

        def noted() -> Iterator[tuple[str, Tensor] | None]:
            for entry in part:
                if entry is not None:
                    sent[entry[0]] = entry[1].nbytes
                yield entry

        described = export_own_part(chunks, groups, round_bytes=ROUND_BYTES, described=True)
        manifest = Manifest.of(described, 20_000)
        assert found == [], "nothing is gathered for a manifest"
        if sends_own_part(groups):
            sender = BroadcastSender(group, groups.pp_rank * groups.ep_size + groups.ep_rank)
            assert sender.send(0, noted(), manifest)[0] == sum(sent.values())
        else:
            assert list(filter(None, part)) == []
    save_hf_checkpoint(directory, chunks, groups)
    return {"sent": sent, "gathers": found, "ep": (groups.ep_rank, groups.ep_size)}


def engine_with(config: Any, directory: str) -> TransformersEngine:
    """An engine that has loaded a directory."""
    engine = TransformersEngine(config.to_dict())
    files = sorted(Path(directory).glob("*.safetensors"))
    buckets = list(pack_buckets(pair for file in files for pair in load_file(file).items()))
    for number, bucket in enumerate(buckets):
        engine.load_weights(0, bucket, last=number == len(buckets) - 1)
    return engine


LAYOUTS: dict[str, tuple[int, dict[str, int], set[str], bool]] = {
    # ranks, sizes, groups over which shards may be gathered, whether a stage shares a process group
    "EP2": (2, {EP: 2}, set(), True),
    "EP2 x PP2": (4, {EP: 2, PP: 2}, set(), True),
    "EP2 x TP2, experts cut": (4, {EP: 2, TP: 2, ETP: 2}, {"tp", "etp"}, False),
    # The second rank helps to gather what is shared, and sends experts: neither may wait for the other.
    "EP2 x TP2, experts not cut": (4, {EP: 2, TP: 2, ETP: 1}, {"tp"}, False),
    "EP2 on TP2, one lane": (2, {EP: 2, TP: 2, ETP: 1}, {"tp"}, True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_sent_by_their_own_ranks_and_arrive_as_in_a_directory(
    run_ranks: Any, tmp_path: Path, layout: str
) -> None:
    ranks, sizes, allowed, shares = LAYOUTS[layout]
    config, store = tiny_qwen3_moe(), open_store("127.0.0.1")
    state = hf_state_dict(config, 5)
    settings = TrainerConfig(
        sequence_parallel=TP in sizes, tensor_model_parallel_size=sizes.get(TP, 1)
    )
    group = WeightGroup(
        *(store.host, store.port, f"parts of {layout}"),
        senders=sizes.get(PP, 1) * sizes[EP],
        receivers=1,
        timeout=60.0,
        per_stage=sizes[EP],
        per_lane=sizes[EP] if shares else 1,
    )
    engine, directory = TransformersEngine(config.to_dict()), str(tmp_path / "saved")
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(engine.receive_weights, 0, group, 0)
        results = run_ranks(send_on_rank, ranks, config, state, settings, group, directory, **sizes)
        received.result(timeout=60)
    expected = engine_with(config, directory).model.state_dict()
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert engine.health().weight_version == 0

    names = [name for result in results for name in result["sent"]]
    assert sorted(names) == sorted(state), "every tensor is sent once"
    for result in results:
        rank, size = result["ep"]
        per_rank = config.num_experts // size
        experts = {int(m.group(1)) for m in map(_EXPERT.search, result["sent"]) if m}
        assert experts <= set(range(rank * per_rank, (rank + 1) * per_rank))
        assert {name for name, _ in result["gathers"]} <= allowed
    total = sum(tensor.nbytes for tensor in state.values())
    assert max(sum(result["sent"].values()) for result in results) < 0.8 * total
    # A shard is gathered once, by the ranks that have it: no replica does it again.
    gathered = [sum(nbytes for _, nbytes in result["gathers"]) for result in results]
    assert sum(gathered) <= 2 * total
