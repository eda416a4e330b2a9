"""Rewards in worker processes: whatever one does, it costs its own group, and the driver goes on."""

from __future__ import annotations

import os
import re
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plugin.config import JobConfig
from plugin.config.data import parse_rewards
from plugin.controller.queue.groups import joined, reward_parts
from plugin.controller.queue.rollout_queue import RolloutQueue
from plugin.environments.deadline_calls import CallFailure
from plugin.errors import BatchError
from plugin.rewards.code_tests import code_tests, strongest_isolation
from plugin.rewards.pool import PoolScorer, RewardPool
from plugin.rewards.reward_set import RewardInput, RewardSet, Score
from plugin.rewards.sandbox import _descendants
from plugin.rewards.scorers import TextScorer
from plugin.rewards.text_rewards import PortableTokenizer, TextSource, TokenResponse
from plugin.tasks.copy_digits import CharacterTokenizer
from plugin.tasks.prompt_data import DatasetTask, PromptDataset
from plugin.tasks.protocol import Prompt
from tests.parallel.tiny_models import tiny_qwen3
from tests.unit.controller.queue.test_rollout_queue import DirectEngines
from tests.unit.engines.tiny_engines import loaded_engine
from tests.unit.rewards.test_rewards import PARAMETERS

pytestmark = [pytest.mark.hostile, pytest.mark.usefixtures("jumping_clock")]


OWN = """
import ctypes, math, os, subprocess, sys, time

def spoiled(response, row):
    kind = row.get("kind")
    if kind == "raises":
        raise KeyError("no such answer")
    if kind == "exits":
        sys.exit(3)
    if kind == "dies":
        os._exit(5)
    if kind == "crashes":
        ctypes.string_at(0)
    if kind == "hangs":
        time.sleep(60)
    if kind == "hangs with a child":
        child = subprocess.Popen(["sleep", "60"])
        open(row["file"], "w").write(str(child.pid))
        child.wait()
    if kind == "takes all memory":
        bytearray(1 << 40)
    if kind == "prints":
        print("a line"); sys.stdout.flush()
    if kind == "slow":
        time.sleep(0.3)
        return os.getpid()
    return {"NaN": math.nan, "None": None, "a list": [1.0]}.get(kind, 1.0)

def torch_free(response, row):
    return float("torch" not in sys.modules)
"""


#: As many tokens as the model.
TOKENIZER = CharacterTokenizer("".join(map(chr, range(48, 47 + tiny_qwen3().vocab_size))))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("rewards") / "own.py"
    file.write_text(OWN)
    return str(file)


@pytest.fixture(scope="module")
def pool(own: str) -> Iterator[RewardPool]:
    chosen = RewardSet(parse_rewards((f"{own}:spoiled:2", f"{own}:torch_free")))
    tokenizer = PortableTokenizer.of(TOKENIZER)
    source = TextSource(chosen, tokenizer, (TOKENIZER.eos_token_id,))
    with RewardPool(source, workers=2, seconds=3.0, memory_mb=256) as running:
        yield running


def ask(pool: RewardPool, *rows: dict[str, Any]) -> list[Score | CallFailure]:
    return answers_of(pool, [TokenResponse(b"", row) for row in rows])


def answers_of(pool: RewardPool, responses: list[Any]) -> list[Score | CallFailure]:
    box = PoolScorer(pool)
    tickets = [box.enqueue(response) for response in responses]
    found: dict[int, Score | CallFailure] = {}
    while len(found) < len(tickets):
        found |= dict(box.finished(wait_seconds=60))
    return [found[ticket] for ticket in tickets]


FAILURES = {
    "raises": r"KeyError: 'no such answer' .*own\.py, line 7",
    "exits": "SystemExit: 3",
    "dies": "ended with exit code 5",
    "crashes": "ended with exit code -11",
    "takes all memory": "MemoryError",
    "NaN": "reward spoiled is nan; it must be a finite number",
    "None": "is None",
    "a list": "is .1.0.",
}


def test_a_reward_that_misbehaves_fails_alone_and_its_worker_is_replaced(pool: RewardPool) -> None:
    sound = Score(3.0, {"spoiled": 1.0, "torch_free": 1.0})
    rows = [{"kind": kind} for kind in FAILURES]
    answers = ask(pool, {}, *rows, {"kind": "prints"}, {})
    assert answers[0] == answers[-2] == answers[-1] == sound
    for kind, answer in zip(FAILURES, answers[1:], strict=False):
        assert isinstance(answer, CallFailure) and re.search(FAILURES[kind], answer.reason), answer
    assert pool.restarts == 2


