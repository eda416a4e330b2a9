"""`megatron-tis doctor`: is this machine fit to train, and do the parallel layouts agree on it?"""

from __future__ import annotations

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the sub-command."""
    parser.add_argument(
        "--layouts",
        metavar="LIST",
        help="layouts to run, comma-separated (tp2,pp2,tp2sp,pp2vpp2,cp2,ep2,dp2); default: those this machine "
        "holds; none = environment only",
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML configuration to validate")
    parser.add_argument(
        "--custom-tis-function-path", metavar="PATH", help="a correction hook to load and check"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for all layouts together"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """0 only if nothing failed and every layout agrees with one process."""
    from plugin.doctor.environment_checks import environment_checks
    from plugin.doctor.layout_agreement import (
        LayoutResult,
        default_layouts,
        machine_ranks,
        parse_layout,
        run_layouts,
    )

    wanted = None
    if args.layouts and args.layouts != "none":
        wanted = [parse_layout(name) for name in args.layouts.split(",")]
    checks = environment_checks(args.custom_tis_function_path, args.config)
    broken = any(check.status == "fail" for check in checks)
    if not args.json:
        print("\n".join(map(str, checks)), flush=True)
    results: list[LayoutResult] = []
    if args.layouts != "none" and not broken:
        specs = default_layouts(machine_ranks()) if wanted is None else wanted
        if not args.json:
            names = ", ".join(spec.name for spec in specs)
            print(f"\nrunning a small model as {names}, and as one process ...", flush=True)
        results = run_layouts(specs, timeout=args.timeout)
    healthy = not broken and all(result.agrees for result in results)
    _present(args, checks, results, healthy)
    return 0 if healthy else 1


def _present(args: argparse.Namespace, checks: list, results: list, healthy: bool) -> None:
    if args.json:
        content = {
            "healthy": healthy,
            "checks": [check.as_dict() for check in checks],
            "layouts": [result.as_dict() for result in results],
        }
        print(json.dumps(content, indent=1))
        return
    for result in results:
        print(result)
        if result.error:
            print(result.error, file=sys.stderr)
    print("\nall is well" if healthy else "\nsomething is wrong: see the lines marked fail")
