"""`megatron-tis doctor --bisect`: its arguments and what it does with them."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import get_args

from plugin.config.model import DtypeName
from plugin.errors import ConfigError
from plugin.observe.html_page import refuse_overwriting, write_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only `--bisect` reads."""
    group = parser.add_argument_group("where the mismatch comes from (--bisect)")
    group.add_argument(
        "--bisect",
        action="store_true",
        help="run the same tokens through engine and trainer and name the layer that differs",
    )
    group.add_argument(
        "--hf-checkpoint",
        metavar="DIR",
        help="the trainer's model, and the engine's; default: a tiny model",
    )
    group.add_argument(
        "--embedded-model",
        choices=("qwen3", "qwen3_moe", "llama"),
        default="qwen3_moe",
        help="family of that tiny model (default: qwen3_moe)",
    )
    group.add_argument(
        "--engine-hf-checkpoint", metavar="DIR", help="another model for the engine, to compare"
    )
    group.add_argument(
        "--hidden-states",
        metavar="FILE",
        help="what an engine elsewhere computed (.safetensors or .npz), instead of running one",
    )
    group.add_argument(
        "--save-hidden-states", metavar="FILE", help="write what the engine computed, for later"
    )
    group.add_argument(
        "--train-dtype",
        choices=get_args(DtypeName),
        default="float32",
        help="the trainer's, besides float32 (default: float32)",
    )
    group.add_argument(
        "--rollout-dtype",
        choices=get_args(DtypeName),
        default="bfloat16",
        help="the engine's, besides float32 (default: bfloat16)",
    )
    group.add_argument(
        "--rollout-quantization",
        choices=("none", "int8"),
        default="none",
        help="of the engine's weights (default: none)",
    )
    group.add_argument(
        "--engine-pass",
        choices=("prompt", "decode"),
        default="prompt",
        help="the engine reads the tokens as one prompt, or one by one through its KV cache, as "
        "when it samples (default: prompt)",
    )
    group.add_argument("--html", metavar="FILE", help="write table and plots as a page")
    group.add_argument("--force", action="store_true", help="replace files that exist")


def given_without_bisect(args: argparse.Namespace) -> str | None:
    """The first flag of this group that would do nothing."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for action in parser._actions:
        name = action.dest
        if name not in ("help", "bisect") and getattr(args, name) != action.default:
            return action.option_strings[0]
    return None


def run(args: argparse.Namespace) -> int:
    """0 if no layer computes something else than rounding explains."""
    outputs = [args.html, args.save_hidden_states]
    for output in outputs:
        if output is not None:
            refuse_overwriting(Path(output), args.force)
    if args.hidden_states is not None:
        for value, option in (
            (args.engine_hf_checkpoint, "--engine-hf-checkpoint"),
            (args.save_hidden_states, "--save-hidden-states"),
            (None if args.rollout_quantization == "none" else 1, "--rollout-quantization"),
            (None if args.engine_pass == "prompt" else 1, "--engine-pass"),
        ):
            if value is not None:
                raise ConfigError(
                    f"{option} with --hidden-states: no engine runs, the file holds what one "
                    "computed; drop one of the two"
                )
    if args.save_hidden_states and Path(args.save_hidden_states).suffix not in (
        ".npz",
        ".safetensors",
    ):
        raise ConfigError(
            f"--save-hidden-states {args.save_hidden_states}: end it in .safetensors or .npz"
        )
    # Megatron warns at import about every optional package.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from plugin.tools.doctor.bisect.presentation import as_page, as_text
        from plugin.tools.doctor.bisect.runs import BisectOptions, run_bisect

        names = BisectOptions.__dataclass_fields__.keys() & vars(args).keys()
        passes, verdict = run_bisect(BisectOptions(**{name: getattr(args, name) for name in names}))
    if args.json:
        content = {
            "verdict": vars(verdict),
            "passes": [bisection.as_dict() for bisection in passes],
        }
        print(json.dumps(content, indent=1))
    else:
        print(as_text(passes, verdict))
    if args.html is not None:
        write_page(Path(args.html), as_page(passes, verdict), force=args.force)
    return 1 if verdict.fault else 0
