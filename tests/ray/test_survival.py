"""Jobs that lose engines, ranks, nodes or their driver: nothing is lost, nothing is done twice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from plugin.commands.eval import evaluate
from plugin.controller.job import JobResult
from plugin.controller.queue.group_journal import journal_files, read_file
from plugin.controller.weight_sync import WeightSync
from plugin.errors import ClusterError, EngineError, ParallelError
from plugin.observe.console import Console
from plugin.observe.run_record import read_run
from tests.ray.casualties import (
    AfterSteps,
    dropped_prompts,
    kill_one,
    logged_steps,
    trained_prompts,
    workers,
)
from tests.ray.small_jobs import SIZES, run_small

pytestmark = pytest.mark.timeout(600)

ONE_NODE = {"num_nodes": 1, "num_rollouts": 10}
RESUMABLE = {
    **ONE_NODE,
    "num_gpus_per_node": 2,
    "save_interval": 3,
    "eval_data": "held:8",
    "eval_interval": 2,
    "dynamic_sampling": True,
    "over_sampling_batch_size": 6,
}


@pytest.fixture(scope="module")
def unbroken(two_nodes: str, tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    """The run that broken runs have to repeat."""
    return run_small(two_nodes, tmp_path_factory.mktemp("unbroken") / "run", **RESUMABLE)


def test_a_killed_engine_is_replaced_and_a_killed_rank_sends_the_trainer_back_to_its_checkpoint(
    two_nodes: str, unbroken: JobResult, tmp_path: Path
) -> None:
    with (
        AfterSteps(tmp_path / "run", 2, lambda: kill_one("EngineActor")) as engine,
        AfterSteps(tmp_path / "run", 5, lambda: kill_one("TrainerRank")) as rank,
    ):
        result = run_small(two_nodes, tmp_path / "run", **RESUMABLE)
    assert engine.done and rank.done
    assert result.history[-1]["engine_restarts"] == result.history[-1]["trainer_restarts"] == 1
    assert trained_prompts(tmp_path / "run") == trained_prompts(unbroken.run_dir)
    assert dropped_prompts(tmp_path / "run") == dropped_prompts(unbroken.run_dir)
    assert [s["step"] for s in result.history] == list(range(1, 11))
    # Responses depend on weights, prompt and seed alone: the new engine gives the old one's.
    assert [s["loss"] for s in result.history] == [s["loss"] for s in unbroken.history]
    assert [s["grad_norm"] for s in result.history] == [s["grad_norm"] for s in unbroken.history]


def test_weights_by_broadcast_and_through_the_object_store_train_alike(
    two_nodes: str, unbroken: JobResult, tmp_path: Path
) -> None:
    stored = run_small(
        two_nodes, tmp_path / "run", **RESUMABLE | {"num_rollouts": 4}, weight_sync="object-store"
    )
    assert {s["weight_sync"] for s in unbroken.history} == {"broadcast"}
    assert {s["weight_sync"] for s in stored.history} == {"object-store"}
    assert all(s["weight_sync_bytes"] > 0 for s in (*stored.history, *unbroken.history))
    for name in ("loss", "grad_norm", "reward", "mismatch_kl"):
        assert [s[name] for s in stored.history] == [s[name] for s in unbroken.history[:4]], name


@pytest.mark.parametrize("transport", ["broadcast", "delta"])
def test_an_engine_killed_during_a_transfer_is_replaced_and_gets_it_again(
    two_nodes: str,
    unbroken: JobResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
) -> None:
    transfer, transfers = WeightSync._transfer, []

    def third_one_is_lost(*arguments: Any) -> bool:
        transfers.append(len(transfers))
        if len(transfers) == 3:
            # Frozen first, so that it cannot finish before it dies.
            pid = kill_one("EngineActor", signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
        return transfer(*arguments)

    monkeypatch.setattr(WeightSync, "_transfer", third_one_is_lost)
    settings = RESUMABLE | {"num_rollouts": 4, "weight_sync": transport}
    result = run_small(two_nodes, tmp_path / "run", **settings)
    assert len(transfers) == 6  # five versions, one of them twice
    last = result.history[-1]
    assert last["engine_restarts"] == 1 and last["trainer_restarts"] == 0
    assert [s["loss"] for s in result.history] == [s["loss"] for s in unbroken.history[:4]]
    # The third version was to be a delta; after the loss it came in full.
    shares = ["weight_changed_share" in step for step in result.history]
    assert shares == {"broadcast": [False] * 4, "delta": [False, True, False, True]}[transport]


@pytest.mark.slow
def test_a_job_with_deltas_repeats_the_one_without_through_kills(
    two_nodes: str, unbroken: JobResult, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with (
        AfterSteps(run_dir, 2, lambda: kill_one("EngineActor")) as engine,
        AfterSteps(run_dir, 5, lambda: kill_one("TrainerRank")) as rank,
    ):
        settings = {"weight_sync": "delta", "full_weights_every": 4, "verify_weights": "every:1"}
        result = run_small(two_nodes, run_dir, **RESUMABLE, **settings)
    assert engine.done and rank.done
    assert result.history[-1]["engine_restarts"] == result.history[-1]["trainer_restarts"] == 1
    assert result.history[-1]["weight_repairs"] == 0
    assert 3 <= sum("weight_changed_share" in step for step in result.history) <= 8
    assert trained_prompts(run_dir) == trained_prompts(unbroken.run_dir)
    for name in ("loss", "grad_norm", "reward"):
        assert [s[name] for s in result.history] == [s[name] for s in unbroken.history]


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_a_job_on_shared_devices_repeats_the_one_on_its_own_through_kills(
    two_nodes: str, unbroken: JobResult, tmp_path: Path, level: int
) -> None:
    shared = {"colocate": True, "colocate_sleep_level": level, "keep_best": True}
    with (
        # When a step has been logged the engine sleeps.
        AfterSteps(tmp_path / "run", 2, lambda: kill_one("EngineActor")) as engine,
        AfterSteps(tmp_path / "run", 5, lambda: kill_one("TrainerRank")) as rank,
    ):
        result = run_small(two_nodes, tmp_path / "run", **RESUMABLE, **shared)
    assert engine.done and rank.done
    assert result.history[-1]["engine_restarts"] == result.history[-1]["trainer_restarts"] == 1
    assert trained_prompts(tmp_path / "run") == trained_prompts(unbroken.run_dir)
    for name in ("loss", "grad_norm", "reward"):
        assert [s[name] for s in result.history] == [s[name] for s in unbroken.history]
    scores = [[line["eval/held/mean"] for line in r.evaluations] for r in (result, unbroken)]
    assert scores[0] == scores[1]


@pytest.mark.slow
@pytest.mark.parametrize("interrupting", [{}, {"partial_rollouts": True, "max_token_staleness": 1}])
def test_an_asynchronous_job_accounts_for_every_prompt_through_kills(
    two_nodes: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    interrupting: dict[str, Any],
) -> None:
    run_dir = tmp_path / "run"
    with (
        AfterSteps(run_dir, 3, lambda: kill_one("EngineActor")),
        AfterSteps(run_dir, 8, lambda: kill_one("TrainerRank")),
        AfterSteps(run_dir, 14, lambda: kill_one("EngineActor")),
    ):
        result = run_small(
            two_nodes,
            run_dir,
            num_nodes=1,
            num_rollouts=20,
            save_interval=3,
            num_rollout_engines=2,
            async_rollouts=True,
            max_weight_staleness=2,
            use_tis=True,
            **interrupting,
        )
    last = result.history[-1]
    trained, dropped = trained_prompts(run_dir), dropped_prompts(run_dir)
    assert last["trainer_restarts"] == 1 and last["engine_restarts"] >= 2
    assert len(set(trained)) == len(trained) == last["prompts_trained"] == 20 * 4
    assert not set(trained) & set(dropped)
    dropped_in_all = sum(last[f"dropped_{cause}"] for cause in ("stale", "failed", "uniform"))
    accounted = last["prompts_trained"] + dropped_in_all
    assert last["prompts_issued"] == accounted + last["prompts_under_way"]
    assert re.search(r"goes on after rollout \d+ of 20, keeps \d+", "".join(capsys.readouterr()))


@pytest.mark.slow
def test_a_job_that_aborts_surplus_groups_accounts_for_every_prompt(
    two_nodes: str, tmp_path: Path
) -> None:
    settings = RESUMABLE | {"over_sampling_batch_size": 12, "abort_surplus_groups": True}
    more = {"num_rollout_engines": 2, "rollout_max_batch": 8}
    result = run_small(two_nodes, tmp_path / "run", **settings, **more)
    last, trained = result.history[-1], trained_prompts(tmp_path / "run")
    assert len(set(trained)) == len(trained) == last["prompts_trained"] == 10 * 4
    assert not set(trained) & set(dropped_prompts(tmp_path / "run"))
    assert last["groups_surplus"] > 0
    dropped = sum(last[f"dropped_{cause}"] for cause in ("stale", "failed", "uniform"))
    assert last["prompts_issued"] == 10 * 4 + dropped + last["prompts_under_way"]
    assert all(step["staleness"] == 0 for step in result.history)


@pytest.mark.slow
def test_a_hung_engine_is_found_by_its_deadline(two_nodes: str, tmp_path: Path) -> None:
    frozen: list[int] = []
    freeze = AfterSteps(
        tmp_path / "run", 2, lambda: frozen.append(kill_one("EngineActor", signal.SIGSTOP))
    )
    with freeze:
        result = run_small(two_nodes, tmp_path / "run", **ONE_NODE, rollout_timeout=5.0)
    assert freeze.done and result.history[-1]["engine_restarts"] == 1
    assert trained_prompts(tmp_path / "run") == list(range(10 * 4))
    assert _gone(frozen[0])


@pytest.mark.slow
def test_an_engine_that_always_dies_ends_the_job_with_a_reason(
    two_nodes: str, tmp_path: Path
) -> None:
    task = tmp_path / "deadly.py"
    task.write_text(DEADLY_TASK)
    with pytest.raises(EngineError, match="engine 0 was restarted 2 times without answering"):
        run_small(
            two_nodes,
            tmp_path / "run",
            **ONE_NODE,
            max_restarts=2,
            task_path=f"{task}:Deadly",
        )


DEADLY_TASK = """
import os, signal
from plugin.tasks.copy_digits import CopyDigitsTask
from tests.ray.casualties import workers

