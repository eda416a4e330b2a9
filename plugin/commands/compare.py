"""`megatron-tis compare DUMP...`: what every loss and correction would have done with a dump.

With `--advise`: which of them to take, with reasons, as flags to paste.
With `--routing`: what replaying the engine's routes, and their weights, does to the mismatch.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from plugin.config import LossConfig
from plugin.config.model import DtypeName
from plugin.errors import BatchError, ConfigError
from plugin.observe.html_page import refuse_overwriting, write_page

if TYPE_CHECKING:
    from plugin.tools.compare.comparison import Comparison

_CHOSEN = ("policy_loss", "use_tis", "custom_tis_function_path")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's own arguments, and every flag of the loss for the thresholds."""
    parser.usage = (
        "megatron-tis compare [-h | --help-all] [--sweep FLAG=LOW:HIGH ...] [--FLAG VALUE ...] "
        "DUMP [DUMP ...]"
    )
    parser.epilog = "--help-all shows every threshold of the losses and corrections."
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
        help="ESS/N a recommended threshold must reach; with --advise, what comes first among the "
        "alternatives (default: 0.9)",
    )
    parser.add_argument(
        "--all-pairs", action="store_true", help="every correction on every loss that takes it"
    )
    parser.add_argument(
        "--custom-detector-path",
        metavar="PATH",
        help="import paths of your own mismatch detectors, comma-separated",
    )
    parser.add_argument(
        "--advise",
        action="store_true",
        help="instead: the loss and correction that fit these dumps, or a run's directory, with "
        "the reasons, as flags to paste",
    )
    parser.add_argument(
        "--routing",
        action="store_true",
        help="instead: mismatch KL with live routing, the engine's routes, and their weights too, "
        "by forward passes of the model in --hf-checkpoint",
    )
    parser.add_argument(
        "--hf-checkpoint", metavar="DIR", help="--routing: the weights that the dump was made with"
    )
    parser.add_argument(
        "--train-dtype",
        choices=get_args(DtypeName),
        default="float32",
        help="--routing: the trainer's (default: float32)",
    )
    parser.add_argument(
        "--routing-tokens",
        type=int,
        default=65536,
        metavar="N",
        help="--routing: look at no more than about N tokens (default: 65536)",
    )
    parser.add_argument("--html", metavar="FILE", help="write the table and the curves as a page")
    parser.add_argument(
        "--json", metavar="FILE", help="write everything as JSON; - = standard output"
    )
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    LossConfig.add_arguments(parser, in_short_help=_CHOSEN)


def run(args: argparse.Namespace) -> int:
    """Compare, print, write; an error if nothing could be read."""
    try:
        if args.advise:
            return _run_advice(args)
        if args.routing:
            return _run_routing(args)
        if args.hf_checkpoint is not None:
            raise ConfigError("--hf-checkpoint would do nothing without --routing; add it")
        _present(args, _compare(args))
    except OSError as error:
        if error.filename is None:
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return 0


def _run_advice(args: argparse.Namespace) -> int:
    """Replay the candidates on a dump, or look at a run's metrics, and name one."""
    if args.html or args.sweep or args.routing:
        raise ConfigError("--advise prints one text; drop --html, --sweep and --routing")
    _refuse_overwriting(args)
    from plugin.tools.compare.advice import advice_text, advise_dump, advise_run

    runs = [path for path in args.dumps if (Path(path) / "metrics.jsonl").exists()]
    if runs and len(args.dumps) > 1:
        raise ConfigError(f"--advise {runs[0]} is a run; give one run, or dumps alone")
    advise = (advise_run, args.dumps[0]) if runs else (advise_dump, args.dumps)
    advice = advise[0](advise[1], target_ess=args.target_ess)
    _print_result(args, advice.as_dict(), advice_text(advice))
    return 0


def _run_routing(args: argparse.Namespace) -> int:
    """Three forward passes over the samples of a dump that carry routes."""
    if args.hf_checkpoint is None:
        raise ConfigError(
            "--routing needs --hf-checkpoint: the log-probs of a dump are of one routing, and "
            "another takes forward passes of the model"
        )
    if args.html or args.sweep:
        raise ConfigError("--routing prints one table; drop --html and --sweep, or --routing")
    _refuse_overwriting(args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about every optional package
        from plugin.tools.compare.dump_reading import open_dump
        from plugin.tools.compare.routing_mismatch import routing_mismatch, routing_text

        dump = open_dump(args.dumps)
        result = routing_mismatch(
            dump,
            args.hf_checkpoint,
            train_dtype=args.train_dtype,
            temperature=getattr(args, "rollout_temperature", 1.0),
            max_tokens=args.routing_tokens,
        )
    for problem in dump.problems:
        print(f"warning: {problem}", file=sys.stderr)
    _print_result(args, result, routing_text(result))
    return 0


def _compare(args: argparse.Namespace) -> Comparison:
    import torch
    from tqdm import tqdm

    from plugin.tools.compare.comparison import compare
    from plugin.tools.compare.dump_reading import open_dump
    from plugin.tools.compare.replay import Method, all_methods
    from plugin.tools.compare.sweeps import parse_sweeps

    _refuse_overwriting(args)
    given = LossConfig.given_in(args)
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
        return compare(
            dump,
            methods,
            sweeps,
            target_ess=args.target_ess,
            custom_detector_path=args.custom_detector_path,
            progress=bar.update,
        )


def _present(args: argparse.Namespace, comparison: Comparison) -> None:
    from plugin.observe.findings import finding_text
    from plugin.observe.run_record import steps_text
    from plugin.tools.compare.comparison import (
        comparison_html,
        comparison_text,
        recommendation_text,
    )

    for problem in comparison.problems:
        print(f"warning: {problem}", file=sys.stderr)
    if not comparison.tokens:
        raise BatchError("no readable token in these dumps")
    result = comparison.as_dict()
    parts = [
        f"{comparison.tokens:,} tokens in {comparison.samples:,} samples",
        comparison_text(comparison),
        *(recommendation_text(s["recommendation"], args.target_ess) for s in result["sweeps"]),
        *(
            f"{found.get('severity')}: {finding_text(found)} ({steps_text(found)})"
            for found in comparison.findings
        ),
    ]
    _print_result(args, result, "\n\n".join(parts))
    if args.html:
        write_page(Path(args.html), comparison_html(result), force=args.force)


def _refuse_overwriting(args: argparse.Namespace) -> None:
    for output in (args.html, args.json):
        if output and output != "-":
            refuse_overwriting(Path(output), args.force)


def _print_result(args: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    """Print `text`, or the result as JSON with `--json -`; write it with `--json FILE`."""
    content = json.dumps(result, indent=1)
    print(content if args.json == "-" else text)
    if args.json and args.json != "-":
        write_page(Path(args.json), content, force=args.force)
