"""A route is a route and "no route" is none, whatever type an engine, a dump or a caller uses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from plugin.batch_types import (
    Microbatch,
    RolloutBatch,
    RolloutSample,
    no_route,
    route_dtype,
    with_checked_routes,
)
from plugin.cluster.array_transport import batch_from_arrays, batch_to_arrays
from plugin.errors import BatchError, ReplayError
from plugin.megatron_backend.routing.router_replay import share_fingerprint
from plugin.megatron_backend.routing.routes import RoutedModel, routes_of
from plugin.megatron_backend.step.batch_share import cut_share
from plugin.megatron_backend.step.microbatching import MicrobatchPlan
from plugin.megatron_backend.step.sequence_packing import model_inputs
from plugin.observe.log_prob_dump import LogProbDump
from plugin.observe.routing_agreement import routing_finding
from plugin.tools.compare.dump_reading import open_dump
from tests.unit.megatron_backend.rank_places import place

pytestmark = pytest.mark.hostile


#: 256 experts, one per token: a full row of 255 is an expert's row.
MODEL = RoutedModel(routers={}, num_layers=1, num_experts=256, topk=1)


def batch_with(*routes: torch.Tensor) -> RolloutBatch:
    return RolloutBatch.from_samples(
        [
            RolloutSample(torch.arange(3), 2, torch.ones(2), routed_experts=sample)
            for sample in routes
        ]
    )


def routes(values: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values).to(dtype).view(-1, 1, 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int64])
def test_expert_255_never_means_no_route(dtype: torch.dtype) -> None:
    batch = with_checked_routes(batch_with(routes([255, 0, 7], dtype)), (1, 1, 256))
    [sample] = batch.columns["rollout_routed_experts"]
    assert sample.dtype is torch.int16 and sample.flatten().tolist() == [255, 0, 7]
    assert not bool(no_route(sample).any())


def test_samples_of_one_microbatch_never_share_the_first_ones_type() -> None:
    samples = [
        routes([255, 128, 7], torch.uint8),
        routes([255, -1, 127], torch.int16),
        routes([-1, 255, 0], torch.int64),
    ]
    want = [[255, 128, 7], [255, -1, 127], [-1, 255, 0]]
    batch = batch_with(*samples)
    replayed = routes_of(
        Microbatch(batch), model_inputs(batch, place()), MODEL, place(), sequence_parallel=False
    )
    assert replayed.has_route is not None
    assert replayed.has_route.tolist() == [value >= 0 for sample in want for value in sample]
    # A row without a route gets a valid expert, which no router uses.
    assert replayed.experts.flatten().tolist() == [max(v, 0) for sample in want for v in sample]
    sent = batch_from_arrays(batch_to_arrays(batch)).columns["rollout_routed_experts"]
    assert [sample.flatten().tolist() for sample in sent] == want
    checked = with_checked_routes(batch, (1, 1, 256)).columns["rollout_routed_experts"]
    assert {sample.dtype for sample in checked} == {torch.int16}


def test_routes_never_wrap_into_another_expert() -> None:
    for experts, dtype in ((128, torch.int8), (129, torch.int16), (1 << 15, torch.int16)):
        assert route_dtype(experts) is dtype and torch.iinfo(dtype).max >= experts - 1
    assert route_dtype((1 << 15) + 1) is torch.int32
    # In 8 signed bits expert 255 is -1 and expert 128 is -128.
    narrow = routes([255, 255, 255], torch.int8)
    with pytest.raises(ReplayError, match=r"routes are torch.int8.* report torch.int16"):
        batch = batch_with(narrow)
        routes_of(
            Microbatch(batch), model_inputs(batch, place()), MODEL, place(), sequence_parallel=False
        )
    with pytest.raises(BatchError, match=r"routes are torch.int8.* report torch.int16"):
        with_checked_routes(batch_with(narrow), (1, 1, 256))
    with pytest.raises(
        BatchError, match=r"sample 0, token 1, .* are \[256\]; the model has experts 0..3"
    ):
        with_checked_routes(batch_with(routes([0, 256, 1], torch.int64)), (1, 1, 4))
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(BatchError, match="experts are integers"):
            batch_with(routes([0, 1, 0], dtype))


def test_the_largest_value_of_an_unsigned_type_is_refused_where_no_expert_has_it() -> None:
    few = RoutedModel(routers={}, num_layers=1, num_experts=4, topk=1)
    with pytest.raises(ReplayError, match=r"are \[255\]; .* a row of -1 in a signed type"):
        batch = batch_with(routes([0, 255, 1], torch.uint8))
        routes_of(
            Microbatch(batch), model_inputs(batch, place()), few, place(), sequence_parallel=False
        )


def test_a_replay_error_never_numbers_samples_within_a_microbatch() -> None:
    batch = batch_with(routes([0, 1, 2], torch.int16), routes([0, 999, 2], torch.int16))
    with pytest.raises(ReplayError, match="routes of sample 17, token 1, MoE layer 0"):
        routes_of(
            Microbatch(batch),
            model_inputs(batch, place()),
            MODEL,
            place(),
            sequence_parallel=False,
            sample_numbers=(12, 17),
        )


def dump_columns(engine: list[np.ndarray]) -> dict[str, list[object]]:
    return {
        "response_lengths": [2] * len(engine),
        "total_lengths": [3] * len(engine),
        "loss_masks": [np.ones(2)] * len(engine),
        "rollout_log_probs": [np.zeros(2)] * len(engine),
        "log_probs": [np.zeros(2)] * len(engine),
        "rollout_routed_experts": engine,
    }


def test_a_dump_never_turns_no_route_into_an_expert(tmp_path: Path) -> None:
    engine = [np.array([255, -1, 3], np.int16).reshape(3, 1, 1)]
    LogProbDump(tmp_path, with_routes=True).write(0, dump_columns(engine))
    [(block, _)] = list(open_dump([tmp_path]).blocks())
    assert block.routes["rollout_routed_experts"][0].flatten().tolist() == [255, -1, 3]
    # Files in 16 unsigned bits have 65535 for no route.
    [path] = tmp_path.iterdir()
    table = pq.read_table(path)
    old = pa.array([[255, 65535, 3]], pa.list_(pa.uint16()))
    place = table.column_names.index("rollout_routed_experts")
    pq.write_table(table.set_column(place, "rollout_routed_experts", old), path)
    [(block, _)] = list(open_dump([tmp_path]).blocks())
    assert block.routes["rollout_routed_experts"][0].flatten().tolist() == [255, -1, 3]


def test_expert_255_is_never_left_out_of_the_comparison_of_routes() -> None:
    engine = [np.full((9, 1, 1), 255, np.uint8)]
    trainer = [np.zeros((9, 1, 1), np.int32)]
    finding = routing_finding(engine, trainer)
    assert finding is not None and finding.numbers["agreement"] == 0.0


def test_recorded_routes_are_never_taken_for_other_tokens_of_the_same_lengths() -> None:
    plan = MicrobatchPlan((((0, 1),),))
    batch = batch_with(routes([0, 1, 2], torch.int16), routes([0, 1, 2], torch.int16))

    def fingerprint(batch: RolloutBatch) -> bytes:
        return share_fingerprint(cut_share(batch, plan, 0, weight=1.0))

    swapped = batch.with_column("unconcat_tokens", [torch.arange(3), torch.arange(3).flip(0)])
    assert fingerprint(batch) == fingerprint(batch.select([0, 1])) != fingerprint(swapped)
