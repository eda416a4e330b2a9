"""`megatron-tis corrections`: what each loss and correction does, as table or picture."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from plugin.errors import ConfigError

if TYPE_CHECKING:
    from plugin.tools.compare.correction_catalog import CatalogEntry

_COLUMNS = ("name", "formula", "flags (defaults)", "reference")
_NARROWEST_TABLE = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the sub-command."""
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
    from plugin.tools.compare.correction_catalog import catalog

    if args.plot is not None:
        from plugin.tools.compare.correction_catalog import plot_corrections

        plot_corrections(Path(args.plot))
        print(f"{args.plot}: weights and gradients of every correction and policy loss")
    elif args.names:
        print("\n\n".join(details(entry) for entry in _named(catalog(), args.names)))
    else:
        width = shutil.get_terminal_size((140, 24)).columns if sys.stdout.isatty() else 140
        print(listing(catalog(), width))
    return 0


def listing(entries: Sequence[CatalogEntry], width: int) -> str:
    """All entries under two headings; a table if `width` allows, else one block per entry."""
    headings = {
        "policy loss": "Policy losses: --policy-loss NAME",
        "correction": "Corrections: --use-tis --custom-tis-function-path plugin.ppo_utils.NAME, "
        "comma-separated",
    }
    parts = []
    for kind, heading in headings.items():
        rows = [entry for entry in entries if entry.kind == kind]
        if width >= _NARROWEST_TABLE:
            body = table(rows, width)
        else:
            body = "\n\n".join(details(entry, width) for entry in rows)
        parts.append(f"{heading}\n\n{body}")
    legend = (
        "cur, train, rollout: log-probs of the token under the current policy, the trainer's at "
        "the start of the step, and the engine's. A: advantage. sg: no gradient. Corrections "
        "multiply the policy loss (weight) or reject tokens (keep)."
    )
    return "\n\n".join([*parts, textwrap.fill(legend, width)])


def table(entries: Sequence[CatalogEntry], width: int) -> str:
    """Entries as rows with wrapped cells."""
    first = max(len(entry.name) for entry in entries)
    rest = width - first - 6
    formula, flags = rest * 44 // 100, rest * 28 // 100
    widths = (first, formula, flags, rest - formula - flags)
    rows = [_row(_COLUMNS, widths) + "\n" + "  ".join("-" * w for w in widths)]
    for entry in entries:
        rows.append(_row((entry.name, entry.formula, entry.flags, entry.reference), widths) + "\n")
    return "\n".join(rows).rstrip("\n")


def details(entry: CatalogEntry, width: int = 100) -> str:
    """One entry with everything that is known about it."""
    texts = {
        "": entry.summary,
        "formula: ": entry.formula,
        "flags: ": entry.flags,
        "notes: ": entry.notes,
        "use: ": entry.selected_by,
        "reference: ": entry.reference,
    }
    lines = [entry.name]
    for label, text in texts.items():
        lines += textwrap.wrap(
            text,
            width,
            initial_indent="  " + label,
            subsequent_indent="  " + " " * len(label),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    wrapped = [
        textwrap.wrap(cell, width, break_on_hyphens=False)
        for cell, width in zip(cells, widths, strict=True)
    ]
    lines = zip_longest(*wrapped, fillvalue="")
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _named(entries: Sequence[CatalogEntry], names: Sequence[str]) -> list[CatalogEntry]:
    """The entries called `names`, with or without `_function`."""
    found = []
    for name in names:
        matching = [entry for entry in entries if name in (entry.name, entry.short_name)]
        if not matching:
            known = ", ".join(entry.name for entry in entries)
            raise ConfigError(f"there is no loss or correction {name!r}; there are {known}")
        found += matching
    return found
