"""The report: complete, offline, safe, and drawn by a real browser."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plugin.cli import main
from plugin.observe.html_report import MAX_STRETCHES, report_html, thinned
from plugin.observe.metric_table import CHARTS, TILES
from plugin.observe.run_files import RunFiles
from plugin.observe.run_record import read_run

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


SLICES = (
    *("by_position/0", "by_position/64-127", "by_staleness/1", "by_staleness/2"),
    *("by_rollout_prob/0.1-0.5", "by_rollout_prob/0.5-0.9"),
)


def drawn_metrics() -> set[str]:
    """The names of all metrics that the report shows, besides the slices."""
    return {name for chart in CHARTS for name in chart.metrics} | set(TILES.values())


def write_run(directory: Path, *, steps: int = 20, level: float = 1.0, **config: Any) -> Path:
    """A run whose metrics fill every panel."""
    keys = drawn_metrics()
    with RunFiles(directory, {"policy_loss": "ppo", **config}, tensorboard=False) as files:
        for step in range(steps):
            values = {key: level * (1.5 + math.sin(step + len(key))) for key in keys}
            slices = {
                f"mismatch/{name}/{field}": 0.5 for name in SLICES for field in ("k3", "tokens")
            }
            files.log_step({**values, **slices, "step": step})
    return directory


def run_report(*words: str) -> int:
    return main(["report", *words])


def page_data(path: Path) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found
    return json.loads(found.group(1))


def test_the_report_of_one_run_is_rebuilt_in_its_directory(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert run_report(str(tmp_path / "run")) == 0
    assert run_report(str(tmp_path / "run")) == 0
    data = page_data(tmp_path / "run/report.html")
    drawn = {chart["id"] for chart in data["charts"]}
    for panel in ("reward", "mismatch_kl", "ratio_percentiles", "ess", "clipped", "masked"):
        assert panel in drawn
    assert {"rollout_kl", "grad_norm", "staleness", "throughput"} <= drawn
    assert {chart["id"] for chart in data["slices"]} == {
        "by_position",
        "by_staleness",
        "by_rollout_prob",
    }


def test_several_runs_are_overlaid_and_their_differences_listed(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", tis_clip=2.0)
    second = write_run(tmp_path / "b", tis_clip=5.0)
    output = tmp_path / "both.html"
    assert run_report(str(first), str(second), "--output", str(output)) == 0
    data = page_data(output)
    reward = next(chart for chart in data["charts"] if chart["id"] == "reward")
    assert {series["run"] for series in reward["series"]} == {0, 1}
    assert data["different"] == [["tis_clip", "2.0", "5.0"]]


def test_an_existing_file_is_replaced_only_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = write_run(tmp_path / "a"), tmp_path / "out.html"
    output.write_text("mine")
    assert run_report(str(run), "--output", str(output)) == 2
    assert "--force" in capsys.readouterr().err
    assert output.read_text() == "mine"
    assert run_report(str(run), "--output", str(output), "--force") == 0


def test_the_page_asks_the_network_for_nothing(tmp_path: Path) -> None:
    text = report_html([read_run(write_run(tmp_path / "run"))])
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text


def test_a_hostile_setting_cannot_leave_its_place(tmp_path: Path) -> None:
    attack = "</script><script>alert(1)</script>"
    text = report_html([read_run(write_run(tmp_path / "run", name=attack))])
    assert attack not in text


def test_thinning_keeps_the_spikes() -> None:
    steps = list(range(100_000))
    values: list[float | None] = [1.0] * 100_000
    values[54_321], values[777] = 99.0, -5.0
    x, y = thinned(steps, values)
    assert len(x) <= 2 * MAX_STRETCHES
    assert 54_321 in x and 99.0 in y and -5.0 in y


def test_a_run_without_rollout_log_probs_says_what_is_missing(tmp_path: Path) -> None:
    with RunFiles(tmp_path, {}, tensorboard=False) as files:
        files.log_step({"step": 0, "reward": 1.0})
    charts = {c["id"]: c for c in json.loads(_data(report_html([read_run(tmp_path)])))["charts"]}
    assert "log-probs" in charts["ess"]["missing"]
    assert all(value is None for series in charts["ess"]["series"] for value in series["y"])
    assert "entropy" not in charts


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_draws_every_plot_without_a_console_error(tmp_path: Path, theme: str) -> None:
    first = write_run(tmp_path / "a")
    second = write_run(tmp_path / "b", level=2.0)
    page = tmp_path / "page.html"
    text = report_html([read_run(first), read_run(second)])
    page.write_text(text.replace('<html lang="en">', f'<html lang="en" data-theme="{theme}">'))
    data = page_data(page)
    wanted = {chart["id"] for chart in data["charts"] + data["slices"]}
    dom, log = browse(page, "--dump-dom")
    assert "CONSOLE" not in log, log
    assert set(re.findall(r'data-plot="([^"]+)"', dom)) == wanted
    # Every plot holds a line with at least two points for each run.
    for plot in re.findall(r"<svg[^>]*data-plot.*?</svg>", dom, re.DOTALL):
        lines = re.findall(r'class="line" d="([^"]*)"', plot)
        assert sum("L" in line for line in lines) >= 2
        assert "NaN" not in plot
    picture = tmp_path / "page.png"
    browse(page, f"--screenshot={picture}")
    assert picture.stat().st_size > 20_000


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")
def test_the_browser_test_would_see_a_script_error(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = report_html([read_run(write_run(tmp_path / "a"))])
    page.write_text(text.replace("tiles();\n", "tiles(); undefinedFunction();\n"))
    dom, log = browse(page, "--dump-dom")
    assert "CONSOLE" in log
    assert "data-plot" not in dom.split("<script")[0]


def browse(page: Path, action: str) -> tuple[str, str]:
    """The browser's output and what it logged for one page."""
    assert BROWSER is not None
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    flags += ["--disable-component-update", "--disable-sync", "--enable-logging=stderr"]
    flags += [
        "--hide-scrollbars",
        "--window-size=1300,2400",
        f"--user-data-dir={page.parent}/profile",
    ]
    done = subprocess.run(
        [BROWSER, *flags, action, page.as_uri()], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def _data(text: str) -> str:
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return found.group(1)


def test_every_evaluated_set_has_a_chart_with_its_interval(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4)
    with RunFiles(run, {"policy_loss": "ppo"}, tensorboard=False) as files:
        for step in (4, 8):
            scores = {"mean": 0.5, "mean/ci_low": 0.4, "mean/ci_high": 0.6}
            scores |= {f"pass@{k}": 0.1 * k for k in (1, 2, 8)}
            files.log_evaluation(
                {"step": step, **{f"eval/math/{name}": value for name, value in scores.items()}}
            )
    data = page_data(_written(run))
    [chart] = [chart for chart in data["charts"] if chart["id"] == "eval/math/"]
    assert [line["label"] for line in chart["series"]] == ["mean", "pass@1", "pass@8"]
    assert chart["series"][0]["x"] == [4, 8] and chart["bands"][0]["low"] == [0.4, 0.4]
    assert not any("eval/" in chart["id"] for chart in data["other"])


def _written(run: Path) -> Path:
    assert run_report(str(run)) == 0
    return run / "report.html"
