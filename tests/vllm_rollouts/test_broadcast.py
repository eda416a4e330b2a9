"""Weights over a process group into vLLM's workers, against weights from a directory."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest

from plugin.errors import EngineError, TransferError
from plugin.weights.broadcast import BroadcastSender
from plugin.weights.group import Membership, WeightGroup, abort, open_store
from plugin.weights.manifest import Manifest
from tests.parallel.tiny_models import hf_model, hf_state_dict
from tests.unit.engines.tiny_engines import PARAMETERS, REQUESTS, reference_log_probs
from tests.vllm_rollouts.small_job import check_steps, train
from tests.vllm_rollouts.small_model import vllm_config, vllm_engine

pytestmark = pytest.mark.timeout(1800)
VERSIONS = 20


def _in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns in a process of its own, which vLLM's workers end with."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result(timeout=1500)


class _Trainer:
    """Sends state dicts to one engine, from a thread per expert parallel rank of a pipeline stage."""

    def __init__(self, engine: Any, ranks: int) -> None:
        self._engine, self._store = engine, open_store("127.0.0.1")
        self._members = [Membership() for _ in range(ranks)]
        self._groups = 0

    def group(self, absent: int = 0) -> WeightGroup:
        """A new group of the engine's workers and of some that never come."""
        self._groups += 1
        receivers, ranks = self._engine.weight_receivers() + absent, len(self._members)
        place = (self._store.host, self._store.port, f"group-{self._groups}")
        return WeightGroup(
            *place, senders=ranks, receivers=receivers, timeout=60.0, per_stage=ranks
        )

    def send(
        self, group: WeightGroup, version: int, state: dict[str, Any], *, after: int | None = None
    ) -> None:
        """Send a state dict, or so many tensors of it: then the transfer is cut off."""
        ranks = range(len(self._members))
        with ThreadPoolExecutor(len(ranks)) as pool:
            sent = []
            for n in ranks:
                part = _part(self._cut_off(group, state, after), n, len(ranks))
                manifest = Manifest.of(_part(state.items(), n, len(ranks)), 1 << 16)
                sent.append(pool.submit(self._send, n, group, version, part, manifest))
            try:
                self._engine.receive_weights(version, group, 0)
            finally:
                for call in sent:
                    call.exception()

    def _send(
        self, number: int, group: WeightGroup, version: int, part: Any, manifest: Manifest
    ) -> None:
        with self._members[number].of(group, lambda: BroadcastSender(group, number)) as sender:
            sender.send(version, part, manifest)

    def _cut_off(self, group: WeightGroup, state: dict[str, Any], after: int | None) -> Any:
        for number, pair in enumerate(state.items()):
            if number == after:
                abort(self._store, group, "rank 1 died")
                raise TransferError("rank 1 died")
            yield pair


def _part(tensors: Iterable[tuple[str, Any]], rank: int, ranks: int) -> Iterator[Any]:
    """What an expert parallel rank sends: its own experts, and rank 0 all else; a layer a round."""
    layer = None
    for name, tensor in tensors:
        if (found := re.search(r"layers\.(\d+)\.", name)) and found.group(1) != layer:
            yield None
            layer = found.group(1)
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if (int(expert.group(1)) % ranks if expert else 0) == rank:
            yield name, tensor


def _log_probs(engine: Any) -> list[tuple[list[int], list[float]]]:
    answers = engine.generate(REQUESTS, PARAMETERS)
    return [(g.tokens.tolist(), g.log_probs.tolist()) for answer in answers for g in answer]


