"""`megatron-tis report RUN_DIR...`: rebuild the HTML report, or overlay several runs in one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from plugin.errors import ConfigError
from plugin.observe.html_page import refuse_overwriting, write_page
from plugin.observe.run_record import read_run, require_content


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the sub-command."""
    parser.add_argument(
        "run_dirs", nargs="+", metavar="RUN_DIR", help="directories of finished or running jobs"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="where to write; default: RUN_DIR/report.html of one run, report.html here of several",
    )
    parser.add_argument("--force", action="store_true", help="replace --output if it exists")


def run(args: argparse.Namespace) -> int:
    """Write the report; the one inside a run directory is rebuilt without --force.

    1 if a run's settings could not be read: the report lacks them, and what follows from them.
    """
    from plugin.observe.html_report import report_html

    single = len(args.run_dirs) == 1 and args.output is None
    output = Path(args.run_dirs[0], "report.html") if single else Path(args.output or "report.html")
    refuse_overwriting(output, args.force or single)
    try:
        records = [read_run(path) for path in args.run_dirs]
        require_content(records)
        write_page(output, report_html(records), force=True)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    for problem in (problem for record in records for problem in record.problems):
        print(f"warning: {problem}", file=sys.stderr)
    steps = sum(len(record.steps) for record in records)
    print(f"{output}: {len(records)} run{'s' if len(records) > 1 else ''}, {steps} steps")
    return 1 if any(record.settings_unreadable for record in records) else 0
