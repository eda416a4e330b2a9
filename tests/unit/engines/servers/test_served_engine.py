"""Servers that the job starts: their command line, their weights, their end. SGLang is a stand-in."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plugin.config import JobConfig
from plugin.engines.choice import check_engine, make_engine
from plugin.engines.protocol import Generation, GenerationRequest, SamplingParameters
from plugin.engines.servers.process import ServerEnded, ServerProcess, free_port
from plugin.engines.servers.served_engine import ServedEngine, options, sglang_command, vllm_command
from plugin.engines.vllm.startup import IN_PROCESS_ENVIRONMENT, RequireKey, cpu_options
from plugin.errors import ConfigError
from tests.parallel.tiny_models import FAMILIES, hf_state_dict
from tests.unit.engines.servers.misbehaving_server import STOP, TOKENS
from tests.unit.engines.servers.stand_in_sglang import install
from tests.unit.engines.tiny_engines import load

pytestmark = pytest.mark.usefixtures("jumping_clock")

PARAMETERS = SamplingParameters(max_response_length=4, stop_token_ids=(STOP,))
ROOT = str(Path(__file__).parents[4])
REQUESTS = [GenerationRequest((10, 11), (7, 8))]


@functools.cache
def model() -> dict[str, Any]:
    return FAMILIES["qwen3"]().to_dict()


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(*processes: int, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, processes))


def job(tmp_path: Path, **settings: Any) -> JobConfig:
    chosen = {"rollout_engine": "sglang", "start_timeout": 60, "weight_sync": "directory"}
    return JobConfig(**chosen | settings, run_dir=str(tmp_path / "run"))


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(install(tmp_path / "packages"))
    monkeypatch.syspath_prepend(path)
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.fixture
def engine(sglang: None, tmp_path: Path) -> Iterator[ServedEngine]:
    built = make_engine(job(tmp_path), model(), "engine 0")
    assert isinstance(built, ServedEngine)
    yield built
    built.close()


def said(tmp_path: Path) -> dict[str, Any]:
    """What the server printed at its start."""
    return json.loads((tmp_path / "run" / "engine_0.log").read_text().splitlines()[0])


def processes_of(tmp_path: Path, guard: int) -> tuple[int, int, int]:
    """The guard, the server, and the server's own child, which ignores SIGTERM."""
    [server] = [int(p) for p in Path(f"/proc/{guard}/task/{guard}/children").read_text().split()]
    return guard, server, said(tmp_path)["child"]


def test_a_server_is_started_with_the_model_given_weights_and_asked(
    engine: ServedEngine, tmp_path: Path
) -> None:
    load(engine, hf_state_dict(FAMILIES["qwen3"](), 0))
    [answers] = engine.generate(REQUESTS, PARAMETERS)
    assert [a.tokens.tolist() for a in answers if isinstance(a, Generation)] == [TOKENS, TOKENS]
    assert engine.health().weight_version == 0
    started = said(tmp_path)
    assert started["config"] == "qwen3"
    assert "--skip-tokenizer-init" in started["arguments"]
    processes = processes_of(tmp_path, engine.server.guard)
    engine.close()
    assert gone(*processes)
    assert not list(Path("/tmp").glob(f"megatron_tis_server_*/{engine.updates.label}"))


def test_a_server_does_not_inherit_what_an_engine_inside_this_process_sets_for_itself(
    sglang: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in IN_PROCESS_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "the user's")
    built = make_engine(job(tmp_path), model(), "engine 0")
    _, server, _ = processes_of(tmp_path, built.server.guard)
    entries = Path(f"/proc/{server}/environ").read_bytes().decode().split("\0")
    built.close()
    found = {entry for entry in entries if entry.partition("=")[0] in IN_PROCESS_ENVIRONMENT}
    assert found == {"VLLM_NO_USAGE_STATS=the user's"}


def test_a_server_that_ends_makes_the_engine_raise_with_its_log(
    engine: ServedEngine, tmp_path: Path
) -> None:
    load(engine, hf_state_dict(FAMILIES["qwen3"](), 0))
    guard, server, child = processes_of(tmp_path, engine.server.guard)
    os.kill(server, signal.SIGKILL)
    assert gone(guard, server, child)
    with pytest.raises(ServerEnded, match=r"ended with code -9.*engine_0.log"):
        engine.generate(REQUESTS, PARAMETERS)
    with pytest.raises(ServerEnded, match="ended with code -9"):
        engine.load_weights(1, b"", last=True)


def test_a_killed_guard_takes_the_server_with_it(engine: ServedEngine, tmp_path: Path) -> None:
    guard, server, _ = processes_of(tmp_path, engine.server.guard)
    os.kill(guard, signal.SIGKILL)
    assert gone(guard, server)
    os.kill(said(tmp_path)["child"], signal.SIGKILL)  # nobody is left to do it
    model = Path(said(tmp_path)["arguments"][said(tmp_path)["arguments"].index("--model-path") + 1])
    with pytest.raises(ServerEnded, match="by a signal"):
        engine.server.require_alive()
    assert not model.exists()


