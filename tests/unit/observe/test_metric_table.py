"""The table of metrics knows every metric that is computed, and none that is not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from plugin.config import JobConfig, TrainerConfig
from plugin.controller.batch import describe_batch
from plugin.controller.queue.groups import joined
from plugin.loss import POLICY_LOSSES, compute_loss, loss_inputs
from plugin.loss.hook_chain import statistics_of
from plugin.megatron_backend.step.step_metrics import record_step, step_metrics
from plugin.observe.evaluation_metrics import evaluation_metrics
from plugin.observe.metric_table import (
    CHARTS,
    CONSOLE,
    METRICS,
    REQUIRED_METRICS,
    SECTIONS,
    SLICE_CHARTS,
    TILES,
    drawn_in,
    row_of,
)
from plugin.ppo_utils.sufficient_statistics import StatisticsTable
from plugin.tools.compare.correction_catalog import correction_functions
from tests.unit.controller.queue.test_dynamic_sampling import make_queue
from tests.unit.observe.dump_samples import batch_columns


def rows_of(title: str) -> set[str]:
    [section] = [section for section in SECTIONS if section.title == title]
    return {row.name for row in section.metrics}


def known(names: Iterable[str]) -> set[str]:
    """The rows of `names`; a name without one fails."""
    rows = {name: row_of(name) for name in names}
    assert None not in rows.values(), [name for name, row in rows.items() if row is None]
    return {row.name for row in rows.values() if row is not None}


def metrics_of_step(**settings: Any) -> dict[str, float]:
    """What a training step on a few samples records."""
    columns: dict[str, Any] = batch_columns()
    size = sum(columns["response_lengths"])
    versions = [torch.full((n,), 3) for n in columns["response_lengths"]]
    columns |= {"weight_versions": versions, "trainer_version": 5, "current_version": 5.5}
    columns |= dict.fromkeys(("ref_log_probs", "teacher_log_probs"), columns["log_probs"])
    config = TrainerConfig(**settings)
    cur = torch.cat(columns.pop("cur_log_probs")).requires_grad_()
    inputs = loss_inputs(config, columns, cur, torch.ones(size), distill_kl=torch.ones(size))
    inputs = replace(inputs, statistics=statistics_of(config, inputs))
    outputs = compute_loss(config, inputs, with_weights=True)
    table = StatisticsTable()
    record_step(table, config, inputs, outputs, torch.ones(size), columns)
    return step_metrics(table)


def test_no_name_stands_in_the_table_twice() -> None:
    names = [row.name for row in METRICS]
    assert len(names) == len({*names})


def test_everything_that_is_drawn_has_a_row() -> None:
    known(REQUIRED_METRICS)
    known(TILES.values())
    known(name for chart in CHARTS for name in chart.metrics)
    known(name for _, names, _ in CONSOLE for name in names)
    known(f"mismatch/{dimension}/0/k3" for dimension, *_ in SLICE_CHARTS)


def test_a_metric_says_where_it_is_drawn() -> None:
    row = row_of("is_masked")
    assert row is not None and drawn_in(row) == ["chart Masked fraction", "progress line (clipped)"]
    row = row_of("eval/math/pass@8")
    assert row is not None and drawn_in(row) == ["chart Evaluation on <set>"]
    row = row_of("mismatch/by_position/64-127/k3")
    assert row is not None and drawn_in(row) == ["chart By position in the response (k3)"]


def test_names_of_users_are_nobodys_row() -> None:
    assert row_of("my_metric") is None and row_of("mine/share") is None
    assert row_of("mismatch/k4") is None


def test_losses_corrections_and_mismatch_record_what_the_table_lists() -> None:
    hooks = [f"plugin.ppo_utils.{name}" for name in correction_functions()]
    corrected = {
        "use_tis": True,
        "policy_loss": "reinforce",
        "rejection_rules": "token_ratio=0.5:2",
    }
    steps: list[dict[str, Any]] = [
        *({"policy_loss": name} for name in POLICY_LOSSES),
        *({**corrected, "custom_tis_function_path": hook} for hook in hooks),
        # a chain whose stages record metrics of one name
        {
            **corrected,
            "custom_tis_function_path": ",".join(hooks[:1] * 2),
            "tis_clip": "auto:ess=0.9",
        },
        {"use_kl_loss": True, "use_rollout_kl_loss": True, "train_log_probs": "approximate"},
    ]
    found = known(name for settings in steps for name in metrics_of_step(**settings))
    titles = ("The loss and its terms", "Policy losses", "Corrections")
    wanted = set.union(*map(rows_of, (*titles, "Mismatch of rollout and trainer")))
    assert found == wanted | {"num_tokens"}


def test_the_driver_describes_a_batch_by_what_the_table_lists() -> None:
    queue, _ = make_queue({1})
    rollouts = joined(queue.take(0))
    config = JobConfig(max_response_length=4, overlong_buffer_length=2, overlong_penalty_factor=1.0)
    described = known(describe_batch(config, rollouts.batch, rollouts, version=1))
    elsewhere = {"reward/<part>", "stale_token_share", "kept_ids_per_token"}
    assert described == rows_of("Rewards and responses") - elsewhere
    assert known(queue.metrics()) == rows_of("Prompts and groups")


def test_an_evaluation_records_scores_that_the_table_lists() -> None:
    scores = evaluation_metrics([[0.0, 1.0], [1.0, 1.0]], pass_at=[1, 2], pass_reward=1.0)
    found = known(f"eval/math/{name}" for name in scores)
    bounds = {f"eval/<set>/<score>/ci_{end}" for end in ("low", "high")}
    assert found == {"eval/<set>/mean", "eval/<set>/pass@<k>", *bounds}


def test_steps_and_evaluations_of_real_jobs_record_what_the_table_lists() -> None:
    """One line of metrics.jsonl of each of six small jobs; of the slices only the first."""
    lines = Path(__file__).with_name("recorded_metrics.jsonl").read_text().splitlines()
    found = known(name for line in lines for name in json.loads(line))
    titles = ("Progress and time", "Rewards and responses", "Prompts and groups")
    wanted = set.union(*map(rows_of, (*titles, "The optimizer step", "Evaluation", "Critic")))
    # of --entropy-target, float16, --train-log-probs approximate, --overlong-buffer-length, --max-token-staleness, top-p, deltas
    elsewhere = {"loss_scale", "critic/loss_scale", "seconds_log_probs_saved", "overlong_penalty"}
    elsewhere |= {"stale_token_share", "kept_ids_per_token", "entropy_coef", "weight_changed_share"}
    assert wanted - found == elsewhere
