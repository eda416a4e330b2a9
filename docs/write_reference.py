"""Write what the docs repeat of the code: `python -m docs.write_reference`.

The pages under docs/reference, the tables of exact biases, of detectors and of slime's flags.
"""

from __future__ import annotations

import html
import importlib
import inspect
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from plugin.config import FlagGroup, JobConfig
from plugin.config.flags import field_type, option_name
from plugin.config.other_frameworks import SLIME_LOSS_FLAGS, slime_option
from plugin.observe.detectors import DETECTORS
from plugin.observe.metric_table import SECTIONS, drawn_in
from plugin.tools.compare.correction_catalog import CatalogEntry, catalog
from tests.unit.loss.test_bandit_expectation import (
    CUR,
    ROLLOUT,
    TRAIN,
    correction,
    expected_gradient,
    relative_error,
)
from tests.unit.test_public_api import NAMED, PUBLIC

DOCS = Path(__file__).parent

FLAGS_INTRO = """# Flags

Every flag of `megatron-tis train`, from the configuration itself. A flag is also a key of the YAML file that `--config`
names, with `_` or `-`. Flags win over the file, the file over the defaults; everything is checked after merging. In another
framework's namespace the loss reads the same names (with `_`) and takes the defaults for what is missing.
"""

API_INTRO = """# Python API

The public names, from their docstrings. They keep their meaning within a minor version; everything else may move. Shapes:
`T` tokens of a microbatch on this rank, `B` samples, `R` response tokens, `V` vocabulary.
"""

CORRECTIONS_INTRO = """# Losses and corrections

From the docstrings of the functions; `megatron-tis corrections` prints the same. `cur`, `train` and `rollout` are
log-probabilities of the token under the policy being trained, the trainer at the start of the step, and the engine. [All of them in one picture](../correction_catalog.md).
"""

METRICS_INTRO = """# Metrics

Every metric of `metrics.jsonl`, TensorBoard and the report, from the table in
`plugin/observe/metric_table.py`. `cur`, `train` and `rollout` are log-probabilities of the sampled
token, π the probabilities; the ratio is π_train / π_rollout unless a correction works on another.
Means are exact over all ranks: they travel as sums and counts. `over` is the denominator.

Your own hooks, losses and code may record any other name; the report draws each in a chart of its
own.
"""

#: base; correction, or a flag; cur differs from train
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
    ("ipo_tv", None, True),
    ("gmpo", "vanilla_tis_function", True),
    ("clip_cov", "vanilla_tis_function", True),
    ("kl_cov", "vanilla_tis_function", False),
    ("kl_cov", "vanilla_tis_function", True),
    ("reinforce", "--positive-nll-coef 0.1", True),
    ("reinforce", "--score-centering-topk 4", True),
)


