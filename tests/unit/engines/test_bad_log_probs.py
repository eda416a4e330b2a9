"""--bad-log-probs: log-probs that are none fail their response, or have their tokens masked and counted."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from plugin.config import JobConfig
from plugin.controller.batch import describe_batch, prepare_batch
from plugin.engines.choice import sampling_parameters
from plugin.engines.protocol import Generation, GenerationRequest, SamplingParameters
from plugin.engines.response_stream import ResponseStream
from plugin.engines.servers.calls import MalformedAnswer
from plugin.engines.servers.dialects import SglangDialect, VllmDialect
from plugin.environments.group_server import trajectory_of
from plugin.environments.trajectory import Rollouts, Trajectory
from plugin.errors import BatchError
from tests.unit.engines.servers.good_answers import (
    PARAMETERS,
    REQUEST,
    SHAPE,
    sglang_answer,
    vllm_answer,
)
from tests.unit.engines.servers.misbehaving_server import LOG_PROBS, TOKENS

DROP = SamplingParameters(drop_bad_log_probs=True)
ERROR = SamplingParameters()


class Reporting:
    """An engine whose every response is three tokens with these log-probs."""

    def __init__(self, *log_probs: float) -> None:
        self._log_probs = torch.tensor(log_probs)

    def generate(
        self, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> list[list[Generation]]:
        one = Generation(torch.tensor([4, 5, 6]), "stop", 0, self._log_probs)
        return [[one for _ in request.seeds] for request in requests]


def played(parameters: SamplingParameters, *log_probs: float) -> Trajectory:
    stream = ResponseStream(Reporting(*log_probs), 8)  # type: ignore[arg-type]
    stream.add("owner", GenerationRequest((1, 2), (0,)), parameters)
    [finished] = stream.step()
    return trajectory_of((1, 2), finished.answer)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf, -1e30, 0.5])
def test_the_token_is_masked_and_counted_or_the_batch_is_refused(bad: float) -> None:
    good, spoiled = played(DROP, -1.0, -2.0, -0.5), played(DROP, -1.0, bad, -0.5)
    assert good.samples[0].loss_mask.tolist() == [1, 1, 1]
    assert spoiled.samples[0].loss_mask.tolist() == [1, 0, 1]
    rollouts = Rollouts.of(
        [[replace(one, reward=1.0 * i) for i, one in enumerate((good, spoiled))]]
    )
    config = JobConfig(bad_log_probs="drop", rollout_batch_size=1, n_samples_per_prompt=2)
    batch = prepare_batch(config, rollouts)
    assert describe_batch(config, batch, rollouts, 0)["bad_log_prob_share"] == 1 / 6
    refused = played(ERROR, -1.0, bad, -0.5)
    assert refused.samples[0].loss_mask.tolist() == [1, 1, 1]
    with pytest.raises(BatchError, match=r"rollout_log_probs of sample 0 is .* at position 1"):
        Rollouts.of([[refused]])
    assert "bad_log_prob_share" not in describe_batch(JobConfig(), batch, rollouts, 0)


def test_a_response_without_any_log_prob_fails_and_is_sampled_again() -> None:
    trajectory = played(DROP, math.nan, -math.inf, math.nan)
    assert not trajectory.samples
    assert trajectory.error == "no token of the response has a finite log-prob"


def test_the_flag_reaches_the_engines() -> None:
    assert not sampling_parameters(JobConfig(), ()).drop_bad_log_probs
    assert sampling_parameters(JobConfig(bad_log_probs="drop"), ()).drop_bad_log_probs


@pytest.mark.parametrize("dialect", [VllmDialect, SglangDialect])
@pytest.mark.parametrize("bad", [None, math.nan, -math.inf, "x", -9999.0, 0.5])
def test_what_a_server_reports_instead_of_a_log_prob_is_none(dialect: type, bad: object) -> None:
    body = vllm_answer() if dialect is VllmDialect else sglang_answer()
    # 7 stands for the second log-prob, in the text of the answer.
    text = json.dumps(body)
    assert text.count(json.dumps(LOG_PROBS[1])) == 1
    body = json.loads(text.replace(json.dumps(LOG_PROBS[1]), json.dumps(bad)))
    with pytest.raises(MalformedAnswer, match="cannot be that of a sample"):
        dialect(SHAPE).parse(body, REQUEST, PARAMETERS, 3)
    dropping = replace(PARAMETERS, drop_bad_log_probs=True)
    found = dialect(SHAPE).parse(body, REQUEST, dropping, 3).log_probs
    assert found is not None
    expected = np.array(LOG_PROBS[: len(TOKENS)], np.float32)
    assert math.isnan(found[1]) and found[0] == expected[0] and found[2] == expected[2]
