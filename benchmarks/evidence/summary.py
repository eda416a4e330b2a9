"""From the data to the tables in the docs: a short one on the page, all of them in its appendix.

Nothing between the marks of a page is written by hand.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

from benchmarks.evidence.arms import CORE, EQUAL_TO_PPO, arms
from benchmarks.evidence.engine import SEEDS, Setting
from benchmarks.evidence.grid import (
    CHECK,
    SETTINGS,
    STALENESS,
    Row,
    results,
    setting_of,
    shown_settings,
)
from benchmarks.marked_pages import write_marked

DOCS = Path(__file__).parents[2] / "docs"
PAGE, APPENDIX = DOCS / "evidence.md", DOCS / "appendix/evidence_tables.md"
#: The arms of the short table: no correction, what is recommended, and one of each other kind.
HEADLINE = (
    "ppo + vanilla_tis",
    "ppo + vanilla_tis, use-rollout-kl-loss, rollout-kl-loss-coef 0.1",
    "reinforce + off_policy_is, eps-clip 1, eps-clip-high 4",
    "icepop",
    "dppo_tv",
    "topr",
    "ppo + icepop",
    "reinforce + off_policy_is",
    "ppo",
)
#: 97.5 % points of Student's t by the number of seeds.
_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
Results = dict[tuple[str, Setting], Row]
_EXPLAINED = (
    f"Final reward (share of correct digits), mean of {SEEDS} seeds ± half of the 95 % interval of the difference from "
    "the mean of all arms on the same seed (seeds start from different models). Rows are sorted by the mean over the "
    "columns that all arms have. *area*: mean reward over the run. *collapsed*: share of runs that lost more than half "
    "of their best gain, and at least 0.05. *norm*: largest gradient norm before clipping. These three are over the "
    "arm's columns; *ESS* (of exp(cur - rollout), as a share of the tokens) and *kept* (share of the tokens) are means "
    "over the runs at the largest staleness."
)


def wrapped(text: str) -> str:
    """A paragraph or list item in lines of at most 100 characters."""
    return textwrap.fill(
        text,
        100,
        subsequent_indent="  " if text.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval; infinite with fewer than two seeds."""
    if len(values) < 2:
        return mean(values), math.inf
    return mean(values), _T.get(len(values), 1.96) * stdev(values) / math.sqrt(len(values))


def paired_interval(found: Results, name: str, setting: Setting) -> tuple[float, float]:
    """Mean final reward, and half of the 95 % interval of the difference from the mean of all arms, seed by seed.

    Seeds start from different models, which moves all arms together; the difference is what a choice changes.
    """
    others = [row["final"] for (_, at), row in found.items() if at == setting]
    usual = [mean(values) for values in zip(*others, strict=True)]
    own = found[name, setting]["final"]
    _, half = interval([a - b for a, b in zip(own, usual, strict=True)])
    return mean(own), half


def collapsed(row: Row) -> list[bool]:
    """By seed: more than half of the best gain is lost, and at least 0.05 (evaluations scatter by 0.01)."""
    return [
        values[-1] < (values[0] + max(values)) / 2 and values[-1] <= max(values) - 0.05
        for values in row["rewards"]
    ]


def by_cell(rows: Iterable[Row]) -> Results:
    """(arm, setting) -> its row, of the settings that are shown."""
    rows = list(rows)
    whole = set(shown_settings(rows))
    return {(row["arm"], setting_of(row)): row for row in rows if setting_of(row) in whole}


def setting_name(setting: Setting) -> str:
    """What departs from a float32 engine of the same weights."""
    parts = [f"staleness {setting.staleness}"]
    parts += [setting.engine] if setting.engine != "float32" else []
    parts += [f"{setting.updates} updates"] if setting.updates > 1 else []
    if setting.top_p < 1:
        parts.append(f"top-p {setting.top_p:g}{', replayed' if setting.mask_replay else ''}")
    if setting.mixture:
        parts.append("MoE, replayed" if setting.route_replay else "MoE")
    return ", ".join(parts)


def ranked_arms(found: Results, settings: Sequence[Setting]) -> list[str]:
    """Arms measured in any of the settings, best mean of final rewards first, over those that have them all."""
    names = [arm.name for arm in arms() if any((arm.name, s) in found for s in settings)]
    common = [s for s in settings if all((name, s) in found for name in names)]
    if not common:
        common, names = list(settings), [arm.name for arm in CORE]
    return sorted(names, key=lambda name: -mean(mean(found[name, s]["final"]) for s in common))


