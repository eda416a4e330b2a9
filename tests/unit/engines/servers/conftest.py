"""Failed calls are made again at once."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugin.engines.servers.http_engine._BACKOFF_SECONDS", 0.01)
