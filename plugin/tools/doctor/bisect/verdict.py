"""Names the part of a model that engine and trainer compute differently, and the likely cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plugin.tools.doctor.bisect.bisection import PART_NAMES, Bisection, Part, PartDifference


@dataclass(frozen=True)
class Verdict:
    """Where the fault is; `layer` is None where it is in many layers, or in none."""

    fault: bool
    layer: int | None
    part: Part | None
    text: str
    cause: str


def judge(bisection: Bisection) -> Verdict:
    """Name the part that computes something else."""
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
            cause = "quantized weights, other weights, or another precision throughout"
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
    """The first in the order of computation: a router goes before the experts that it chooses."""
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
                "go to other experts"
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
            return "the embedding: weights, or tokens that are not the same"
        case "head":
            return "the final norm or the LM head: weights, precision, or a scale of the logits"
    return "attention, MLP or norms of this layer; a dump with its parts would tell them apart"
