"""Reward workers on the nodes of a cluster: where they run, and what is lost when one is (nothing)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from plugin.cluster import remote_calls
from plugin.cluster.reward_nodes import RewardNodes
from plugin.config import JobConfig
from plugin.config.data import parse_rewards
from plugin.controller.job import run_job
from plugin.environments.deadline_calls import CallFailure
from plugin.errors import ClusterError
from plugin.observe.console import Console
from plugin.rewards.code_tests import strongest_isolation
from plugin.rewards.pool import PoolScorer
from plugin.rewards.reward_set import RewardSet, Score
from plugin.rewards.text_rewards import PortableTokenizer, TextSource, TokenResponse
from plugin.tasks.copy_digits import CharacterTokenizer
from tests.ray.casualties import AfterSteps, dropped_prompts, kill_one, trained_prompts
from tests.ray.small_jobs import SIZES, run_small
from tests.ray.tokenizer_files import save_character_tokenizer
from tests.unit.rewards.test_code_attacks import FORGERIES

pytestmark = [pytest.mark.hostile, pytest.mark.slow, pytest.mark.timeout(600)]

OWN = """
import os, time

def place(response, row):
    time.sleep(row.get("seconds", 0.0))
    if row.get("dies"):
        os._exit(5)
    if row.get("hangs"):
        time.sleep(60)
    return float(os.environ["RAY_RAYLET_PID"])

def word(response, row):
    return float(response == row["text"])
