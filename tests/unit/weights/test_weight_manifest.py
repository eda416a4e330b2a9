"""Manifests: what is joined, in which order it is sent, and what that costs at scale."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.errors import TransferError
from plugin.weights.expert_ways import expert_ways
from plugin.weights.lane import bucket_sizes
from plugin.weights.manifest import Manifest, Packing, in_turns
from tests.unit.tools.plan.model_facts import MODELS
from tests.unit.weights.traffic import traffic_of

Part = Iterator[tuple[str, Tensor] | None]


def named(*sizes: int | None) -> list[tuple[str, Tensor] | None]:
    """Tensors of so many bytes, named by their numbers; None ends a round."""
    return [
        None if size is None else (str(number), torch.empty(size, dtype=torch.uint8))
        for number, size in enumerate(sizes)
    ]


def names(manifest: Manifest) -> list[list[str]]:
    return [
        ["".join(spec.name for spec in bucket) for bucket in buckets] for buckets in manifest.rounds
    ]


def test_tensors_share_a_bucket_until_it_is_full_and_large_ones_have_their_own() -> None:
    # 64 and 128 bytes with padding share 200; 200 is as large as a bucket.
    assert names(Manifest.of(named(64, 100, 1, 200, 64), 200)) == [["01", "3", "24"]]
    # Of a size that is sent from where it is, though it would fit.
    assert names(Manifest.of(named(64, 100, 1, 200, 64), 1000, 100)) == [["1", "3", "024"]]
    assert names(Manifest.of(named(64, None, 64, None), 200)) == [["0"], ["2"]]
    assert names(Manifest.of(named(None, 64, None), 200)) == [[], ["1"]]


@pytest.mark.parametrize("seed", range(20))
def test_buckets_are_complete_in_the_order_in_which_they_are_sent(seed: int) -> None:
    sizes = torch.randint(1, 400, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
    part = named(*sizes)
    manifest = Manifest.of(part, 500, 300)
    packing, ended = Packing(manifest), []
    for name, tensor in filter(None, part):
        bucket, place, completes = packing.place_of(name, tensor)
        assert bucket[place].name == name
        if completes:
            ended.append(bucket)
    packing.require_complete()
    assert ended == manifest.buckets
    assert all(sum(spec.nbytes for spec in bucket) <= 500 for bucket in manifest.buckets)
    assert manifest.nbytes == sum(sizes)


def test_a_manifest_is_the_same_after_it_was_sent() -> None:
    part = [("a", torch.empty(2, 3)), None, ("b", torch.empty((), dtype=torch.bfloat16))]
    manifest = Manifest.of(part, 100)
    assert Manifest.decoded(manifest.encoded()) == manifest


def test_what_is_missing_or_unknown_is_an_error() -> None:
    packing = Packing(Manifest.of(named(64, 64), 200))
    with pytest.raises(TransferError, match="expect nothing"):
        packing.place_of("other", torch.empty(64, dtype=torch.uint8))
    packing.place_of("0", torch.empty(64, dtype=torch.uint8))
    with pytest.raises(TransferError, match="1 tensors of the manifest were not sent"):
        packing.require_complete()


def test_stages_alternate_and_the_senders_of_a_stage_within_a_round() -> None:
    manifests = [
        Manifest.of(named(*sizes), 1)
        for sizes in ((64, 64, None, 64), (64, None, 64, 64), (64, 64), (64,))
    ]
    turns = [(sender, bucket[0].name) for sender, bucket in in_turns(manifests, 2)]
    first = [(0, "0"), (1, "0"), (0, "1"), (0, "3"), (1, "2"), (1, "3")]
    second = [(2, "0"), (3, "0"), (2, "1")]
    assert [turn for turn in turns if turn[0] < 2] == first
    assert [turn for turn in turns if turn[0] >= 2] == second
    assert turns[:4] == [first[0], second[0], first[1], second[1]]


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def moe_parts(facts: dict[str, Any], stages: int, ranks: int) -> list[list[Any]]:
    """What every sender of an MoE model has, by stage and expert rank; a layer in two rounds."""
    hidden, width = facts["hidden_size"], facts["moe_intermediate_size"]
    experts = facts.get("n_routed_experts") or facts["num_experts"]
    layers, vocabulary = facts["num_hidden_layers"], facts["vocab_size"]
    parts: list[list[Any]] = []
    for stage in range(stages):
        own = range(layers)[layers * stage // stages : layers * (stage + 1) // stages]
        for rank in range(ranks):
            part: list[Any] = []
            if rank == 0 and stage in (0, stages - 1):
                part.append((f"vocabulary {stage}", meta(vocabulary, hidden)))
            for layer in own:
                if rank == 0:
                    part += [(f"{layer}.{n}", meta(hidden, 4096)) for n in "qkvo"]
                part.append(None)
                for expert in range(experts)[
                    experts * rank // ranks : experts * (rank + 1) // ranks
                ]:
                    part += [(f"{layer}.{expert}.{n}", meta(width, hidden)) for n in "gud"]
                part.append(None)
            parts.append(part)
    return parts


#: Stages, expert ranks, operations, gigabytes of the model, of a sender, and of a worker's buffers.
SCALE = {
    "Qwen3-30B-A3B": (1, 8, 850, 62, 62, 0.9),
    "Qwen3-235B-A22B": (4, 8, 8000, 470, 121, 3.2),
    # All of its layers as MoE layers.
    "DeepSeek-V3": (16, 8, 24_000, 1400, 93, 6.5),
}


@cache
def manifests_of(model: str) -> list[Manifest]:
    stages, ranks, *_ = SCALE[model]
    sizes = bucket_sizes(stages, on_gpu=True)
    return [Manifest.of(part, *sizes) for part in moe_parts(MODELS[model], stages, ranks)]


@pytest.mark.parametrize("workers", [64, 512])
@pytest.mark.parametrize("model", SCALE)
def test_a_version_of_a_large_model_is_few_groups_messages_and_operations(
    model: str, workers: int
) -> None:
    stages, ranks, operations, size, sender, buffers = SCALE[model]
    engines = workers // 8
    found = traffic_of(
        manifests_of(model), per_stage=ranks, per_lane=ranks, workers=workers, engines=engines
    )
    assert found.groups == stages
    assert found.connections == 2 * (stages * ranks + workers)
    assert found.messages == engines + 1 + 2 * stages
    assert found.operations <= operations
    assert found.worker_bytes <= size * 1e9
    assert found.sender_bytes <= sender * 1e9
    assert found.buffer_bytes <= buffers * 1e9
    assert found.manifest_bytes <= 1 << 20


def test_ways_for_experts_by_hand() -> None:
    # 40 bytes that all share and 800 of experts; 2 stages of 4 expert ranks, engines of 2 workers.
    ways = expert_ways(40, 800, stages=2, ranks=4, owners=2)
    assert {n: (w.groups, w.worker_bytes, w.sender_bytes) for n, w in ways.items()} == {
        "own": (2, 840, 420),
        "gathered": (2, 840, 420),
        # In each stage a group for what all share, and one for each of two ranks with a worker's experts.
        "sharded": (6, 40 + 400, 20 + 100),
    }
    # 3 of a stage's 4 parts come from other ranks.
    assert [way.gathered_bytes for way in ways.values()] == [0, 300, 0]
    # Links as fast as the network hide the gather, ones of a tenth of it do not.
    assert [way.seconds(10.0, 10.0) for way in ways.values()] == [84.0, 84.0, 44.0]
    assert [way.seconds(10.0, 1.0) for way in ways.values()] == [84.0, 300.0, 44.0]