def test_a_hanging_reward_is_killed_with_what_it_has_started(
    pool: RewardPool, tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    rows = [{"kind": "hangs with a child", "file": str(file)}, {}]
    hung, sound = ask(pool, *rows)
    assert hung == CallFailure("a reward gave no answer within 3 seconds")
    assert isinstance(sound, Score)
    child = int(file.read_text())
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()


def test_rewards_run_several_at_once_and_submitting_never_waits(pool: RewardPool) -> None:
    ask(pool, {}, {})
    box, other = PoolScorer(pool), PoolScorer(pool)
    left = {box.enqueue(TokenResponse(b"", {"kind": "slow"})) for _ in range(6)}
    assert box.finished() == []
    processes: set[float] = set()
    while left:
        for ticket, score in box.finished(wait_seconds=60):
            assert isinstance(score, Score)
            processes.add(score.parts["spoiled"])
            left.remove(ticket)
    assert len(processes) == 2 and other.finished() == []


def test_closing_ends_the_workers_at_once_also_while_they_work(own: str) -> None:
    pool = RewardPool(
        RewardSet(parse_rewards((f"{own}:spoiled",))), workers=1, seconds=60, memory_mb=256
    )
    ask(pool, {})
    process = pool._workers[0]._process
    assert process is not None
    PoolScorer(pool).enqueue(RewardInput("text", {"kind": "hangs"}))
    time.sleep(0.2)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 4
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_program_under_test_ends_with_the_worker() -> None:
    chosen = RewardSet(parse_rewards(("code_tests",)), constants={"timeout": 60.0})
    program = "import time\ntime.sleep(60)"
    with RewardPool(chosen, workers=1, seconds=60, memory_mb=256) as pool:
        PoolScorer(pool).enqueue(RewardInput(program, {"answer": "assert True"}))
        while not (worker := pool._workers[0]._process):
            time.sleep(0.05)
        while not (started := _sleeping(worker.pid)):
            time.sleep(0.05)
    for _ in range(100):
        if not any(Path(f"/proc/{process}").exists() for process in started):
            return
        time.sleep(0.05)
    raise AssertionError("the program outlived its worker")


def _sleeping(worker: int) -> list[int]:
    """A worker's descendants once one of them is the program: tests, keeper, program."""
    found = _descendants(worker)
    wanted = 3 if strongest_isolation() == "namespaces" else 2
    return found if len(found) >= wanted else []


def test_a_worker_that_cannot_be_started_fails_its_responses(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("plugin.rewards.pool.subprocess.Popen", refuse)
    chosen = RewardSet(parse_rewards((f"{own}:spoiled",)))
    with RewardPool(chosen, workers=1, seconds=1, memory_mb=64) as pool:
        assert ask(pool, {}) == [CallFailure("no process for rewards: no more processes")]


def test_a_row_that_cannot_be_sent_costs_itself(pool: RewardPool) -> None:
    bad, good = ask(pool, {"kind": lambda: None}, {})
    assert isinstance(bad, CallFailure) and isinstance(good, Score)


def queue_over(
    rows: list[dict[str, Any]], pool: RewardPool, tmp_path: Path, **settings: Any
) -> tuple[RolloutQueue, list[str]]:
    import json

    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{i}=", **row}) for i, row in enumerate(rows)))
    data = PromptDataset(file, TOKENIZER, shuffle=False)
    task = DatasetTask(data, TOKENIZER, RewardSet(parse_rewards(("length_penalty",)), constants={"max_response_length": 4}))  # fmt: skip
    config = JobConfig(rollout_batch_size=4, n_samples_per_prompt=2, **settings)
    said: list[str] = []
    engines = DirectEngines([loaded_engine()])
    return RolloutQueue(
        task, engines, PARAMETERS, config, said.append, TextScorer(task, pool)
    ), said


def test_the_queue_loses_the_group_of_a_failing_reward_only(
    pool: RewardPool, tmp_path: Path
) -> None:
    rows = [{}, {"kind": "raises"}, {}, {"kind": "NaN"}, {}, {}]
    queue, said = queue_over(rows, pool, tmp_path, max_error_reschedule_attempts=1)
    groups = queue.take(0)
    assert [group.index for group in groups] == [0, 2, 4, 5]
    dropped = queue.take_dropped()
    # Two workers, so that either may fail first.
    assert dropped.keys() == {"failed"} and sorted(dropped["failed"]) == [1, 3]
    assert (queue.counts.dropped_failed, queue.counts.failed_rewards) == (2, 4)
    assert queue.counts.issued == 6 == queue.counts.taken + queue.counts.dropped_failed
    assert any("KeyError: 'no such answer'" in line for line in said)
    assert joined(groups).rewards.tolist() == [3.0] * 8
    parts = reward_parts(groups)
    assert {name: values.tolist() for name, values in parts.items()} == {
        "spoiled": [1.0] * 8,
        "torch_free": [1.0] * 8,
    }


def test_groups_that_are_being_scored_are_under_way_and_are_repeated_after_a_restart(
    pool: RewardPool, tmp_path: Path
) -> None:
    queue, _ = queue_over([{"kind": "slow"}] * 8, pool, tmp_path)
    queue._issue()
    queue.engines.work()  # type: ignore[attr-defined]
    queue._collect(wait=False)
    assert queue.under_way == 4 == queue.counts.issued
    state = queue.state()
    assert [index for index, _ in state["pending"]] == [0, 1, 2, 3]
    queue.restore(state)
    assert [group.index for group in queue.take(0)] == [0, 1, 2, 3]
    assert queue.under_way == 0


def test_a_reward_that_fails_for_every_row_ends_the_job_with_its_error(
    pool: RewardPool, tmp_path: Path
) -> None:
    queue, _ = queue_over([{"kind": "raises"}] * 4, pool, tmp_path)
    with pytest.raises(
        BatchError, match=r"8 groups in a row; the first error: a reward failed: KeyError"
    ):
        queue.take(0)


def test_tokens_without_a_text_cost_their_response_only(pool: RewardPool) -> None:
    ids = array("i", [TOKENIZER.vocab_size])
    bad, good = answers_of(pool, [TokenResponse(ids.tobytes(), {}), TokenResponse(b"", {})])
    assert isinstance(bad, CallFailure) and isinstance(good, Score)
    assert "BatchError: the tokenizer failed: IndexError: " in bad.reason


def test_the_worker_turns_token_ids_into_the_text_without_its_end(own: str, tmp_path: Path) -> None:
    file = tmp_path / "shown.py"
    file.write_text(
        "def seen(response, row, *, prompt, num_tokens, truncated):\n"
        "    return float((response, prompt, num_tokens, truncated) == (':;', '2=', 3, True))\n"
    )
    chosen = RewardSet(parse_rewards((f"{file}:seen",)))
    end = TOKENIZER.eos_token_id
    with RewardPool(
        TextSource(chosen, PortableTokenizer.of(TOKENIZER), (end,)),
        workers=1,
        seconds=20,
        memory_mb=64,
    ) as pool:
        prompt = Prompt(tuple(TOKENIZER.encode("2=")))
        task = SimpleNamespace(asks_prompt=True)
        scorer = TextScorer(task, pool)  # type: ignore[arg-type]
        ids = [*TOKENIZER.encode(":;"), end]
        for response in (ids, np.array(ids), np.array(ids, np.int32)):
            scorer.submit(prompt, response, truncated=True)
        found: list[Any] = []
        while len(found) < 3:
            found += scorer.finished(wait_seconds=60)
    assert [score for _, score in found] == [Score(1.0, {"seen": 1.0})] * 3


PROGRAMS: dict[str, Callable[[Path], str]] = {
    "loops": lambda _: "while True: pass",
    "sleeps": lambda _: "import time; time.sleep(60)",
    "takes memory": lambda _: "x = bytearray(8 << 30)",
    "fills the disk": lambda p: (
        f"f = open({str(p / 'big')!r}, 'wb')\nfor _ in range(64): f.write(bytes(1 << 20))"
    ),
    "reads the environment": lambda _: "import os; assert 'SECRET' in os.environ",
    "ends early": lambda _: "import os; os._exit(0)",
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_program_that_passes_its_limits_is_wrong_and_costs_nothing_else(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    began = time.monotonic()
    assert code_tests(PROGRAMS[kind](tmp_path), {}, label="assert True", timeout=1.5) == 0.0
    assert time.monotonic() - began < 10
    big = tmp_path / "big"
    assert not big.exists() or big.stat().st_size <= 16 << 20


def test_a_program_reaches_no_network_where_the_system_allows_it() -> None:
    import socket

    if strongest_isolation() != "namespaces":
        pytest.skip("this machine does not let its users make network namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        assert code_tests(program, {}, label="assert True", timeout=20) == 0.0
        assert code_tests("import socket", {}, label="assert True", timeout=20) == 1.0
