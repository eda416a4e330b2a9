"""The table of model families in the docs: what the tests compared, by family and layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from plugin.megatron_backend.model.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "model_families.md"
BEGIN, END = "<!-- table of families: begin -->\n", "<!-- table of families: end -->\n"
LAYOUTS = ("one rank", "TP2", "TP2+SP", "TP2+SP ETP1", "PP2", "EP2")


def table(compared: Mapping[tuple[str, str], str]) -> str:
    """Markdown rows; `compared` has letters by family and layout."""
    lines = [
        f"| `model_type` | models | weights by | {' | '.join(LAYOUTS)} |",
        f"|---|---|---|{'---|' * len(LAYOUTS)}",
    ]
    for name, family in FAMILIES.items():
        source = "mbridge" if family.weights.startswith("mbridge") else "own, from mbridge's"
        cells = [" ".join(compared.get((name, layout), "-")) for layout in LAYOUTS]
        models = family.note or family.architecture.removesuffix("ForCausalLM")
        lines.append(f"| `{name}` | {models} | {source} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def written(compared: Mapping[tuple[str, str], str]) -> bool:
    """Put the table into the page; whether the page had another one."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    new = before + BEGIN + table(compared) + END + after
    PAGE.write_text(new, encoding="utf-8")
    return new != page
