"""More layouts, every built-in correction, estimator and policy loss, and the command itself; minutes in all."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet
import pytest
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT

from plugin.config import JobConfig
from plugin.config.loss.loss_config import ESTIMATOR_TRAITS
from plugin.config.loss.policy_loss import traits_of
from plugin.controller.job import run_job
from plugin.loss import POLICY_LOSSES
from plugin.observe.run_record import read_run, read_samples
from plugin.tools.compare.correction_catalog import correction_functions
from tests.ray.small_jobs import SIZES, run_small
from tests.ray.tokenizer_files import save_character_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Estimators that a job can use by themselves: a value model has `test_critic_jobs.py`, a teacher without rewards
#: `test_distillation_jobs.py`; several rewards are at the end of this file's job with a table.
ESTIMATORS = [
    name for name, t in ESTIMATOR_TRAITS.items() if t.rewards and not (t.values or t.parts)
]


def side_by_side(first: Iterable[str], second: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs that hold every name of both tables; the shorter table starts again."""
    names = (list(first), list(second))
    return list(islice(zip(*map(cycle, names), strict=True), max(map(len, names))))


@pytest.mark.parametrize(("hook", "estimator"), side_by_side(correction_functions(), ESTIMATORS))
def test_every_built_in_correction_and_every_estimator_runs_in_a_job(
    two_nodes: str, tmp_path: Path, hook: str, estimator: str
) -> None:
    run_small(
        two_nodes,
        tmp_path / "run",
        num_nodes=1,
        # Where the best responses of every group are equal there is nothing to learn.
        learns_every_step=estimator != "best_of_group",
        policy_loss="reinforce",
        advantage_estimator=estimator,
        use_tis=True,
        custom_tis_function_path=f"plugin.ppo_utils.{hook}",
        rollout_dtype="bfloat16",
    )


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_policy_loss_runs_in_an_asynchronous_job(
    two_nodes: str, tmp_path: Path, loss: str
) -> None:
    run_small(
        two_nodes,
        tmp_path / "run",
        num_nodes=1,
        policy_loss=loss,
        use_tis=traits_of(loss).compares_with != "rollout",
        async_rollouts=True,
        rollout_quantization="int8",
    )


