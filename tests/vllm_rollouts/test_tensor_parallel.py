"""vLLM spread over two workers: their log-probs, their end, and a job with them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.vllm_rollouts.small_job import check_steps, train

pytestmark = pytest.mark.timeout(1500)


def _children(process: int) -> set[int]:
    """The live processes below `process`."""
    found: set[int] = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == process and state != "Z":
            found |= {int(file.parent.name)} | _children(int(file.parent.name))
    return found


def _listening(process: int) -> list[Any]:
    found = psutil.Process(process).net_connections(kind="inet")
    return [connection for connection in found if connection.status == "LISTEN"]


def _serve(pipe: Connection) -> None:
    """Builds an engine over two workers, reports its log-probs with those of transformers, and obeys."""
    from tests.parallel.tiny_models import hf_model, hf_state_dict
    from tests.unit.engines.tiny_engines import (
        PARAMETERS,
        REQUESTS,
        load,
        reference_log_probs,
    )
    from tests.vllm_rollouts.small_model import vllm_config, vllm_engine

    config = vllm_config(tie_word_embeddings=True)
    engine = vllm_engine(
        config,
        rollout_max_batch=16,
        rollout_num_gpus_per_engine=2,
        vllm_args=("block_size=32",),
    )
    for seed in (1, 0):  # the second version replaces the first
        load(engine, hf_state_dict(config, seed), 1 - seed)
    model, rows = hf_model(config), []
    for request, answers in zip(REQUESTS, engine.generate(REQUESTS, PARAMETERS), strict=True):
        for answer in answers:
            expected = reference_log_probs(model, request, answer, PARAMETERS)
            rows.append((answer.log_probs.tolist(), expected.tolist()))
    pipe.send(rows)
    while pipe.recv() == "generate":
        try:
            engine.generate(REQUESTS, PARAMETERS)
            pipe.send(None)
        except Exception as error:
            pipe.send(type(error).__name__)


@contextmanager
def _engine_process() -> Iterator[tuple[Any, Connection]]:
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(there,))
    process.start()
    try:
        assert here.poll(600), "the engine did not start"
        yield process, here
    finally:
        process.kill()
        process.join()


def _wait_until_gone(processes: set[int]) -> set[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        alive = {p for p in processes if Path(f"/proc/{p}").exists()}
        if not alive:
            return alive
        time.sleep(0.2)
    return alive


def _shared_memory(processes: set[int]) -> set[Path]:
    maps = [mapped.path for p in processes for mapped in psutil.Process(p).memory_maps()]
    return {Path(path) for path in maps if path.startswith("/dev/shm/vllm")}


def test_log_probs_are_right_and_no_worker_or_memory_outlives_a_killed_engine() -> None:
    with _engine_process() as (process, pipe):
        for reported, expected in pipe.recv():
            assert reported == pytest.approx(expected, abs=2e-5)
        workers = _children(process.pid)
        assert len(workers) >= 2
        listeners = {c.laddr.ip for p in workers for c in _listening(p)}
        assert all(ip.startswith("127.") or ip == "::1" for ip in listeners), listeners
        shared = _shared_memory(workers)
        assert shared and all(file.exists() for file in shared)
        os.kill(process.pid, signal.SIGKILL)
        assert not _wait_until_gone(workers)
        deadline = time.monotonic() + 60
        while any(file.exists() for file in shared):
            assert time.monotonic() < deadline, shared
            time.sleep(0.1)


def test_an_engine_that_lost_a_worker_fails_instead_of_hanging() -> None:
    with _engine_process() as (process, pipe):
        pipe.recv()
        workers = {p for p in _children(process.pid) if _is_worker(p)}
        os.kill(max(workers), signal.SIGKILL)
        pipe.send("generate")
        assert pipe.poll(120), "the engine hangs"
        assert pipe.recv() is not None


def _is_worker(process: int) -> bool:
    return b"VLLM::Worker" in Path(f"/proc/{process}/cmdline").read_bytes()


def test_a_job_trains_on_the_responses_of_an_engine_over_two_workers(tmp_path: Path) -> None:
    flags = ("--rollout-engine", "vllm", "--rollout-num-gpus-per-engine", "2")
    lines = train(tmp_path / "run", *flags, "--vllm-args", "block_size=32")
    check_steps(lines)
    assert all(line["mismatch_kl"] < 1e-6 for line in lines)
