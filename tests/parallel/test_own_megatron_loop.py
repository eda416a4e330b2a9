"""The step that the documentation shows for somebody's own loop runs, and is the trainer's."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from examples import own_megatron_loop
from examples.own_megatron_loop import policy_gradient_step
from plugin.megatron_backend.parallel_groups import ParallelGroups, destroy_parallel
from tests.parallel.training_jobs import Layout, RunRanks, Start, new_trainer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_megatron_loop.py"
SETTINGS: dict[str, Any] = {"use_tis": True, "entropy_coef": 0.05, "max_tokens_per_gpu": 20}


def test_the_documentation_shows_the_function_that_the_example_runs() -> None:
    source, page = EXAMPLE.read_text(), (ROOT / "docs" / "megatron_integration.md").read_text()
    snippet = source.split("# [snippet]\n")[1].split("# [/snippet]")[0].strip()
    assert f"```python\n{snippet}\n```" in page


def run_example(groups: ParallelGroups) -> str:
    """What the example prints; it joins a process group of its own."""
    destroy_parallel()
    with redirect_stdout(StringIO()) as printed:
        own_megatron_loop.main()
    return printed.getvalue()


def test_the_example_runs_on_a_stock_model_and_lowers_its_loss(run_ranks: RunRanks) -> None:
    (printed,) = run_ranks(run_example, 1)
    losses = [float(line.split("'loss': ")[1].split(",")[0]) for line in printed.splitlines()]
    assert len(losses) == 8 and losses[-1] < losses[1] - 0.3


def both_steps(
    groups: ParallelGroups, start: Start, settings: dict[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of the documented step on the chunks of one trainer, and of another trainer's own step."""
    borrowed, trainer = (new_trainer(groups, start, settings) for _ in range(2))
    assert borrowed.optimizer is not None
    mine = policy_gradient_step(
        borrowed.chunks, borrowed.optimizer.optimizer, borrowed.config, start.batch, groups
    )
    return mine, trainer.train_step(start.batch).metrics


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(2), id="DP2"),
        pytest.param(
            Layout(2, {"tensor_model_parallel_size": 2}), id="TP2", marks=pytest.mark.slow
        ),
        pytest.param(Layout(2, {"pipeline_model_parallel_size": 2}), id="PP2"),
    ],
)
def test_the_documented_step_is_the_trainers(run_ranks: RunRanks, layout: Layout) -> None:
    for per_token in (False, True):
        settings = {**SETTINGS, "calculate_per_token_loss": per_token}
        results = run_ranks(both_steps, layout.ranks, Start.of("qwen3"), settings, **layout.sizes)
        # Metrics are on the last stage, the gradient norm is everywhere.
        mine, expected = results[-1]
        for name in ("loss", "pg_loss", "entropy_loss", "tis", "mismatch_kl", "num_tokens"):
            assert mine[name] == pytest.approx(expected[name], rel=1e-12), name
        for mine, expected in results:
            assert mine["grad_norm"] == expected["grad_norm"]