class Deadly(CopyDigitsTask):
    def __init__(self, config, tokenizer):
        super().__init__(tokenizer, seed=config.seed)

    def prompt(self, index):
        if index >= 8:
            for process in workers("EngineActor"):
                os.kill(process.pid, signal.SIGKILL)
        return super().prompt(index)
"""


@pytest.mark.slow
def test_a_lost_rank_without_checkpoints_ends_the_job_with_advice(
    two_nodes: str, tmp_path: Path
) -> None:
    with (
        AfterSteps(tmp_path / "run", 2, lambda: kill_one("TrainerRank")),
        pytest.raises(ParallelError, match="with --save-interval it would restart"),
    ):
        run_small(two_nodes, tmp_path / "run", **ONE_NODE)
    assert (tmp_path / "run" / "report.html").exists()


def _command(
    run_dir: Path, *extra: str, rollouts: int, settings: dict[str, Any] = RESUMABLE
) -> list[str]:
    """`run_small` as a command of its own process."""
    sizes = {**SIZES, **settings, "num_rollouts": rollouts, "run_dir": run_dir}
    flags = []
    for name, value in sizes.items():
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [sys.executable, "-m", "plugin", "train", *flags, *extra]


def _scores(run_dir: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, without their times."""
    found = read_run(run_dir).evaluations
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in found]


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_run_resumed_after_kill_9_of_the_driver_repeats_the_unbroken_one(
    two_nodes: str, unbroken: JobResult, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    # On a Ray of its own, which has to go with its driver.
    driver = subprocess.Popen(_command(killed, rollouts=10))
    while logged_steps(killed / "metrics.jsonl") < 5:
        assert driver.poll() is None, "the job ended before it could be killed"
        time.sleep(0.02)
    family = [p for p in psutil.Process(driver.pid).children(recursive=True) if not _is_agent(p)]
    started = {Path(part).name for process in family for part in process.cmdline()[:3]}
    assert not started & {"dashboard.py", "log_monitor.py", "monitor.py"}
    actors = [p for p in family if p.cmdline() and p.cmdline()[0].startswith("ray::")]
    assert actors and {p.nice() for p in actors} == {psutil.Process(driver.pid).nice()}
    driver.kill()
    driver.wait()
    assert logged_steps(killed / "metrics.jsonl") < 10
    run_small(two_nodes, killed, **RESUMABLE, resume=True)
    mine, theirs = read_run(killed).steps, read_run(unbroken.run_dir).steps
    assert [step["step"] for step in mine] == list(range(1, 11))
    for name in ("loss", "grad_norm", "reward", "mismatch_kl", "weight_version", "lr"):
        assert [s[name] for s in mine] == [s[name] for s in theirs], name
    assert [line["step"] for line in _scores(killed)] == [0, 2, 4, 6, 8, 10]
    assert _scores(killed) == _scores(unbroken.run_dir)
    trained = trained_prompts(killed)
    assert trained == trained_prompts(unbroken.run_dir) and len(set(trained)) == 10 * 4
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, [process.cmdline() for process in alive]


@pytest.mark.slow
def test_an_asynchronous_run_resumed_after_kill_9_of_the_driver_trains_on_its_finished_groups(
    two_nodes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, rollouts = tmp_path / "run", 14
    settings = {**ONE_NODE, "save_interval": 3, "async_rollouts": True, "use_tis": True}
    settings |= {"max_weight_staleness": 2, "num_rollout_engines": 2}
    driver = subprocess.Popen(_command(run_dir, rollouts=1000, settings=settings))
    while logged_steps(run_dir / "metrics.jsonl") < 7:
        assert driver.poll() is None, "the job ended before it could be killed"
        time.sleep(0.02)
    driver.kill()
    driver.wait()
    before = trained_prompts(run_dir)
    groups = _finished_groups(run_dir)
    finished, newest = {g.index for g in groups}, max(g.last_version for g in groups)
    assert len(finished) >= 4, "groups were ahead of the trainer"
    capsys.readouterr()
    result = run_small(two_nodes, run_dir, **settings | {"num_rollouts": rollouts}, resume=True)
    text = "".join(capsys.readouterr())
    said = re.search(r"goes on after rollout (\d+) of 14, keeps (\d+)", text)
    assert said is not None, text
    at, kept = int(said[1]), int(said[2])
    trained = trained_prompts(run_dir)
    # The prompts up to the checkpoint are those of before; the next batch was all there.
    assert trained[: at * 4] == before[: at * 4]
    assert set(trained[at * 4 : (at + min(1, kept // 4)) * 4]) <= finished
    last = result.history[-1]
    assert len(set(trained)) == len(trained) == last["prompts_trained"] == rollouts * 4
    dropped = sum(last[f"dropped_{cause}"] for cause in ("stale", "failed", "uniform"))
    assert last["prompts_issued"] == rollouts * 4 + dropped + last["prompts_under_way"]
    # A version names one set of weights: none of the lost ones has that of the checkpoint.
    resumed = next(step for step in result.history if step["rollout"] == at)
    assert resumed["weight_version"] == (newest + 1 if newest > at else at)


def _finished_groups(run_dir: Path) -> list[Any]:
    """The groups in the journal of a run."""
    found = []
    for path in journal_files(run_dir):
        key = json.loads(path.read_bytes().partition(b"\n")[0])["key"]
        found += read_file(path, key)
    return found


@pytest.mark.slow
def test_a_checkpoint_evaluated_by_itself_scores_what_the_run_recorded(unbroken: JobResult) -> None:
    for source in (unbroken.run_dir, unbroken.run_dir / "checkpoints" / "step_0000010"):
        alone = evaluate(source, None, {}, Console())
        assert alone["checkpoint"] == "step_0000010"
        recorded = {k: v for k, v in unbroken.evaluations[-1].items() if k.startswith("eval/")}
        assert recorded["eval/held/prompts"] == 8
        assert {k: alone[k] for k in recorded} == pytest.approx(recorded)


def _is_agent(process: psutil.Process) -> bool:
    """Ray's own agents take a minute: they first try to report to the server that died with the driver."""
    return any("Agent" in part for part in process.cmdline()[:1])


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_port_or_shared_memory(tmp_path: Path) -> None:
    driver = subprocess.Popen(_command(tmp_path / "run", rollouts=1000))
    while logged_steps(tmp_path / "run" / "metrics.jsonl") < 3:
        assert driver.poll() is None
        time.sleep(0.05)
    family = psutil.Process(driver.pid).children(recursive=True)
    ports = {c.laddr.port for p in family for c in _listening(p)}
    shared = _shared_memory(family)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(timeout=60) == 130
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert ports and not ports & {
        c.laddr.port for c in psutil.net_connections("tcp") if c.status == "LISTEN"
    }
    assert not [file for file in shared if file.exists()]
    assert (tmp_path / "run" / "report.html").exists()


def _shared_memory(family: list[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that processes have mapped; other jobs of the machine have their own."""
    maps = [mapped.path for process in family for mapped in process.memory_maps()]
    return {Path(path) for path in maps if path.startswith("/dev/shm/")}


def _listening(process: psutil.Process) -> list[Any]:
    return [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]


@pytest.mark.slow
def test_a_node_that_leaves_takes_its_engine_and_the_job_moves_to_another(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(num_cpus=1, include_dashboard=False)
    extra = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    try:
        leave = AfterSteps(
            tmp_path / "run", 3, lambda: cluster.remove_node(_node_with_engine(extra))
        )
        with leave:
            result = run_small(cluster.address, tmp_path / "run", **ONE_NODE, save_interval=2)
        assert leave.done
        assert trained_prompts(tmp_path / "run") == list(range(10 * 4))
        assert result.history[-1]["engine_restarts"] + result.history[-1]["trainer_restarts"] >= 1
    finally:
        cluster.shutdown()


def _node_with_engine(nodes: list[Any]) -> Any:
    """A node that runs one of the job's actors, and not the cluster's head."""
    for node in nodes:
        raylet = node.all_processes["raylet"][0].process.pid
        if workers("EngineActor", raylet) or workers("TrainerRank", raylet):
            return node
    raise AssertionError("the actors are all on the first node")


@pytest.mark.slow
@pytest.mark.timeout(900)  # of these it waits --load-timeout for an engine that has no node
def test_routes_that_are_lost_with_a_node_cost_one_restart_of_the_trainer(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    cluster, run_dir = Cluster(), tmp_path / "run"
    # Routes of short responses would be kept by the driver, not by the engine's node.
    cluster.add_node(
        num_cpus=2, include_dashboard=False, _system_config={"max_direct_call_object_size": 100}
    )
    extra = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    try:
        with AfterSteps(run_dir, 4, lambda: cluster.remove_node(extra)) as leave:
            result = run_small(
                cluster.address,
                run_dir,
                num_nodes=1,
                num_rollouts=12,
                num_rollout_engines=2,
                save_interval=3,
                embedded_model="qwen3_moe",
                use_rollout_routing_replay="ids",
                async_rollouts=True,
                max_weight_staleness=3,
                use_tis=True,
            )
        assert leave.done
    finally:
        cluster.shutdown()
    last, trained = result.history[-1], trained_prompts(run_dir)
    assert last["trainer_restarts"] <= 1
    assert len(set(trained)) == len(trained) == last["prompts_trained"] == 12 * 4
    dropped = sum(last[f"dropped_{cause}"] for cause in ("stale", "failed", "uniform"))
    assert last["prompts_issued"] == 12 * 4 + dropped + last["prompts_under_way"]


@pytest.mark.slow
def test_a_job_starts_with_the_engines_there_is_room_for_and_takes_the_others_as_nodes_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(num_cpus=2, include_dashboard=False)  # room for the rank and one engine
    cluster.wait_for_nodes()
    run_dir, sizes = tmp_path / "run", {"num_nodes": 1, "num_rollout_engines": 2}
    try:
        with pytest.raises(ClusterError, match=r"2 x .1 CPU. for engines"):
            run_small(cluster.address, tmp_path / "all", num_rollouts=1, **sizes)
        with AfterSteps(run_dir, 3, lambda: cluster.add_node(num_cpus=1)) as arrival:
            result = run_small(
                cluster.address, run_dir, num_rollouts=60, min_rollout_engines=1, **sizes
            )
        assert arrival.done
    finally:
        cluster.shutdown()
    said = "".join(capsys.readouterr())
    assert "room for 1 of 2 engines" in said and "engine 1 has joined: 2 of 2" in said
    engines = [step["rollout_engines"] for step in result.history]
    assert engines[:3] == [1, 1, 1] and engines[-1] == 2
    assert trained_prompts(run_dir) == list(range(60 * 4))
    last = result.history[-1]
    assert last["engine_restarts"] == 0
    assert last["prompts_issued"] == last["prompts_trained"] == 60 * 4


@pytest.mark.slow
def test_a_job_goes_on_without_an_engine_that_has_no_node_any_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    # Room for the rank and one engine, and for the other engine.
    cluster.add_node(num_cpus=2, include_dashboard=False)
    extra = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    run_dir = tmp_path / "run"
    try:
        with AfterSteps(run_dir, 3, lambda: cluster.remove_node(extra)) as leave:
            result = run_small(
                cluster.address,
                run_dir,
                num_nodes=1,
                num_rollouts=12,
                num_rollout_engines=2,
                start_timeout=30.0,
            )
        assert leave.done
    finally:
        cluster.shutdown()
    assert trained_prompts(run_dir) == list(range(12 * 4))
    engines = [step["rollout_engines"] for step in result.history]
    assert engines[0] == 2 and engines[-1] == 1
    last = result.history[-1]
    assert last["prompts_issued"] == last["prompts_trained"] + last["prompts_under_way"] == 12 * 4
    assert "the job goes on with 1 of 2 engines" in "".join(capsys.readouterr())