"""
TEXT = CharacterTokenizer("".join(map(chr, range(1, 128))), end=chr(128))


@pytest.fixture
def joined(two_nodes: str) -> Iterator[str]:
    import ray

    ray.init(address=two_nodes, log_to_driver=False)
    yield two_nodes
    ray.shutdown()


def nodes_of(*rewards: str, seconds: float = 20.0, **constants: Any) -> RewardNodes:
    import ray

    chosen = RewardSet(parse_rewards(rewards), constants={"timeout": seconds, **constants})
    source = TextSource(chosen, PortableTokenizer.of(TEXT), (TEXT.eos_token_id,))
    config = JobConfig(task_path="own.py:make", reward_timeout=seconds, reward_workers=2)
    nodes = RewardNodes(Console(), source, config)
    nodes.begin({node["NodeID"]: 1.0 for node in ray.nodes() if node["Alive"]})
    return nodes


def response(text: str, /, **row: Any) -> TokenResponse:
    from array import array

    return TokenResponse(array("i", [*TEXT.encode(text), TEXT.eos_token_id]).tobytes(), row)


class Asked:
    """Responses that are being scored."""

    def __init__(self, nodes: RewardNodes, responses: list[TokenResponse]) -> None:
        self._scorer = PoolScorer(nodes)
        self._tickets = [self._scorer.enqueue(one) for one in responses]
        self.found: dict[int, Score | CallFailure] = {}

    def wait(self, count: int | None = None) -> list[Score | CallFailure]:
        """The answers in order, once there are so many."""
        deadline = time.monotonic() + 120
        while len(self.found) < (len(self._tickets) if count is None else count):
            assert time.monotonic() < deadline, f"{len(self.found)} of {len(self._tickets)}"
            self.found |= dict(self._scorer.finished(wait_seconds=1))
        return [self.found[ticket] for ticket in self._tickets if ticket in self.found]


def test_rewards_run_on_every_node_and_a_bad_one_costs_its_response_only(
    joined: str, tmp_path: Path
) -> None:
    import ray

    file = tmp_path / "own.py"
    file.write_text(OWN)
    nodes = nodes_of(f"{file}:place", f"{file}:word", seconds=3.0)
    try:
        texts = [f"text {i}" for i in range(40)]
        many = [response(text, text=text, seconds=0.05) for text in texts]
        bad = [response("x", text="x", dies=True), response("x", text="x", hangs=True)]
        *sound, died, hung = Asked(nodes, [*many, *bad]).wait()
        places = {score.parts["place"] for score in sound if isinstance(score, Score)}
        assert len(sound) == 40 and all(s.parts["word"] == 1.0 for s in sound)  # type: ignore[union-attr]
        # Each node has a raylet of its own.
        assert len(places) == 2 and os.getpid() not in places
        assert isinstance(died, CallFailure) and "ended with exit code 5" in died.reason
        assert hung == CallFailure("a reward gave no answer within 3 seconds")
        assert nodes.restarts == 0
        assert ray.available_resources().get("CPU", 0.0) <= 3.0  # of 5: two are taken
    finally:
        nodes.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_lost_actor_had_is_scored_by_others(
    joined: str, tmp_path: Path, how: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    if how == signal.SIGSTOP:
        monkeypatch.setattr(remote_calls, "SILENCE_SECONDS", 15.0)
    file = tmp_path / "own.py"
    file.write_text(OWN)
    nodes = nodes_of(f"{file}:place")
    try:
        asked = Asked(nodes, [response("x", seconds=0.3) for _ in range(40)])
        asked.wait(8)
        victim = ray.get(nodes._nodes[0].actor.ping.remote())
        os.kill(victim, how)
        answers = asked.wait()
        assert len(answers) == 40 and all(isinstance(a, Score) for a in answers)
        assert nodes.restarts == 1
        with pytest.raises(ProcessLookupError):
            for _ in range(100):
                os.kill(victim, 0)
                time.sleep(0.1)
    finally:
        nodes.close()


def test_a_lost_node_takes_no_response_with_it(tmp_path: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    file = tmp_path / "own.py"
    file.write_text(OWN)
    cluster = Cluster()
    cluster.add_node(num_cpus=2, include_dashboard=False)
    extra = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        nodes = nodes_of(f"{file}:place")
        asked = Asked(nodes, [response("x", seconds=0.3) for _ in range(40)])
        before = {score.total for score in asked.wait(8) if isinstance(score, Score)}
        cluster.remove_node(extra)
        answers = asked.wait()
        assert len(answers) == 40 and all(isinstance(a, Score) for a in answers)
        assert nodes.restarts == 1
        # Its workers start where there is room: on the node that is left.
        deadline = time.monotonic() + 60
        while not all(node.has_started for node in nodes._nodes):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        after = Asked(nodes, [response("x", seconds=0.3) for _ in range(8)]).wait()
        assert len(before | {score.total for score in after}) <= 2  # type: ignore[union-attr]
        nodes.close()
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_forged_programs_earn_nothing_in_an_actor_and_honest_ones_pass(joined: str) -> None:
    nodes = nodes_of("code_tests", isolation=strongest_isolation())
    try:
        programs = [(p, tests) for p, tests in FORGERIES.values() if p.isascii()]
        honest = ("def add(a, b): return a + b", "assert add(2, 3) == 5")
        asked = [
            response(f"```python\n{program}\n```", answer=tests)
            for program, tests in [*programs, honest]
        ]
        *forged, passed = Asked(nodes, asked).wait()
        assert len(forged) > 20
        assert [s.total for s in forged] == [0.0] * len(forged)  # type: ignore[union-attr]
        assert passed == Score(1.0, {"code_tests": 1.0})
    finally:
        nodes.close()


def test_more_workers_than_the_cluster_has_cpus_left_are_refused_before_the_start(
    two_nodes: str, tmp_path: Path
) -> None:
    task = tmp_path / "own.py"
    task.write_text(
        "from plugin.tasks.copy_digits import CopyDigitsTask\n"
        "def make(config, tokenizer): return CopyDigitsTask(tokenizer, seed=config.seed)\n"
    )
    with pytest.raises(
        ClusterError,
        match=r"--reward-workers is 4, and the job's ranks and engines leave 3 CPUs of the cluster",
    ):
        run_small(
            *(two_nodes, tmp_path / "run"),
            num_nodes=1,
            task_path=f"{task}:make",
            reward_workers=4,
        )


def test_a_job_whose_reward_actor_is_killed_loses_no_group(two_nodes: str, tmp_path: Path) -> None:
    first = run_small(two_nodes, tmp_path / "first", num_nodes=1, num_rollouts=1, save_hf=True)
    model = first.run_dir / "model"
    save_character_tokenizer(model)
    data, file = tmp_path / "prompts.parquet", tmp_path / "own.py"
    rows = [{"prompt": f"{i}{i}=", "answer": f"{i}{i}"} for i in range(10)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), data)
    file.write_text(
        "import os\n"
        "def place(response, row, *, num_tokens):\n"
        "    raylet = os.environ.get('RAY_RAYLET_PID')\n"
        "    if raylet:  # not in the driver, which tries the reward once\n"
        f"        open({str(tmp_path / 'places')!r}, 'a').write(raylet + ' ')\n"
        "    return num_tokens / 10\n"
    )
    run_dir = tmp_path / "run"
    config = JobConfig.from_sources(
        {
            **SIZES,
            "num_nodes": 1,
            "num_rollouts": 40,
            "address": two_nodes,
            "run_dir": str(run_dir),
            "hf_checkpoint": str(model),
            "prompt_data": str(data),
            "reward": [f"{file}:place"],
            "reward_workers": 2,
            "async_rollouts": True,
            "use_tis": True,
        }
    )
    with AfterSteps(run_dir, 5, lambda: kill_one("RewardActor")) as killed:
        result = run_job(config)
    assert killed.done and len(result.history) == 40
    trained, last = trained_prompts(run_dir), result.history[-1]
    assert len(trained) == len(set(trained)) == 160
    dropped = dropped_prompts(run_dir)
    assert last["prompts_issued"] == 160 + len(dropped) + last["prompts_under_way"]
    assert last["dropped_failed"] == last["failed_rewards"] == last["groups_resampled"] == 0
    assert sorted({*trained, *dropped})[: len(trained)] == list(range(160))[: len(trained)]
    # As many as there are nodes with workers; the driver's own process is none of their parents.
    places = set((tmp_path / "places").read_text().split())
    assert 1 <= len(places) <= 2 and str(os.getpid()) not in places
