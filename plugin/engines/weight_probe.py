"""The probe by which an engine shows what it computes with: a short response, and checksums.

An engine answers with its ordinary `generate`. One that stands for several models (servers) has
`probe(request, parameters) -> [(name, answers)]`, and one that can has `weight_checksums()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plugin.engines.protocol import (
    Answer,
    GenerationRequest,
    RolloutEngine,
    SamplingParameters,
    check_generations,
)
from plugin.weights.checksums import Checksums


@dataclass(frozen=True)
class WeightProbe:
    """What an engine is asked once it has new weights.

    checksums: whether it also reports those of its weights, if it can
    """

    request: GenerationRequest
    parameters: SamplingParameters
    checksums: bool = False


@dataclass(frozen=True)
class ProbeAnswer:
    """What one model answered.

    server: its address; empty where the engine itself generates
    answers: one per seed of the probe
    """

    server: str
    answers: Sequence[Answer]
    checksums: Checksums | None = None


def answer_probe(engine: RolloutEngine, probe: WeightProbe) -> list[ProbeAnswer]:
    """Have an engine that is idle answer, once for each model that it stands for."""
    # OpenMP counts threads for each of ours, and this may be the first operation of this one.
    torch.set_num_threads(torch.get_num_threads())
    several: Any = getattr(engine, "probe", None)
    if several is not None:
        found = several(probe.request, probe.parameters)
    else:
        found = [("", engine.generate([probe.request], probe.parameters)[0])]
    for _, answers in found:
        check_generations([probe.request], [answers], probe.parameters)
    report: Any = getattr(engine, "weight_checksums", None)
    sums = report() if probe.checksums and report is not None else None
    return [ProbeAnswer(server, answers, sums) for server, answers in found]
