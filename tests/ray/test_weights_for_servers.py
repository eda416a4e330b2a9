"""Nothing stays in the directory through which servers get their weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin.config import JobConfig
from plugin.controller.job import run_job
from plugin.tasks.copy_digits import ALPHABET, CharacterTokenizer
from tests.ray.casualties import AfterSteps, kill_one
from tests.ray.small_jobs import SIZES
from tests.unit.engines.servers.misbehaving_server import MisbehavingServer, saying

pytestmark = [pytest.mark.hostile, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_job_that_lost_an_engine_leaves_no_weights_behind(two_nodes: str, tmp_path: Path) -> None:
    end = CharacterTokenizer(ALPHABET).eos_token_id
    server, shared, most = MisbehavingServer(), tmp_path / "shared", 0
    server.always = saying([1, 2, end], [-0.5, -1.5, -0.25], "stop")
    settings = {
        "rollout_engine": "http",
        "rollout_url": server.url,
        "rollout_weights_dir": str(shared),
        # The server says the same to every prompt.
        "verify_weights": "off",
        "on_finding": "warn",
        "num_nodes": 1,
        "num_rollouts": 6,
        "address": two_nodes,
        "run_dir": str(tmp_path / "run"),
    }

    def lose_the_engine() -> None:
        nonlocal most
        most = len(list(shared.glob("megatron_tis_*")))
        kill_one("EngineActor")

    try:
        with AfterSteps(tmp_path / "run", 2, lose_the_engine):
            history = run_job(JobConfig.from_sources({**SIZES, **settings})).history
    finally:
        server.close()
    assert most == 1 and history[-1]["engine_restarts"] == 1
    assert len({Path(update).parent for update in server.updates}) == 2
    assert not list(shared.iterdir())
