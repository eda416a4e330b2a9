"""Deadlines that follow from the lengths of responses, worked out by hand."""

from __future__ import annotations

import pytest

from plugin.config import JobConfig
from plugin.controller.preflight.job_checks import check_patience
from plugin.errors import ConfigError

pytestmark = pytest.mark.hostile

SERVERS = {
    "rollout_engine": "http",
    "rollout_url": "http://127.0.0.1:1",
    "rollout_weights_dir": "/w",
}


def test_no_response_of_32k_tokens_is_given_up_at_the_pace_of_a_short_one() -> None:
    # 32,768 tokens at 10 a second.
    config = JobConfig(**SERVERS, max_response_length=32_768, rollout_request_retries=2)  # type: ignore[arg-type]
    assert config.request_patience == pytest.approx(3276.8)
    # Their client gives every request a deadline, so the engine only has to show that it lives.
    assert config.engine_patience == 600 and config.server_silence == 600
    check_patience(config)
    assert JobConfig(**SERVERS, max_response_length=1000).request_patience == 600  # type: ignore[arg-type]


def test_an_engine_that_reports_tokens_is_not_waited_for_as_long_as_a_response_takes() -> None:
    assert JobConfig(max_response_length=32_768).engine_patience == 600
    assert JobConfig(max_response_length=32_768, rollout_timeout=5.0).engine_patience == 5
    own = JobConfig(rollout_engine="mine.engines:make", max_response_length=32_768)
    assert own.engine_patience == pytest.approx(600 + 3276.8)


def test_weights_do_not_cut_off_the_responses_that_they_wait_for() -> None:
    # 1,800 s, and in an asynchronous job the longest response: 20,000 tokens at 5 a second.
    slow = {"max_response_length": 20_000, "least_response_speed": 5.0, "use_tis": True}
    assert JobConfig(**slow).transfer_patience == 1800  # type: ignore[arg-type]
    assert JobConfig(**slow, async_rollouts=True).transfer_patience == 1800 + 4000  # type: ignore[arg-type]
    partial = JobConfig(**slow, async_rollouts=True, partial_rollouts=True)  # type: ignore[arg-type]
    assert partial.transfer_patience == 1800
    assert JobConfig(**slow, weight_timeout=7.0).transfer_patience == 7  # type: ignore[arg-type]


def test_a_deadline_that_long_responses_would_miss_is_refused_before_the_start() -> None:
    short = {"rollout_request_timeout": 600.0}
    config = JobConfig(**SERVERS, max_response_length=32_768, **short)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"takes 3276.8 s; raise the timeout or the speed"):
        check_patience(config)
    # Seconds without a token, not for a response.
    silent = {"rollout_timeout": 30.0}
    config = JobConfig(**SERVERS, max_response_length=32_768, **silent)  # type: ignore[arg-type]
    check_patience(config)
    assert config.engine_patience == config.server_silence == 30
