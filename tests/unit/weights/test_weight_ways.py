"""Every way that weights take from a trainer to an engine: 20 versions, equal to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plugin.weights import make_receiver, make_sender
from plugin.weights.buckets import pack_buckets, read_bucket
from plugin.weights.directory import WeightDirectory, read_directory
from plugin.weights.group import Membership, WeightGroup, abort, open_store
from plugin.weights.manifest import Manifest

VERSIONS = 20
Version = dict[str, Tensor]


def version_of(number: int) -> Version:
    """Tensors of several dtypes and sizes, one of which never changes; NaN and signed zeros among them."""
    generator = torch.Generator().manual_seed(number)
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    found = {
        f"layers.{n}": torch.randn(5, 1 + 37 * n, generator=generator).to(kinds[n % 3])
        for n in range(12)
    }
    found["layers.0"][0, 0] = torch.nan
    found["layers.1"][0, 0] = -0.0
    return found | {"same": torch.arange(999.0), "none": torch.zeros(0, 3)}


def between_members(tmp_path: Path, **settings: object) -> Iterator[Version]:
    """Over a group of one sender and one receiver."""
    store = open_store("127.0.0.1")
    group = WeightGroup(store.host, store.port, "twenty", 1, 1, 30.0, **settings)  # type: ignore[arg-type]

    def send() -> None:
        with Membership().of(group, lambda: make_sender(group, 0)) as sender:
            for number in range(VERSIONS):
                tensors = version_of(number)
                sender.send(number, tensors.items(), Manifest.of(tensors.items(), 1000))

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        with Membership().of(group, lambda: make_receiver(group, 0)) as receiver:
            for number in range(VERSIONS):
                found: Version = {}
                receiver.barrier(number)
                receiver.receive(
                    number, lambda bucket, to=found: to.update((n, t.clone()) for n, t in bucket)
                )
                yield found
        sent.result(timeout=30)
    abort(store, group, "the test has ended")


def through_a_directory(tmp_path: Path) -> Iterator[Version]:
    directory = WeightDirectory(tmp_path, {})
    for number in range(VERSIONS):
        directory.begin()
        for bucket in pack_buckets(version_of(number).items(), bucket_bytes=1000):
            directory.add(bucket)
        directory.finish(f"v{number}")
        yield dict(read_directory(directory.path_of(f"v{number}")))
        directory.remove_older(f"v{number}")


def through_the_object_store(tmp_path: Path) -> Iterator[Version]:
    for number in range(VERSIONS):
        buckets = pack_buckets(version_of(number).items(), bucket_bytes=1000)
        yield {name: t for bucket in buckets for name, t in read_bucket(bucket).items()}


WAYS: dict[str, Callable[[Path], Iterator[Version]]] = {
    "broadcast": between_members,
    "IPC": lambda path: between_members(path, ipc_ranks=(0,)),
    "directory": through_a_directory,
    "object store": through_the_object_store,
}


@pytest.mark.parametrize("way", WAYS)
def test_twenty_versions_arrive_equal_to_the_bit(way: str, tmp_path: Path) -> None:
    count = 0
    for number, found in enumerate(WAYS[way](tmp_path)):
        expected = version_of(number)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            bits, arrived = (
                t.contiguous().view(-1).view(torch.uint8) for t in (tensor, found[name])
            )
            assert torch.equal(bits, arrived), (number, name)
        count += 1
    assert count == VERSIONS
