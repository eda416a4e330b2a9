"""Weights in buckets: what is read from one is what was put in, without a copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from plugin.rollout.engines.weight_buckets import WeightLoader, pack_buckets, read_bucket
from plugin.rollout.engines.weight_directory import WeightDirectory
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


def test_a_view_is_written_to_a_file_as_it_is(tmp_path: Path) -> None:
    (bucket,) = pack_buckets(WEIGHTS.items())
    directory = WeightDirectory(tmp_path, {})
    directory.begin()
    directory.add(np.frombuffer(bucket, np.uint8))
    directory.finish(0)
    assert (
        Path(directory.path_of(str(directory.label))) / "model-00001.safetensors"
    ).read_bytes() == bucket


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_checkpoint_of_every_family_fills_its_model(family: str) -> None:
    config = ALL_FAMILIES[family]()
    loader = WeightLoader(hf_model(config, seed=1))
    (bucket,) = pack_buckets(hf_state_dict(config).items())
    loader.load(0, bucket, last=True)
    for name, tensor in hf_model(config).state_dict().items():
        assert torch.equal(loader._model.state_dict()[name], tensor), name
