"""What a person sees of a job: the progress line, and warnings."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys

from plugin.observe.console import Console, progress_line

METRICS = {
    "step": 3,
    "reward": 0.5,
    "response_length": 41.2,
    "truncated_share": 0.12,
    "grad_norm": 0.1234,
    "loss": -0.01,
    "mismatch_kl": 1.5e-3,
    "pg_clipfrac": 0.25,
    "tokens_per_second": 1234.4,
    "staleness": 2.0,
}


def test_the_line_shows_what_the_job_promises() -> None:
    assert progress_line(METRICS, 9, seconds_left=3671) == (
        "step    3/9  1:01:11 left  reward 0.500  length 41  truncated 12%  grad norm 0.123  "
        "mismatch kl 1.5e-03  clipped 25.0%  loss -0.0100  tokens/s 1234  staleness 2.0"
    )


def test_masked_tokens_count_as_clipped_where_a_loss_masks() -> None:
    assert "clipped 10.0%" in progress_line({**METRICS, "is_masked": 0.1}, 9)


def test_what_is_missing_shows_as_a_dash() -> None:
    assert "mismatch kl -" in progress_line({**METRICS, "mismatch_kl": None}, 9)


def test_outside_a_terminal_lines_are_rare_but_the_last_step_is_shown() -> None:
    stream = io.StringIO()
    console = Console(stream)
    for step in range(1, 6):
        console.step({**METRICS, "step": step}, 5)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step    1/5") and lines[-1].startswith("step    5/5")
    assert len(lines) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_warning_is_shown_once_with_who_raised_it_first() -> None:
    stream, errors = Terminal(), io.StringIO()
    console = Console(stream, errors)
    console.step(METRICS, 9)
    console.warn("too long", "rank 3")
    console.warn("too long", "rank 1")
    console.warn("of the driver")
    assert errors.getvalue() == "warning: rank 3: too long\nwarning: of the driver\n"
    # The rewritten line is ended first.
    assert stream.getvalue().endswith("\n")


WARNS_IN_A_PROCESS = """
import logging, warnings
from plugin.observe.console import capture_warnings
from plugin.config import JobConfig

caught, usual = [], warnings.showwarning
with capture_warnings(caught.append):
    JobConfig(rollout_top_k=5, use_rollout_sampling_mask="off", policy_loss="reinforce")
    warnings.warn("for developers", DeprecationWarning)
    logging.getLogger("plugin.engines").warning("server %s is out", "a")
assert warnings.showwarning is usual and not logging.getLogger("plugin").handlers
assert len(caught) == 2 and "truncated distribution" in caught[0] and caught[1] == "server a is out"
"""


def test_warnings_and_our_loggers_are_captured_in_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WARNS_IN_A_PROCESS], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_a_phase_is_one_line_with_its_seconds_also_when_it_fails() -> None:
    stream = io.StringIO()
    console = Console(stream)
    with console.phase("loading"):
        pass
    with contextlib.suppress(ValueError), console.phase("checking"):
        raise ValueError
    assert stream.getvalue() == "loading took 0.0 s\nchecking failed after 0.0 s\n"


def test_on_a_terminal_a_phase_is_rewritten_in_place_and_leaves_a_line() -> None:
    stream = Terminal()
    console = Console(stream)
    with console.phase("loading"):
        console.log("2 rows left out")
    first, *others = stream.getvalue().split("\n")
    assert first.startswith("\r| loading 0 s")
    assert re.fullmatch(r"loading took \d\.\d s", others[-2].split("\r")[-1])
    assert others[-1] == ""
