"""Whose turn it is on shared devices: the order of the steps, and what a failure in each leaves."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.controller.shared_devices import OwnDevices, SharedDevices, Turn
from plugin.errors import ParallelError

CYCLE = [
    "offload gradients optimizer",
    "wake weights",
    "send",
    "offload weights",
    "wake cache",
    "sleep 2",
    "onload weights optimizer gradients",
]


class Both:
    """Trainer and engines: write down what they are told; fail once where they should."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.fails_at: str | None = None
        self.error: BaseException = ParallelError("as told")

    def note(self, text: str) -> None:
        self.told.append(text)
        if text == self.fails_at:
            self.fails_at = None
            raise self.error

    def offload(self, parts: Any) -> None:
        self.note(" ".join(("offload", *parts)))

    def onload(self, parts: Any) -> None:
        self.note(" ".join(("onload", *parts)))

    def sleep(self, level: int) -> None:
        self.note(f"sleep {level}")

    def wake(self, part: str) -> None:
        self.note(f"wake {part}")


def cycle(both: Both, devices: SharedDevices) -> None:
    with devices.sending():
        assert devices.turn is Turn.SENDING
        both.note("send")
    assert devices.turn is Turn.GENERATING
    devices.train()
    assert devices.turn is Turn.TRAINING


def test_no_two_large_things_are_on_the_device_at_once() -> None:
    both = Both()
    devices = SharedDevices(both, both, 2)
    for _ in range(3):
        cycle(both, devices)
    devices.train()  # it is the trainer's turn already
    assert both.told == CYCLE * 3


@pytest.mark.parametrize("step", CYCLE)
@pytest.mark.parametrize("error", [ParallelError("lost"), KeyboardInterrupt()])
def test_after_a_failure_in_any_step_the_trainer_gets_its_memory_and_the_job_goes_on(
    step: str, error: BaseException
) -> None:
    both = Both()
    devices = SharedDevices(both, both, 2)
    both.fails_at, both.error = step, error
    with pytest.raises(type(error)):
        cycle(both, devices)
    assert devices.turn is (Turn.SENDING if step == "send" else Turn.MOVING)
    both.told.clear()
    devices.train()
    assert devices.turn is Turn.TRAINING
    assert both.told == CYCLE[-2:]
    both.told.clear()
    cycle(both, devices)
    assert both.told == CYCLE


def test_sending_out_of_turn_first_gives_the_trainer_its_turn() -> None:
    both = Both()
    devices = SharedDevices(both, both, 1)
    with devices.sending():
        pass
    both.told.clear()
    with devices.sending():  # new weights, while the engines had the devices
        pass
    assert both.told[:2] == ["sleep 1", "onload weights optimizer gradients"]
    assert devices.turn is Turn.GENERATING


def test_a_trainer_that_is_restarted_finds_the_devices_free() -> None:
    both = Both()
    devices = SharedDevices(both, both, 1)
    with devices.sending():
        pass
    both.told.clear()
    with devices.restarting():
        both.note("restart")
    assert both.told == ["sleep 1", "restart"] and devices.turn is Turn.TRAINING
    with pytest.raises(ParallelError), devices.restarting():
        raise ParallelError("again")
    assert devices.turn is Turn.MOVING


def test_own_devices_are_nobodys_turn() -> None:
    devices = OwnDevices()
    with devices.sending(), devices.restarting():
        devices.train()
    assert devices.turn is Turn.GENERATING
