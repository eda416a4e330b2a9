"""Layouts ranked by time, and the page of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plugin.cli import main
from plugin.plan.plan_page import timeline
from plugin.plan.search import Candidate
from tests.unit.plan.model_facts import MODELS


@pytest.fixture
def model(tmp_path: Path) -> str:
    small = {"num_hidden_layers": 4, "hidden_size": 256, "vocab_size": 1000}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["Qwen3-8B"] | small))
    return str(file)


def test_search_ranks_layouts_that_fit_by_time_and_remembers_them(
    capsys: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = [
        *("plan", "--search", "--json", "--hf-config", model, "--num-gpus-per-node", "4"),
        *("--max-tokens-per-gpu", "1024", "--search-limit", "3"),
    ]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 3 and all(entry["fits"] for entry in found)
    times = [entry["step_seconds"] for entry in found]
    assert times == sorted(times)
    kept = sorted((tmp_path / "cache" / "megatron-tis" / "plan").iterdir())
    assert len(kept) == 3

    def planned_again(*_: Any, **__: Any) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr("plugin.plan.search.plan_job", planned_again)
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_a_candidate_says_what_its_time_is_made_of() -> None:
    # 6 s and 2 s, and of the 10 s of the step a fifth waits
    candidate = Candidate("TP2", {}, True, 1, 10.0, compute=6.0, messages=2.0, bubble=0.2)
    assert candidate.why == "compute 60%, messages 20%, bubble 20%"
    assert Candidate("TP3", {}, problem="3 does not divide 8").why == "3 does not divide 8"


def test_a_timeline_keeps_the_order_of_1f1b() -> None:
    # two stages, 3 s of a microbatch on each: 1 s forward, 2 s backward
    first, last = timeline([3.0, 3.0], 2)
    assert [(p["kind"], p["number"], p["start"]) for p in first] == [
        ("F", 0, 0.0),
        ("F", 1, 1.0),
        ("B", 0, 4.0),
        ("B", 1, 7.0),
    ]
    assert [(p["kind"], p["number"], p["start"]) for p in last] == [
        ("F", 0, 1.0),
        ("B", 0, 2.0),
        ("F", 1, 4.0),
        ("B", 1, 5.0),
    ]


def test_the_page_is_one_file_that_fetches_nothing(capsys: Any, model: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = ["plan", "--hf-config", model, "--html", str(page)]
    assert main(words) == 0
    text = page.read_text(encoding="utf-8")
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert '"peak_bytes"' in text and "stage 0: embedding, layers 1-4, loss" in text
    capsys.readouterr()
    assert main(words) == 2
    assert "exists; add --force" in capsys.readouterr().err


def test_search_without_a_gpu_is_refused(capsys: Any, model: str) -> None:
    assert main(["plan", "--search", "--gpu", "none", "--hf-config", model]) == 2
    assert "--search compares times on a GPU" in capsys.readouterr().err
