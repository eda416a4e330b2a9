"""The real model, its conversations, and what each layout of ranks computes with them; `make test-real` runs this directory.

What is expensive runs once per session: a layout loads the model once per dtype, and the tests read what it measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch
from tests.real import chat_samples, layout_runs
from tests.real.layout_runs import Measured, RoundTrip
from tests.suites import ROOT

# For the ranks, before their fork server starts: a thread that waits for another gives up its core.
os.environ["OMP_WAIT_POLICY"] = "passive"

MODEL = ROOT / "runs" / "real_model" / "model"

#: name -> (ranks, parallel sizes, cuts of the batch)
LAYOUTS: dict[str, tuple[int, dict[str, int], tuple[str, ...]]] = {
    "one rank": (1, {}, ("packed", "padded", "one sample")),
    "TP3": (3, {"tensor_model_parallel_size": 3}, ("packed",)),
    "PP2": (2, {"pipeline_model_parallel_size": 2}, ("packed", "padded")),
}
#: Of a layout; minutes on a busy machine.
SECONDS = 900

_measured = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_measured] = []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.stash[_measured]:
        terminalreporter.section("measured with the real model")
        for line in config.stash[_measured]:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def note(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Adds a line to what is printed at the end of the run."""
    return pytestconfig.stash[_measured].append


@pytest.fixture(scope="session")
def model() -> str:
    """The model's directory."""
    if not (MODEL / "config.json").exists():
        pytest.fail(f"{MODEL} is not there; `make test-real` gets it", pytrace=False)
    return str(MODEL)


@pytest.fixture(scope="session")
def tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="session")
def rows(tokenizer: Any) -> list[chat_samples.Row]:
    """The conversations as token ids."""
    return chat_samples.chat_rows(tokenizer, chat_samples.CONVERSATIONS)


@pytest.fixture(scope="session")
def of_transformers(model: str, rows: list[chat_samples.Row]) -> dict[str, Tensor]:
    """Log-probs of all response tokens by dtype, computed by transformers."""
    return {
        name: torch.cat(
            chat_samples.response_log_probs(
                chat_samples.transformers_model(model, getattr(torch, name)), rows
            )
        )
        for name in ("float32", "bfloat16")
    }


@pytest.fixture(scope="session")
def batch(rows: list[chat_samples.Row], of_transformers: dict[str, Tensor]) -> RolloutBatch:
    """The conversations with advantages of both signs; a bfloat16 engine reported their log-probs."""
    lengths = [len(response) for _, response in rows]
    reported = of_transformers["bfloat16"].split(lengths)
    return chat_samples.rollout_batch(rows, [1.0, -0.5, 0.75, -1.0, 0.25, -0.75], reported)


class LayoutResults:
    """What layouts compute, each at the first request."""

    def __init__(self, run_ranks: Callable[..., list[Any]], model: str, batch: RolloutBatch):
        self._run_ranks, self._model, self._batch = run_ranks, model, batch
        self._float32: dict[str, tuple[RoundTrip, dict[str, Measured]]] = {}
        self._bfloat16: dict[str, tuple[RoundTrip, Measured]] = {}

    def float32(self, layout: str) -> tuple[RoundTrip, dict[str, Measured]]:
        """The round trip, and log-probs and steps by cut."""
        if layout not in self._float32:
            ranks, sizes, cuts = LAYOUTS[layout]
            self._float32[layout] = self._run_ranks(
                *(layout_runs.measure_float32, ranks, self._model, self._batch, cuts),
                timeout=SECONDS,
                **sizes,
            )[0]
        return self._float32[layout]

    def bfloat16(self, layout: str) -> tuple[RoundTrip, Measured]:
        """The round trip and log-probs."""
        if layout not in self._bfloat16:
            ranks, sizes, _ = LAYOUTS[layout]
            self._bfloat16[layout] = self._run_ranks(
                *(layout_runs.measure_bfloat16, ranks, self._model, self._batch),
                timeout=SECONDS,
                **sizes,
            )[0]
        return self._bfloat16[layout]


@pytest.fixture(scope="session")
def results(rank_pool: Any, model: str, batch: RolloutBatch) -> LayoutResults:
    return LayoutResults(rank_pool.run_ranks, model, batch)
