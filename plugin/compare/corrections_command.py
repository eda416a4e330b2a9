"""`megatron-tis corrections`: what each policy loss and correction does, as a table or as a picture."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from plugin.errors import ConfigError

if TYPE_CHECKING:
    from plugin.compare.correction_catalog import CatalogEntry

_COLUMNS = ("name", "formula", "flags (defaults)", "reference")
_NARROWEST_TABLE = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the sub-command."""
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="show these only, with summary and notes"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw the weight against the ratio, and the gradient against ratio and probability "
        "difference (png, pdf or svg)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table, the named entries, or draw the picture."""
    from plugin.compare.correction_catalog import catalog

    if args.plot is not None:
        from plugin.compare.correction_plot import plot_corrections

        plot_corrections(Path(args.plot))
        print(f"{args.plot}: weights and gradients of every correction and policy loss")
        return 0
    entries = catalog()
    if args.names:
        print("\n\n".join(details(entry) for entry in _named(entries, args.names)))
        return 0
    width = shutil.get_terminal_size((140, 24)).columns if sys.stdout.isatty() else 140
    print(listing(entries, width))
    return 0


def listing(entries: Sequence[CatalogEntry], width: int) -> str:
    """All entries under two headings; a table if `width` allows, else one block per entry."""
    parts = []
    for kind, how in (
        ("policy loss", "--policy-loss NAME"),
        (
            "correction",
            "--use-tis --custom-tis-function-path plugin.ppo_utils.NAME, comma-separated",
        ),
    ):
        rows = [entry for entry in entries if entry.kind == kind]
        plural = "Policy losses" if kind == "policy loss" else "Corrections"
        body = (
            table(rows, width)
            if width >= _NARROWEST_TABLE
            else "\n\n".join(details(entry, width) for entry in rows)
        )
        parts.append(f"{plural}: {how}\n\n{body}")
    legend = (
        "cur, train, rollout: log-probs of the token under the current policy, the trainer's at the start of "
        "the step, and the engine's. A: advantage. sg: no gradient. Corrections multiply the policy loss "
        "(weight) or reject tokens (keep)."
    )
    return "\n\n".join([*parts, textwrap.fill(legend, width)])


def table(entries: Sequence[CatalogEntry], width: int) -> str:
    """Entries as rows with wrapped cells."""
    first = max(len(entry.name) for entry in entries)
    rest = width - first - 6
    widths = (first, rest * 44 // 100, rest * 28 // 100, rest - rest * 44 // 100 - rest * 28 // 100)
    rule = "  ".join("-" * w for w in widths)
    rows = [_row(_COLUMNS, widths), rule]
    for entry in entries:
        rows.append(_row((entry.name, entry.formula, entry.flags, entry.reference), widths))
        rows.append("")
    return "\n".join(rows[:-1])


def details(entry: CatalogEntry, width: int = 100) -> str:
    """One entry with everything that is known about it."""
    lines = [entry.name, *_indented("", entry.summary, width)]
    for label, text in (
        ("formula", entry.formula),
        ("flags", entry.flags),
        ("notes", entry.notes),
        ("use", entry.selected_by),
        ("reference", entry.reference),
    ):
        if text:
            lines += _indented(f"{label}: ", text, width)
    return "\n".join(lines)


def _indented(label: str, text: str, width: int) -> list[str]:
    hanging = "  " + " " * len(label)
    return textwrap.wrap(
        text,
        width,
        initial_indent="  " + label,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    wrapped = [
        textwrap.wrap(cell, width, break_on_hyphens=False) or [""]
        for cell, width in zip(cells, widths, strict=True)
    ]
    height = max(len(lines) for lines in wrapped)
    return "\n".join(
        "  ".join(
            (lines[i] if i < len(lines) else "").ljust(width)
            for lines, width in zip(wrapped, widths, strict=True)
        ).rstrip()
        for i in range(height)
    )


def _named(entries: Sequence[CatalogEntry], names: Sequence[str]) -> list[CatalogEntry]:
    """The entries called `names`, with or without `_function`."""
    found = []
    for name in names:
        matching = [entry for entry in entries if name in (entry.name, short_name(entry.name))]
        if not matching:
            known = ", ".join(entry.name for entry in entries)
            raise ConfigError(f"there is no loss or correction {name!r}; there are {known}")
        found += matching
    return found


def short_name(name: str) -> str:
    """`vanilla_tis_function` as `vanilla_tis`."""
    return name.removesuffix("_function")
