"""Servers that join a process group with the trainer, and take its weights over it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from plugin.config import JobConfig
from plugin.engines.protocol import Generation, GenerationRequest, SamplingParameters
from plugin.engines.servers.http_engine import HttpEngine
from plugin.errors import ConfigError, EngineError, TransferError
from plugin.weights.announced import Announcements, ServerSender
from plugin.weights.group import Membership, Receiver, WeightGroup, abort, open_store
from plugin.weights.lane import Lane, Payload, Step
from tests.parallel.tiny_models import hf_state_dict, tiny_qwen3
from tests.unit.engines.servers.misbehaving_server import STOP
from tests.unit.engines.servers.stand_in_weights import ReceivingServer
from tests.unit.engines.tiny_engines import http_engine

pytestmark = pytest.mark.usefixtures("jumping_clock")

CONFIG = tiny_qwen3()
PARAMETERS = SamplingParameters(max_response_length=8, stop_token_ids=(STOP,))
REQUESTS = [GenerationRequest((1, 2), (0, 1))]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReceivingServer]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    running = ReceivingServer()
    yield running
    running.close()


def engine_of(server: ReceivingServer, **options: Any) -> HttpEngine:
    settings = {"rollout_server": "sglang", "step_timeout": 30.0} | options
    return http_engine(CONFIG.to_dict(), server.url, **settings)


class _OtherServer(Receiver):
    """The worker of another server: receiver number 0."""

    def __init__(self, group: WeightGroup) -> None:
        super().__init__(group)
        self._lanes = [Lane(self._store, number, rank=1) for number in range(group.lanes)]

    def barrier(self, version: int) -> None:
        self._store.engine_is_ready(version, 0)

    def receive(self, version: int, take: Any = None) -> None:
        self.barrier(version)
        announcements = Announcements(self._store, self.group.name)
        for sender, lane in enumerate(self._lanes):
            for specs, _ in announcements.read(version, sender):
                memory = lane.empty(sum(spec.nbytes for spec in specs))
                lane.run_to_end([Step(0, partial(Payload, memory), lambda _: None)])


class Stages:
    """Two pipeline stages that send a state dict to a server and to another receiver."""

    def __init__(self) -> None:
        self.store, self._groups = open_store("127.0.0.1"), 0
        self._senders = [Membership(), Membership()]
        self._other = Membership()

    def group(self) -> WeightGroup:
        self._groups += 1
        place = (self.store.host, self.store.port, f"servers-{self._groups}")
        return WeightGroup(*place, senders=2, receivers=2, timeout=20.0, to_servers=True)

    def send(
        self, engine: HttpEngine, group: WeightGroup, version: int, state: dict[str, Any]
    ) -> None:
        """The server is receiver number 1, another one number 0."""
        rows = list(state.items())
        parts = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(self._part, stage, group, version, parts) for stage in (0, 1)]
            calls.append(pool.submit(self._receive, group, version))
            with self._calls_off(group):
                engine.receive_weights(version, group, 1)
            errors = [call.exception() for call in calls]
        assert not any(errors), errors

    @contextmanager
    def _calls_off(self, group: WeightGroup) -> Iterator[None]:
        """As the driver does, so that no member waits for one that has failed."""
        try:
            yield
        except Exception as error:
            abort(self.store, group, str(error))
            raise

    def _part(self, stage: int, group: WeightGroup, version: int, parts: list[Any]) -> None:
        membership = self._senders[stage].of(group, lambda: ServerSender(group, stage))
        with self._calls_off(group), membership as sender:
            sender.send(version, parts[stage], bucket_bytes=10_000)

    def _receive(self, group: WeightGroup, version: int) -> None:
        membership = self._other.of(group, lambda: _OtherServer(group))
        with self._calls_off(group), membership as receiver:
            receiver.receive(version)


def test_a_server_gets_the_tensors_of_all_stages_and_answers_with_their_version(
    server: ReceivingServer,
) -> None:
    engine, stages = engine_of(server), Stages()
    assert engine.weight_receivers() == 1
    group = stages.group()
    for version in (0, 1):
        state = hf_state_dict(CONFIG, version)
        stages.send(engine, group, version, state)
        assert server.loaded.keys() == state.keys()
        assert all(torch.equal(server.loaded[name], tensor) for name, tensor in state.items())
        assert server.label.endswith(f"-v{version}")
        [answers] = engine.generate(REQUESTS, PARAMETERS)
        assert all(isinstance(a, Generation) and a.weight_version == version for a in answers)
    assert len(server.groups) == 2


def test_tensors_of_several_dtypes_are_one_broadcast(server: ReceivingServer) -> None:
    engine, stages = engine_of(server), Stages()
    engine.weight_receivers()
    # An odd number of 2-byte elements before those of 4 bytes, which are read where they are.
    state: dict[str, Any] = hf_state_dict(CONFIG, 0)
    kinds = (torch.bfloat16, torch.float32, torch.float16)
    state = {name: t.to(kinds[n % 3]) for n, (name, t) in enumerate(state.items())}
    ledger = engine._weights
    engine._weights = engine.updates._ledger = _Anything()  # type: ignore[assignment]
    state = {"odd": torch.ones(3, dtype=torch.bfloat16), **state, "none": torch.zeros(0, 2)}
    stages.send(engine, stages.group(), 0, state)
    engine._weights = engine.updates._ledger = ledger
    assert server.loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert server.loaded[name].dtype == tensor.dtype
        assert torch.equal(server.loaded[name], tensor)
    assert server.broadcasts == server.buckets < len(state) / 2


class _Anything:
    """A ledger for tensors that no model has."""

    version = -1

    def begin(self, version: int) -> None: ...
    def take(self, named_tensors: Any) -> None:
        list(named_tensors)

    def end(self) -> None: ...


def test_a_server_that_fails_in_the_middle_is_not_asked_until_it_has_a_whole_version(
    server: ReceivingServer,
) -> None:
    engine, stages = engine_of(server), Stages()
    engine.weight_receivers()
    server.refuse_bucket = 3
    state = hf_state_dict(CONFIG, 0)
    with pytest.raises(TransferError, match=r"HTTP 400 .*Failed, as told"):
        stages.send(engine, stages.group(), 0, state)
    assert server.label.startswith("loading ")
    with pytest.raises(EngineError, match="half of a new version"):
        engine.generate(REQUESTS, PARAMETERS)
    assert engine.weight_receivers() == 1
    stages.send(engine, stages.group(), 0, state)
    [answers] = engine.generate(REQUESTS, PARAMETERS)
    assert all(isinstance(a, Generation) and a.weight_version == 0 for a in answers)


def test_a_server_that_refuses_the_pause_cuts_the_transfer_off_and_is_out_of_service(
    server: ReceivingServer,
) -> None:
    engine, stages = engine_of(server, partial_rollouts=True), Stages()
    engine.weight_receivers()
    server.refuse_updates = True
    with pytest.raises(TransferError, match="not in development mode"):
        engine.receive_weights(0, stages.group(), 0)
    assert "did not receive new weights" in str(engine.pool.servers[0].out_because)


def test_servers_without_a_shared_directory_get_weights_by_broadcast_where_they_can() -> None:
    http = {"rollout_engine": "http", "rollout_url": "http://127.0.0.1:1", "num_rollouts": 1}
    sglang = http | {"rollout_server": "sglang"}
    assert JobConfig.from_sources(sglang).weight_transport == "broadcast"
    assert (
        JobConfig.from_sources(sglang | {"rollout_weights_dir": "/w"}).weight_transport
        == "directory"
    )
    with pytest.raises(ConfigError, match="needs --rollout-weights-dir"):
        JobConfig.from_sources(sglang | {"weight_sync": "directory"})
    with pytest.raises(ConfigError, match="http needs --rollout-weights-dir"):
        JobConfig.from_sources(http)
    with pytest.raises(ConfigError, match="http gets weights by directory; use auto"):
        JobConfig.from_sources(http | {"weight_sync": "broadcast"})
