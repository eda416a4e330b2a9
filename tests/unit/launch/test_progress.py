"""The progress line."""

from __future__ import annotations

import io

from plugin.launch.progress import ProgressPrinter, progress_line

METRICS = {
    "step": 3,
    "reward": 0.5,
    "loss": -0.01,
    "mismatch_kl": 1.5e-3,
    "pg_clipfrac": 0.25,
    "tokens_per_second": 1234.4,
    "staleness": 2.0,
}


def test_the_line_shows_what_the_job_promises() -> None:
    assert progress_line(METRICS, 9) == (
        "step    3/9  reward 0.500  loss -0.0100  mismatch kl 1.5e-03  clipped 25.0%  tokens/s 1234  "
        "staleness 2.0"
    )


def test_masked_tokens_count_as_clipped_where_a_loss_masks() -> None:
    assert "clipped 10.0%" in progress_line({**METRICS, "is_masked": 0.1}, 9)


def test_what_is_missing_shows_as_a_dash() -> None:
    assert "mismatch kl -" in progress_line({**METRICS, "mismatch_kl": None}, 9)


def test_outside_a_terminal_lines_are_rare_but_the_last_step_is_shown() -> None:
    stream = io.StringIO()
    printer = ProgressPrinter(5, stream)
    for step in range(1, 6):
        printer.step({**METRICS, "step": step})
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step    1/5") and lines[-1].startswith("step    5/5")
    assert len(lines) == 2
