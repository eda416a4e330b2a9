"""Writes the pages under docs/reference and the table of exact biases from the code: `python -m docs.write_reference`."""

from __future__ import annotations

import dataclasses
import html
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from plugin.compare.correction_catalog import CatalogEntry, catalog
from plugin.config import JobConfig
from plugin.config.flags import field_type, option_name

DOCS = Path(__file__).parent
BEGIN, END = "<!-- exact biases: begin -->", "<!-- exact biases: end -->"

FLAGS_INTRO = """# Flags

Every flag of `megatron-tis train`, from the configuration itself. A flag is also a key of the YAML file that `--config`
names, with `_` or `-`. Flags win over the file, the file over the defaults; everything is checked after merging. In another
framework's namespace the loss reads the same names (with `_`) and takes the defaults for what is missing.
"""

CORRECTIONS_INTRO = """# Losses and corrections

From the docstrings of the functions; `megatron-tis corrections` prints the same. `cur`, `train` and `rollout` are
log-probabilities of the token under the policy being trained, the trainer at the start of the step, and the engine.

![Weight of every correction and gradient of every policy loss](../images/corrections.png)
"""

#: base, correction, cur differs from train
BIAS_CASES: tuple[tuple[str, str | None, bool], ...] = (
    ("ppo", None, True),
    ("ppo", None, False),
    ("ppo", "vanilla_tis_function", True),
    ("reinforce", None, True),
    ("reinforce", "vanilla_tis_function", True),
    ("reinforce", "off_policy_is_function", True),
    ("ppo", "off_policy_is_function", True),
    ("ppo", "off_policy_is_function", False),
    ("cispo", "vanilla_tis_function", True),
    ("icepop", None, True),
    ("dppo_tv", None, True),
)


def flags_page() -> str:
    """One table per group of flags."""
    parts = [FLAGS_INTRO]
    for group in JobConfig.groups():
        rows = "\n".join(
            _flag_row(name)
            for name in vars(group)["__annotations__"]
            if name in {f.name for f in dataclasses.fields(JobConfig)}
        )
        title = group.title[0].upper() + group.title[1:]
        parts.append(f"## {title}\n\n| flag | default | meaning |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _flag_row(name: str) -> str:
    item = next(f for f in dataclasses.fields(JobConfig) if f.name == name)
    kind, _ = field_type(JobConfig, name)
    shown = option_name(name)
    if kind is bool:
        shown = f"{shown}` / `--no-{shown[2:]}"
    meaning = html.escape(item.metadata["help"], quote=False)
    if get_origin(kind) is Literal:
        meaning += ": " + ", ".join(f"`{value}`" for value in get_args(kind))
    elif names := item.metadata["names"]:
        meaning += ": " + ", ".join(f"`{value}`" for value in names) + ", or an import path"
    return f"| `{shown}` | {_default(item.default)} | {meaning.replace('|', '&#124;')} |"


def _default(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


def corrections_page() -> str:
    """Every policy loss and every correction."""
    sections = {"policy loss": "Policy losses", "correction": "Corrections"}
    parts = [CORRECTIONS_INTRO]
    for kind, title in sections.items():
        parts.append(f"## {title}\n")
        parts.extend(_entry(entry) for entry in catalog() if entry.kind == kind)
    return "\n".join(parts)


def _entry(entry: CatalogEntry) -> str:
    notes = f" {entry.notes}" if entry.notes else ""
    return (
        f"### {entry.name}\n\n{entry.summary}{notes}\n\n```text\n{entry.formula}\n```\n\n"
        f"- select: `{entry.selected_by}`\n- flags: {_as_code(entry.flags)}\n- reference: {entry.reference}\n"
    )


def _as_code(flags: str) -> str:
    return flags if not flags.startswith("--") else f"`{flags}`"


def bias_table() -> str:
    """Relative error of the expected gradient on the softmax bandit of the tests, bounds removed."""
    from tests.unit.loss.test_bandit_expectation import (
        CUR,
        ROLLOUT,
        TRAIN,
        correction,
        expected_gradient,
        relative_error,
    )

    lines = [
        "| policy loss | correction | updates on this rollout | error of the gradient |",
        "|---|---|---|---|",
    ]
    for base, hook, several in BIAS_CASES:
        flags = correction(hook)
        if hook == "off_policy_is_function" and base != "reinforce":
            flags["allow_biased_correction"] = True
        gradient = expected_gradient(
            CUR, TRAIN if several else CUR, ROLLOUT, policy_loss=base, **flags
        )
        error = relative_error(gradient)
        shown = "**0**" if error < 1e-5 else f"{error:.0%}"
        times = "later ones" if several else "the first"
        lines.append(f"| `{base}` | {f'`{hook}`' if hook else 'none'} | {times} | {shown} |")
    return "\n".join(lines)


def with_bias_table(page: str) -> str:
    """`page` with the table between its two markers."""
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{bias_table()}\n{END}{tail}"


def pages() -> dict[Path, str]:
    """Every generated page with the content it must have."""
    decision = DOCS / "which_correction.md"
    return {
        DOCS / "reference" / "flags.md": flags_page(),
        DOCS / "reference" / "corrections.md": corrections_page(),
        decision: with_bias_table(decision.read_text()),
    }


def main() -> None:
    for path, content in pages().items():
        path.write_text(content)


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    main()