def test_a_held_entropy_moves_the_bonus_and_a_resumed_job_goes_on_with_it(
    two_nodes: str, tmp_path: Path
) -> None:
    # No entropy of this vocabulary reaches 100 nats: the bonus grows to its bound.
    held = {"num_nodes": 1, "save_interval": 2, "entropy_target": 100.0, "entropy_coef_step": 0.002}
    run_small(two_nodes, tmp_path / "whole", **held, num_rollouts=4)
    run_small(two_nodes, tmp_path / "parts", **held, num_rollouts=2)
    run_small(two_nodes, tmp_path / "parts", **held, num_rollouts=4, resume=True)
    whole, parts = (read_run(tmp_path / name).steps for name in ("whole", "parts"))
    assert [line["entropy_coef"] for line in whole] == pytest.approx([0.0, 0.002, 0.004, 0.005])
    for name in ("entropy_coef", "loss", "grad_norm", "entropy_loss"):
        assert [line[name] for line in parts] == [line[name] for line in whole], name
    run_small(two_nodes, tmp_path / "plain", num_nodes=1, num_rollouts=2)
    plain = read_run(tmp_path / "plain").steps
    assert plain[0]["grad_norm"] == whole[0]["grad_norm"]
    assert plain[1]["grad_norm"] != whole[1]["grad_norm"] and "entropy_coef" not in plain[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "num_nodes": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "num_nodes": 1},
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "num_nodes": 1,
        },
        {"context_parallel_size": 2, "num_nodes": 1},
        {
            "expert_model_parallel_size": 2,
            "embedded_model": "qwen3_moe",
            "use_rollout_routing_replay": True,
            "num_nodes": 2,
        },
        {"embedded_model": "qwen3_moe", "use_routing_replay": True, "num_nodes": 1},
        {"embedded_model": "llama", "num_rollout_engines": 2, "num_nodes": 1},
        {"num_nodes": 1, "num_gpus_per_node": 2, "use_distributed_optimizer": True},
    ],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()),
)
def test_layouts(two_nodes: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    run_small(two_nodes, tmp_path / "run", **settings)


@pytest.mark.parametrize(
    "more", [{}, {"tensor_model_parallel_size": 2}, {"num_updates_per_rollout": 2}]
)
def test_a_job_with_truncated_sampling_keeps_the_mismatch_of_one_without(
    two_nodes: str, tmp_path: Path, more: dict[str, Any]
) -> None:
    # Many prompts: with few, a truncated policy may get one reward for all, and no gradient.
    sizes = {"num_nodes": 1, "rollout_batch_size": 32}
    settings = {**sizes, "rollout_dtype": "bfloat16", "use_tis": True, **more}
    truncated = {"rollout_top_p": 0.95, "rollout_top_k": 8}
    plain = run_small(two_nodes, tmp_path / "plain", **settings).history
    replayed = run_small(two_nodes, tmp_path / "replayed", **settings, **truncated).history
    # At the first update engine and trainer have the same weights: what is left is bfloat16.
    assert replayed[0]["mismatch_kl"] < 2 * plain[0]["mismatch_kl"] < 1e-3
    # In bfloat16 several ids may tie for the last place, and all of them are kept.
    assert all(1 <= line["kept_ids_per_token"] < 12 for line in replayed)


OWN_REWARD = """
def picky(response, row, *, label, num_tokens):
    if label == "33":
        raise ValueError("no reward for 33")
    return num_tokens / 100
"""


def test_a_saved_model_is_trained_further_on_a_table_with_rewards_and_a_teacher(
    two_nodes: str, tmp_path: Path
) -> None:
    first = run_small(two_nodes, tmp_path / "first", num_nodes=1, save_hf=True)
    model = first.run_dir / "model"
    save_character_tokenizer(model)
    rows = [{"question": f"{i}{i}=", "label": {"text": f"{i}{i}"}} for i in range(10)]
    data, own = tmp_path / "prompts.parquet", tmp_path / "own.py"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), data)
    own.write_text(OWN_REWARD)
    config = JobConfig.from_sources(
        {
            **SIZES,
            "num_nodes": 1,
            "address": two_nodes,
            "run_dir": str(tmp_path / "second"),
            "hf_checkpoint": str(model),
            "prompt_data": str(data),
            "prompt_key": "question",
            "label_key": "label.text",
            "reward": ["exact", f"{own}:picky:0.5"],
            "reward_workers": 2,
            "max_error_reschedule_attempts": 0,
            "teacher_hf_checkpoint": str(model),
            "teacher_tau": 0.5,
            "policy_loss": "dppo_tv",
            "advantage_estimator": "gdpo",
        }
    )
    history = run_job(config).history
    assert len(history) == 3
    # At the first step the teacher is the policy.
    assert history[0]["teacher_kl"] == 0.0 != history[1]["teacher_kl"]
    # The 12 prompts of 3 rollouts hold all 10 rows; the one without a reward costs its group.
    assert history[-1]["dropped_failed"] == history[-1]["failed_rewards"] >= 1
    assert history[-1]["epoch"] == (12 + history[-1]["dropped_failed"]) / 10
    for line in history:
        parts = line["reward/exact"] + 0.5 * line["reward/picky"]
        assert line["reward"] == pytest.approx(parts) and 0 < line["reward/picky"] <= 0.06
    samples = read_samples(tmp_path / "second")
    assert [(s["step"], s["kind"]) for s in samples[:3]] == [
        (1, "best"),
        (1, "worst"),
        (1, "random"),
    ]
    assert samples[0]["prompt"] in {row["question"] for row in rows}
    assert set(samples[0]["rewards"]) == {"exact", "picky"} and samples[-1]["step"] == 3


def train_command(run_dir: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "plugin", "train", "--run-dir", str(run_dir), *flags]


