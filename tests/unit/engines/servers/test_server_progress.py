"""Servers that tell their progress are waited for as long as they make some, and no longer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from plugin.engines.protocol import Generation, GenerationFailure
from plugin.engines.servers import http_engine, progress
from plugin.engines.servers.http_engine import HttpEngine
from plugin.engines.servers.pool import Server
from plugin.engines.servers.process import ServerEnded
from plugin.engines.servers.served_engine import ServedEngine
from tests.unit.engines.servers.misbehaving_server import Handler, MisbehavingServer, well
from tests.unit.engines.servers.test_http_engine import engine_for, only, start

__all__ = ["start"]

KINDS = {
    "vllm": 'vllm:generation_tokens_total{{engine="0",model_name="m"}} {}.0',
    "sglang": 'sglang:gen_throughput{{model_name="m"}} {}.0',
}


class Telling(Handler):
    """Has metrics, which count up while `server.generates`, and none from a number of tokens on."""

    server: Any

    def do_GET(self) -> None:
        if self.path != "/metrics":
            super().do_GET()
            return
        server = self.server
        if server.tokens >= server.freezes_at:
            server.ending.wait(30)
            return
        server.tokens += server.generates
        lines = ["# HELP process_cpu_seconds_total CPU", f"process_cpu_seconds_total {time.time()}"]
        lines.append(KINDS[server.kind].format(server.tokens))
        self.answer("\n".join(lines).encode())


def after(seconds: float) -> Any:
    """A good answer that takes a while."""

    def behavior(handler: Handler) -> None:
        handler.server.ending.wait(seconds)
        well(handler)

    return behavior


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts servers with metrics; the client looks at them often."""
    monkeypatch.setattr(http_engine, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(progress, "WATCH_SECONDS", 0.05)
    servers = []

    def starter(*script: Any, kind: str = "vllm", generates: bool = True) -> Any:
        server: Any = MisbehavingServer(*script, handler=Telling)
        server.kind, server.tokens, server.generates = kind, 0, generates
        server.freezes_at = float("inf")
        servers.append(server)
        return server

    yield starter
    for server in servers:
        server.close()


def impatient(tmp_path: Path, server: Any, **options: Any) -> HttpEngine:
    """Without metrics a response may take 0.4 s, with them a server may be silent for 0.3 s."""
    engine = engine_for(
        tmp_path, server, rollout_request_timeout=None, rollout_server=server.kind, **options
    )
    engine._responses._limits = {"timeout": 0.4, "silence": 0.3, "is_final": False}
    return engine


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_generates_is_waited_for_beyond_the_time_of_a_response(
    telling: Any, tmp_path: Path, kind: str
) -> None:
    answer = only(impatient(tmp_path, telling(after(1.0), kind=kind)))
    assert isinstance(answer, Generation)


def test_a_server_that_stops_generating_is_found(telling: Any, tmp_path: Path) -> None:
    server = telling(after(5.0), generates=False)
    began = time.monotonic()
    answer = only(impatient(tmp_path, server))
    assert isinstance(answer, GenerationFailure) and time.monotonic() - began < 3
    assert "generated nothing for 0.3 s (--rollout-timeout)" in answer.reason


def test_a_server_whose_metrics_fall_silent_is_found(telling: Any, tmp_path: Path) -> None:
    server = telling(after(20.0))
    server.freezes_at = 5
    engine = impatient(tmp_path, server)
    engine._responses._limits["timeout"] = 5.0  # the first look is sooner on any machine
    answer = only(engine)
    assert isinstance(answer, GenerationFailure)
    assert "generated nothing for 0.3 s" in answer.reason


def test_no_answer_is_waited_for_without_end(telling: Any, tmp_path: Path) -> None:
    answer = only(impatient(tmp_path, telling(after(20.0))))
    assert isinstance(answer, GenerationFailure)
    assert "no complete answer within 1.6 s" in answer.reason  # 4 times as long


def test_a_deadline_that_was_given_holds_also_where_the_server_generates(
    telling: Any, tmp_path: Path
) -> None:
    engine = engine_for(tmp_path, telling(after(5.0)), rollout_request_timeout=0.5)
    answer = only(engine)
    assert isinstance(answer, GenerationFailure)
    assert "no complete answer within 0.5 s" in answer.reason


def test_the_client_is_known_to_be_alive_while_it_waits(telling: Any, tmp_path: Path) -> None:
    engine = impatient(tmp_path, telling(after(0.6)))
    before = engine.progress
    only(engine)
    assert engine.progress > before + 3
    now = engine.progress
    assert engine.progress == now
    with engine.pool.servers[0].updating:
        assert engine.progress > now, "weights on their way have a deadline of their own"


def test_a_server_of_the_job_that_is_silent_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = ServedEngine.__new__(ServedEngine)
    alive: Any = type("Process", (), {"require_alive": lambda self: None})()
    engine.server, engine.pool = alive, type("Pool", (), {"servers": [Server("http://x")]})()
    monkeypatch.setattr(HttpEngine, "step", lambda self: [])
    assert engine.step() == []
    engine.pool.servers[0].is_silent = True
    with pytest.raises(ServerEnded, match="but has generated nothing for too long"):
        engine.step()
