"""Seconds and peak memory of a weight sync, by every way, against model size and number of engines.

One trainer rank and transformers engines on one machine. The ways take turns with the same actors; the fastest of
some syncs counts. `ipc` is the way of engines that share the trainer's devices, here over memory of the host. `directory` is what happens besides the trainer when one server gets its weights that way: the buckets
are read from the object store, written to files, and read back into a model's memory.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from benchmarks.job_task import Model, write_model

_MB = 1 << 20
_SAMPLE_SECONDS = 0.004


@dataclass
class Peak:
    """Growth of private memory by process, and of shared memory, while the body runs."""

    processes: dict[str, list[psutil.Process]]
    grown: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(self._now(), ended))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _watch(self, before: dict[str, float], ended: threading.Event) -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            for name, value in self._now().items():
                self.grown[name] = max(self.grown.get(name, 0.0), value - before[name])

    def _now(self) -> dict[str, float]:
        sizes = {
            name: max(_private(process) for process in processes)
            for name, processes in self.processes.items()
        }
        room = os.statvfs("/dev/shm")
        return sizes | {"shared": (room.f_blocks - room.f_bfree) * room.f_frsize / _MB}


def _private(process: psutil.Process) -> float:
    fields = Path(f"/proc/{process.pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") / _MB


def _workers(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        if any(f"ray::{name}" in part for part in process.cmdline()):
            found.append(process)
    return found


def measure_weight_sync(quick: bool) -> list[dict[str, Any]]:
    """One row per model, number of engines and way."""
    shapes = [
        Model(hidden=256, layers=4, heads=4, vocabulary=4096),
        Model(hidden=512, layers=6, heads=8, vocabulary=16_384),
        Model(hidden=768, layers=8, heads=12, vocabulary=24_576),
        Model(hidden=1024, layers=8, heads=8, vocabulary=32_768),
    ]
    counts = [(0, 1)]
    if not quick:
        counts = [(0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (1, 2), (0, 4), (1, 4)]
    rows = []
    for shape, engines in counts:
        with tempfile.TemporaryDirectory() as directory:
            write_model(shapes[shape], 64, Path(directory))
            rows += _measure(directory, engines, 2 if quick else 5)
    return rows


def _measure(model: str, engines: int, rounds: int) -> list[dict[str, Any]]:
    from plugin.cluster.model_source import policy_source
    from plugin.cluster.ray_cluster import cluster
    from plugin.config import JobConfig
    from plugin.controller.interrupts import Interrupts
    from plugin.controller.job import _running
    from plugin.controller.weight_sync import WeightSync
    from plugin.observe.console import Console

    config = JobConfig(
        hf_checkpoint=model, num_rollout_engines=engines, task_path="benchmarks.job_task:make_task"
    )
    parts: Any = SimpleNamespace(
        policy=policy_source(config), reference=None, teachers={}, critic=None
    )
    console = Console()
    with (
        cluster(config) as connected,
        _running(
            config, parts, Path(model), console, connected, Interrupts(console.log)
        ) as running,
    ):
        trainer, pool, _ = running
        syncs = {
            way: WeightSync(config.unchecked_copy(weight_sync=way), trainer, pool, console)
            for way in ("broadcast", "ipc", "object-store")
        }
        processes = {"rank": _workers("TrainerRank"), "engine": _workers("EngineActor")}
        peaks = {way: Peak(processes) for way in (*syncs, "directory")}
        seconds: dict[str, list[float]] = {way: [] for way in peaks}
        version = 0
        # Members leave the groups of one way for those of the other, so these do not alternate.
        for way in ("broadcast", "ipc"):
            for _ in range(rounds):
                for one in (way, "object-store"):
                    pool._from_ranks = one != "object-store"

                    def send(sync: WeightSync = syncs[one], version: int = version) -> None:
                        sync.send(version, wait=True)

                    seconds[one].append(_timed(peaks[one], send))
                    version += 1
        for _ in range(rounds):
            if engines == 1:
                seconds["directory"].append(
                    _timed(peaks["directory"], lambda: _through_files(trainer))
                )
        size = syncs["broadcast"].metrics()["weight_sync_bytes"] / _MB
    return [
        {"mb": size, "engines": engines, "way": way, "seconds": min(took), **peaks[way].grown}
        for way, took in seconds.items()
        if took
    ]


def _timed(peak: Peak, work: Callable[[], None]) -> float:
    with peak.watching():
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


def _through_files(trainer: Any) -> None:
    """Export, write and read back, as the client of a server and the server do."""
    import ray
    from safetensors.torch import load_file

    from plugin.weights.directory import WeightDirectory

    buckets, _ = trainer.export_weights()
    with tempfile.TemporaryDirectory() as root:
        files = WeightDirectory(root, {})
        files.begin()
        for bucket in buckets:
            files.add(ray.get(bucket))
        files.finish("v")
        for file in sorted(Path(files.path_of("v")).glob("*.safetensors")):
            for tensor in load_file(file).values():
                tensor.clone()
