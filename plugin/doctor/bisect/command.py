"""`megatron-tis doctor --bisect`: its arguments, its table and its page."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plugin.errors import ConfigError
from plugin.observe.html_page import page, refuse_overwriting, series, write_page

if TYPE_CHECKING:
    from plugin.doctor.bisect.bisection import Bisection, Verdict

_PARTS = ("attention", "router", "mlp", "layer")
#: Where a logarithmic axis shows 0.
_SHOWN_ZERO = 1e-8


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
        choices=("float32", "bfloat16"),
        default="float32",
        help="the trainer's, besides float32 (default: float32)",
    )
    group.add_argument(
        "--rollout-dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="the engine's, besides float32 (default: bfloat16)",
    )
    group.add_argument(
        "--rollout-quantization",
        choices=("none", "int8"),
        default="none",
        help="of the engine's weights (default: none)",
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
        from plugin.doctor.bisect.runs import BisectOptions, run_bisect

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


def as_text(passes: Sequence[Bisection], verdict: Verdict) -> str:
    """One table per pair of dtypes, and the verdict."""
    blocks = []
    for bisection in passes:
        headers, rows = table(bisection)
        cells = [headers, *([_shown(cell) for cell in row] for row in rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
        lines = [
            "  ".join(
                text.ljust(width) if i == 0 else text.rjust(width)
                for i, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in cells
        ]
        off = bisection.log_prob_difference
        summary = "" if off is None else f"; log-probs differ by {off:.1e} on average"
        blocks.append("\n".join([bisection.name + summary, *lines]))
    word = "FOUND" if verdict.fault else "ok"
    blocks.append(f"{word}: {verdict.text}\n  likely: {verdict.cause}")
    return "\n\n".join(blocks)


def table(bisection: Bisection) -> tuple[list[str], list[list[Any]]]:
    """Headers and rows: layer, local differences by part, accumulated difference.

    A part that computes something else is marked with `!`.
    """
    parts = [part for part in _PARTS if any(p.part == part for p in bisection.parts)]
    headers = ["layer", *(f"{'MLP' if p == 'mlp' else p}, local" for p in parts)]
    if "router" in parts:
        headers.append("other experts")
    headers.append("accumulated")
    rows: list[list[Any]] = []
    edges = bisection.of_layer(None)
    if "embedding" in edges:
        blank = [None] * (len(headers) - 2)
        rows.append(["embedding", *blank, _marked(edges["embedding"])])
    for layer, accumulated in enumerate(bisection.accumulated):
        found = bisection.of_layer(layer)
        row: list[Any] = [str(layer)]
        row += [_marked(found[part]) if part in found else None for part in parts]
        if "router" in parts:
            row.append(f"{found['router'].changed:.1%}" if "router" in found else None)
        row.append(f"{accumulated:.1e}" + (" <- jumps" if layer == bisection.jump else ""))
        rows.append(row)
    if "head" in edges:
        blank = [None] * (len(headers) - 2)
        rows.append(["LM head (log-probs)", *blank, _marked(edges["head"])])
    return headers, rows


def _marked(part: Any) -> str:
    return f"{part.local:.1e}" + (" !" if part.is_fault else "")


def _shown(cell: Any) -> str:
    return "" if cell is None else str(cell)


def as_page(passes: Sequence[Bisection], verdict: Verdict) -> str:
    """The page: verdict, local and accumulated differences by layer, the tables."""
    charts = []
    for number, bisection in enumerate(passes):
        charts.append(_local_chart(number, bisection, verdict))
    charts.append(_accumulated_chart(passes, verdict))
    data = {
        "finding": {
            "title": verdict.text[0].upper() + verdict.text[1:],
            "severity": "error" if verdict.fault else "info",
            "cause": verdict.cause,
        },
        "charts": [{**chart, "keyColors": True} for chart in charts],
        "tables": [
            {"title": bisection.name, "headers": headers, "rows": rows}
            for bisection, (headers, rows) in ((b, table(b)) for b in passes)
        ],
        "problems": [],
        "footer": "local: |trainer − engine| / |engine| of what a part adds to the residual "
        "stream, when the trainer's part gets the engine's input; accumulated: the same of a "
        "layer's output, when both run by themselves; ! = more than rounding explains",
    }
    names = "; ".join(bisection.name for bisection in passes)
    subtitle = f"{len(passes[0].accumulated)} layers; {names}"
    return page("Where does the mismatch come from?", subtitle, data, "bisect.js")


def _local_chart(number: int, bisection: Bisection, verdict: Verdict) -> dict[str, Any]:
    lines = []
    for color, part in enumerate(_PARTS):
        found = [p for p in bisection.parts if p.part == part]
        if found:
            label = "MLP" if part == "mlp" else part
            lines.append(
                series(
                    color,
                    label,
                    [p.layer for p in found],
                    [max(p.local, _SHOWN_ZERO) for p in found],
                    dots=True,
                    kind=label,
                )
            )
    limits = {p.limit for p in bisection.parts if p.layer is not None}
    return {
        "id": f"local-{number}",
        "title": f"Local difference, {bisection.name}",
        "note": "Each layer on the engine's own input: a fault stands out where it is. Dotted: "
        "what rounding explains; 0 is drawn at 1e-8.",
        "log": True,
        "xLabels": [str(layer) for layer in range(len(bisection.accumulated))],
        "marks": [{"y": limit} for limit in sorted(limits)],
        "points": _points(verdict),
        "series": lines,
    }


def _accumulated_chart(passes: Sequence[Bisection], verdict: Verdict) -> dict[str, Any]:
    return {
        "id": "accumulated",
        "title": "Accumulated difference of the hidden states",
        "note": "Engine and trainer by themselves: what one layer gets wrong reaches all after it.",
        "log": True,
        "xLabels": [str(layer) for layer in range(len(passes[0].accumulated))],
        "points": _points(verdict),
        "series": [
            series(
                number,
                bisection.name,
                list(range(len(bisection.accumulated))),
                bisection.accumulated,
                dots=True,
                kind=bisection.name,
            )
            for number, bisection in enumerate(passes)
        ],
    }


def _points(verdict: Verdict) -> list[dict[str, Any]]:
    """The layer that the verdict points at, as a vertical line."""
    if not verdict.fault or verdict.layer is None:
        return []
    part = {"mlp": "MLP"}.get(verdict.part or "", verdict.part)
    return [{"x": verdict.layer, "label": f"layer {verdict.layer}: {part}"}]
