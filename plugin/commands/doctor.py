"""`megatron-tis doctor`: can this machine train, do its layouts agree, what went wrong in a run?

With `--bisect`: which layer do engine and trainer compute differently?
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from dataclasses import asdict

from plugin.errors import ConfigError
from plugin.tools.doctor.bisect import command as bisect_command
from plugin.tools.doctor.configuration_checks import configuration_checks
from plugin.tools.doctor.environment_checks import environment_checks
from plugin.tools.doctor.layout_agreement import default_layouts, parse_layout, run_layouts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the sub-command."""
    parser.usage = "megatron-tis doctor [-h] [RUN_DIR | --bisect] [--FLAG VALUE ...]"
    parser.add_argument(
        "run_dir",
        nargs="?",
        metavar="RUN_DIR",
        help="directory of a run: what went wrong in it, instead of checking this machine",
    )
    parser.add_argument(
        "--layouts",
        metavar="LIST",
        help="parallel layouts, comma-separated (tp2,pp2,tp2sp,pp2vpp2,cp2,ep2,dp2), under which a "
        "tiny model is trained for one step and compared with one process; default: the usual ones "
        "that this machine has ranks for, or none with --config; none = no training",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML configuration of `train`: everything that it checks before a job starts",
    )
    parser.add_argument(
        "--custom-tis-function-path", metavar="PATH", help="correction hooks to load and try out"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for all layouts together"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    bisect_command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 only if nothing failed and every layout agrees with one process."""
    if args.bisect:
        return _run_bisect(args)
    if idle := bisect_command.given_without_bisect(args):
        raise ConfigError(f"{idle} would do nothing without --bisect; add that, or drop {idle}")
    if args.run_dir is not None:
        return _run_on_run_dir(args)
    named = [] if args.layouts in (None, "none") else args.layouts.split(",")
    specs = [parse_layout(name) for name in named]
    # With --json there is nothing but the object on standard output.
    log = (lambda text: None) if args.json else functools.partial(print, flush=True)
    checks = environment_checks(args.custom_tis_function_path)
    if all(check.status != "fail" for check in checks):
        checks += configuration_checks(args.config)
    log("\n".join(map(str, checks)))
    healthy = all(check.status != "fail" for check in checks)
    results = []
    if healthy and args.layouts is None and args.config is None:
        specs = default_layouts()
    if healthy and specs:
        names = ", ".join(spec.name for spec in specs)
        log(f"\nrunning a small model as {names}, and as one process ...")
        results = run_layouts(specs, timeout=args.timeout)
        healthy = all(result.agrees for result in results)
    for result in results:
        log(str(result))
        if result.error and not args.json:
            print(result.error, file=sys.stderr)
    log("\nall is well" if healthy else "\nsomething is wrong: see the lines marked fail")
    if args.json:
        content = {
            "healthy": healthy,
            "checks": [asdict(check) for check in checks],
            "layouts": [result.as_dict() for result in results],
        }
        print(json.dumps(content, indent=1))
    return 0 if healthy else 1


def _run_bisect(args: argparse.Namespace) -> int:
    if args.run_dir or args.layouts or args.config or args.custom_tis_function_path:
        raise ConfigError(
            "doctor --bisect compares the layers of engine and trainer and checks nothing else; "
            "drop RUN_DIR, --layouts, --config and --custom-tis-function-path"
        )
    return bisect_command.run(args)


def _run_on_run_dir(args: argparse.Namespace) -> int:
    """0 if the run's findings hold no error."""
    from plugin.tools.doctor.run_diagnosis import as_text, diagnose

    if args.layouts or args.config or args.custom_tis_function_path:
        raise ConfigError(
            f"doctor {args.run_dir} looks at a finished or running job and checks nothing else; "
            "drop --layouts, --config and --custom-tis-function-path"
        )
    diagnosis = diagnose(args.run_dir)
    print(json.dumps(diagnosis, indent=1, default=str) if args.json else as_text(diagnosis))
    return 0 if diagnosis["healthy"] else 1
