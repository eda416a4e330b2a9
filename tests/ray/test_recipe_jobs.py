"""The CPU size of every recipe runs to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plugin.config import JobConfig
from plugin.controller.job import run_job

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
SHORT = {"num_rollouts": 2, "eval_data": ("copy:4",), "eval_interval": 1, "start_timeout": 250.0}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "recipe",
    [
        recipe.stem if recipe.stem == "dapo" else pytest.param(recipe.stem, marks=pytest.mark.slow)
        for recipe in sorted(RECIPES.glob("*.yaml"))
    ],
)
def test_a_recipe_runs_to_its_end(two_nodes: str, tmp_path: Path, recipe: str) -> None:
    run_dir = tmp_path / "run"
    settings = {**SHORT, "address": two_nodes, "run_dir": str(run_dir)}
    config = JobConfig.from_sources(settings, RECIPES / f"{recipe}.yaml")
    result = run_job(config)
    assert not result.interrupted
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    steps = [line for line in lines if "reward" in line]
    assert len(steps) == config.total_updates >= 2
    assert sum("eval/copy/mean" in line for line in lines) == 3  # before, between and after