def short_table(rows: Iterable[Row]) -> str:
    """Final rewards of a few arms by staleness, for the page."""
    found = by_cell(rows)
    main = [Setting(s) for s in STALENESS if ("ppo", Setting(s)) in found]
    if not main:
        return "Not measured yet: `make evidence`."
    lines = [
        f"| final reward, by staleness | {' | '.join(str(s.staleness) for s in main)} | collapsed |",
        "|---" * (len(main) + 2) + "|",
    ]
    for name in HEADLINE:
        runs = [found[name, s] for s in main]
        cells = [f"{mean(run['final']):.3f}" for run in runs]
        lost = sum(sum(collapsed(run)) for run in runs)
        lines.append(f"| `{name}` | {' | '.join(cells)} | {lost} of {SEEDS * len(runs)} |")
    return "\n".join(lines)


def tables(rows: Iterable[Row]) -> str:
    """Every arm in every setting, for the appendix."""
    found = by_cell(rows)
    settings = {setting for _, setting in found}
    main = [Setting(s) for s in STALENESS if Setting(s) in settings]
    if not main:
        return "Not measured yet: `make evidence`."
    parts = [wrapped(_EXPLAINED), _main_table(found, main)]
    groups: dict[str, Callable[[Setting], bool]] = {
        "A coarser engine": lambda s: s.engine != "float32" and not s.mixture,
        "Four updates per rollout, a quarter of its groups each": lambda s: s.updates > 1,
        "Truncated sampling, without and with the engine's kept ids replayed": lambda s: (
            s.top_p < 1
        ),
        "A MoE model on an int8 engine, without and with the engine's routes replayed": lambda s: (
            s.mixture
        ),
    }
    held_back: dict[str, Callable[[Setting], bool]] = {
        "Settings that only check the adviser, one update": lambda s: s.updates == 1,
        "Settings that only check the adviser, several updates": lambda s: s.updates > 1,
    }
    for which, titles in ((SETTINGS, groups), (CHECK, held_back)):
        for title, belongs in titles.items():
            columns = sorted((s for s in which if belongs(s) and s in settings), key=_column_order)
            if columns:
                parts += [f"**{title}.** Final reward.", _plain_table(found, columns)]
    open_settings = [s for s in (*SETTINGS, *CHECK) if s not in settings]
    if open_settings:
        left = "; ".join(map(setting_name, open_settings))
        parts.append(wrapped(f"Not measured yet: {left}."))
    equal = ", ".join(f"`{name}`" for name in EQUAL_TO_PPO)
    parts.append(
        wrapped(
            f"With one update per rollout {equal} have the gradient of `ppo`, and therefore its numbers; on fresh "
            "samples (staleness 0, float32, one update) this holds for all arms but `clip_cov`. An empty cell: not run."
        )
    )
    return "\n\n".join(parts)


def _column_order(setting: Setting) -> tuple[object, ...]:
    return setting.engine, setting.staleness, setting.mask_replay, setting.route_replay


def _main_table(found: Results, columns: Sequence[Setting]) -> str:
    heads = [f"{s.staleness}" for s in columns]
    lines = [
        f"| arm, by staleness | {' | '.join(heads)} | area | collapsed | norm | ESS | kept |",
        "|---" * (len(columns) + 6) + "|",
    ]
    for name in ranked_arms(found, columns):
        runs = [found[name, s] for s in columns if (name, s) in found]
        numbers = (
            f"{mean(v for r in runs for v in r['area']):.3f}",
            f"{mean(v for r in runs for v in collapsed(r)):.0%}",
            f"{max(v for r in runs for v in r['largest_gradient_norm']):.2g}",
            f"{mean(runs[-1]['ess_share']):.2f}",
            f"{mean(runs[-1]['kept_share']):.2f}",
        )
        cells = [_cell(found, name, s) for s in columns]
        lines.append(f"| `{name}` | {' | '.join((*cells, *numbers))} |")
    return "\n".join(lines)


def _plain_table(found: Results, columns: Sequence[Setting]) -> str:
    lines = [
        f"| arm | {' | '.join(map(setting_name, columns))} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name in ranked_arms(found, columns):
        lines.append(f"| `{name}` | {' | '.join(_cell(found, name, s) for s in columns)} |")
    return "\n".join(lines)


def _cell(found: Results, name: str, setting: Setting) -> str:
    if (name, setting) not in found:
        return ""
    middle, half = paired_interval(found, name, setting)
    return f"{middle:.3f} ± {half:.3f}"


def write_summary() -> None:
    """Write the tables into the page and its appendix, and the figures beside them."""
    from benchmarks.evidence.figures import draw

    rows = results()
    write_marked(PAGE, "evidence", short_table(rows))
    write_marked(APPENDIX, "evidence", tables(rows))
    draw(by_cell(rows))
