"""What cannot work is refused on the driver, before a process, a model or a cluster is waited for."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from plugin.cluster.placement import check_machine
from plugin.cluster.ray_cluster import _join
from plugin.config import JobConfig, LossConfig, TrainerConfig
from plugin.controller.preflight.job_checks import check_job
from plugin.errors import ConfigError, HookLoadError, MegatronTisError
from plugin.loss.objective import check_loss
from plugin.megatron_backend.model.layout_rules import check_model
from plugin.tools.doctor.checks import configuration_checks
from tests.parallel.tiny_models import tiny_llama, tiny_qwen3_moe

pytestmark = pytest.mark.hostile


DENSE = tiny_llama(
    num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=6, intermediate_size=64
)
MOE = tiny_qwen3_moe()


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (DENSE, {"tensor_model_parallel_size": 4}, "size 4: .*key_value_heads is 2, .* by 1, 2$"),
        (DENSE, {"pipeline_model_parallel_size": 4}, "num_hidden_layers is 6, .* by 1, 2, 3, 6$"),
        (
            DENSE,
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "size 2 x --virtual-pipeline-model-parallel-size 2: .*num_hidden_layers is 6",
        ),
        (DENSE, {"expert_model_parallel_size": 2}, "llama has no experts; drop it"),
        (DENSE, {"moe_router_fusion": True}, "--moe-router-fusion needs a MoE model, not llama"),
        (MOE, {"expert_model_parallel_size": 3}, "num_experts is 4, which cannot .* by 3"),
        (MOE, {"tensor_model_parallel_size": 2}, "needs --sequence-parallel; add it"),
        (MOE, {"moe_token_dispatcher_type": "allgather"}, "use alltoall"),
    ],
)
def test_no_layout_that_the_builder_would_refuse_passes_the_preflight(
    model: Any, layout: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(model, TrainerConfig(**layout))


def test_no_layout_of_the_whole_job_is_refused_only_by_its_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_attention_heads is 4, which cannot be divided by 3"):
        check_job(JobConfig.from_sources({"tensor_model_parallel_size": 3}))
    DENSE.save_pretrained(tmp_path)
    for option in ("hf_checkpoint", "ref_hf_checkpoint"):
        settings = {option: str(tmp_path), "use_kl_loss": True, "pipeline_model_parallel_size": 4}
        with pytest.raises(ConfigError, match="num_hidden_layers is 6"):
            check_job(JobConfig.from_sources(settings))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return args.my_flag", "failed on an example of 2 samples: AttributeError: .*my_flag"),
        ("return pg_loss, loss_masks", r"must return \(pg_loss, loss_masks, metrics\)"),
    ],
)
def test_no_hook_fails_for_the_first_time_on_a_rank(
    tmp_path: Path, body: str, message: str
) -> None:
    file = tmp_path / "hooks.py"
    file.write_text(f"def hook(args, *, pg_loss, loss_masks, **kwargs):\n    {body}\n")
    config = LossConfig(use_tis=True, custom_tis_function_path=f"{file}:hook")
    with pytest.raises(HookLoadError, match=message):
        check_loss(config)


def test_no_policy_loss_of_the_users_own_ends_in_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "losses.py"
    file.write_text("def loss(inputs, config):\n    return inputs.no_such_field\n")
    with pytest.raises(HookLoadError, match=r"losses.py:loss failed on an example(.|\n)*line 2"):
        check_loss(LossConfig(policy_loss=f"{file}:loss"))


TASKS = """
from plugin.tasks.protocol import Prompt


class Task:
    stop_token_ids = (1,)

    def __init__(self, config, tokenizer):
        pass

    def prompt(self, index):
        return Prompt((2, 3))

    def reward(self, prompt, response):
        return 0.0


class NoTable(Task):
    def __init__(self, config, tokenizer):
        self.table = {}["rows"]


class NoPrompt(Task):
    def prompt(self, index):
        return self.rows[index]


class NotAPrompt(Task):
    def prompt(self, index):
        return [2, 3]


class ForeignTokens(Task):
    def prompt(self, index):
        return Prompt((2, 15))


