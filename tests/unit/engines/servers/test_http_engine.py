"""The HTTP client against servers that misbehave."""

from __future__ import annotations

import functools
import gc
import importlib.util
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from plugin.config import JobConfig
from plugin.engines.choice import check_engine, make_engine
from plugin.engines.expert_routes import continued_routes
from plugin.engines.protocol import (
    Generation,
    GenerationFailure,
    GenerationRequest,
    SamplingParameters,
    check_generations,
)
from plugin.engines.servers.http_engine import HttpEngine
from plugin.engines.weight_changes import WeightProbe, answer_probe
from plugin.errors import ConfigError, EngineError, WeightError
from tests.parallel.tiny_models import FAMILIES, hf_state_dict
from tests.unit.engines.servers import misbehaving_server as server_kinds
from tests.unit.engines.servers.misbehaving_server import (
    LOG_PROBS,
    STOP,
    TOKENS,
    MisbehavingServer,
    saying,
    status,
    text,
)
from tests.unit.engines.tiny_engines import http_engine, load

pytestmark = pytest.mark.usefixtures("jumping_clock")

PARAMETERS = SamplingParameters(max_response_length=4, stop_token_ids=(STOP,))
ONE = [GenerationRequest((10, 11), (7,))]
NAN = float("nan")


@functools.cache
def weights(seed: int) -> dict[str, torch.Tensor]:
    return hf_state_dict(FAMILIES["qwen3"](), seed)


def connections() -> set[Any]:
    found = psutil.Process().net_connections(kind="inet")
    return {c for c in found if c.status in ("ESTABLISHED", "LISTEN", "CLOSE_WAIT")}


@pytest.fixture
def start() -> Iterator[Callable[..., MisbehavingServer]]:
    """Starts servers; afterwards no thread and no socket of client or server is left."""
    weights(0)  # before the threads are counted: a progress bar keeps one
    gc.collect()  # before the sockets are counted: stores of other tests close theirs
    threads, sockets = set(threading.enumerate()), connections()
    servers: list[MisbehavingServer] = []

    def starter(*script: Any, port: int = 0) -> MisbehavingServer:
        servers.append(MisbehavingServer(*script, port=port))
        return servers[-1]

    yield starter
    for server in servers:
        server.close()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - threads or connections() - sockets:
        assert time.monotonic() < deadline, (threading.enumerate(), connections() - sockets)
        time.sleep(0.02)


def engine_for(tmp_path: Path, *servers: MisbehavingServer | str, **options: Any) -> HttpEngine:
    """An engine with weights of version 0 at the servers, impatient unless told otherwise."""
    urls = [server if isinstance(server, str) else server.url for server in servers]
    settings = {"rollout_request_timeout": 5.0, "rollout_request_retries": 0, "step_timeout": 20.0}
    settings |= {"rollout_weights_dir": str(tmp_path), "weight_sync": "directory"}
    engine = http_engine(FAMILIES["qwen3"]().to_dict(), *urls, **(settings | options))
    load(engine, weights(0))
    return engine


def only(engine: HttpEngine) -> Generation | GenerationFailure:
    answers = engine.generate(ONE, PARAMETERS)
    check_generations(ONE, answers, PARAMETERS)
    return answers[0][0]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_good_answer_becomes_a_generation(start: Any, tmp_path: Path, kind: str) -> None:
    server = start()
    answer = only(engine_for(tmp_path, server, rollout_server=kind))
    assert isinstance(answer, Generation)
    assert answer.tokens.tolist() == TOKENS
    assert torch.allclose(answer.log_probs, torch.tensor(LOG_PROBS))
    assert (answer.finish_reason, answer.weight_version) == ("stop", 0)
    asked = server.asked[0]
    assert asked.get("prompt", asked.get("input_ids")) == [10, 11]
    assert asked.get("seed", asked.get("sampling_params", {}).get("sampling_seed")) == 7


def test_a_probe_asks_every_server_in_service_whichever_has_the_prompt(
    start: Any, tmp_path: Path
) -> None:
    servers = [start(), start()]
    engine = engine_for(tmp_path, *servers)
    request = GenerationRequest((10, 11), (7, 8))
    answers = answer_probe(engine, WeightProbe(request, PARAMETERS, checksums=True))
    assert [answer.server for answer in answers] == [server.url for server in servers]
    for server, answer in zip(servers, answers, strict=True):
        assert [asked["seed"] for asked in server.asked if "seed" in asked] in ([7, 8], [8, 7])
        assert [one.tokens.tolist() for one in answer.answers] == [TOKENS, TOKENS]
        assert answer.checksums is None
    engine.pool.take_out(engine.pool.servers[0], "a test")
    [only_one] = answer_probe(engine, WeightProbe(request, PARAMETERS))
    assert only_one.server == servers[1].url


