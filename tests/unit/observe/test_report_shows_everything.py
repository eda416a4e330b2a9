"""The report leaves out no metric of the user's, no difference between runs, and repeats no finding."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from plugin.observe.html_report import report_html
from plugin.observe.run_files import RunFiles
from plugin.observe.run_record import read_run

pytestmark = pytest.mark.hostile


def data_of(*runs: Path) -> dict[str, Any]:
    found = re.search(
        r'id="data">(.*?)</script>', report_html([read_run(run) for run in runs]), re.DOTALL
    )
    assert found
    return json.loads(found.group(1))


def write_run(path: Path, metrics: dict[str, Any], findings: int = 0, **settings: Any) -> Path:
    with RunFiles(path, {"run_dir": str(path), **settings}, tensorboard=False) as files:
        for step in (1, 2, 3):
            files.log_step({"step": step, "grad_norm": 0.5, **metrics})
            entry = {"detector": "staleness", "title": "old", "severity": "warning"}
            files.log_findings(step, [entry] * (step <= findings))
    return path


def test_metrics_of_hooks_and_own_code_are_not_left_out(tmp_path: Path) -> None:
    own = {"my_metric": 2.5, "own/by_hand/share": 0.1, "veto/is_masked": 0.2, "tis": 1.0}
    counted = {"seconds_training": 1.0, "prompts_issued": 4, "mismatch/k1": 0.1, "num_tokens": 9}
    data = data_of(write_run(tmp_path / "a", {**own, **counted, "text": "no number"}))
    assert [chart["title"] for chart in data["other"]] == sorted(own)
    [chart] = [chart for chart in data["other"] if chart["title"] == "my_metric"]
    assert chart["series"][0]["y"] == [2.5, 2.5, 2.5]


def test_a_metric_that_only_one_run_has_is_drawn_for_it(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a", {"mine": 1.0}), write_run(tmp_path / "b", {})
    [chart] = data_of(first, second)["other"]
    assert [series["y"] for series in chart["series"]] == [[1.0] * 3, [None] * 3]


def test_settings_that_differ_are_listed_without_those_that_always_do(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", {}, lr=1e-3, tis_clip=2.0, seed=1)
    second = write_run(tmp_path / "b", {}, lr=1e-3, tis_clip=5.0)
    assert data_of(first, second)["different"] == [
        ["tis_clip", "2.0", "5.0"],
        ["seed", "1", "not recorded"],
    ]


def test_a_finding_is_not_repeated_for_every_step(tmp_path: Path) -> None:
    data = data_of(write_run(tmp_path / "a", {}, 3), write_run(tmp_path / "b", {}, 1))
    where = [finding["where"] for finding in data["findings"]]
    assert where == ["a, steps 1 to 3, 3 times", "b, step 1"]
