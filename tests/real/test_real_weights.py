"""The real model from a Megatron trainer into an engine, by every way that weights take: equal to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plugin.cluster.model_source import policy_source
from plugin.config import JobConfig
from plugin.engines.transformers.engine import TransformersEngine
from plugin.megatron_backend.cpu_runtime import import_megatron
from plugin.weights import make_sender
from plugin.weights.buckets import BUCKET_BYTES, pack_buckets
from plugin.weights.checksums import differing, with_checksums
from plugin.weights.directory import WeightDirectory, read_directory
from plugin.weights.group import Membership, WeightGroup, abort, open_store
from plugin.weights.lane import bucket_sizes
from plugin.weights.manifest import Manifest

pytestmark = pytest.mark.timeout(900)

Way = Callable[[Any, TransformersEngine, int, Path], None]


@pytest.fixture(scope="module")
def both(model: str) -> Iterator[Any]:
    """Trainer and engine, and what the model's file holds."""
    import_megatron()
    from plugin.megatron_backend.parallel_groups import one_process
    from plugin.megatron_backend.trainer import MegatronTrainer

    settings: dict[str, Any] = {"train_dtype": "bfloat16", "rollout_dtype": "bfloat16"}
    config = JobConfig(hf_checkpoint=model, prompt_data="unused", **settings)
    source = policy_source(config)
    torch.set_num_threads(2)
    with one_process() as groups:
        trainer = MegatronTrainer(
            config, source.as_config(), groups, layout="padded", trainable=False, seed=0
        )
        trainer.load_hf_weights(model)
        engine = TransformersEngine(source.hf_config, dtype="bfloat16")
        held = load_file(Path(model) / "model.safetensors")
        yield SimpleNamespace(trainer=trainer, engine=engine, held=held)


def between_members(
    trainer: Any, engine: TransformersEngine, version: int, **settings: Any
) -> None:
    store = open_store("127.0.0.1")
    group = WeightGroup(store.host, store.port, f"real {version}", 1, 1, 300.0, **settings)
    if group.ipc_ranks:
        part, manifest = trainer.export_hf_weights(), None
    else:
        described = trainer.export_own_part(round_bytes=BUCKET_BYTES, described=True)
        manifest = Manifest.of(described, *bucket_sizes(1, on_gpu=False))
        part = trainer.export_own_part(round_bytes=BUCKET_BYTES)

    def receive() -> None:
        engine.receive_weights(version, group, 0)

    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive)
        with Membership().of(group, lambda: make_sender(group, 0)) as sender:
            sender.send(version, part, manifest)
        received.result(timeout=300)
    abort(store, group, "the test has ended")


def through_a_directory(trainer: Any, engine: TransformersEngine, version: int, path: Path) -> None:
    directory = WeightDirectory(path, {})
    directory.begin()
    for bucket in pack_buckets(trainer.export_hf_weights()):
        directory.add(bucket)
    directory.finish("version")
    tensors = read_directory(directory.path_of("version"))
    load(engine, version, list(pack_buckets(tensors)))


def through_the_object_store(
    trainer: Any, engine: TransformersEngine, version: int, path: Path
) -> None:
    load(engine, version, list(pack_buckets(trainer.export_hf_weights())))


def load(engine: TransformersEngine, version: int, buckets: list[bytes]) -> None:
    for number, bucket in enumerate(buckets):
        engine.load_weights(version, bucket, last=number == len(buckets) - 1)


WAYS: dict[str, Way] = {
    "broadcast": lambda trainer, engine, version, _: between_members(trainer, engine, version),
    "IPC": lambda trainer, engine, version, _: between_members(
        trainer, engine, version, ipc_ranks=(0,)
    ),
    "directory": through_a_directory,
    "object store": through_the_object_store,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_engine_holds_the_bits_of_the_file(
    both: Any, way: str, tmp_path: Path, note: Callable[[str], None]
) -> None:
    for tensor in both.engine.model.state_dict().values():
        tensor.zero_()
    WAYS[way](both.trainer, both.engine, list(WAYS).index(way), tmp_path)
    arrived: dict[str, Tensor] = both.engine.model.state_dict()
    for name, tensor in both.held.items():
        assert arrived[name].dtype == tensor.dtype == torch.bfloat16
        assert torch.equal(arrived[name].view(torch.int16), tensor.view(torch.int16)), name
    sums: dict[str, int] = {}
    list(with_checksums(both.held.items(), torch.bfloat16, sums))
    own = both.engine.weight_checksums()
    assert own is not None and differing(own, sums) == []
    note(f"weights by {way}: {len(both.held)} tensors of the file, equal to the bit")
