"""tests/parallel/test_bfloat16_layouts.py on Transformer Engine's layers: tensor, sequence, pipeline, context and expert
parallelism, replayed routes, checkpoints (also onto local layers) and export."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.parallel.test_bfloat16_layouts import *  # noqa: F403

NUM_GPUS = 4

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="Transformer Engine is not installed",
)


@pytest.fixture(scope="module")
def layers() -> dict[str, Any]:
    """In place of the local layers of the shared bodies."""
    return {"train_dtype": "bfloat16", "transformer_impl": "transformer_engine"}
