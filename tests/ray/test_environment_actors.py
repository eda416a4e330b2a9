"""Environments in processes of their own: the engine's runs none of their code and outlives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin.errors import ClusterError
from tests.ray.casualties import AfterSteps, dropped_prompts, kill_one, trained_prompts
from tests.ray.small_jobs import run_small

pytestmark = [pytest.mark.hostile, pytest.mark.slow, pytest.mark.timeout(600)]

OWN = """
import os, sys
from examples.tiny_tool_task import LookupEnvironment, LookupTask

class Watched(LookupEnvironment):
    def step(self, reply, history):
        with open({file!r}, "a") as file:
            file.write(f"{{os.getpid()}} {{'plugin.engines.choice' in sys.modules}}\\n")
        return super().step(reply, history)

class Task(LookupTask):
    def environment(self, index, seed):
        return Watched(*self._key_and_table(index))
"""
SEVERAL_TURNS = {"num_nodes": 1, "max_turns": 3, "rollout_batch_size": 4}


def test_environments_run_outside_of_the_engine_and_one_that_dies_costs_their_groups_a_try(
    two_nodes: str, tmp_path: Path
) -> None:
    task, told, run_dir = tmp_path / "own.py", tmp_path / "told", tmp_path / "run"
    task.write_text(OWN.format(file=str(told)))
    with AfterSteps(run_dir, 5, lambda: kill_one("EnvironmentActor")) as killed:
        result = run_small(
            two_nodes,
            run_dir,
            learns_every_step=False,
            num_rollouts=40,
            task_path=f"{task}:Task",
            **SEVERAL_TURNS,
        )
    assert killed.done
    told_by = {line.split()[0]: line.split()[1] for line in told.read_text().splitlines()}
    # Two processes, one after the other, and neither is an engine's.
    assert len(told_by) == 2 and set(told_by.values()) == {"False"}
    last, trained = result.history[-1], trained_prompts(run_dir)
    assert last["engine_restarts"] == 0 and trained == list(range(160))
    assert dropped_prompts(run_dir) == []
    assert last["prompts_issued"] == 160 + last["prompts_under_way"]


def test_environments_without_a_cpu_are_refused_before_the_start(
    two_nodes: str, tmp_path: Path
) -> None:
    with pytest.raises(
        ClusterError, match=r"environments of --task-path need 2 CPUs.* leave 1 of the cluster"
    ):
        run_small(
            two_nodes,
            tmp_path / "run",
            task_path="examples/tiny_tool_task.py:LookupTask",
            num_rollout_engines=2,
            **SEVERAL_TURNS | {"num_gpus_per_node": 2},
        )