def test_the_command_without_flags_learns_the_built_in_task(tmp_path: Path) -> None:
    done = subprocess.run(
        train_command(tmp_path / "run"), capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert steps[0]["reward"] < 0.15
    assert sum(step["reward"] for step in steps[-5:]) / 5 >= 0.9


def processes_of_session(marker: str) -> list[str]:
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if marker in line]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_writes_the_report_and_leaves_no_process(
    tmp_path: Path, ending: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    environment = {**os.environ, "RAY_TMPDIR": "/tmp"}
    process = subprocess.Popen(
        train_command(run_dir, "--num-rollouts", "100000"),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        _wait_for_steps(run_dir / "metrics.jsonl", process)
        listening = _listening_addresses()
        [driver] = psutil.Process(process.pid).children()
        process.send_signal(ending)
        output, _ = process.communicate(timeout=120)
    finally:
        # A failed test must not leave the job running; its own end takes Ray along.
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=120)
    assert process.returncode == 130, output
    assert (run_dir / "report.html").exists()
    assert not processes_of_session(f"_{driver.pid}/")
    outside = [address for address in listening if not address.startswith(("127.", "[::ffff:127."))]
    assert not outside, outside


def _wait_for_steps(metrics: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(6000):
        if metrics.exists() and metrics.read_text().count("\n") >= 2:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("the job made no step in ten minutes")


def _listening_addresses() -> list[str]:
    """Local addresses of Ray's own processes that accept connections."""
    found = subprocess.run(["ss", "-ltnp"], capture_output=True, text=True).stdout.splitlines()
    ours = [line.split() for line in found if "ray" in line or "python" in line or "gcs" in line]
    return [columns[3] for columns in ours]


#: On the ranks: the head node was started without either; the driver sets the second one itself.
_SEES_VARIABLES = """
import os

def sees_variables(args, *, pg_loss, loss_masks, **_):
    seen = [os.environ.get(name) for name in ("NCCL_DEBUG", "OMP_WAIT_POLICY")]
    assert seen == ["WARN", "PASSIVE"], seen
    return pg_loss, loss_masks, {}
"""


def test_ray_job_submit_runs_a_job(tmp_path: Path) -> None:
    """`ray job submit` needs a head node with its dashboard; both listen on loopback here."""
    ray_command = str(Path(sys.executable).parent / "ray")
    # Another Ray on this machine may have the agent's well-known port, and ours would start without.
    port, dashboard, agent = _free_port(), _free_port(), _free_port()
    # A token of this cluster's own, shared by the head node and the client.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {**os.environ, **token}
    head = subprocess.Popen(
        [
            *(ray_command, "start", "--head", "--block", f"--port={port}", "--num-cpus=4"),
            *("--include-dashboard=true", "--dashboard-host=127.0.0.1"),
            *(f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"),
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        # The dashboard waits 10 s for the agent that runs jobs; on a busy machine it starts later.
        _wait_until_healthy(f"http://127.0.0.1:{dashboard}/api/gcs_healthz", head)
        _wait_until_healthy(f"http://127.0.0.1:{agent}/api/healthz", head)
        # A variable of the submitted job, which Ray would refuse to be given again by the driver.
        variables = ("--runtime-env-json", json.dumps({"env_vars": {"NCCL_DEBUG": "WARN"}}))
        submit = (ray_command, "job", "submit", "--address", f"http://127.0.0.1:{dashboard}")
        submit = (*submit, *variables, "--")
        hook = tmp_path / "hook.py"
        hook.write_text(_SEES_VARIABLES)
        address = ("--address", f"127.0.0.1:{port}", "--use-tis")
        address = (*address, "--custom-tis-function-path", f"{hook}:sees_variables")
        sizes = ("--num-rollouts", "2", "--rollout-batch-size", "4")
        done = subprocess.run(
            [*submit, *train_command(tmp_path / "run", *address, *sizes)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2
    finally:
        # `ray start --block` ends the processes of its own node; `ray stop` would end every Ray here.
        head.terminate()
        head.wait(timeout=120)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(url: str, head: subprocess.Popen[bytes]) -> None:
    deadline, trouble = time.monotonic() + 180, None
    while time.monotonic() < deadline:
        assert head.poll() is None, "the head node ended"
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError as error:
            trouble = error
            time.sleep(0.5)
    raise AssertionError(f"{url} is not healthy after 180 s: {trouble}")


def test_a_private_ray_leaves_the_port_of_ray_agents_to_others_and_keeps_no_event_of_calls() -> (
    None
):
    """Whoever runs `ray start --head` beside a job needs it for `ray job submit`."""
    script = (
        "from plugin.config import JobConfig\n"
        "from plugin.cluster.ray_cluster import cluster\n"
        "with cluster(JobConfig()) as connected:\n"
        "    connected()\n"
        "    import ray._private.worker\n"
        "    print('port', ray._private.worker._global_node.dashboard_agent_listen_port)\n"
        "    import psutil\n"
        "    for child in psutil.Process().children(recursive=True):\n"
        "        if child.name() == 'gcs_server':\n"
        "            print('events', child.environ()['RAY_task_events_report_interval_ms'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    [port] = [int(s.split()[1]) for s in done.stdout.splitlines() if s.startswith("port ")]
    assert port > 0 and port != DEFAULT_DASHBOARD_AGENT_LISTEN_PORT, done.stdout + done.stderr
    assert "events 0" in done.stdout.splitlines(), done.stdout + done.stderr
