"""The experiment suite: what it measures, that it goes on where it was, and that docs and data agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.evidence import grid, simulation, summary
from benchmarks.evidence.simulation import Cell, run_cell


def test_the_table_in_the_docs_is_that_of_the_data() -> None:
    page = summary.PAGE.read_text()
    shown = page.split(summary.BEGIN)[1].split(summary.END)[0].strip()
    assert shown == summary.table(grid.results()), "python -m benchmarks.evidence --summary"
    assert not grid.results() or (summary.FIGURE.exists() and summary.HEAT_MAP.exists())


def test_no_method_of_a_measured_setting_is_left_out() -> None:
    rows = grid.results()
    whole = [cell for cell in grid.cells() if cell.seed == 0 and cell.updates == 1 and cell.engine == "float32"]  # fmt: skip
    measured = {(r["loss"], r["hook"], r["staleness"]) for r in rows if r["seed"] == 0}
    staleness = {r["staleness"] for r in rows}
    assert {(c.loss, c.hook, c.staleness) for c in whole if c.staleness in staleness} <= measured


def test_intervals_by_hand() -> None:
    # 0.2, 0.4, 0.6: mean 0.4, deviation 0.2; 4.30 * 0.2 / sqrt(3) = 0.4965
    assert summary.interval([0.2, 0.4, 0.6]) == (
        pytest.approx(0.4),
        pytest.approx(0.4965, abs=1e-4),
    )
    assert summary.interval([0.5]) == (0.5, None)


def test_a_suite_that_was_ended_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "STEPS", 2)
    monkeypatch.setattr(simulation, "WARM_STEPS", 2)
    file = tmp_path / "data.jsonl"
    cells = grid.open_cells(file)
    assert cells == list(grid.cells()) and len(cells) == len(set(cells))
    for cell in cells[:2]:
        grid.record(run_cell(cell), file)
    assert grid.open_cells(file) == cells[2:]


@pytest.mark.parametrize("engine", ["float32", "bfloat16", "int8"])
def test_a_run_is_the_same_every_time_and_its_engine_differs_as_said(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(simulation, "STEPS", 3)
    monkeypatch.setattr(simulation, "WARM_STEPS", 5)
    cell = Cell("ppo", "vanilla_tis", 0, engine, 2, 0)
    first, second = run_cell(cell), run_cell(cell)
    first.pop("processor_seconds"), second.pop("processor_seconds")
    assert first == second
    stale = run_cell(Cell("ppo", "vanilla_tis", 2, engine, 1, 0))
    fresh = run_cell(Cell("ppo", "vanilla_tis", 0, engine, 1, 0))
    assert stale["ess_share"] < fresh["ess_share"]
    exact = run_cell(Cell("ppo", "vanilla_tis", 0, "float32", 1, 0))
    assert (fresh["ess_share"] == exact["ess_share"]) == (engine == "float32")
