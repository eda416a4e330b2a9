"""tests/parallel/test_bfloat16_families.py on the layers that a GPU gets: Transformer Engine's where they compute the family,
against the local layers of one rank, for every family and layout."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.parallel.test_bfloat16_families import *  # noqa: F403

NUM_GPUS = 2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="Transformer Engine is not installed",
)


@pytest.fixture(scope="module")
def layers() -> dict[str, Any]:
    """In place of the local layers of the shared bodies."""
    return {"train_dtype": "bfloat16", "transformer_impl": "auto"}


@pytest.fixture(scope="session")
def rank_pool(rank_pool: Any) -> Any:
    """Ranks with the layers that the settings name: nothing is put in place of them."""

    class Real:
        run_ranks = staticmethod(rank_pool.run_real_ranks)

    return Real()
