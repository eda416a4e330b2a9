"""Compares the layers of engine and trainer and names the part that differs, with its cause.

The difference of hidden states grows from layer to layer, whatever caused it: what one layer gets
wrong is the input of all that follow. So a layer is judged by what the trainer makes of the
*engine's* input to it. That difference, the local one, is the layer's own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from plugin.tools.doctor.layer_trace import LayerTrace

#: part, layer, the engine's values, the trainer's, and more of `PartDifference`
_Pair = tuple[Any, int | None, Tensor, Tensor, dict[str, Any]]
Part = Literal["embedding", "attention", "router", "mlp", "layer", "head"]
#: What rounding explains is five times the median of all layers, within these bounds: below the
#: first it always does, above the second never.
_LIMITS = {"float32": (2e-5, 2e-4), "float16": (4e-3, 1.5e-2), "bfloat16": (2e-2, 5e-2)}
_STANDS_OUT = 5.0
PART_NAMES = {"mlp": "MLP", "head": "LM head", "layer": "whole"}


@dataclass(frozen=True)
class PartDifference:
    """The difference of trainer and engine in one part of one layer, on the engine's input.

    layer: None for embedding and head
    local: |trainer - engine| / |engine| of what the part adds to the residual stream; of the
        logits, less their mean, for a router; mean |difference| of log-probs for the head
    limit: what rounding explains
    by_position: the same at the first token, the next three, and all later ones
    experts: those with a difference on every token, unless that is all of them
    changed: share of tokens that the routers send to other experts
    """

    layer: int | None
    part: Part
    local: float
    limit: float
    by_position: tuple[float, float, float]
    experts: tuple[int, ...] = ()
    changed: float | None = None

    @property
    def is_fault(self) -> bool:
        return not self.local <= self.limit

    @property
    def name(self) -> str:
        part = PART_NAMES.get(self.part, self.part)
        return part if self.layer is None else f"{part} of layer {self.layer}"


@dataclass(frozen=True)
class Bisection:
    """One comparison, at one pair of dtypes.

    accumulated: per layer |trainer - engine| / |engine| of its output when both run by themselves
    jump: the layer that makes it grow by the largest factor; None where rounding explains it
    log_prob_difference: mean |trainer - engine| of the tokens' log-probs, likewise
    """

    train_dtype: str
    rollout_dtype: str
    parts: list[PartDifference]
    accumulated: list[float]
    jump: int | None = None
    log_prob_difference: float | None = None

    @property
    def name(self) -> str:
        return f"{self.train_dtype} trainer, {self.rollout_dtype} engine"

    def of_layer(self, layer: int | None) -> dict[str, PartDifference]:
        return {part.part: part for part in self.parts if part.layer == layer}

    def as_dict(self) -> dict[str, Any]:
        parts = [{**asdict(part), "is_fault": part.is_fault} for part in self.parts]
        return {**asdict(self), "parts": parts}


def bisect(
    engine: LayerTrace,
    alone: LayerTrace,
    forced: LayerTrace,
    *,
    train_dtype: str,
    rollout_dtype: str,
    topk: int | None = None,
) -> Bisection:
    """Compare the engine with the trainer by itself and with the trainer on the engine's inputs.

    topk: experts per token, where the model has any
    """
    low, high = _LIMITS[max((train_dtype, rollout_dtype), key=lambda name: _LIMITS[name][0])]
    groups = _group_rows(engine)
    found: list[PartDifference] = []
    pairs: list[_Pair] = [
        ("embedding", None, engine.states["embedding"], alone.states["embedding"], {})
    ]
    for i in range(engine.num_layers):
        pairs += _layer_pairs(engine, forced, i, topk, low)
    for part, layer, wanted, got, more in pairs:
        rows = more.pop("rows", None)
        local, by_position = _relative(got, wanted, groups, rows)
        found.append(PartDifference(layer, part, local, low, by_position, **more))
    found = [_with_limit(part, found, low, high) for part in found]
    found = [_with_experts(part, engine, forced, topk) for part in found]
    if "log_probs" in engine.states:
        off = (forced.states["log_probs"] - engine.states["log_probs"]).abs().double()
        mean = float(off.mean())
        # Log-probs are sums over the hidden size: rounding counts in full, not relative.
        found.append(PartDifference(None, "head", mean, 5 * low, (mean, mean, mean)))
    accumulated = [
        _relative(alone.states[name], engine.states[name], groups)[0]
        for name in (f"layers.{i}.output" for i in range(engine.num_layers))
    ]
    difference = None
    if "log_probs" in engine.states:
        difference = float((alone.states["log_probs"] - engine.states["log_probs"]).abs().mean())
    jump = jump_of([found[0].local, *accumulated], low)
    return Bisection(train_dtype, rollout_dtype, found, accumulated, jump, difference)


def jump_of(differences: Sequence[float], floor: float) -> int | None:
    """The layer after which a difference above `floor` has grown most; the embedding comes first.

    Example: [0, 1e-7, 2e-7, 1e-3, 3e-3] and floor 1e-5: layer 2, by a factor of 100.
    """
    pairs = itertools.pairwise(differences)
    factors = [after / max(before, floor) for before, after in pairs]
    largest = int(np.argmax(factors))
    return largest if factors[largest] > 2 else None


def _layer_pairs(
    engine: LayerTrace, forced: LayerTrace, i: int, topk: int | None, low: float
) -> list[_Pair]:
    """The pairs to compare in one layer; `low`: router logit differences that do not matter."""
    name = f"layers.{i}"
    if not engine.has_parts:
        # What the layer adds: next to the residual stream itself it would be hard to see.
        before = engine.input_of(i)
        wanted, got = (trace.states[f"{name}.output"] - before for trace in (engine, forced))
        return [("layer", i, wanted, got, {})]
    pairs: list[_Pair] = [
        ("attention", i, engine.states[f"{name}.attention"], forced.states[f"{name}.attention"], {})
    ]
    same: Tensor | None = None
    if topk is not None and f"{name}.router" in engine.states and f"{name}.router" in forced.states:
        wanted, got = (
            logits - logits.mean(dim=1, keepdim=True)
            for logits in (trace.states[f"{name}.router"] for trace in (engine, forced))
        )
        same = _same_choice(wanted, got, topk)
        pairs.append(("router", i, wanted, got, {"changed": float((~same).double().mean())}))
        # Different router weights are the router's fault, not the experts'.
        same &= (got - wanted).norm(dim=1) <= low * wanted.norm(dim=1)
        if not bool(same.any()):
            return pairs
    wanted, got = engine.states[f"{name}.mlp"], forced.states[f"{name}.mlp"]
    pairs.append(("mlp", i, wanted, got, {"rows": same}))
    return pairs


def _same_choice(first: Tensor, second: Tensor, topk: int) -> Tensor:
    """[T] bool: whether both logits [T, experts] choose the same experts, in any order."""
    chosen = [logits.topk(topk, dim=1).indices.sort(dim=1).values for logits in (first, second)]
    return (chosen[0] == chosen[1]).all(dim=1)


def _group_rows(trace: LayerTrace) -> list[Tensor]:
    """[T] bool each: first tokens, the next three, later ones."""
    positions = torch.from_numpy(trace.positions)
    return [positions == 0, (positions > 0) & (positions < 4), positions >= 4]


def _relative(
    got: Tensor, wanted: Tensor, groups: Sequence[Tensor], rows: Tensor | None = None
) -> tuple[float, tuple[float, float, float]]:
    """|got - wanted| / |wanted| over the tokens of `rows`, and in each of the groups."""
    off = (got.double() - wanted.double()).square().sum(dim=1)
    size = wanted.double().square().sum(dim=1)

    def share(chosen: Tensor) -> float:
        if rows is not None:
            chosen = chosen & rows
        return math.sqrt(float(off[chosen].sum()) / max(float(size[chosen].sum()), 1e-30))

    everything = torch.ones(len(off), dtype=torch.bool)
    return share(everything), (share(groups[0]), share(groups[1]), share(groups[2]))


def _with_limit(
    part: PartDifference, found: Sequence[PartDifference], low: float, high: float
) -> PartDifference:
    """The part with a limit that follows from the other layers."""
    kind = [other.local for other in found if other.part == part.part]
    limit = min(max(_STANDS_OUT * median(kind), low), high) if len(kind) > 2 else high
    return replace(part, limit=limit)


def _with_experts(
    part: PartDifference, engine: LayerTrace, forced: LayerTrace, topk: int | None
) -> PartDifference:
    """The part with the experts that differ on every token, if experts are at fault."""
    name = f"layers.{part.layer}"
    if part.part != "mlp" or not part.is_fault or topk is None:
        return part
    if f"{name}.router" not in engine.states:
        return part
    logits = engine.states[f"{name}.router"]
    wanted, got = (trace.states[f"{name}.mlp"].double() for trace in (engine, forced))
    off = (got - wanted).norm(dim=1) > part.limit * wanted.norm(dim=1)
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    chosen.scatter_(1, logits.topk(topk, dim=1).indices, True)
    used = [e for e in range(logits.shape[1]) if bool(chosen[:, e].any())]
    bad = tuple(e for e in used if bool(off[chosen[:, e]].all()))
    return part if len(bad) == len(used) else replace(part, experts=bad)


@dataclass(frozen=True)
class Verdict:
    """Where the fault is; `layer` is None where it is in many layers, or in none."""

    fault: bool
    layer: int | None
    part: Part | None
    text: str
    cause: str


def judge(bisection: Bisection) -> Verdict:
    """Name the part that differs by more than rounding."""
    faults = [part for part in bisection.parts if part.is_fault]
    if not faults:
        largest = max(
            (part for part in bisection.parts if part.layer is not None), key=lambda p: p.local
        )
        text = (
            f"no layer computes something else ({bisection.name}); the largest local difference, "
            f"{largest.local:.1e} in the {largest.name}, is rounding"
        )
        return Verdict(False, largest.layer, largest.part, text, "rounding")
    layers = len(bisection.accumulated)
    kinds = {part.part for part in faults if part.layer is not None}
    wide = [
        kind
        for kind in sorted(kinds)
        if layers > 1 and sum(part.part == kind for part in faults) > layers // 2
    ]
    if wide:
        worst = max((p for p in faults if p.part in wide), key=lambda p: p.local)
        names = " and ".join(PART_NAMES.get(kind, kind) for kind in wide)
        text = (
            f"most layers differ in {names} by more than rounding explains, most of all the "
            f"{worst.name} ({worst.local:.1e}, limit {worst.limit:.1e})"
        )
        if len(wide) > 1:
            cause = "quantized weights, different weights, or a different precision throughout"
            return Verdict(True, None, None, text, cause)
        return Verdict(True, None, worst.part, text, _cause(worst))
    first = _first_cause(faults)
    others = [part.name for part in faults if part is not first and part.part != "head"]
    text = (
        f"the {first.name} differs by {first.local:.1e} on the engine's own input, where rounding "
        f"explains {first.limit:.1e}"
    )
    if others:
        text += f"; also the {', the '.join(others)}"
    return Verdict(True, first.layer, first.part, text, _cause(first))


def _first_cause(faults: Sequence[PartDifference]) -> PartDifference:
    """The first in the order of computation: a router comes before the experts it selects."""
    order = ["embedding", "attention", "router", "layer", "mlp", "head"]

    def place(part: PartDifference) -> tuple[float, int]:
        edge = -1 if part.part == "embedding" else math.inf
        return (edge if part.layer is None else part.layer, order.index(part.part))

    return min(faults, key=place)


def _cause(part: PartDifference) -> str:
    first, next_ones, later = part.by_position
    match part.part:
        case "attention" if first <= part.limit < max(next_ones, later):
            return (
                "the first token of a sequence agrees, those that look back do not: RoPE base or "
                "scaling, the attention mask, or the weights of queries and keys"
            )
        case "attention":
            return "weights or precision of values and output projection, or the norm before them"
        case "router":
            return (
                f"weights, bias or precision of the router; {part.changed or 0:.1%} of the tokens "
                "go to different experts"
            )
        case "mlp" if part.experts:
            experts = " and ".join(map(str, part.experts))
            return (
                f"every token of expert {experts} is off and the router agrees: the experts' "
                "weights (swapped, quantized, not updated)"
            )
        case "mlp":
            return "weights or precision of the MLP or of all experts, or the norm before it"
        case "embedding":
            return "the embedding: its weights, or different tokens"
        case "head":
            return "the final norm or the LM head: weights, precision, or a scale of the logits"
    return "attention, MLP or norms of this layer; dump its parts to separate them"
