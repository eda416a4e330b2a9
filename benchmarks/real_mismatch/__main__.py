"""`python -m benchmarks.real_mismatch`: SmolLM2-135M-Instruct sampled by every engine and scored by trainers of three
precisions; then table and figure.

The engines need vLLM's environment, the figure matplotlib: `make evidence-real-mismatch` runs each part where it can. What
was measured before is kept: a row that is in the data is not measured again (--again measures all).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Measure what is missing, or write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_mismatch")
    parser.add_argument("--model", type=Path, default=Path("runs/real_model/model"))
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--length", type=int, default=128, help="longest response, in tokens")
    parser.add_argument("--again", action="store_true", help="measure all rows again")
    parser.add_argument("--summary", action="store_true", help="only write table and figure")
    options = parser.parse_args()
    if options.summary:
        from benchmarks.real_mismatch.summary import write_summary

        write_summary()
        return 0
    if not (options.model / "config.json").exists():
        print(f"{options.model} is missing: make runs/real_model/model")
        return 1
    from benchmarks.real_mismatch.measure import measure

    measure(options.model, options.prompts, options.length, again=options.again)
    return 0


if __name__ == "__main__":
    sys.exit(main())
