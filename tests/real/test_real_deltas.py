"""Deltas on the real model: the engine has the trainer's bits after every one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.real.real_jobs import train

pytestmark = pytest.mark.timeout(1500)

Note = Callable[[str], None]


def test_an_engine_that_gets_deltas_has_the_trainers_checksums_at_every_version(
    tmp_path: Path, model: str, note: Note
) -> None:
    settings: dict[str, Any] = {
        "train-dtype": "bfloat16",
        "num-rollouts": 4,
        "lr": 8e-5,
        "save-at-end": False,
        "verify-weights": "every:1",
    }
    deltas = {"weight-sync": "delta", "full-weights-every": 3}
    found = train(tmp_path / "delta", model, settings | deltas)
    whole = train(tmp_path / "broadcast", model, settings)
    for name in ("loss", "grad_norm", "reward", "mismatch_kl"):
        assert [line[name] for line in found] == [line[name] for line in whole], name
    # Versions 0 and 3 are full ones.
    shares = [line.get("weight_changed_share") for line in found]
    assert [share is None for share in shares] == [True, False, False, True]
    sizes = [line["weight_sync_bytes"] for line in found]
    full = {line["weight_sync_bytes"] for line in whole}
    assert {sizes[0], sizes[3]} == full
    for share, size in zip(shares[1:3], sizes[1:3], strict=True):
        note(f"delta: {share:.2%} of the elements changed, {size / sizes[0]:.2%} of the bytes")
        assert 0 < share < 1 and size < sizes[0]
    assert all(line["weight_repairs"] == 0 for line in found)
    printed = (tmp_path / "delta.log").read_text()
    assert printed.count("computes with the trainer's weights") == 4
    assert printed.count("tensors have its checksums") == 4
