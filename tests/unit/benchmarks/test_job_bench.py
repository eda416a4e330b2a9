"""Jobs of the benchmark take turns, and their report copes with what was not measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import job_figure, real_jobs, report, step_profile
from benchmarks.job_bench import _driver_costs
from benchmarks.job_task import EndlessDigits
from benchmarks.job_worker import JobSpec, Turns


def test_the_first_step_of_the_job_and_of_each_round_does_not_count(tmp_path: Path) -> None:
    spec = JobSpec("synchronous", str(tmp_path), "", 1, 1, 1, 1, 1e-3, rounds=2, steps=3)
    for number in range(3):
        (tmp_path / f"go-{number}").touch()
    turns = Turns(spec)
    for _ in range(spec.all_steps):
        turns.end_of_step({}, 0.0, 1)
    counts = [json.loads(line)["counts"] for line in (tmp_path / "steps.jsonl").open()]
    # start | round 1: warm-up, 2 steps | round 2: warm-up, 2 steps
    assert counts == [False, False, True, True, False, True, True]
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0", "done-1", "done-2"]


def test_no_token_ends_a_response_of_the_task() -> None:
    task = EndlessDigits()
    assert task.stop_token_ids == ()
    prompt = task.prompt(0)
    digits = [int(character) for character in prompt.data["answer"]]
    # 3 digits are right, the end is not among 8 tokens
    assert task.reward(prompt, [*digits, 0, 0, 0, 0, 0]) == 3 / 8
    # of a larger vocabulary, ids modulo 15 characters
    assert task.reward(prompt, [digit + 15 for digit in digits]) == 3 / 4


@pytest.mark.parametrize("kind", ["synchronous", "TRL"])
def test_the_shares_of_a_step_add_up_to_the_step(kind: str) -> None:
    shares = report.phase_shares(
        {"kind": kind, "seconds": 2.0, "phases": {"waiting": 0.5, "preparing": 0.1}}
    )
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["training" if kind == "TRL" else "other"] == pytest.approx(0.7)


def test_jobs_without_trl_are_reported_without_a_speed() -> None:
    size = {"name": "small", "prompts": 1, "response": 2, "microbatch": 1}
    row = {
        "kind": "synchronous",
        "seconds": 1.0,
        "range": [0.9, 1.1],
        "phases": {"training": 0.4},
        "rewards": [0.0, 0.1],
    }
    data = {
        "samples_per_prompt": 8,
        "cores": 2,
        "sizes": [{"size": size, "rows": [row]}],
        "absent": ["TRL's jobs: trl not installed"],
    }
    part = {"data": data, "seconds": 1.0, "made": "today", "load_before": 0.0, "quick": True}
    text = report.render({"jobs": part})
    assert "| small | 1 | 2 | 1 | synchronous | - | 0.90 to 1.10 |" in text
    assert "- TRL's jobs: trl not installed" in text
    assert "- part job-growth" in text


def test_a_quick_run_makes_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"jobs": {"quick": True, "data": {"absent": []}}}))
    monkeypatch.setattr(job_figure, "RESULTS", results)
    before = job_figure.PAGE.read_text()
    assert job_figure.main() == 1
    assert job_figure.PAGE.read_text() == before


def test_the_way_of_a_batch_can_be_followed_to_every_number_of_ranks() -> None:
    for ranks in (1, 4):
        costs = _driver_costs(samples=64, length=4, ranks=ranks, repeats=1)
        assert costs.keys() == {"preparing", "cutting", "rank", "rank_bytes"}
        assert costs["rank_bytes"] > 0


def test_the_profile_of_a_job_adds_up_to_its_steps() -> None:
    first = {"seconds": 50.0, "seconds_training": 50.0}
    second = {
        "seconds": 10.0,
        "seconds_waiting": 5.0,
        "seconds_preparing": 0.5,
        "seconds_training": 4.0,
        "seconds_transport": 1.5,
        "seconds_weight_sync": 0.25,
    }
    table = step_profile.job_table("\n".join(map(json.dumps, (first, second, second))))
    found = dict(line.strip("| ").split(" | ") for line in table.splitlines()[2:])
    assert found["update"] == "2.500"  # what is recorded of it has the transport
    assert found["the batch to the ranks, and results back"] == "1.500"
    assert found["driver: the rest"] == "0.500"  # 10 - 5 - 0.5 - 2.5 - 1.5
    assert found["**whole step**"] == "10.000"
    assert found["weight sync before it (engines idle)"] == "0.250"


def test_real_jobs_are_compared_with_the_peer_of_their_precision() -> None:
    def row(kind: str, dtype: str, seconds: float) -> dict[str, object]:
        return {
            "kind": kind,
            "dtype": dtype,
            "engine": "transformers",
            "seconds": seconds,
            "range": [seconds, seconds],
            "phases": {"waiting": 1.0},
            "tokens": 64,
            "rewards": [0.0, 0.5],
        }

    rows = [row("synchronous", "float32", 4.0), row("TRL", "float32", 6.0)]
    rows += [row("synchronous", "bfloat16", 2.0), row("TRL", "bfloat16", 4.0)]
    lines = real_jobs.table({"rows": rows, "cores": 2, "made": "today"}).splitlines()[4:]
    assert [line.split(" | ")[4] for line in lines] == ["1.50x", "1.00x", "2.00x", "1.00x"]
