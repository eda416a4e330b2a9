"""Chooses samples of a rollout for samples.jsonl and decodes them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugin.environments.trajectory import Rollouts

#: Of a text, the beginning and the end: a run of 10,000 steps must not fill the disk.
_MOST_CHARACTERS = 8000


def readable_samples(
    rollouts: Rollouts,
    parts: Mapping[str, NDArray[np.float64]],
    prompts: Sequence[int],
    tokenizer: Any,
    count: int,
    seed: str,
) -> list[dict[str, Any]]:
    """At most `count` samples as samples.jsonl holds them: in turn the best, the worst, a random.

    parts: [M] of every reward before its weight; prompts: the number of each group's prompt
    """
    return [
        {
            "kind": kind,
            "prompt_index": int(prompts[int(rollouts.groups[i])]),
            "reward": float(rollouts.rewards[i]),
            "rewards": {name: float(values[i]) for name, values in parts.items()},
            "truncated": bool(rollouts.truncated[i]),
            "weight_version": int(rollouts.oldest_version[i]),
            **_texts(rollouts, i, tokenizer),
        }
        for kind, i in chosen(rollouts.rewards, count, seed)
    ]


def chosen(rewards: NDArray[np.float64], count: int, seed: str) -> list[tuple[str, int]]:
    """Kinds and numbers of different trajectories: best, worst, random, best, ..."""
    order = [int(i) for i in np.argsort(rewards, kind="stable")]
    draw = random.Random(f"samples/{seed}")
    found: list[tuple[str, int]] = []
    while order and len(found) < count:
        kind = ("best", "worst", "random")[len(found) % 3]
        place = {"best": -1, "worst": 0, "random": draw.randrange(len(order))}[kind]
        found.append((kind, order.pop(place)))
    return found


def _texts(rollouts: Rollouts, trajectory: int, tokenizer: Any) -> dict[str, Any]:
    """Prompt and response of a trajectory's last sample, and how many tokens the response has."""
    last = int(rollouts.sample_starts[trajectory] + rollouts.samples[trajectory] - 1)
    tokens = rollouts.batch.columns["unconcat_tokens"][last].tolist()
    length = int(rollouts.batch.columns["response_lengths"][last])
    return {
        "tokens": length,
        "prompt": _text(tokenizer, tokens[: len(tokens) - length]),
        "response": _text(tokenizer, tokens[len(tokens) - length :]),
    }


def _text(tokenizer: Any, tokens: list[int]) -> str:
    try:
        text = str(tokenizer.decode(tokens))
    except Exception:  # of whatever tokenizer; ids that it does not know are still readable
        text = " ".join(map(str, tokens))
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
