"""Server answers that hypothesis spoils: a generation comes out, or `MalformedAnswer`, and nothing else."""

from __future__ import annotations

import base64
import copy
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plugin.engines.protocol import Generation, check_generations
from plugin.engines.servers.calls import MalformedAnswer, parse_json
from plugin.engines.servers.dialects import DIALECTS
from tests.unit.engines.servers.good_answers import (
    PARAMETERS,
    REQUEST,
    SHAPE,
    sglang_answer,
    vllm_answer,
)

pytestmark = pytest.mark.hostile


ANSWERS = {"vllm": vllm_answer(), "sglang": sglang_answer()}
#: What a field may not hold, or only just may.
NASTY: list[Any] = [None, True, False, 0, 1, 3, -1, 95, 96, 2**63, -(2**64), 10**400, 1e-3, -0.0]
NASTY += [-9998.9, -9999, 1e308, -1e308, float("nan"), float("inf"), -float("inf"), "", "stop"]
NASTY += [
    "length",
    "abort",
    {"type": "abort"},
    "\ud800",
    "AAAA",
    "k05VTVBZ",
    "é",
    [],
    {},
    [[]],
    [None] * 3,
    [3],
    {"type": "stop"},
]
NASTY += [
    {"token_logprobs": [-1] * 3},
    {"token_logprobs": {}},
    [[-1, 3, None]] * 3,
    [[]] * 3,
    ["x"] * 3,
]
VALUES = (
    st.sampled_from(NASTY).map(copy.deepcopy) | st.integers() | st.floats() | st.text(max_size=8)
)


SPOTS, BYTES = st.integers(0, 1000), st.integers(0, 255)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to every value inside `value`."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [path] + [place for key, inner in items for place in places(inner, (*path, key))]


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[str, bytes]:
    """The name of a dialect and an answer in it, with one or two values replaced or bytes changed."""
    name = draw(st.sampled_from(sorted(ANSWERS)))
    body: Any = copy.deepcopy(ANSWERS[name])
    changes = draw(st.integers(0, 2))
    for _ in range(changes):
        *above, last = draw(st.sampled_from(places(body)[1:] or [(None,)]))
        holder = body
        for key in above:
            holder = holder[key]
        if not isinstance(holder, (dict, list)) or last is None:
            break
        old = holder[last]
        if isinstance(old, str) and len(old) > 40:  # routes: inside the base64
            data = bytearray(base64.b64decode(old))
            at, byte, end = draw(st.tuples(SPOTS, BYTES, SPOTS | st.just(len(data))))
            data[at % len(data)] = byte
            holder[last] = base64.b64encode(data[:end]).decode()
        elif draw(st.booleans()):
            holder[last] = draw(VALUES)
        else:
            del holder[last]
    text = bytearray(json.dumps(body).encode())
    if changes == 0:
        at, byte, end = draw(st.tuples(SPOTS, BYTES, SPOTS | st.just(len(text))))
        text[at % len(text)] = byte
        text = text[:end]
    return name, bytes(text)


def test_no_answer_of_a_server_raises_anything_else() -> None:
    outcomes: Counter[str] = Counter()

    # Eight answers to an example: most of the time is hypothesis' own, per example.
    @given(st.lists(spoiled(), min_size=8, max_size=8))
    @settings(
        max_examples=255,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def read(answers: list[tuple[str, bytes]]) -> None:
        for name, text in answers:
            dialect = DIALECTS[name](replace(SHAPE, interrupts=True))
            try:
                body = parse_json(text)
                generation = dialect.parse(body, REQUEST, PARAMETERS, 0)
                dialect.label_of_response(body)
            except MalformedAnswer as error:
                outcomes["malformed"] += 1
                assert len(str(error)) < 2000
            else:
                outcomes["used"] += 1
                assert isinstance(generation, Generation)
                check_generations([REQUEST], [[generation]], PARAMETERS)
                assert generation.log_probs is not None and bool((generation.log_probs <= 0).all())

    read()
    assert outcomes.total() >= 2000 and min(outcomes.values()) > 50, outcomes


@pytest.mark.parametrize("name", ANSWERS)
def test_no_answer_to_another_call_raises_anything_else(name: str) -> None:
    dialect = DIALECTS[name](SHAPE)
    calls = [*dialect.weight_update("weights", "label", abort=True), dialect.weight_label("label")]
    if name == "vllm":
        calls.append(dialect.self_test(PARAMETERS.__class__(temperature=0.5)))

    @given(
        VALUES
        | VALUES.map(lambda v: {"success": v, "weight_version": v, "choices": v, "message": v})
    )
    @settings(max_examples=200, deadline=None, database=None, derandomize=True)  # fmt: skip
    def read(body: Any) -> None:
        for call in calls:
            try:
                call.check(body)
            except MalformedAnswer as error:
                assert len(str(error)) < 2000

    read()