def test_nothing_outlives_a_killed_owner(sglang: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    removed, port = tmp_path / "weights", free_port()
    removed.mkdir()
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from plugin.engines.servers.process import ServerProcess\n"
        "command = [sys.executable, '-m', 'sglang.launch_server', *sys.argv[3:]]\n"
        f"url, log = 'http://127.0.0.1:{port}', Path(sys.argv[1])\n"
        "options = dict(directory=Path(sys.argv[2]), log=log)\n"
        "server = ServerProcess(command, os.environ, url, **options)\n"
        "server.wait_until_ready(60)\n"
        "print(server.guard, flush=True)\n"
        "time.sleep(600)\n"
    )
    path = os.pathsep.join((ROOT, os.environ["PYTHONPATH"]))
    log = tmp_path / "run" / "engine_0.log"
    options = ("--port", str(port), "--model-path", str(tmp_path))
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(log), str(removed), *options],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert owner.stdout is not None
    processes = processes_of(tmp_path, int(owner.stdout.readline()))
    assert len(processes) == 3 and all(map(alive, processes))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert gone(*processes)
    assert not removed.exists()


def test_a_server_that_cannot_start_is_reported_with_the_end_of_its_log(
    sglang: None, tmp_path: Path
) -> None:
    config = job(tmp_path, sglang_args=("mem_fraction_static=0.99",))
    with pytest.raises(ServerEnded, match=r"(?s)ended with code 3.*out of memory"):
        make_engine(config, model(), "engine 0")


def test_the_cause_is_the_exception_that_is_not_about_another_one(tmp_path: Path) -> None:
    log = (
        "(Worker pid=2) ERROR 11-18 10:13:16 [executor.py:953] Traceback (most recent call last):\n"
        "(Worker pid=2) ERROR 11-18 10:13:16 [executor.py:953]     raise ValueError(\n"
        "(Worker pid=2) ERROR 11-18 10:13:16 [executor.py:953] ValueError: no memory on node 0\n"
        "Traceback (most recent call last):\n"
        '  File "core.py", line 1, in main\n'
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    script = f"import sys; sys.stdout.write({log!r}); sys.exit(1)"
    server = ServerProcess(
        [sys.executable, "-c", script],
        os.environ,
        f"http://127.0.0.1:{free_port()}",
        directory=tmp_path / "removed",
        log=tmp_path / "server.log",
    )
    with pytest.raises(ServerEnded) as raised:
        server.wait_until_ready(30)
    cause = f"ValueError: no memory on node 0 (its log: {tmp_path / 'server.log'})"
    assert str(raised.value) == f"the server ended with code 1; {cause}"


def test_vllm_on_cpu_has_a_bounded_cache_unless_the_user_gives_a_share_or_a_size() -> None:
    # 2 (keys, values) x 4 layers x 2 heads x 16 channels x 2 bytes = 512 bytes per token.
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"hidden_size": 64}
    chosen = cpu_options(shape, "bfloat16", 4, 1 << 20, {})
    assert chosen["enforce_eager"] and chosen["kv_cache_memory_bytes"] == 4 * 512 << 20
    largest = cpu_options(shape, "bfloat16", 1024, 1 << 20, {})
    assert largest["kv_cache_memory_bytes"] == 4 << 30
    share = cpu_options(shape, "bfloat16", 4, 512, {"gpu_memory_utilization": 0.1})
    assert share["gpu_memory_utilization"] == 0.1 and "kv_cache_memory_bytes" not in share
    size = cpu_options(shape, "bfloat16", 4, 512, {"kv_cache_memory_bytes": 7})
    assert size["kv_cache_memory_bytes"] == 7


def test_vllm_on_cpu_reads_a_prompt_in_one_piece_unless_the_user_says_otherwise() -> None:
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    for longest, room in ((512, 4096), (8192, 8192)):
        chosen = cpu_options(shape, "float32", 4, longest, {})
        assert chosen["enable_chunked_prefill"] is False
        assert chosen["max_num_batched_tokens"] == room
    assert cpu_options(shape, "float32", 4, 512, {"enable_chunked_prefill": True})[
        "enable_chunked_prefill"
    ]


def test_what_a_vllm_server_does_by_default_can_be_turned_off(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 64}'
    )
    config = JobConfig().unchecked_copy(vllm_args=("async_scheduling=False",))
    arguments = vllm_command(config, str(tmp_path), 1, 512).command
    assert {"--no-async-scheduling", "--no-enable-chunked-prefill"} <= set(arguments)


