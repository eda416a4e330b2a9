"""The arithmetic task with engines behind: that they are, that the suite goes on, and that docs and data agree."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from benchmarks.evidence import math_jobs, math_summary, summary
from benchmarks.evidence.grid import read_rows, record
from benchmarks.evidence.math_jobs import ARMS, SEEDS, STALENESS, MathRun
from benchmarks.marked_pages import marked
from examples.math_words import make_data, warm_up


def test_the_table_in_the_docs_is_that_of_the_data() -> None:
    rows = read_rows(math_jobs.DATA)
    shown = marked(summary.APPENDIX, "math")
    assert shown == math_summary.table(rows), "python -m benchmarks.evidence.math_jobs --summary"
    measured = "Not measured yet" not in shown
    assert math_summary.FIGURE.exists() == measured
    assert ("evidence_math.svg" in summary.PAGE.read_text()) == measured
    assert all(math.isfinite(value) for row in rows for value in row["accuracy"])
    # The engine was as far behind as the row says.
    assert all(row["final_staleness"] == row["staleness"] for row in rows)


def test_a_seed_is_shown_once_all_its_runs_are_made(tmp_path: Path) -> None:
    file, runs = tmp_path / "data.jsonl", list(math_jobs.runs())
    assert len(set(runs)) == len(runs) == len(SEEDS) * (1 + len(STALENESS) * len(ARMS))
    oldest = STALENESS[0]
    first = [one for one in runs if one.seed == SEEDS[0] and one.staleness in (0, oldest)]
    for one in first:
        last = 1.0 if one.arm == ARMS[0] else 0.75
        row = {"arm": one.arm.name, "staleness": one.staleness, "seed": one.seed}
        curves = {name: [1.0] for name in math_jobs.CURVES}
        record({**row, "accuracy": [0.5, last], **curves}, file)
        assert (oldest in math_summary.measured(read_rows(file))[1]) == (one is first[-1])
    assert math_jobs.open_runs(file) == [one for one in runs if one not in first]
    found, seeds = math_summary.measured(read_rows(file))
    assert seeds == {0: [SEEDS[0]], oldest: [SEEDS[0]]}
    assert math_summary.final_accuracy(found, seeds[oldest], "ppo", oldest) == (1.0, math.inf)
    assert "| `ppo` | 1.000 | 1.00 | 1.000 |" in math_summary.table(read_rows(file))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("math_jobs")
    make_data.main(["--output", str(directory), "--train-rows", "40", "--eval-rows", "4"])
    sizes = ("--hidden", "32", "--layers", "1", "--steps", "1", "--batch-size", "2")
    warm_up.main(["--data", str(directory), "--output", str(directory / "model"), *sizes])
    return directory


def test_the_engine_is_behind_by_exactly_so_many_rollouts(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ages = []
    describe = math_jobs.describe_batch

    def watch(config, batch, rollouts, version):  # type: ignore[no-untyped-def]
        described = describe(config, batch, rollouts, version)
        ages.append(described["staleness"])
        return described

    monkeypatch.setattr(math_jobs, "describe_batch", watch)
    small = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollouts": 4}
    row = math_jobs.run(MathRun(ARMS[1], 2, 1), inputs, **small, eval_interval=2)
    assert ages == [0, 1, 2, 2]
    # The reward of a hardly trained model is the same everywhere: the trainer saw the engine's log-probs nevertheless.
    assert row["mismatch_kl"][0] < 1e-9 and len(row["accuracy"]) == 3


def test_arms_set_what_they_are_called(inputs: Path) -> None:
    configs = [math_jobs.config_of(MathRun(arm, 8, 1), inputs) for arm in ARMS]
    assert [c.policy_loss for c in configs] == [arm.loss for arm in ARMS]
    assert all(a != b for a, b in itertools.combinations(configs, 2))
    assert all(c.total_updates == c.num_rollouts for c in configs)
