"""Which version the weights of a checkpoint get when groups of the journal are kept."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plugin.controller.training_loop import Position, TrainingLoop
from plugin.errors import ActorLost, BatchLost
from plugin.weights.buckets import NO_WEIGHTS


def resumed(groups: list[int], *, asynchronous: bool = True) -> tuple[int, Any]:
    """The version after a resume from a checkpoint of version 5, and what the queue was told.

    groups: the newest version of each group in the journal
    """
    told: dict[str, Any] = {}

    def restore(state: Any, **given: Any) -> int:
        told.update(given)
        return len(given["finished"])

    nothing = SimpleNamespace(go_back=lambda at: None)
    loop: Any = object.__new__(TrainingLoop)
    state = {"position": {"rollouts": 5, "updates": 5, "version": 5}, "queue": {}}
    loop._config = SimpleNamespace(async_rollouts=asynchronous, num_rollouts=9)
    loop._checkpoints = SimpleNamespace(newest=lambda: Path("step_0000005"))
    loop._trainer = SimpleNamespace(load_checkpoint=lambda path: state)
    loop._weights = SimpleNamespace(version=NO_WEIGHTS)
    loop._queue = SimpleNamespace(restore=restore, state=dict)
    loop._parts, loop._at = SimpleNamespace(data=None), Position()
    loop._records = loop._evaluations = nothing
    loop._console = SimpleNamespace(log=lambda text: None, warn=lambda text: None)
    loop._start_of_queue, loop._send_weights = {}, lambda wait: None
    found: Any = [SimpleNamespace(last_version=version) for version in groups]
    loop._go_back_to_checkpoint(finished=found)
    return loop._at.version, told["keep_for"]


@pytest.mark.parametrize(
    ("groups", "version"),
    [
        ([], 5),
        # Of the checkpoint's own weights, and older: nothing else has their number.
        ([3, 5], 5),
        # Weights 6 to 8 are lost, and there are tokens of theirs.
        ([5, 8, 6], 9),
    ],
)
def test_the_checkpoint_gets_a_version_that_no_kept_group_comes_from(
    groups: list[int], version: int
) -> None:
    assert resumed(groups) == (version, version if groups else None)


def test_a_synchronous_run_repeats_its_versions_whatever_the_journal_has() -> None:
    assert resumed([5, 6], asynchronous=False) == (5, 5)


@pytest.mark.parametrize(
    ("error", "forgets"),
    [(BatchLost("a part of the batch is lost"), True), (ActorLost("rank 0 died"), False)],
)
def test_finished_groups_are_kept_by_a_restart_unless_parts_of_them_may_be_lost(
    error: ActorLost, forgets: bool
) -> None:
    told: list[str] = []

    def log(word: str) -> Any:
        return lambda *_, **__: told.append(word)

    loop: Any = object.__new__(TrainingLoop)
    loop._config = SimpleNamespace(staleness_limit=2)
    loop._trainer = SimpleNamespace(dead_ranks=list, restart=log("restart"))
    loop._engines = SimpleNamespace(keep_groups=log("keep"))
    loop._queue = SimpleNamespace(forget_stored=log("forget stored"))
    loop._console = SimpleNamespace(log=lambda text: None)
    loop._devices = SimpleNamespace(restarting=contextlib.nullcontext)
    loop._count_restart, loop._go_back_to_checkpoint = lambda error: None, log("go back")
    loop._recover(error)
    assert told == ["keep", *["forget stored"] * forgets, "restart", "go back"]