def _versions_both_ways(directory: str, family: str, workers: int, versions: int) -> Any:
    """Every version by broadcast and from a directory; then a transfer that is cut off, and a killed worker."""
    from plugin.weights.buckets import pack_buckets
    from plugin.weights.directory import WeightDirectory

    config = vllm_config(family, tie_word_embeddings=True)
    engine = vllm_engine(
        config,
        rollout_max_batch=16,
        rollout_num_gpus_per_engine=workers,
        vllm_args=("block_size=32",),
    )
    trainer = _Trainer(engine, ranks=2 if family == "qwen3_moe" else 1)
    found: dict[str, Any] = {"pairs": [], "reference": []}
    group, files = trainer.group(), WeightDirectory(directory, config.to_dict())
    for version in range(versions):
        state = hf_state_dict(config, version)
        trainer.send(group, 2 * version, state)
        by_broadcast = _log_probs(engine)
        files.begin()
        for bucket in pack_buckets(state.items()):
            files.add(bucket)
        files.finish(f"v{version}")
        _reload(engine, files.path_of(f"v{version}"))
        found["pairs"].append((by_broadcast, _log_probs(engine)))
    model = hf_model(config, versions - 1)
    for request, answers in zip(REQUESTS, engine.generate(REQUESTS, PARAMETERS), strict=True):
        for answer in answers:
            expected = reference_log_probs(model, request, answer, PARAMETERS)
            found["reference"].append((answer.log_probs.tolist(), expected.tolist()))
    found |= _broken_transfers(engine, trainer, config, 2 * versions)
    return found


def _reload(engine: Any, directory: str) -> None:
    """Load a directory into the workers, as a server does."""
    refusals = engine._llm.llm_engine.collective_rpc("load_directory", args=(directory,))
    assert not any(refusals), refusals
    assert engine._llm.reset_prefix_cache()


def _broken_transfers(engine: Any, trainer: _Trainer, config: Any, version: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    state, group = hf_state_dict(config, 99), trainer.group()
    try:
        trainer.send(group, version, state, after=5)
    except TransferError as error:
        found["cut off"] = str(error)
    try:
        engine.generate(REQUESTS, PARAMETERS)
    except EngineError as error:
        found["half"] = str(error)
    trainer.send(trainer.group(), version, state)
    again = _log_probs(engine)
    trainer.send(trainer.group(), version + 1, state)
    found["again"] = (again, _log_probs(engine))
    workers = [p for p in psutil.Process().children(recursive=True) if "Worker" in p.name()]
    if workers:
        threading.Timer(1.0, os.kill, (workers[-1].pid, signal.SIGKILL)).start()
        began = time.monotonic()
        try:
            engine.receive_weights(version + 2, trainer.group(absent=1), 0)
        except Exception as error:
            found["killed"] = (type(error).__name__, time.monotonic() - began)
    return found


@pytest.mark.parametrize(("family", "versions"), [("qwen3", VERSIONS), ("qwen3_moe", 3)])
def test_log_probs_are_to_the_bit_those_of_weights_from_a_directory(
    tmp_path: Path, family: str, versions: int
) -> None:
    found = _in_a_process(_versions_both_ways, str(tmp_path), family, 2, versions)
    assert len(found["pairs"]) == versions
    for by_broadcast, from_directory in found["pairs"]:
        assert by_broadcast == from_directory
    assert len({str(pair) for pair in found["pairs"]}) == versions
    for reported, expected in found["reference"]:
        assert reported == pytest.approx(expected, abs=2e-5)
    assert "rank 1 died" in found["cut off"]
    assert "half of a new version" in found["half"]
    # After half a layer of weights the next version is whole, and the one after it the same.
    assert found["again"][0] == found["again"][1]
    assert "killed" in found and found["killed"][1] < 120


def test_a_job_over_two_workers_is_the_same_whichever_way_its_weights_take(tmp_path: Path) -> None:
    flags = ("--rollout-engine", "vllm", "--rollout-num-gpus-per-engine", "2")
    flags += ("--pipeline-model-parallel-size", "2", "--vllm-args", "block_size=32")
    ways = {
        "broadcast": (),
        "delta": ("--weight-sync", "delta"),
        "object-store": ("--weight-sync", "object-store"),
        "ipc": ("--colocate",),
    }
    found = {}
    for way, further in ways.items():
        found[way] = lines = train(tmp_path / way, *flags, *further)
        check_steps(lines)
        assert {line["weight_sync"] for line in lines} == {way}
        assert all(line["mismatch_kl"] < 1e-6 for line in lines)
    for name in ("loss", "mismatch_kl", "reward"):
        values = [[line[name] for line in lines] for lines in found.values()]
        assert all(other == values[0] for other in values), name
    assert all("weight_changed_share" in line for line in found["delta"][1:])
