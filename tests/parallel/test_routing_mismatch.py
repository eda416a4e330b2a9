"""`megatron-tis compare --routing`: routes and weights of a dump, replayed by the trainer's model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from plugin.observe.log_prob_dump import LogProbDump
from tests.parallel import routing_jobs, tiny_models


def test_replaying_ids_lowers_the_mismatch_and_weights_lower_it_further(
    run_ranks, tmp_path
) -> None:
    # More experts than usual: scores are closer, and bfloat16 flips more choices.
    config = tiny_models.tiny_qwen3_moe(num_experts=16, num_experts_per_tok=4)
    state = tiny_models.hf_state_dict(config, seed=3)
    rows = run_ranks(routing_jobs.replay_a_dump, 1, config, state, str(tmp_path))[0]
    live, ids, weights = rows
    assert [row["routing"] for row in rows] == [
        "live",
        "ids replayed",
        "ids and weights replayed",
    ]
    assert live["k3"] > 1.2 * ids["k3"] > 1.2 * weights["k3"] > 0
    assert live["abs_log_ratio"] > ids["abs_log_ratio"] > weights["abs_log_ratio"]


def test_kept_ids_of_truncated_sampling_count_in_every_row(run_ranks, tmp_path) -> None:
    config = tiny_models.tiny_qwen3_moe()
    state = tiny_models.hf_state_dict(config, seed=3)
    rows = run_ranks(routing_jobs.replay_a_dump, 1, config, state, str(tmp_path), 5)[0]
    # 5 of 96 tokens: over the whole vocabulary the mean |log ratio| would be above 1.
    assert all(row["abs_log_ratio"] < 0.1 for row in rows)


@pytest.mark.slow
def test_the_command_prints_a_row_for_every_way_to_route(tmp_path) -> None:
    config = tiny_models.tiny_qwen3_moe()
    tiny_models.hf_model(config, seed=3).save_pretrained(tmp_path / "model")
    batch = routing_jobs.sampled(
        config, tiny_models.hf_state_dict(config, seed=3), dtype="bfloat16"
    )
    columns = {**batch.columns, "log_probs": batch.columns["rollout_log_probs"]}
    LogProbDump(tmp_path / "dump", with_routes=True).write(0, columns)
    words = ("compare", str(tmp_path / "dump"), "--routing", "--json", "-")
    done = subprocess.run(
        [sys.executable, "-m", "plugin", *words, "--hf-checkpoint", str(tmp_path / "model")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert result["samples"] == 128 and len(result["rows"]) == 3, done.stderr
