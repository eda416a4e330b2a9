"""Around a change of weights: when it may happen, and how an engine shows what it computes with.

Weights change under running responses between two decode steps (`PausePoint`). After that an engine
answers a probe: a short response by its ordinary `generate`, and checksums. One that fronts
several models (servers) has `probe(request, parameters) -> [(name, answers)]`, and one that can has
`weight_checksums()`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from plugin.engines.protocol import (
    Answer,
    GenerationRequest,
    RolloutEngine,
    SamplingParameters,
    check_generations,
)
from plugin.errors import TransferError
from plugin.weights.checksums import Checksums, differing


@dataclass(frozen=True)
class WeightProbe:
    """What an engine is asked once it has new weights.

    request: None = it generates nothing, for an engine that has no memory for a response yet
    checksums: whether it also reports those of its weights, if it can
    """

    request: GenerationRequest | None
    parameters: SamplingParameters
    checksums: bool = False

    def without_response(self) -> WeightProbe | None:
        """The same for checksums alone; None if they are not asked for."""
        return replace(self, request=None) if self.checksums else None


@dataclass(frozen=True)
class ProbeAnswer:
    """What one model answered.

    server: its address; empty where the engine itself generates
    answers: one per seed of the probe; none where checksums alone were asked for
    """

    server: str
    answers: Sequence[Answer]
    checksums: Checksums | None = None


def answer_probe(engine: RolloutEngine, probe: WeightProbe) -> list[ProbeAnswer]:
    """Have an idle engine answer, once for each model behind it."""
    # OpenMP counts threads for each of ours, and this may be the first operation of this one.
    torch.set_num_threads(torch.get_num_threads())
    report: Any = getattr(engine, "weight_checksums", None)
    sums = report() if probe.checksums and report is not None else None
    if probe.request is None:
        return [ProbeAnswer("", (), sums)]
    several: Any = getattr(engine, "probe", None)
    if several is not None:
        found = several(probe.request, probe.parameters)
    else:
        found = [("", engine.generate([probe.request], probe.parameters)[0])]
    for _, answers in found:
        check_generations([probe.request], [answers], probe.parameters)
    return [ProbeAnswer(server, answers, sums) for server, answers in found]


def wrong_tensors(answers: Sequence[ProbeAnswer], expected: Checksums) -> list[str]:
    """Names of the tensors whose checksums are not those expected."""
    own = [answer.checksums for answer in answers if answer.checksums]
    return sorted({name for sums in own for name in differing(sums, expected)})


def require_equal(answers: Sequence[ProbeAnswer], expected: Checksums, version: int) -> None:
    """A `TransferError` if an engine reports other checksums than the trainer's."""
    if wrong := wrong_tensors(answers, expected):
        raise TransferError(
            f"{len(wrong)} tensors of weight version {version} are not the trainer's, the first of "
            f"them {wrong[0]}"
        )


class PausePoint:
    """One thread generates, another changes the weights; never both at the same time.

    The generating thread is in `generating` during every decode step; whoever waits for `changing`
    has its turn between two of them, before a step that has not begun.

    waits: after a `TransferError` in a change, nothing is generated until another one succeeds
    """

    def __init__(self, *, waits: bool = False) -> None:
        self._waits = waits
        self._turn = threading.Condition()
        self._busy = False
        self._changes_waiting = 0
        self._half_changed = False

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Keep changes out during a decode step."""

        def is_my_turn() -> bool:
            must_wait = self._changes_waiting > 0 or (self._waits and self._half_changed)
            return not self._busy and not must_wait

        with self._turn:
            self._turn.wait_for(is_my_turn)
            self._busy = True
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Wait until nothing is generated, and keep decode steps out."""
        with self._turn:
            self._changes_waiting += 1
            self._turn.wait_for(lambda: not self._busy)
            self._busy = True
        try:
            yield
            self._half_changed = False
        except TransferError:
            self._half_changed = True
            raise
        finally:
            with self._turn:
                self._changes_waiting -= 1
            self._end()

    def _end(self) -> None:
        with self._turn:
            self._busy = False
            self._turn.notify_all()