def test_a_silent_server_is_ended(tmp_path: Path) -> None:
    port = free_port()
    script = (
        "from tests.unit.engines.servers.misbehaving_server import MisbehavingServer\n"
        "import threading, time\n"
        f"server = MisbehavingServer(port={port})\n"
        "while not server.health_answers: time.sleep(0.01)\n"
        "server.silent = True\nthreading.Event().wait()\n"
    )
    server = ServerProcess(
        [sys.executable, "-c", script],
        os.environ | {"PYTHONPATH": ROOT},
        f"http://127.0.0.1:{port}",
        directory=tmp_path / "removed",
        log=tmp_path / "server.log",
        silence=0.5,
    )
    server.wait_until_ready(30)
    assert gone(server.guard, seconds=30)
    with pytest.raises(ServerEnded, match="did not answer /health"):
        server.require_alive()


def test_command_lines_have_what_the_job_sets_and_what_the_user_adds(tmp_path: Path) -> None:
    config = JobConfig(
        rollout_engine="sglang",
        rollout_num_gpus_per_engine=2,
        rollout_dtype="bfloat16",
        sglang_args=("attention_backend=fa3 chunked_prefill_size=4096",),
    )
    command = sglang_command(config, "/m", 30000, 512).command
    assert command[1:3] == ("-m", "sglang.launch_server")
    pairs = dict(itertools.pairwise(command))
    assert (pairs["--model-path"], pairs["--port"], pairs["--tp-size"]) == ("/m", "30000", "2")
    assert (pairs["--host"], pairs["--load-format"]) == ("127.0.0.1", "dummy")
    assert (pairs["--dtype"], pairs["--context-length"]) == ("bfloat16", "512")
    assert (pairs["--attention-backend"], pairs["--chunked-prefill-size"]) == ("fa3", "4096")
    assert "--enable-return-routed-experts" not in command
    (tmp_path / "config.json").write_text(json.dumps(model()))
    vllm = vllm_command(JobConfig(rollout_engine="vllm_server"), str(tmp_path), 8000, 512)
    assert vllm.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "WorkerExtension" in " ".join(vllm.command)
    assert options({"a_b": True, "c": False, "d": None, "e": [1, 2], "f": {"g": 1}}) == [
        *("--a-b", "--e", "1", "2", "--f", '{"g": 1}')
    ]


def test_flags_of_servers_are_taken_and_those_of_foreign_ones_refused(sglang: None) -> None:
    check_engine(JobConfig(rollout_engine="sglang", sglang_args=("attention_backend=fa3",)))
    with pytest.raises(ConfigError, match="no argument atention_backend; did you mean attention"):
        check_engine(JobConfig(rollout_engine="sglang", sglang_args=("atention_backend=fa3",)))
    with pytest.raises(ConfigError, match="--rollout-url is given but --rollout-engine is sglang"):
        JobConfig(rollout_engine="sglang", rollout_url="http://127.0.0.1:1")
    own = {"rollout_engine": "sglang", "rollout_request_retries": 5, "max_answer_bytes": 1 << 20}
    assert JobConfig.from_sources(own).server_dialect == "sglang"
    with pytest.raises(ConfigError, match="--rollout-server sglang would do nothing"):
        JobConfig.from_sources({"rollout_engine": "vllm_server", "rollout_server": "sglang"})
    with pytest.raises(ConfigError, match="SGLang reports log-probs of the distribution before"):
        JobConfig(
            rollout_engine="sglang",
            rollout_top_k=5,
            use_rollout_sampling_mask="off",
            allow_biased_correction=True,
        )


def called(url: str, path: str, key: str | None) -> int:
    """The status of a call; None: without a key."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_server_of_the_job_answers_nobody_without_its_key(
    engine: ServedEngine, tmp_path: Path
) -> None:
    [server] = engine.pool.servers
    directory = Path(said(tmp_path)["config_file"]).parent
    assert directory.stat().st_mode & 0o077 == 0
    key = yaml.safe_load((directory / "server.yaml").read_text())["api-key"]
    assert called(server.url, "/health", None) == 200
    for wrong in (None, "", "x" * len(key)):
        assert called(server.url, "/get_model_info", wrong) == 401
    assert called(server.url, "/get_model_info", key) == 200
    # No other user of the machine sees it among the arguments.
    for process in processes_of(tmp_path, engine.server.guard):
        assert key.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()


def test_the_key_of_a_vllm_server_covers_the_paths_that_change_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "right")
    passed: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope.get("path", scope["type"]))

    async def send(message: Any) -> None:
        sent.append(message)

    guard = RequireKey(app)
    for path in ("/v1/completions", "/collective_rpc", "/update_weight_version", "/health"):
        for header in ([], [(b"authorization", b"Bearer wrong")]):
            scope = {"type": "http", "path": path, "headers": header}
            asyncio.run(guard(scope, None, send))
    assert passed == ["/health"] * 2
    assert [m["status"] for m in sent if "status" in m] == [401] * 6
    scope = {"type": "http", "path": "/pause", "headers": [(b"authorization", b"Bearer right")]}
    asyncio.run(guard(scope, None, send))
    asyncio.run(guard({"type": "lifespan"}, None, send))
    assert passed[2:] == ["/pause", "lifespan"]
