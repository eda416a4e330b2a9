"""A reward that hangs, raises or is no number costs its group; the process and the job go on."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.controller.queue.rollout_queue import RolloutQueue
from plugin.engines.protocol import SamplingParameters
from plugin.environments.deadline_calls import CallFailure, calls_here
from plugin.errors import BatchError
from plugin.tasks.copy_digits import ALPHABET, CharacterTokenizer, CopyDigitsTask
from plugin.tasks.protocol import Prompt
from tests.unit.controller.queue.test_rollout_queue import DirectEngines
from tests.unit.engines.tiny_engines import loaded_engine

pytestmark = pytest.mark.hostile


PARAMETERS = SamplingParameters(max_response_length=4, stop_token_ids=(len(ALPHABET),))


class Scored(CopyDigitsTask):
    """The rewards of some prompts are those of `spoil`."""

    def __init__(self, spoil: Callable[[], Any], *prompts: int) -> None:
        super().__init__(CharacterTokenizer(ALPHABET), seed=1)
        self.spoil, self.answers = spoil, {self.prompt(i).data["answer"] for i in prompts}

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        if prompt.data["answer"] in self.answers:
            return self.spoil()
        return super().reward(prompt, response)


def queue_for(task: CopyDigitsTask, **settings: Any) -> tuple[RolloutQueue, list[str]]:
    config = JobConfig(rollout_batch_size=4, n_samples_per_prompt=2, **settings)
    said: list[str] = []
    return (
        RolloutQueue(task, DirectEngines([loaded_engine()]), PARAMETERS, config, said.append),
        said,
    )


def raises() -> float:
    raise KeyError("no such answer")


def loops() -> float:
    while True:
        pass


def waits_for_a_lock() -> float:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
    return 0.0


def catches_everything() -> float:
    while True:
        with contextlib.suppress(Exception):
            time.sleep(10)


HANGS = "no answer within 0.25 seconds"
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (raises, "failed: KeyError: 'no such answer' .*test_rewards.py, line"),
    "exits": (lambda: sys.exit(3), "failed: SystemExit: 3"),
    "None": (lambda: None, "is None; it must be a finite number"),
    "NaN": (lambda: float("nan"), "is nan"),
    "infinite": (lambda: -float("inf"), "is -inf"),
    "too large": (lambda: 10**400, "is 1000"),
    "a list": (lambda: [1.0, 2.0], "is .1.0, 2.0."),
    "sleeps": (lambda: time.sleep(30), HANGS),
    "loops": (loops, HANGS),
    "waits for a lock": (waits_for_a_lock, HANGS),
    "catches everything": (catches_everything, HANGS),
}


@pytest.mark.parametrize("case", BAD)
def test_a_failing_reward_does_not_cost_more_than_its_group(case: str) -> None:
    spoil, message = BAD[case]
    # The sound rewards must not be late, however busy the machine is.
    patience = {"reward_timeout": 0.25} if message == HANGS else {}
    queue, said = queue_for(Scored(spoil, 1), max_error_reschedule_attempts=1, **patience)
    assert [group.index for group in queue.take(0)] == [0, 2, 3, 4]
    assert queue.take_dropped() == {"failed": [1]}
    assert (queue.counts.dropped_failed, queue.counts.failed_rewards) == (1, 2)
    assert queue.counts.issued == queue.counts.taken + queue.counts.dropped_failed
    assert "prompt 1 is dropped after 2 failed attempts" in said[-1]
    assert re.search(message, said[-1])


def test_a_reward_that_fails_for_one_row_for_ever_does_not_stop_the_batch() -> None:
    queue, said = queue_for(Scored(raises, 1))
    assert [group.index for group in queue.take(0)] == [0, 2, 3, 4]
    assert "prompt 1 is dropped after 4 failed attempts" in said[-1]


def test_a_reward_that_fails_once_is_not_dropped() -> None:
    left = [1]
    queue, _ = queue_for(Scored(lambda: raises() if left and left.pop() else 0.5, 1))
    assert [group.index for group in queue.take(0)] == [0, 1, 2, 3]
    assert (queue.counts.resampled, queue.counts.failed_rewards) == (1, 1)


def test_a_reward_that_always_fails_does_not_sample_for_ever() -> None:
    queue, _ = queue_for(Scored(raises, *range(100)))
    with pytest.raises(
        BatchError, match=r"for 8 groups in a row; the first error: .*no such answer"
    ):
        queue.take(0)


def call_here(function: Callable[[], Any], *, seconds: float) -> Any:
    with calls_here(seconds) as call:
        return call(function)


def test_a_deadline_leaves_the_alarm_as_it_was() -> None:
    handler, (left, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    assert call_here(lambda: 7, seconds=5.0) == 7
    assert isinstance(call_here(loops, seconds=0.02), CallFailure)
    assert signal.getsignal(signal.SIGALRM) is handler
    # pytest-timeout's own alarm, where it has one.
    assert 0 <= left - signal.getitimer(signal.ITIMER_REAL)[0] < 60


def test_ctrl_c_during_a_reward_is_not_taken_for_its_failure() -> None:
    # A suite that a shell started in the background inherits an ignored SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            call_here(lambda: signal.raise_signal(signal.SIGINT), seconds=5.0)
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_a_hanging_reward_is_abandoned() -> None:
    found: list[Any] = []
    forever = threading.Event()
    worker = threading.Thread(
        target=lambda: found.append(call_here(lambda: forever.wait(30), seconds=0.05))
    )
    worker.start()
    worker.join(25)
    forever.set()
    assert found == [CallFailure("no answer within 0.05 seconds")]
