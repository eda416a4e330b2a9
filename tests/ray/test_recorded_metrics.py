"""What whole jobs write to metrics.jsonl is what the table of metrics lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ray.small_jobs import run_small
from tests.unit.observe.test_metric_table import known, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: A critic, float16 on both models, mini-batches, and an evaluation.
WITH_CRITIC = {
    "num_nodes": 1,
    "num_rollouts": 2,
    "advantage_estimator": "gae",
    "train_dtype": "float16",
    "rollout_batch_size": 32,
    "global_batch_size": 64,
    "eval_data": "held:6",
    "eval_interval": 2,
}
#: Experts whose routes are replayed, several rewards, truncated sampling, tokens of old weights.
WITH_EXPERTS = {
    "num_nodes": 1,
    "embedded_model": "qwen3_moe",
    "use_rollout_routing_replay": True,
    "use_tis": True,
    "async_rollouts": True,
    "max_token_staleness": 2,
    "rollout_top_k": 8,
    "rollout_batch_size": 16,
}


def test_every_metric_of_a_job_is_in_the_table_and_every_row_is_recorded(
    two_nodes: str, tmp_path: Path
) -> None:
    recorded: set[str] = set()
    for number, settings in enumerate((WITH_CRITIC, WITH_EXPERTS)):
        run_dir = tmp_path / f"run{number}"
        run_small(two_nodes, run_dir, **settings)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        recorded |= {name for line in lines for name in json.loads(line)}
    found = known(recorded)
    titles = ("Progress and time", "Rewards and responses", "The optimizer step", "Evaluation")
    wanted = set.union(*map(rows_of, (*titles, "Routing replay", "Critic")))
    # of --prompt-data, --reward-path, --overlong-buffer-length, --train-log-probs approximate
    elsewhere = {"epoch", "reward/<part>", "overlong_penalty", "seconds_log_probs_saved"}
    assert wanted - found <= elsewhere
