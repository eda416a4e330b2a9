"""Do engine and trainer send tokens to the same experts?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugin.observe.findings import Finding

#: Engines and trainers in bfloat16 agree on more than nine of ten choices.
ENOUGH_AGREEMENT = 0.8
_MAX_ROWS = 4096


def routing_finding(rollout_routes: Sequence[Any], train_routes: Sequence[Any]) -> Finding | None:
    """Compare routes [tokens, layers, topk] per sample; None if they agree.

    One side may hold the first samples only.
    """
    pairs = list(zip(rollout_routes, train_routes, strict=False))
    if not pairs:
        return None
    mismatched = next(((a, b) for a, b in pairs if np.shape(a) != np.shape(b)), None)
    if mismatched is not None:
        engine, trainer = map(np.shape, mismatched)
        mean = 0.0
        evidence = f"routes have shapes {engine} in the engine and {trainer} in the trainer"
        cause = "the engine reports a different number of layers or a different top-k"
    else:
        rollout, train = _rows(pairs)
        if not len(rollout):
            return None
        layers = agreement(rollout, train)
        mean = float(layers.mean())
        if mean >= ENOUGH_AGREEMENT:
            return None
        better, cause = _cause(rollout, train, mean)
        evidence = (
            f"engine and trainer choose the same experts for {mean:.0%} of the choices "
            f"(worst layer {layers.min():.0%}){better}"
        )
    return Finding(
        "engine and trainer route tokens to different experts",
        "warning",
        evidence,
        cause,
        "replay the engine's routes (--use-rollout-routing-replay) once their order is right; keep "
        "the router in float32",
        {"agreement": mean},
    )


def agreement(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.float64]:
    """[layers]: mean share of equal choices, in any order; routes are [rows, layers, topk]."""
    same = (first[..., :, None] == second[..., None, :]).any(-1)
    return same.mean((0, 2))


def _cause(rollout: NDArray[Any], train: NDArray[Any], mean: float) -> tuple[str, str]:
    """Find further evidence: swapped layers or shifted tokens that match much better."""
    layers = range(rollout.shape[1])
    cross = np.array(
        [[agreement(rollout[:, i : i + 1], train[:, j : j + 1])[0] for j in layers] for i in layers]
    )
    best = cross.argmax(1)
    if sorted(best) == list(layers) and cross.max(1).mean() > mean + 0.1:
        moved = ", ".join([f"{i} with {j}" for i, j in enumerate(best) if i != j][:4])
        return (
            f"; matching engine layer {moved} gives {cross.max(1).mean():.0%}",
            "the layers of the routes are in another order than the trainer's",
        )
    for shift in (-1, 1):
        shifted = float(agreement(rollout[1:-1], np.roll(train, shift, 0)[1:-1]).mean())
        if shifted > mean + 0.1:
            return (
                f"; one token away it is {shifted:.0%}",
                "the routes are shifted by one token",
            )
    return "", "different router precision, or weights from a different step"


def _rows(pairs: Sequence[tuple[Any, Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Routes of both sides, [rows, layers, topk] each: tokens of the first samples that both route.

    The last token of a sample is left out: engines sample it but never run it through the model.
    """
    kept: list[tuple[NDArray[Any], NDArray[Any]]] = []
    rows = 0
    for pair in pairs:
        first, second = (np.asarray(routes)[:-1] for routes in pair)
        both = _routed(first) & _routed(second)
        kept.append((first[both].astype(np.int64), second[both].astype(np.int64)))
        rows += len(kept[-1][0])
        if rows >= _MAX_ROWS:
            break
    rollout, train = (np.concatenate(side) for side in zip(*kept, strict=True))
    return rollout, train


def _routed(routes: NDArray[Any]) -> NDArray[np.bool_]:
    """[rows]: False where all choices are negative: "no route"."""
    return np.asarray((routes >= 0).any((1, 2)))
