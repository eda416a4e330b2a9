"""`python -m benchmarks.precision`: mismatch by the dtypes of trainer and engine, then table and figure."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def main() -> int:
    """Measure every pair, then write the docs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision")
    parser.add_argument("--summary", action="store_true", help="only write table and figure")
    options = parser.parse_args()
    from benchmarks.precision.summary import DATA, write_summary

    if not options.summary:
        DATA.write_text(json.dumps(_measured(), indent=1) + "\n")
    write_summary()
    return 0


def _measured() -> dict[str, Any]:
    from benchmarks.precision import pairs
    from benchmarks.precision.sharpened_model import model_config, sharpened_weights

    weights, factor = sharpened_weights()
    rows = []
    for row in pairs.measured(model_config(), weights):
        rows.append({k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()})
        print(rows[-1], file=sys.stderr, flush=True)
    return {"head": round(factor, 2), "response_length": pairs.RESPONSE, "pairs": rows}


if __name__ == "__main__":
    sys.exit(main())
