"""`megatron-tis compare --routing`: routes and weights of a dump, replayed by the trainer's model."""

from __future__ import annotations

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