MALFORMED = {
    "too few log-probs": (saying(TOKENS, LOG_PROBS[:2], "stop"), "log-probs"),
    "no log-probs": (saying(TOKENS, None, "stop"), "no log-probs"),
    "NaN": (saying(TOKENS, [-0.5, NAN, -0.25], "stop"), "log-prob nan at token 1"),
    "null": (saying(TOKENS, [-0.5, None, -0.25], "stop"), "log-prob None at token 1"),
    "minus infinity": (saying(TOKENS, [-0.5, -9999.0, -0.25], "stop"), "cannot be that of a sample"),
    "above 1": (saying(TOKENS, [-0.5, 0.5, -0.25], "stop"), "log-prob 0.5 at token 1"),
    "too long": (saying([11] * 5, [-1.0] * 5, "length"), "5 tokens came back where at most 4"),
    "no tokens": (saying([], [], "stop"), "no tokens"),
    "not a token": (saying([11, 99, 3], LOG_PROBS, "stop"), "token 99 is not among the model's 96"),
    "not an integer": (saying([11, 1.5, 3], LOG_PROBS, "stop"), "not a list of integers"),
    "stopped without a stop": (saying([11, 12], [-1.0, -1.0], "stop"), "12 is no stop token"),
    "cut short": (saying([11, 12], [-1.0, -1.0], "length"), "length with 2 of 4 tokens"),
    "goes on": (saying([3, 12, 3], LOG_PROBS, "stop"), "goes on after a stop token"),
    "aborted": (saying([11, 12], [-1.0, -1.0], "abort"), "finish reason 'abort'"),
    "empty": (text(b""), "has no"),
    "not JSON": (text(b"<html>proxy error</html>"), "not JSON"),
    "another shape": (text(b'{"detail": []}'), "has no"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_answer_is_never_a_generation(
    start: Any, tmp_path: Path, case: str, kind: str
) -> None:
    behavior, message = MALFORMED[case]
    server = start(behavior)
    answer = only(engine_for(tmp_path, server, rollout_server=kind))
    assert isinstance(answer, GenerationFailure)
    assert message in answer.reason
    assert server.url in answer.reason


def test_a_server_that_says_nothing_is_given_up_at_the_deadline(start: Any, tmp_path: Path) -> None:
    answer = only(engine_for(tmp_path, start(server_kinds.hang), rollout_request_timeout=0.3))
    assert "no complete answer within 0.3 s" in answer.reason


def test_trickling_bytes_do_not_move_the_deadline(start: Any, tmp_path: Path) -> None:
    answer = only(engine_for(tmp_path, start(server_kinds.trickle), rollout_request_timeout=0.4))
    assert "no complete answer within 0.4 s" in answer.reason


def test_a_connection_that_breaks_in_the_answer_is_a_failure(start: Any, tmp_path: Path) -> None:
    answer = only(engine_for(tmp_path, start(server_kinds.die_midstream)))
    assert "the connection broke" in answer.reason


@pytest.mark.parametrize(
    "trouble", [status(500), status(503), status(429), server_kinds.die_midstream, MALFORMED["NaN"][0]]
)  # fmt: skip
def test_trouble_that_passes_is_retried_away(start: Any, tmp_path: Path, trouble: Any) -> None:
    server = start(trouble, trouble)
    answer = only(engine_for(tmp_path, server, rollout_request_retries=2))
    assert isinstance(answer, Generation)
    assert len(server.asked) == 3


def test_trouble_that_stays_fails_after_the_retries_and_names_server_and_cause(
    start: Any, tmp_path: Path
) -> None:
    server = start(*[status(500)] * 2)
    answer = only(engine_for(tmp_path, server, rollout_request_retries=1))
    assert answer.reason.startswith(f"2 attempts failed, the last at {server.url}: HTTP 500")
    assert len(server.asked) == 2


def test_a_refused_request_is_not_repeated(start: Any, tmp_path: Path) -> None:
    server = start(status(400))
    answer = only(engine_for(tmp_path, server, rollout_request_retries=3))
    assert "HTTP 400" in answer.reason
    assert len(server.asked) == 1


def test_a_retry_goes_to_another_server(start: Any, tmp_path: Path) -> None:
    bad, good = start(status(500)), start()
    assert isinstance(only(engine_for(tmp_path, bad, good, rollout_request_retries=1)), Generation)
    assert (len(bad.asked), len(good.asked)) == (1, 1)


def test_when_one_response_fails_the_others_of_its_prompt_are_canceled(
    start: Any, tmp_path: Path
) -> None:
    server = start()

    def by_seed(handler: Any) -> None:
        if handler.payload["seed"] == 2:
            status(400)(handler)
        elif handler.payload["seed"] == 3:
            server_kinds.hang(handler)
        else:
            server_kinds.well(handler)

    server.always = by_seed
    requests = [GenerationRequest((10,), (2, 3)), GenerationRequest((10,), (4, 5))]
    failed, fine = engine_for(tmp_path, server, rollout_request_timeout=20.0).generate(
        requests, PARAMETERS
    )
    assert "HTTP 400" in failed[0].reason
    assert failed[1].reason.startswith("not waited for: another response to this prompt failed")
    assert all(isinstance(answer, Generation) for answer in fine)


def test_requests_are_spread_over_the_servers(start: Any, tmp_path: Path) -> None:
    servers = [start(), start(), start()]
    for server in servers:
        server.always = lambda handler: (time.sleep(0.05), server_kinds.well(handler))
    engine = engine_for(tmp_path, *servers)
    requests = [GenerationRequest((10,), (seed,), prompt_index=seed) for seed in range(30)]
    answers = engine.generate(requests, PARAMETERS)
    assert all(isinstance(answer, Generation) for [answer] in answers)
    assert min(len(server.asked) for server in servers) >= 5


def test_a_burst_of_failures_counts_as_one_trouble(start: Any, tmp_path: Path) -> None:
    asked = threading.Barrier(8)

    def fail_together(handler: Any) -> None:
        """All have been asked for before the first of them fails."""
        asked.wait(30)
        status(503)(handler)

    server = start(*[fail_together] * 8)
    engine = engine_for(tmp_path, server, rollout_request_retries=2, rollout_request_timeout=60.0)
    answers = engine.generate([GenerationRequest((10,), tuple(range(8)))], PARAMETERS)
    assert all(isinstance(answer, Generation) for answer in answers[0])
    assert engine.pool.times_out == 0


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_dead_server_is_left_out_and_the_others_do_its_work(start: Any, tmp_path: Path) -> None:
    good = start()
    engine = engine_for(tmp_path, f"http://127.0.0.1:{closed_port()}", good)
    answers = engine.generate([GenerationRequest((10,), tuple(range(6)))], PARAMETERS)
    assert all(isinstance(answer, Generation) for answer in answers[0])
    assert [server.url for server in engine.pool.in_service] == [good.url]


def test_with_every_server_dead_all_responses_fail_with_the_cause(
    start: Any, tmp_path: Path
) -> None:
    ports = closed_port(), closed_port()
    engine = engine_for(
        tmp_path, *(f"http://127.0.0.1:{port}" for port in ports), rollout_request_retries=5
    )
    for server in engine.pool.servers:
        server.probe_at = 0.0  # looked for in vain before the first request: the cause stays
    answers = engine.generate([GenerationRequest((10,), tuple(range(50)))], PARAMETERS)
    assert all(server.probe_at > 0.0 for server in engine.pool.servers)
    for answer in answers[0]:
        assert "no rollout server is in service" in answer.reason
        assert all(f":{port}: it did not load new weights" in answer.reason for port in ports)


def test_servers_that_never_answer_end_the_job_instead_of_letting_it_wait_for_ever(
    tmp_path: Path,
) -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    message = rf"within 0.1 s \(--start-timeout\): {url}: cannot connect"
    with pytest.raises(WeightError, match=message):
        engine_for(tmp_path, url, start_timeout=0.1)
    settings = {"rollout_server": "sglang", "start_timeout": 0.1}
    by_broadcast = http_engine(FAMILIES["qwen3"]().to_dict(), url, **settings)
    with pytest.raises(WeightError, match=message):
        by_broadcast.weight_receivers()


def test_a_server_that_starts_after_the_job_is_waited_for(start: Any, tmp_path: Path) -> None:
    port = closed_port()
    starting = threading.Timer(0.5, start, kwargs={"port": port})
    starting.start()
    engine = engine_for(tmp_path, f"http://127.0.0.1:{port}", start_timeout=60.0)
    starting.join()
    assert isinstance(only(engine), Generation)


def test_a_server_that_comes_back_without_weights_gets_them_again(
    start: Any, tmp_path: Path
) -> None:
    first = start()
    engine = engine_for(tmp_path, first)
    port = first.server_address[1]
    first.close()
    assert isinstance(only(engine), GenerationFailure)
    second = start(port=port)
    deadline = time.monotonic() + 20
    while isinstance(answer := only(engine), GenerationFailure):
        assert time.monotonic() < deadline, answer.reason
    assert second.updates == first.updates
    assert answer.weight_version == 0


def test_a_server_that_got_its_weights_again_awaits_a_probe_until_it_has_answered_one(
    start: Any, tmp_path: Path
) -> None:
    first = start()
    engine = engine_for(tmp_path, first)
    assert not engine.awaits_probe()
    first.close()
    only(engine)
    start(port=first.server_address[1])
    deadline = time.monotonic() + 20
    while isinstance(only(engine), GenerationFailure):
        assert time.monotonic() < deadline
    assert engine.awaits_probe()
    request = GenerationRequest((1, 2), (0,))
    assert len(engine.probe(request, SamplingParameters(max_response_length=2))) == 1
    assert not engine.awaits_probe()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_response_of_a_server_that_lost_its_weights_is_not_used(
    start: Any, tmp_path: Path, kind: str
) -> None:
    server = start(server_kinds.forget_weights)
    engine = engine_for(tmp_path, server, rollout_server=kind)
    answer = only(engine)
    assert isinstance(answer, GenerationFailure)
    assert "'default'" in answer.reason
    assert not engine.pool.in_service
    assert engine.pool.times_out == 1


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_new_weights_reach_every_server_and_old_files_go(
    start: Any, tmp_path: Path, kind: str
) -> None:
    servers = [start(), start()]
    engine = engine_for(tmp_path, *servers, rollout_server=kind)
    new = weights(1)
    load(engine, new, version=4)
    assert only(engine).weight_version == 4
    for server in servers:
        assert len(server.updates) == 2
        assert server.loaded.keys() == new.keys()
        assert all(torch.equal(server.loaded[name], tensor) for name, tensor in new.items())
        assert server.label.endswith("-v4")
    versions = [d.name for d in tmp_path.iterdir() if not d.name.endswith(".tensors")]
    assert versions == [servers[0].label]
    assert len(list(tmp_path.glob("*.tensors/*"))) == len(new)


def interrupted(engine: HttpEngine, server: MisbehavingServer) -> Generation | GenerationFailure:
    """The response that the server was asked for when version 1 arrived."""
    answers: list[Generation | GenerationFailure] = []
    thread = threading.Thread(target=lambda: answers.append(only(engine)))
    thread.start()
    while not server.asked:
        time.sleep(0.005)
    load(engine, weights(1), version=1)
    thread.join(20)
    return answers[0]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_interrupted_response_goes_on_where_it_was(
    start: Any, tmp_path: Path, kind: str
) -> None:
    server = start(
        server_kinds.until_paused([12, 13], [-0.75, -1.25]),
        saying([14, STOP], [-2.0, -3.0], "stop"),
    )
    engine = engine_for(tmp_path, server, rollout_server=kind, partial_rollouts=True)
    answer = interrupted(engine, server)
    assert isinstance(answer, Generation)
    assert answer.tokens.tolist() == [12, 13, 14, STOP] and answer.finish_reason == "stop"
    assert answer.log_probs is not None
    assert answer.log_probs.tolist() == [-0.75, -1.25, -2.0, -3.0]
    assert answer.token_versions().tolist() == [0, 0, 1, 1]
    first, second = server.asked
    assert second.get("prompt", second.get("input_ids")) == [10, 11, 12, 13]
    sampling = [asked.get("sampling_params", asked) for asked in (first, second)]
    assert [s.get("max_tokens", s.get("max_new_tokens")) for s in sampling] == [4, 2]
    assert len({s.get("seed", s.get("sampling_seed")) for s in sampling}) == 2
    assert engine.pool.times_out == 0


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "first",
    [
        server_kinds.until_paused([], []),  # aborted before its first token
        server_kinds.late,  # sampled by the new weights, asked for under the old ones
    ],
)
def test_a_response_without_a_piece_of_the_old_weights_begins_again(
    start: Any, tmp_path: Path, kind: str, first: Any
) -> None:
    server = start(first)
    answer = interrupted(
        engine_for(tmp_path, server, rollout_server=kind, partial_rollouts=True), server
    )
    assert isinstance(answer, Generation)
    assert answer.tokens.tolist() == TOKENS and answer.token_versions().tolist() == [1, 1, 1]
    assert len(server.asked) == 2


def test_a_piece_of_unknown_weights_is_thrown_away(start: Any, tmp_path: Path) -> None:
    def lost_then_paused(handler: Any) -> None:
        handler.server.label = "default"  # the server restarted with other weights
        server_kinds.until_paused([12, 13], [-0.75, -1.25])(handler)

    server = start(lost_then_paused)
    engine = engine_for(tmp_path, server, partial_rollouts=True, rollout_request_retries=1)
    answer = interrupted(engine, server)
    assert isinstance(answer, Generation)
    assert answer.tokens.tolist() == TOKENS and answer.token_versions().tolist() == [1, 1, 1]


def test_a_response_that_somebody_else_aborted_is_no_answer(start: Any, tmp_path: Path) -> None:
    server = start(saying([12, 13], [-0.75, -1.25], "abort"))
    answer = only(engine_for(tmp_path, server, partial_rollouts=True))
    assert (
        isinstance(answer, GenerationFailure) and "no new weights were the cause" in answer.reason
    )


def test_routes_of_the_pieces_stay_as_they_were_sampled() -> None:
    # Prompt of 2; pieces of 2 and 1 tokens. Row 3 is the stand-in for the last token of piece 1.
    first = torch.tensor([10, 11, 12, 12]).view(4, 1, 1)
    second = torch.tensor([20, 21, 22, 23, 23]).view(5, 1, 1)
    assert continued_routes(first, second).flatten().tolist() == [10, 11, 12, 23, 23]


def test_a_server_that_does_not_take_new_weights_is_not_asked(start: Any, tmp_path: Path) -> None:
    good, bad = start(), start()
    engine = engine_for(tmp_path, good, bad)
    bad.refuse_updates = True
    load(engine, weights(1), version=1)
    answers = engine.generate([GenerationRequest((10,), tuple(range(6)))], PARAMETERS)
    assert {answer.weight_version for answer in answers[0]} == {1}
    assert len(bad.asked) == 0
    assert engine.pool.times_out == 1


def test_weights_that_every_server_refuses_are_an_error_that_says_what_to_do(
    start: Any, tmp_path: Path
) -> None:
    server = start()
    server.refuse_updates = True
    with pytest.raises(WeightError, match="VLLM_SERVER_DEV_MODE=1"):
        engine_for(tmp_path, server)


def test_wrong_weights_are_found_before_a_server_sees_them(start: Any, tmp_path: Path) -> None:
    server = start()
    engine = engine_for(tmp_path, server)
    state = dict(weights(0))
    del state["model.norm.weight"]
    with pytest.raises(WeightError, match="without 1 tensors"):
        load(engine, state, version=1)
    assert len(server.updates) == 1
    with pytest.raises(EngineError, match="half of a new version"):
        only(engine)


def test_a_server_that_reports_raw_log_probs_is_a_config_error(start: Any, tmp_path: Path) -> None:
    server = start()
    server.raw_log_probs = True
    engine = engine_for(tmp_path, server)
    assert isinstance(only(engine), Generation)  # at temperature 1 both kinds are the same
    warm = SamplingParameters(temperature=0.7, max_response_length=4, stop_token_ids=(STOP,))
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        engine.generate(ONE, warm)


def test_a_prompt_that_fills_the_context_fails_alone(start: Any, tmp_path: Path) -> None:
    engine = engine_for(tmp_path, start(), max_context_length=8)
    full, fine = engine.generate([GenerationRequest((10,) * 8, (1,)), ONE[0]], PARAMETERS)
    assert "8 tokens leaves no room" in full[0].reason
    assert isinstance(fine[0], Generation)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_engine": "http"}, "needs --rollout-url"),
        ({"rollout_engine": "http", "rollout_url": "http://127.0.0.1:1"}, "needs --rollout-weights-dir"),
        ({"rollout_url": "http://127.0.0.1:1"}, "--rollout-engine is transformers, which uses no server"),
        ({"rollout_engine": "vllm", "rollout_weights_dir": "w"}, "--rollout-weights-dir is given"),
        ({"rollout_engine": "http", "rollout_url": "127.0.0.1:1"}, "expected http://host:port"),
        ({"rollout_engine": "http", "rollout_url": "http://127.0.0.1:99999"}, "port below 65536"),
        ({"rollout_engine": "http", "rollout_url": "http://[::1:80"}, "expected http://host:port"),
        ({"rollout_engine": "http", "rollout_url": "https://a:1,https://a:1/"}, "twice"),
        ({"rollout_engine": "vllm", "rollout_quantization": "int8"}, "transformers engine only"),
        ({"rollout_engine": "vllm", "rollout_temperature": 0.001}, "choose at least 0.01"),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit_together_are_errors(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig.from_sources(settings)


HTTP = {
    "rollout_engine": "http",
    "rollout_url": "http://127.0.0.1:1, http://localhost:2/",
    "rollout_weights_dir": "weights",
}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_dtype": "bfloat16"}, "the servers choose their dtype"),
        ({"num_rollout_engines": 2}, "one client serves every URL"),
        (
            {
                "rollout_server": "sglang",
                "rollout_top_k": 5,
                "use_rollout_sampling_mask": "off",
                "allow_biased_correction": True,
            },
            "before truncation",
        ),
    ],
)
def test_flags_that_servers_would_ignore_are_errors(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig.from_sources(HTTP | settings)


def test_a_missing_vllm_is_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install vllm"):
        check_engine(JobConfig.from_sources({"rollout_engine": "vllm"}))
    # The driver of another cluster need not have what its engines have.
    check_engine(JobConfig.from_sources({"rollout_engine": "vllm", "address": "auto"}))


def test_an_open_address_is_warned_about_and_loopback_is_not() -> None:
    with pytest.warns(UserWarning, match="travel unencrypted"):
        JobConfig.from_sources(HTTP | {"rollout_url": "http://10.0.0.1:8000"})
    assert JobConfig.from_sources(HTTP).rollout_urls == ("http://127.0.0.1:1", "http://localhost:2")


def test_the_engine_of_a_configuration_speaks_to_its_servers(start: Any, tmp_path: Path) -> None:
    server = start()
    settings = {"rollout_url": server.url, "rollout_weights_dir": str(tmp_path)}
    config = JobConfig.from_sources(HTTP | settings)
    engine = make_engine(config, FAMILIES["qwen3"]().to_dict(), "engine 0")
    load(engine, weights(0))
    assert isinstance(engine.generate(ONE, PARAMETERS)[0][0], Generation)
    assert engine.health().generated_tokens == len(TOKENS)


def test_responses_to_a_prompt_and_later_turns_go_to_the_server_that_read_it(
    start: Any, tmp_path: Path
) -> None:
    one, two = start(), start()
    engine = engine_for(tmp_path, one, two)
    opening = tuple(range(10, 30))
    groups = [GenerationRequest((*opening, i), (1, 2, 3, 4), prompt_index=i) for i in (0, 1)]
    engine.generate(groups, PARAMETERS)

    def prompts(server: MisbehavingServer) -> list[list[int]]:
        return [asked["prompt"] for asked in server.asked]

    homes = {prompt[-1]: server for server in (one, two) for prompt in prompts(server)}
    assert homes[0] is not homes[1]
    for index, server in homes.items():
        assert prompts(server) == [[*opening, index]] * 4
    for _ in range(3):
        later = GenerationRequest((*opening, 1, 3, 50), (9,), prompt_index=1)
        engine.generate([later], PARAMETERS)
    assert prompts(homes[1])[4:] == [[*opening, 1, 3, 50]] * 3
    homes[1].close()
    [[answer]] = engine.generate([later], PARAMETERS)
    assert isinstance(answer, GenerationFailure)  # no retries here: the server is found out
    [[answer]] = engine.generate([later], PARAMETERS)
    assert isinstance(answer, Generation) and prompts(homes[0])[4:] == [[*opening, 1, 3, 50]]
