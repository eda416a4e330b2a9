"""Ctrl-C saves no half-trained weights, and a second one is obeyed at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.controller import interrupts as interrupts_module
from plugin.controller import job as jobs
from plugin.controller.interrupts import Interrupts, ignored_interrupts
from plugin.errors import ClusterError
from plugin.observe.console import Console

pytestmark = [pytest.mark.hostile, pytest.mark.usefixtures("jumping_clock")]


@pytest.fixture(autouse=True)
def no_signal_counts_as_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests press Ctrl-C twice within less time than a scheduler takes to signal all processes."""
    monkeypatch.setattr(interrupts_module, "_SAME_SECONDS", 0.0)


def test_a_signal_that_arrives_twice_is_one_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts_module, "_SAME_SECONDS", 60.0)
    interrupts, finished = Interrupts(lambda text: None), False
    with interrupts.handled(), pytest.raises(KeyboardInterrupt):
        with interrupts.held_back("finishes"):
            press()
            press()
            finished = True
        raise AssertionError("the interrupt was lost")
    assert finished


def press(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_end_of_an_update(number: int) -> None:
    said: list[str] = []
    interrupts, finished = Interrupts(said.append), False
    with interrupts.handled(), pytest.raises(KeyboardInterrupt):
        with interrupts.held_back("the update is finished first"):
            press(number)
            finished = True
        raise AssertionError("the interrupt was lost")
    assert finished and said == ["interrupted: the update is finished first; again to end at once"]
    with interrupts.handled(), pytest.raises(KeyboardInterrupt):
        press(number)


def test_a_second_interrupt_does_not_wait() -> None:
    interrupts, reached = Interrupts(lambda text: None), []
    with (
        interrupts.handled(),
        pytest.raises(KeyboardInterrupt),
        interrupts.held_back("finishes"),
    ):
        press()
        reached.append(1)
        press()
        reached.append(2)
    assert reached == [1]
    with interrupts.handled(), interrupts.held_back("finishes"):
        pass


def test_a_second_interrupt_does_not_lose_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None: ...

    def report(files: jobs.RunFiles) -> None:
        press()
        press(signal.SIGTERM)

    monkeypatch.setattr(
        jobs, "check_job", lambda config, log: SimpleNamespace(data=None, task=None)
    )
    monkeypatch.setattr(jobs, "_running", lambda *_: Interrupted())
    monkeypatch.setattr(jobs, "earlier_history", lambda run_dir: ([{"step": 1}], [], []))
    monkeypatch.setattr(jobs.RunFiles, "write_report", report)
    config = JobConfig.from_sources({"run_dir": str(tmp_path), "resume": True})
    result = jobs.run_job(config, Console(), lambda: None)
    assert result.interrupted and result.history == [{"step": 1}]
    with ignored_interrupts():
        press()


def test_the_end_of_the_actors_does_not_cost_the_report_of_an_interrupted_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal to the whole process group kills Ray as well, so that ending the actors fails."""
    told: list[jobs.JobResult] = []

    class Actors:
        def __enter__(self) -> tuple[Any, Any, Any, Any]:
            return None, SimpleNamespace(places_as_text=lambda: "1 here"), (), None

        def __exit__(self, *_: object) -> None:
            assert [result.interrupted for result in told] == [True]
            raise ClusterError("Ray is gone")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        jobs, "check_job", lambda config, log: SimpleNamespace(data=None, task=None)
    )
    monkeypatch.setattr(jobs, "_running", lambda *_: Actors())
    monkeypatch.setattr(jobs, "TrainingLoop", lambda *_: SimpleNamespace(run=interrupted))
    config = JobConfig.from_sources({"run_dir": str(tmp_path)})
    with pytest.raises(ClusterError, match="Ray is gone"):
        jobs.run_job(config, Console(), lambda: None, told.append)
    assert len(told) == 1


def test_weights_of_an_own_model_are_not_thrown_away_by_default() -> None:
    own = {"hf_checkpoint": "model", "prompt_data": "rows.jsonl"}
    assert not JobConfig.from_sources({}).saves_at_end
    assert JobConfig.from_sources(own).saves_at_end
    assert JobConfig.from_sources({"save_interval": 5}).saves_at_end
    assert not JobConfig.from_sources({**own, "save_at_end": False}).saves_at_end
