"""Weights in buckets: what is read from one is what was put in, without a copy."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from plugin.engines.transformers.weight_loader import WeightLoader
from plugin.errors import ParallelError
from plugin.weights.buckets import pack_buckets, read_bucket
from plugin.weights.directory import WeightDirectory
from tests.full_disk import largest_file
from tests.parallel.tiny_models import ALL_FAMILIES, hf_model, hf_state_dict

WEIGHTS = {
    "a": torch.arange(3, dtype=torch.bfloat16),
    "b": torch.arange(6.0).view(2, 3).t(),
    "c": torch.tensor(2.5, dtype=torch.float16),
    "d": torch.zeros(0, 4),
}


@pytest.mark.parametrize("as_array", [False, True])
def test_a_bucket_is_read_as_safetensors_reads_it(as_array: bool) -> None:
    (bucket,) = pack_buckets(WEIGHTS.items())
    found = read_bucket(np.frombuffer(bucket, np.uint8) if as_array else bucket)
    expected = safetensors.torch.load(bucket)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == WEIGHTS[name].dtype
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


@pytest.mark.filterwarnings("error")
def test_tensors_are_views_of_read_only_memory() -> None:
    (bucket,) = pack_buckets(WEIGHTS.items())
    shared = np.frombuffer(bucket, np.uint8)
    assert not shared.flags.writeable
    first, end = shared.ctypes.data, shared.ctypes.data + len(bucket)
    pointers = [t.data_ptr() for t in read_bucket(shared).values() if t.numel()]
    assert all(first <= pointer < end for pointer in pointers)


def write(directory: WeightDirectory, label: str, weights: dict[str, torch.Tensor]) -> Path:
    """Write a version and check that a server finds it there, whole."""
    directory.begin()
    for bucket in pack_buckets(weights.items(), bucket_bytes=20):
        directory.add(np.frombuffer(bucket, np.uint8))
    directory.finish(label)
    found: dict[str, torch.Tensor] = {}
    for file in Path(directory.path_of(label)).glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    return Path(directory.path_of(label))


def test_tensors_that_have_not_changed_are_not_written_again(tmp_path: Path) -> None:
    directory = WeightDirectory(tmp_path, {"model_type": "llama"})
    first = write(directory, "v0", WEIGHTS)
    assert directory.written_bytes > sum(tensor.nbytes for tensor in WEIGHTS.values())
    second = write(directory, "v1", WEIGHTS | {"a": WEIGHTS["a"] + 1})
    # Of a, 3 numbers of 2 bytes, and its header.
    assert 6 < directory.written_bytes < 200
    assert (second / "config.json").read_text() == '{"model_type": "llama"}'
    directory.remove_older("v1")
    assert not first.exists() and len(list(tmp_path.glob("*.tensors/*"))) == len(WEIGHTS)
    write(directory, "v2", WEIGHTS)
    assert 6 < directory.written_bytes < 200  # the old a is gone and is written again


@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_a_damaged_or_missing_tensor_is_written_again(tmp_path: Path, damage: str) -> None:
    directory = WeightDirectory(tmp_path, {})
    write(directory, "v0", WEIGHTS)
    for file in tmp_path.glob("*.tensors/*"):
        content = file.read_bytes()
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(content[:-1] if damage == "cut" else content[:-1] + b"?")
    write(directory, "v1", WEIGHTS)
    assert directory.written_bytes > sum(tensor.nbytes for tensor in WEIGHTS.values())
    write(directory, "v2", WEIGHTS)
    assert directory.written_bytes == 0


def test_a_version_with_one_damaged_and_one_missing_file_is_as_whole_as_a_full_one(
    tmp_path: Path,
) -> None:
    directory = WeightDirectory(tmp_path, {})
    first = write(directory, "v0", WEIGHTS)
    damaged, missing, *_ = sorted(tmp_path.glob("*.tensors/*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    sizes = damaged.stat().st_size + missing.stat().st_size
    missing.unlink()
    second = write(directory, "v1", WEIGHTS)
    assert directory.written_bytes == sizes
    # Every file of the version was read or written for it: all have the content their name promises.
    stored = {file.stat().st_ino: file.name for file in tmp_path.glob("*.tensors/*")}
    for file in second.glob("*.safetensors"):
        assert hashlib.sha256(file.read_bytes()).hexdigest() == stored[file.stat().st_ino]
    # A file that a server may be reading is not written over: the version before is as it was.
    assert len(list(first.glob("*.safetensors"))) == len(WEIGHTS)
    full = write(WeightDirectory(tmp_path / "other", {}), "v1", WEIGHTS)
    contents = [{f.name: f.read_bytes() for f in place.iterdir()} for place in (second, full)]
    assert contents[0] == contents[1]


def test_a_version_that_comes_again_takes_the_place_of_the_damaged_one(tmp_path: Path) -> None:
    directory = WeightDirectory(tmp_path, {})
    write(directory, "v0", WEIGHTS)
    damaged = write(directory, "v1", WEIGHTS)
    next(damaged.glob("*.safetensors")).unlink()
    whole = write(directory, "v1", WEIGHTS)
    assert len(list(whole.glob("*.safetensors"))) == len(WEIGHTS)
    directory.remove_older("v1")
    assert [place.name for place in tmp_path.glob("v*")] == ["v1"]


def test_a_version_that_the_disk_refuses_names_the_directory_and_the_next_one_is_whole(
    tmp_path: Path,
) -> None:
    directory = WeightDirectory(tmp_path, {})
    large = WEIGHTS | {"e": torch.zeros(1 << 20)}
    with (
        largest_file(1 << 16),
        pytest.raises(ParallelError, match="room for two versions") as found,
    ):
        write(directory, "v0", large)
    assert str(tmp_path) in str(found.value) and "File too large" in str(found.value)
    assert not list(tmp_path.rglob("*.partial"))
    write(directory, "v1", large)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_checkpoint_of_every_family_fills_its_model(family: str) -> None:
    config = ALL_FAMILIES[family]()
    loader = WeightLoader(hf_model(config, seed=1))
    (bucket,) = pack_buckets(hf_state_dict(config).items())
    loader.load(0, bucket, last=True)
    for name, tensor in hf_model(config).state_dict().items():
        assert torch.equal(loader._model.state_dict()[name], tensor), name
