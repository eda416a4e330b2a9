"""`python -m benchmarks.evidence`: make the runs that are missing, then write tables and figures.

It can be ended at any time and goes on where it was: every finished run is a line of `data.jsonl`.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.evidence.grid import open_runs, record
from benchmarks.evidence.simulation import run


def main() -> int:
    """Run until everything is measured or the minutes are over."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--summary", action="store_true", help="only write tables and figures")
    options = parser.parse_args()
    end, missing = time.monotonic() + 60 * options.minutes, open_runs()
    if not options.summary:
        for number, (arm, setting) in enumerate(missing):
            if time.monotonic() > end:
                break
            record(run(arm, setting))
            if number % 10 == 0:
                print(f"{len(missing) - number} runs to go", file=sys.stderr, flush=True)
    from benchmarks.evidence.summary import write_summary

    write_summary()
    return 0


if __name__ == "__main__":
    sys.exit(main())
