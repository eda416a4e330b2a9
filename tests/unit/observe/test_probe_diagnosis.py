"""Limits and diagnoses of a probe, on numbers computed by hand."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from plugin.config import JobConfig
from plugin.observe.findings import bisect_command
from plugin.observe.probe_diagnosis import (
    Limit,
    ProbedModel,
    ProbeScores,
    likely_cause,
    limit_for,
    probe_finding,
)

BFLOAT16 = Limit(0.15, "bfloat16", "bfloat16")
FLOAT32 = Limit(1e-3, "float32", "float32")
MODEL = ProbedModel(vocab_size=49152)


def scores(distance: Any, *, rollout: float = -2.0, responses: int = 4) -> ProbeScores:
    """Responses of 8 tokens; distance: |train - rollout| of each place, or of all of them."""
    by_place = np.broadcast_to(np.asarray(distance, np.float64), 8)
    return ProbeScores(
        np.full(8 * responses, rollout),
        rollout - np.tile(by_place, responses),
        np.tile(np.arange(8), responses),
    )


@pytest.mark.parametrize(
    ("settings", "trainer", "options", "expected"),
    [
        ({}, "float32", {}, 1e-3),
        ({"rollout_dtype": "bfloat16"}, "float32", {}, 0.1),
        ({}, "bfloat16", {}, 0.1),  # the trainer's is the coarser
        ({"rollout_dtype": "float16"}, "float32", {}, 0.05),
        ({"rollout_dtype": "float16"}, "bfloat16", {}, 0.1),
        ({"rollout_quantization": "int8"}, "float32", {}, 0.5),
        ({}, "float32", {"on_gpu": True}, 0.05),  # TF32
        ({"rollout_dtype": "bfloat16"}, "bfloat16", {"is_moe": True}, 0.2),
        ({}, "float32", {"is_moe": True}, 1e-3),  # ties within 1e-6 are rare
        ({"rollout_temperature": 0.5}, "float32", {}, 2e-3),  # logits are divided by it
        ({"rollout_temperature": 2.0}, "float32", {}, 1e-3),
        ({"rollout_engine": "vllm", "vllm_args": ("quantization=fp8",)}, "bfloat16", {}, 0.5),
        (
            {
                "rollout_engine": "http",
                "rollout_url": "http://127.0.0.1:1",
                "rollout_weights_dir": "w",
            },
            "float32",
            {},
            0.5,
        ),
    ],
)
def test_the_coarser_dtype_sets_the_limit(
    settings: dict[str, Any], trainer: Any, options: dict[str, Any], expected: float
) -> None:
    limit = limit_for(JobConfig(**settings), trainer, **options)
    assert math.isclose(limit.value, expected)


def test_routing_replay_leaves_no_ties_to_allow_for() -> None:
    config = JobConfig(
        embedded_model="qwen3_moe",
        rollout_dtype="bfloat16",
        use_rollout_routing_replay="ids",
    )
    assert limit_for(config, "bfloat16", is_moe=True).value == 0.1


def test_the_mean_is_over_all_tokens_and_what_is_no_number_is_infinite() -> None:
    # (7 x 0.1 + 1 x 0.9) / 8 = 0.2
    assert math.isclose(scores([0.1] * 7 + [0.9]).mean, 0.2)
    assert scores(math.nan).mean == math.inf


def test_a_difference_at_the_limit_is_healthy_and_one_beyond_it_is_a_finding() -> None:
    config = JobConfig()
    assert probe_finding("engine 0", scores(0.15), BFLOAT16, MODEL, config) is None
    found = probe_finding("engine 0", scores(0.16), BFLOAT16, MODEL, config)
    assert found is not None and found.unmistakable
    assert "mean |log-prob difference| 0.16 on 32 tokens of a probe, limit 0.15" in found.evidence
    assert "megatron-tis doctor --bisect" in found.what_to_try
    other = ProbedModel(100, differing=["a", "b", "c", "d"], checked=9)
    named = probe_finding("engine 0", scores(0.0), BFLOAT16, other, config)
    assert named is not None
    assert (
        named.likely_cause
        == "4 of 9 tensors of the engine differ from the trainer's: a, b, c and 1 more"
    )


@pytest.mark.parametrize(
    ("given", "limit", "model", "cause"),
    [
        # ln 49152 = 10.8: the engine is near uniform, the trainer finds its tokens impossible.
        (scores(4.7, rollout=-10.3), BFLOAT16, MODEL, "^a missing tensor"),
        (scores(4.7, rollout=-10.3), BFLOAT16, ProbedModel(49152, is_tied=True), "^the tied LM"),
        (scores(12.0), BFLOAT16, ProbedModel(49152, is_tied=True), "^the tied LM head"),
        (scores([0.0] + [0.5] * 7), BFLOAT16, MODEL, "^positions or the KV cache"),
        (scores(np.linspace(0.2, 4, 8)), BFLOAT16, MODEL, "^a wrong rope"),
        # A first token that is nearly certain says nothing.
        (scores([0.0] + [0.5] * 7, rollout=-0.1), BFLOAT16, MODEL, "^a wrong tensor"),
        (scores(0.02), FLOAT32, MODEL, "^a coarser dtype: float16 explains"),
        (scores(0.08), FLOAT32, MODEL, "^a coarser dtype: bfloat16 explains"),
        (scores(0.4), FLOAT32, MODEL, "^a wrong tensor"),
        (scores(0.4), BFLOAT16, MODEL, "^a wrong tensor"),
        (scores(0.4), BFLOAT16, ProbedModel(49152, checked=9), "all 9 tensors have the trainer"),
    ],
)
def test_the_shape_of_the_difference_names_its_cause(
    given: ProbeScores, limit: Limit, model: ProbedModel, cause: str
) -> None:
    assert re.search(cause, likely_cause(given, limit, model)), likely_cause(given, limit, model)


def test_an_engine_that_computes_no_numbers_is_named() -> None:
    broken = ProbeScores(np.array([-1.0, math.nan]), np.array([-1.0, -1.0]), np.arange(2))
    assert likely_cause(broken, BFLOAT16, MODEL).startswith("the engine computes NaN")


def test_the_next_command_has_the_settings_of_the_job() -> None:
    config = JobConfig(
        hf_checkpoint="my model",
        prompt_data="rows",
        train_dtype="bfloat16",
        rollout_dtype="float16",
    )
    assert bisect_command(config) == (
        "megatron-tis doctor --bisect --hf-checkpoint 'my model' --train-dtype bfloat16 "
        "--rollout-dtype float16"
    )
