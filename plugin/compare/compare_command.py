"""`megatron-tis compare DUMP...`: what every loss and correction would have done with these log-probs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plugin.config import LossConfig

if TYPE_CHECKING:
    from plugin.compare.comparison import Comparison

_CHOSEN = ("policy_loss", "use_tis", "custom_tis_function_path")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the sub-command: its own, and every flag of the loss for the thresholds."""
    parser.add_argument(
        "dumps",
        nargs="+",
        metavar="DUMP",
        help="directory of --dump-log-probs, or .parquet, .pt, .npz, .jsonl",
    )
    parser.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        default=[],
        metavar="FLAG=LOW:HIGH",
        help="vary a threshold, e.g. tis-clip=1.5:10 or tis-clip=2,3,5",
    )
    parser.add_argument(
        "--target-ess",
        type=float,
        default=0.9,
        metavar="X",
        help="ESS/N a recommended threshold must reach (default: 0.9)",
    )
    parser.add_argument(
        "--all-pairs", action="store_true", help="every correction on every loss that takes it"
    )
    parser.add_argument("--html", metavar="FILE", help="write the table and the curves as a page")
    parser.add_argument(
        "--json", metavar="FILE", help="write everything as JSON; - = standard output"
    )
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    LossConfig.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compare, print, write; 0 if anything could be read."""
    from plugin.errors import MegatronTisError

    try:
        return _compare(args)
    except MegatronTisError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    return 2


def _compare(args: argparse.Namespace) -> int:
    import torch
    from tqdm import tqdm

    from plugin.compare.comparison import compare
    from plugin.compare.dump_reading import open_dump
    from plugin.compare.replay import Method, all_methods
    from plugin.compare.sweeps import parse_sweeps
    from plugin.observe.html_page import refuse_overwriting

    for output in (args.html, args.json):
        if output and output != "-":
            refuse_overwriting(Path(output), args.force)
    given = {
        name: value for name, value in vars(args).items() if name in LossConfig.__dataclass_fields__
    }
    settings = {name: value for name, value in given.items() if name not in _CHOSEN}
    methods = all_methods(every_pair=args.all_pairs, **settings)
    if any(name in given for name in _CHOSEN):
        methods.append(Method.of_config("yours", LossConfig(**given)))
    sweeps = parse_sweeps(args.sweep, settings)
    # A block fits into the cache: threads that wait for each other cost more than they gain.
    torch.set_num_threads(1)
    dump = open_dump(args.dumps)
    with tqdm(
        total=dump.total_bytes(), unit="B", unit_scale=True, desc="reading", disable=None
    ) as bar:
        comparison = compare(dump, methods, sweeps, target_ess=args.target_ess, progress=bar.update)
    return _present(args, comparison)


def _present(args: argparse.Namespace, comparison: Comparison) -> int:
    from plugin.compare.compare_page import comparison_html
    from plugin.compare.comparison import recommendation_text, text_table
    from plugin.observe.html_page import write_page

    for problem in comparison.problems:
        print(f"warning: {problem}", file=sys.stderr)
    if not comparison.tokens:
        print("error: no readable token in these dumps", file=sys.stderr)
        return 2
    result: dict[str, Any] = comparison.as_dict()
    if args.json == "-":
        print(json.dumps(result, indent=1))
    else:
        print(
            f"{comparison.tokens:,} tokens in {comparison.samples:,} samples\n\n{text_table(comparison)}"
        )
        for sweep in result["sweeps"]:
            print("\n" + recommendation_text(sweep["recommendation"], args.target_ess))
        for repeated in comparison.findings:
            print(f"\n{repeated.finding} (steps {repeated.first_step} to {repeated.last_step})")
    if args.json and args.json != "-":
        write_page(Path(args.json), json.dumps(result, indent=1), force=args.force)
    if args.html:
        write_page(Path(args.html), comparison_html(result), force=args.force)
    return 0
