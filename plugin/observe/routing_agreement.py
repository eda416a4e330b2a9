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


def routing_finding(
    rollout_routes: Sequence[Any] | None, train_routes: Sequence[Any] | None
) -> Finding | None:
    """Routes [tokens, layers, topk] per sample from both sides; None if they agree or one is missing.

    One side may hold the first samples only.
    """
    if not rollout_routes or not train_routes:
        return None
    pairs = list(zip(rollout_routes, train_routes, strict=False))
    if any(np.shape(a) != np.shape(b) for a, b in pairs):
        shapes = np.shape(rollout_routes[0]), np.shape(train_routes[0])
        return _finding(
            f"routes have shapes {shapes[0]} in the engine and {shapes[1]} in the trainer",
            "the engine reports other layers or another top-k than the trainer has",
            0.0,
        )
    rollout, train = _rows(pairs)
    if not len(rollout):
        return None
    layers = agreement(rollout, train)
    mean = float(layers.mean())
    if mean >= ENOUGH_AGREEMENT:
        return None
    evidence = f"engine and trainer choose the same experts for {mean:.0%} of the choices (worst layer {layers.min():.0%})"
    return _finding(*_cause(rollout, train, mean, evidence), mean)


def agreement(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.float64]:
    """[layers]: mean share of equal choices, whatever their order; routes are [rows, layers, topk]."""
    same = (first[..., :, None] == second[..., None, :]).any(-1)
    return same.mean((0, 2))


def _cause(
    rollout: NDArray[Any], train: NDArray[Any], mean: float, evidence: str
) -> tuple[str, str]:
    """Evidence and cause; the best explanation among swapped layers and shifted tokens, if it is much better."""
    layers = rollout.shape[1]
    cross = np.array(
        [
            [agreement(rollout[:, i : i + 1], train[:, j : j + 1])[0] for j in range(layers)]
            for i in range(layers)
        ]
    )
    best = cross.argmax(1)
    if sorted(best) == list(range(layers)) and cross.max(1).mean() > mean + 0.1:
        moved = [f"{i} with {j}" for i, j in enumerate(best) if i != j]
        text = f"{evidence}; matching engine layer {', '.join(moved[:4])} gives {cross.max(1).mean():.0%}"
        return text, "the layers of the routes are in another order than the trainer's"
    for shift in (-1, 1):
        shifted = float(agreement(rollout[1:-1], np.roll(train, shift, 0)[1:-1]).mean())
        if shifted > mean + 0.1:
            text = f"{evidence}; one token away it is {shifted:.0%}"
            return text, "the routes are shifted by one token against the tokens"
    return evidence, "different router precision, or weights of another step"


def _finding(evidence: str, cause: str, mean: float) -> Finding:
    return Finding(
        "routing",
        "engine and trainer route tokens to different experts",
        "warning",
        evidence,
        cause,
        "replay the engine's routes (--use-rollout-routing-replay) once their order is right; keep the router in float32",
        {"agreement": mean},
    )


def _rows(pairs: Sequence[tuple[Any, Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Twice [rows, layers, topk]: the tokens of the first samples, enough to judge, that both sides have routed.

    The last token of a sample is left out: engines sample it and never read it.
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
    """[rows]: False where every choice is the type's largest value or negative, which stand for "no route"."""
    missing = np.iinfo(routes.dtype).max if routes.dtype.kind in "iu" else np.inf
    return ~((routes == missing) | (routes < 0)).all((1, 2))
