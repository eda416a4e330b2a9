"""A run shows no secret to others, and a model directory cannot run code."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import save_file

from plugin.cluster.model_source import directory_source
from plugin.config import JobConfig
from plugin.config.flags import without_credentials
from plugin.engines.choice import check_engine, make_engine
from plugin.engines.protocol import GenerationRequest, SamplingParameters
from plugin.engines.transformers.engine import TransformersEngine
from plugin.engines.transformers.weight_loader import weight_ledger
from plugin.errors import ConfigError
from plugin.observe.html_report import write_report
from plugin.observe.run_files import RunFiles
from tests.parallel.tiny_models import FAMILIES, hf_state_dict
from tests.unit.engines.servers.misbehaving_server import STOP, MisbehavingServer
from tests.unit.engines.tiny_engines import load

pytestmark = pytest.mark.hostile


SERVERS = {"rollout_engine": "http", "rollout_weights_dir": "weights"}


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hunter2@127.0.0.1:1",
        "http://127.0.0.1:1,http://hunter2@127.0.0.1:2",
        "http://me:x,hunter2/@127.0.0.1:1",
        "http://127.0.0.1:1?key=hunter2",
    ],
)
def test_a_password_in_a_url_is_neither_taken_nor_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="--rollout-api-key-env") as caught:
        JobConfig.from_sources(SERVERS | {"rollout_url": url})
    assert "hunter2" not in str(caught.value)


def test_a_key_given_in_place_of_its_variable_is_not_repeated() -> None:
    flags = SERVERS | {"rollout_url": "http://127.0.0.1:1", "rollout_api_key_env": "sk-hunter2"}
    with pytest.raises(ConfigError, match="the name of an environment variable") as caught:
        JobConfig.from_sources(flags)
    assert "hunter2" not in str(caught.value)


def test_config_and_report_never_show_a_password_of_a_url(tmp_path: Path) -> None:
    secret = {"a": "https://me:hunter2@host/x", "b": ["ftp://hunter2@host"], "c": "no@url"}
    with RunFiles(tmp_path / "new", secret, tensorboard=False) as files:
        files.log_step({"step": 1})
    saved = yaml.safe_load((tmp_path / "new" / "config.yaml").read_text())
    assert saved == {"a": "https://host/x", "b": ["ftp://host"], "c": "no@url"}
    # A run of an earlier version may have one on disk.
    (tmp_path / "new" / "config.yaml").write_text(yaml.safe_dump(secret | {"b": "b"}))
    page = write_report([tmp_path / "new"], tmp_path / "report.html", force=True).read_text()
    assert "https://host/x" in page and "hunter2" not in page
    assert without_credentials("http://a:b@c,http://d") == "http://c,http://d"


def test_others_cannot_read_a_new_run_directory(tmp_path: Path) -> None:
    with RunFiles(tmp_path / "runs" / "new", {}, tensorboard=False) as files:
        assert stat.S_IMODE(files.run_dir.stat().st_mode) == 0o700


def test_every_call_to_a_server_carries_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = MisbehavingServer()
    flags = {"rollout_url": server.url, "rollout_weights_dir": str(tmp_path)}
    config = JobConfig.from_sources(SERVERS | flags | {"rollout_api_key_env": "SERVERS_KEY"})
    monkeypatch.delenv("SERVERS_KEY", raising=False)
    try:
        with pytest.raises(ConfigError, match="export SERVERS_KEY="):
            check_engine(config)
        monkeypatch.setenv("SERVERS_KEY", "hunter2")
        engine = make_engine(config, FAMILIES["qwen3"]().to_dict(), "engine 0")
        load(engine, hf_state_dict(FAMILIES["qwen3"](), 0))
        parameters = SamplingParameters(max_response_length=4, stop_token_ids=(STOP,))
        engine.generate([GenerationRequest((10, 11), (7,))], parameters)
    finally:
        server.close()
    assert server.asked and server.authorizations == {"Bearer hunter2"}
    assert "hunter2" not in str(config.as_dict())


def test_the_code_of_a_model_directory_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on the terminal unless it is told not to; here that would be an answer."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    own_code = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (tmp_path / "own.py").write_text("raise SystemExit('this code was run')\n")
    config: dict[str, Any] = {"model_type": "own_model", "auto_map": own_code}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"--hf-checkpoint .* code that comes with a model"):
        directory_source(str(tmp_path), "--hf-checkpoint", JobConfig())
    known = FAMILIES["qwen3"]().to_dict() | {"auto_map": own_code, "_name_or_path": str(tmp_path)}
    (tmp_path / "config.json").write_text(json.dumps(known))
    save_file(hf_state_dict(FAMILIES["qwen3"]()), tmp_path / "model.safetensors")
    source = directory_source(str(tmp_path), "--hf-checkpoint", JobConfig())
    assert source.as_config().model_type == "qwen3"
    TransformersEngine(source.hf_config)
    weight_ledger(source.hf_config)
