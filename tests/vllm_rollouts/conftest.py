"""These tests need vLLM, which `make test-vllm` installs; without it they are skipped."""

from __future__ import annotations

import importlib.util
import os

import pytest

# Before Ray is imported: its nodes then listen on loopback only.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def _vllm_is_installed() -> bool:
    # This directory itself can be imported as `vllm`, a package without a file.
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _vllm_is_installed():
        return
    for item in items:
        if item.path.is_relative_to(os.path.dirname(__file__)):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed; run make test-vllm"))