class TextPrompt(Task):
    def prompt(self, index):
        return Prompt("23=")
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "NoTable",
            r"made no task: KeyError: 'rows'; correct it\n.*own.py\", line \d+, in __init__",
        ),
        ("NoPrompt", r"prompt 0 of the task failed: AttributeError(.|\n)*own.py\".*in prompt"),
        ("NotAPrompt", r"prompt 0 of the task is \[2, 3\]; it must be a Prompt whose"),
        ("ForeignTokens", "prompt 0 holds token 15, and the model has 15; use the model's own"),
        ("TextPrompt", r"prompt 0 of the task is Prompt\(tokens='23='"),
    ],
)
def test_no_task_of_the_users_own_ends_in_a_traceback(
    tmp_path: Path, name: str, message: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(TASKS)
    check_job(JobConfig(task_path=f"{file}:Task"))
    with pytest.raises(MegatronTisError, match=message) as caught:
        check_job(JobConfig(task_path=f"{file}:{name}"))
    assert "import_paths.py" not in str(caught.value), "only the user's own frames"


@pytest.mark.parametrize("option", ["hf_checkpoint", "ref_hf_checkpoint"])
def test_no_rank_finds_out_that_a_model_has_no_weights(tmp_path: Path, option: str) -> None:
    DENSE.save_pretrained(tmp_path)
    settings = {option: str(tmp_path), "use_kl_loss": True}
    flag = "--" + option.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{flag} .* holds no \*.safetensors file"):
        check_job(JobConfig.from_sources(settings))


def test_no_config_of_a_model_ends_in_a_traceback(tmp_path: Path) -> None:
    DENSE.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": "many"}))
    with pytest.raises(ConfigError, match=r"is not a model that transformers .*vocab_size"):
        check_job(JobConfig.from_sources({"hf_checkpoint": str(tmp_path)}))


REFUSED = """
import sys, time, types
from plugin.cluster import ray_cluster

def never_ready(slots):
    time.sleep(600)

def run_job(*_):
    from plugin.errors import ConfigError
    raise ConfigError("refused by the driver")

ray_cluster._start_private = never_ready
sys.modules["plugin.controller.job"] = types.SimpleNamespace(run_job=run_job)
sys.argv = ["megatron-tis", "train"]
from plugin.cli import main
sys.exit(main())
"""


def test_nobody_waits_for_ray_to_start_after_an_error_of_the_driver() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2 and "error: refused by the driver" in ended.stderr


@pytest.mark.parametrize(
    ("settings", "gpus", "message"),
    [
        ({"num_gpus_per_node": 64}, 0, "65 processes on 2 CPU cores, and more than 16"),
        ({"num_gpus_per_node": 8}, 8, "8 trainer ranks and 1 engines, .* has 8; lower"),
        ({"num_gpus_per_node": 9, "colocate": True}, 8, "9 trainer ranks, .* has 8; lower"),
        ({"num_nodes": 2}, 8, "--num-nodes is 2, .* pass --address"),
    ],
)
def test_no_more_ranks_are_started_than_the_machine_has_room_for(
    settings: dict[str, Any], gpus: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_machine(JobConfig(**settings), cores=2, gpus=gpus)


def test_what_a_machine_has_room_for_is_accepted() -> None:
    eight = {"tensor_model_parallel_size": 8}
    check_machine(JobConfig(**eight), cores=1, gpus=0)
    check_machine(JobConfig(**eight, colocate=True), cores=8, gpus=8)
    check_machine(JobConfig(**eight), cores=8, gpus=9)


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_nobody_waits_for_a_cluster_that_is_not_there(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it tries for more than a minute"))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nothing listens there, and nothing else will
        with pytest.raises(ConfigError, match=r"no Ray cluster answers there .*; start one with"):
            _join(f"{prefix}127.0.0.1:{bound.getsockname()[1]}")


def test_the_doctor_finds_what_the_preflight_of_train_would(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("tensor_model_parallel_size: 3\n")
    *passed, last = configuration_checks(str(file))
    assert {"configuration", "machine", "loss and corrections"} <= {c.name for c in passed}
    assert {c.status for c in passed} == {"ok"}
    assert (last.name, last.status) == ("models and parallel layout", "fail")
    assert "--tensor-model-parallel-size 3" in last.detail