def flags_page() -> str:
    """One table per group of flags."""
    parts = [FLAGS_INTRO]
    for group in JobConfig.groups():
        rows = "\n".join(
            _flag_row(name)
            for name in vars(group)["__annotations__"]
            if name in JobConfig.setting_names()
        )
        title = group.title[0].upper() + group.title[1:]
        parts.append(f"## {title}\n\n| flag | default | meaning |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _flag_row(name: str) -> str:
    item = JobConfig.__dataclass_fields__[name]
    kind, _ = field_type(JobConfig, name)
    shown = option_name(name)
    if kind is bool:
        shown = f"{shown}` / `--no-{shown[2:]}"
    meaning = html.escape(item.metadata["help"], quote=False)
    if kind == tuple[str, ...]:
        meaning += "; may be repeated"
    if get_origin(kind) is Literal:
        choices = [value for value in get_args(kind) if value is not False]
        meaning += ": " + ", ".join(f"`{value}`" for value in choices)
        if False in get_args(kind):
            meaning += f"; alone: `{choices[0]}`"
            shown = f"{shown}` / `--no-{shown[2:]}"
    elif names := item.metadata["names"]:
        meaning += ": " + ", ".join(f"`{value}`" for value in names) + ", or an import path"
    return f"| `{shown}` | {_default(item.default)} | {meaning.replace('|', '&#124;')} |"


def _default(value: Any) -> str:
    if value in (None, ()):
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


def api_page() -> str:
    """Every public name of the package: the exports of three packages, and the named modules."""
    parts = [API_INTRO]
    for module_name, listed in {**PUBLIC, **NAMED}.items():
        module = importlib.import_module(module_name)
        names = getattr(module, "__all__", sorted(listed))
        entries = {name: getattr(module, name) for name in names}
        parts.append(f"## {module_name}\n\n{_prose(module)}\n")
        lines = [line for name, value in entries.items() if (line := _api_line(name, value))]
        if lines:
            parts.append("\n".join(lines) + "\n")
        parts += [_api_entry(n, v) for n, v in entries.items() if not _api_line(n, v)]
    return "\n".join(parts)


def _api_line(name: str, value: Any) -> str:
    """Constants, errors, groups of flags and corrections in one line; "" for everything else."""
    if name.endswith("_function") and name in {entry.name for entry in catalog()}:
        return f"- [`{name}`](corrections.md#{name}): {_prose(value)}"
    if isinstance(value, type) and issubclass(value, Exception):
        return (
            f"- `{name}({', '.join(base.__name__ for base in value.__bases__)})`: {_prose(value)}"
        )
    if isinstance(value, type) and issubclass(value, FlagGroup) and value is not FlagGroup:
        group = f'[flags](flags.md) of the group "{value.title}"'
        return f"- `{name}`: {group if 'title' in vars(value) else _prose(value)}"
    if isinstance(value, Mapping | tuple):
        return f"- `{name}`: {', '.join(f'`{item}`' for item in value)}"
    return ""


def _api_entry(name: str, value: Any) -> str:
    """Heading, signature, docstring, and the public methods of a class."""
    is_class = isinstance(value, type)
    # A configuration takes every flag, a protocol says nothing.
    plain = is_class and (issubclass(value, FlagGroup) or getattr(value, "_is_protocol", False))
    shown = ("class " if is_class else "def ") + name + ("" if plain else _signature(value))
    text = f"### {name}\n\n```python\n{shown}\n```\n\n{_prose(value)}\n"
    details = (inspect.getdoc(value) or "").partition("\n\n")[2]
    if details:
        text += f"\n```text\n{details}\n```\n"
    methods = [
        f"- `{method}{_signature(function, width=1000)}`: {_prose(function)}"
        for method, function in inspect.getmembers(value)
        if is_class and _documents(value, method) and (method[0] != "_" or method == "__call__")
        if (inspect.isfunction(function) or inspect.ismethod(function)) and function.__doc__
    ]
    return text + ("\n" + "\n".join(methods) + "\n" if methods else "")


def _documents(cls: type, method: str) -> bool:
    """Whether a method is listed with `cls`: its own, or one that every model on a rank has."""
    bases = [
        base for base in cls.__mro__ if base.__module__ == "plugin.megatron_backend.rank_model"
    ]
    return any(method in vars(owner) for owner in (cls, *bases))


def _prose(value: Any) -> str:
    """The first paragraph of a docstring as one line of Markdown."""
    paragraph = (inspect.getdoc(value) or "").partition("\n\n")[0]
    parts = " ".join(paragraph.split()).split("`")
    parts[::2] = [
        re.sub(r"([*\[\]])", r"\\\1", html.escape(part, quote=False)) for part in parts[::2]
    ]
    return "`".join(parts)


class _Annotation:
    """An annotation that prints as it was written."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _signature(function: Any, *, width: int = 80) -> str:
    """The parameters as they are written, one per line where they do not fit into `width`."""

    def written(note: Any) -> Any:
        return _Annotation(note) if isinstance(note, str) else note

    found = inspect.signature(function)
    shown = [
        parameter.replace(annotation=written(parameter.annotation))
        for parameter in found.parameters.values()
        if parameter.name != "self"
    ]
    result = inspect.Signature.empty
    if not isinstance(function, type):
        result = written(found.return_annotation)
    text = str(found.replace(parameters=shown, return_annotation=result))
    if len(text) < width:
        return text
    lines: list[str] = []
    for parameter in shown:
        if parameter.kind is parameter.KEYWORD_ONLY and not any(x.startswith("*") for x in lines):
            lines.append("*")
        lines.append(str(parameter))
    arrow = "" if result is inspect.Signature.empty else f" -> {result}"
    return "(\n" + "".join(f"    {line},\n" for line in lines) + ")" + arrow


def metrics_page() -> str:
    """One table per section of `SECTIONS`."""
    parts = [METRICS_INTRO]
    for section in SECTIONS:
        rows = [
            "| metric | meaning | unit | over | better | where a person sees it |",
            "|---|---|---|---|---|---|",
        ]
        for row in section.metrics:
            meaning = row.formula.replace("|", "&#124;")
            cells = (f"`{row.name}`", meaning, row.unit, row.over, row.better)
            rows.append(f"| {' | '.join((*cells, ', '.join(drawn_in(row))))} |")
        table = "\n".join(rows)
        parts.append(f"## {section.title}\n\nFrom `{section.source}`.\n\n{table}\n")
    return "\n".join(parts)


def bias_table() -> str:
    """Relative error of the expected gradient on the softmax bandit of the tests, bounds removed."""
    lines = [
        "| policy loss | correction | updates on this rollout | error of the gradient |",
        "|---|---|---|---|",
    ]
    for base, hook, several in BIAS_CASES:
        flags = _with_flag(hook) if hook and hook.startswith("--") else correction(hook)
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


def _with_flag(option: str) -> dict[str, Any]:
    """`--some-flag 4` as a setting."""
    name, value = option.removeprefix("--").split()
    return {name.replace("-", "_"): float(value) if "." in value else int(value)}


def detector_table() -> str:
    """Every detector and what it looks for."""
    lines = ["| detector | what it looks for |", "|---|---|"]
    lines += [f"| {d.name.replace('_', ' ')} | {d.looks_for} |" for d in DETECTORS]
    return "\n".join(lines)


def slime_table() -> str:
    """What becomes of slime's flags that bear on the loss."""
    lines = ["| flag of slime or miles | our loss | |", "|---|---|---|"]
    for name, flag in SLIME_LOSS_FLAGS.items():
        default = "" if flag.state != "refused" else f" unless {_shown(flag.default)}"
        lines.append(f"| `{slime_option(name)}` | {flag.state}{default} | {flag.note} |")
    return "\n".join(lines)


def _shown(default: Any) -> str:
    return "not set" if default in (None, False) else f"`{default}`"


def with_table(page: Path, marker: str, table: str) -> str:
    """The text of `page` with `table` between the two comments of `marker`."""
    begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    head, rest = page.read_text().split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def pages() -> dict[Path, str]:
    """Every generated page with the content it must have."""
    decision, mismatch = DOCS / "which_correction.md", DOCS / "mismatch.md"
    frameworks = DOCS / "frameworks.md"
    return {
        DOCS / "reference" / "flags.md": flags_page(),
        DOCS / "reference" / "corrections.md": corrections_page(),
        DOCS / "reference" / "metrics.md": metrics_page(),
        DOCS / "reference" / "api.md": api_page(),
        decision: with_table(decision, "exact biases", bias_table()),
        mismatch: with_table(mismatch, "detectors", detector_table()),
        frameworks: with_table(frameworks, "slime's flags", slime_table()),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for path, content in pages().items():
        path.write_text(content)
