"""Every policy loss and correction: its formula, flags and reference, and its picture.

The losses are those of `plugin.loss.POLICY_LOSSES`, the corrections the `*_function` exports of
`plugin.ppo_utils`: one that is added there is also here, in `compare`, its sweeps and the docs. The
layout of a docstring: a sentence; the formula; `Flags: ...` ending with a full stop, after which
notes may follow; `Reference: ...`.

The picture shows what each one does to one token, by running it. Three blocks of small panels: the
weight a correction gives a token of a certain ratio; the gradient a policy loss gives it, by ratio;
and the same gradient by the difference of probabilities.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from plugin import ppo_utils
from plugin.config import LossConfig
from plugin.errors import ConfigError
from plugin.loss import POLICY_LOSSES, compute_loss, loss_inputs
from plugin.loss.hook_chain import statistics_of
from plugin.ppo_utils.batch_statistics import collect_statistics, declared_statistics

Kind = Literal["policy loss", "correction"]


@dataclass(frozen=True)
class CatalogEntry:
    """One loss or correction; `selected_by` is the flag that turns it on."""

    name: str
    kind: Kind
    selected_by: str
    summary: str
    formula: str
    flags: str
    notes: str
    reference: str

    @property
    def short_name(self) -> str:
        """`vanilla_tis_function` as `vanilla_tis`."""
        return self.name.removesuffix("_function")


def catalog() -> list[CatalogEntry]:
    """All policy losses, then all corrections."""
    entries = [
        entry_of(function, name, "policy loss", f"--policy-loss {name}")
        for name, function in POLICY_LOSSES.items()
    ]
    for name, function in correction_functions().items():
        flags = f"--use-tis --custom-tis-function-path plugin.ppo_utils.{name}"
        entries.append(entry_of(function, name, "correction", flags))
    return entries


def correction_functions() -> dict[str, Callable[..., Any]]:
    """The hooks that `plugin.ppo_utils` exports, by name, the default one first."""
    names = [name for name in ppo_utils.__all__ if name.endswith("_function")]
    names.sort(key=lambda name: (name != "vanilla_tis_function", name))
    return {name: getattr(ppo_utils, name) for name in names}


def entry_of(function: Callable[..., Any], name: str, kind: Kind, selected_by: str) -> CatalogEntry:
    """The entry that the docstring of `function` describes; a ValueError if a part is missing."""
    text = inspect.getdoc(function) or ""
    match = re.fullmatch(
        r"(?P<summary>.+?)\n\n(?P<formula>.+?)\nFlags: (?P<flags>.+?)\.(?:\s(?P<notes>.+?))?"
        r"\nReference: (?P<reference>.+)",
        text,
        flags=re.DOTALL,
    )
    if match is None:
        raise ValueError(
            f"the docstring of {name} has no sentence, formula, 'Flags:' and 'Reference:' in this "
            "order"
        )
    parts = {key: " ".join((value or "").split()) for key, value in match.groupdict().items()}
    return CatalogEntry(name, kind, selected_by, **parts)


#: Probability of the token under the rollout policy. A ratio of 20 is then still a probability.
RARE, COMMON = 0.05, 0.4
_POINTS = 401
#: Panels side by side; a block has as many lines as it needs.
_COLUMNS = 7
_DEFAULT_RANGE = (0.05, 20.0)
#: Bounds that lie outside the default range of ratios, or too close together in it, need their own.
_RANGES = {"veto_function": (1e-6, 20.0), "geometric_mask_function": (0.95, 1.05)}

_UP, _DOWN, _INK, _MUTED = "#1f6fb4", "#d9622b", "#23282d", "#8a929a"


def correction_weight(name: str, ratios: Tensor) -> Tensor:
    """[K]: the weight that the hook `name` gives a token of each ratio [K] to the rollout policy.

    Every token is a sample of its own. The trainer's and the current policy have the ratio, except
    for `opsm_function`, which looks at how far the current policy has left the trainer's, at A =
    -1.
    """
    rollout = torch.full_like(ratios, RARE).log()
    moved = rollout + ratios.log()
    ones = [torch.ones(1) for _ in ratios]
    hook, config = correction_functions()[name], LossConfig(policy_loss="reinforce")
    declared = declared_statistics(hook, config)
    loss, _, _ = hook(
        config,
        pg_loss=torch.ones_like(ratios),
        train_log_probs=(rollout if name == "opsm_function" else moved).split(1),
        rollout_log_probs=rollout.split(1),
        cur_log_probs=moved.split(1),
        advantages=[-one for one in ones],
        loss_masks=ones,
        total_lengths=[2] * len(ones),
        response_lengths=[1] * len(ones),
        # Of a threshold over a batch, the batch are these very tokens.
        batch_statistics=declared and collect_statistics(declared, ratios.log(), config),
    )
    return loss


def loss_gradient(name: str, cur: Tensor, rollout: Tensor, advantage: float) -> Tensor:
    """[K]: -d loss / d cur of the policy loss `name` on one-token samples; train equals rollout."""
    config = LossConfig.from_sources({"policy_loss": name})
    cur = cur.clone().requires_grad_()
    count = cur.numel()
    batch: dict[str, Any] = {
        "total_lengths": [2] * count,
        "response_lengths": [1] * count,
        "loss_masks": list(torch.ones(count, 1)),
        "advantages": list(torch.full((count, 1), advantage)),
        "log_probs": rollout.split(1),
        "rollout_log_probs": rollout.split(1),
    }
    inputs = loss_inputs(config, batch, cur)
    inputs = replace(inputs, statistics=statistics_of(config, inputs))
    outputs = compute_loss(config, inputs)
    (gradient,) = torch.autograd.grad(outputs.policy.loss.sum(), cur)
    return -gradient


def gradient_by_ratio(name: str, advantage: float) -> tuple[Tensor, Tensor]:
    """pi_cur / pi_rollout of a rare token, and the gradient of a loss there."""
    ratios = torch.logspace(-1.3, 1.3, _POINTS)
    rollout = torch.full_like(ratios, RARE).log()
    return ratios, loss_gradient(name, rollout + ratios.log(), rollout, advantage)


def gradient_by_difference(name: str, advantage: float) -> tuple[Tensor, Tensor]:
    """pi_cur - pi_rollout of a common token, and the gradient of a loss there."""
    probabilities = torch.linspace(0.005, 0.995, _POINTS)
    rollout = torch.full_like(probabilities, COMMON).log()
    gradient = loss_gradient(name, probabilities.log(), rollout, advantage)
    return probabilities - COMMON, gradient


def plot_corrections(file: Path) -> None:
    """Write the picture to `file`; the suffix selects the format."""
    if file.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--plot {file}: its ending must be .png, .pdf or .svg")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no folder {file.parent}; create it first")
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib; pip install 'megatron-tis[job]' or matplotlib alone"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):
        figure = pyplot.figure(figsize=(2.15 * _COLUMNS, 15.6))
        rows: Any = figure.subfigures(3, 1, hspace=0.0)
        _weight_block(rows[0])
        _gradient_block(rows[1], by_ratio=True)
        _gradient_block(rows[2], by_ratio=False)
        try:
            figure.savefig(file, dpi=150)
        except OSError as error:
            raise ConfigError(f"--plot {file}: cannot be written ({error.strerror})") from error
        finally:
            pyplot.close(figure)


_STYLE: Any = {
    "font.size": 8,
    "font.family": "DejaVu Sans",
    "text.color": _INK,
    "axes.edgecolor": "#c9ced3",
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#eceff1",
    "grid.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


def _panels(block: Any, names: Collection[str], title: str, subtitle: str) -> dict:
    """Name -> its empty panel, under a heading."""
    block.text(0.012, 0.975, title, fontsize=11.5, weight="bold", va="top")
    block.text(0.012, 0.93, subtitle, fontsize=8.5, color=_MUTED, va="top")
    grid = block.subplots(math.ceil(len(names) / _COLUMNS), _COLUMNS).flatten()
    block.subplots_adjust(left=0.03, right=0.99, bottom=0.07, top=0.84, wspace=0.32, hspace=0.4)
    panels = dict(zip(names, grid, strict=False))
    for name, axes in panels.items():
        axes.set_title(name.removesuffix("_function"), fontsize=9, weight="bold", loc="left")
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    return panels


def _weight_block(block: Any) -> None:
    title = "Corrections: weight on the policy loss against the ratio to π_rollout"
    subtitle = (
        "one-token samples, default flags; dotted: the ratio itself; shaded: weight 0, rejected; "
        "opsm: A = −1, π_train = π_rollout"
    )
    for name, axes in _panels(block, correction_functions(), title, subtitle).items():
        low, high = _RANGES.get(name, _DEFAULT_RANGE)
        x = torch.logspace(math.log10(low), math.log10(high), _POINTS)
        y = correction_weight(name, x)
        axes.plot(x, x, color=_MUTED, linewidth=1, linestyle=":")
        shade = {"color": "#f6d9cc", "alpha": 0.6, "linewidth": 0}
        axes.fill_between(x, 0, 1, where=(y == 0), transform=axes.get_xaxis_transform(), **shade)
        _plot_steps(axes, x, y, _UP)
        axes.set_ylim(-0.12, 2.4)
        _ratio_axis(axes, low, high)
        axes.axhline(1, color="#c9ced3", linewidth=0.8, zorder=0)


def _gradient_block(block: Any, *, by_ratio: bool) -> None:
    title = (
        "Policy losses: gradient −∂loss/∂log π_cur against the ratio π_cur / π_rollout"
        if by_ratio
        else "Policy losses: the same gradient against the difference π_cur − π_rollout"
    )
    probability, curve = (RARE, gradient_by_ratio) if by_ratio else (COMMON, gradient_by_difference)
    subtitle = f"a token of π_rollout = {probability}, π_train = π_rollout, default flags"
    for name, axes in _panels(block, POLICY_LOSSES, title, subtitle).items():
        # Dashed on top of solid: where both are 0, both are seen.
        for advantage, color, dashes in ((1.0, _UP, "solid"), (-1.0, _DOWN, (0, (3, 2)))):
            x, y = curve(name, advantage)
            _plot_steps(axes, x, y, color, dashes)
        axes.axhline(0, color="#c9ced3", linewidth=0.8, zorder=0)
        axes.set_ylim(-3.2, 3.2)
        axes.set_xlim(x[0].item(), x[-1].item())
        if by_ratio:
            _ratio_axis(axes, x[0].item(), x[-1].item())
        else:
            axes.set_xticks([-0.4, -0.2, 0, 0.2, 0.4], ["−.4", "−.2", "0", ".2", ".4"])
    key = {"fontsize": 9.5, "weight": "bold", "va": "top", "ha": "right"}
    block.text(0.91, 0.975, "━ A = +1", color=_UP, **key)
    block.text(0.99, 0.975, "╍ A = −1", color=_DOWN, **key)


def _plot_steps(axes: Any, x: Tensor, y: Tensor, color: str, dashes: Any = "solid") -> None:
    """Plot a line that breaks where it jumps: a rejection has no values in between."""
    jump = (y[1:] - y[:-1]).abs() > 0.15
    values = y.clone().float()
    values[1:][jump] = float("nan")
    axes.plot(x, values, color=color, linestyle=dashes)


def _ratio_axis(axes: Any, low: float, high: float) -> None:
    ticks: tuple[str, ...] = ("0.95", "1", "1.05")
    if high / low > 2:
        ticks = ("0.1", "0.5", "1", "2", "5", "20")
    if high / low > 1e4:
        ticks = ("1e-6", "1e-4", "0.01", "1")
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks([float(tick) for tick in ticks], ticks)
    axes.minorticks_off()
