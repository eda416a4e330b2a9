"""A member that dies, freezes or loses its connections in the middle of a version, in every way between processes.

The others end at once when the driver calls the transfer off, leave nothing behind, and get the version from a new
group, equal to the bit.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import TransferError
from plugin.weights import make_receiver, make_sender
from plugin.weights.group import Membership, WeightGroup, abort, open_store
from plugin.weights.manifest import Manifest
from tests.unit.weights.test_weight_ipc import in_shm, lent_files

pytestmark = pytest.mark.slow

_SERVER = multiprocessing.get_context("forkserver")

WAYS: dict[str, dict[str, Any]] = {
    "a lane for each sender": {"per_stage": 2},
    "one lane for a stage": {"per_stage": 2, "per_lane": 2},
    "IPC": {"ipc_ranks": (0, 1)},
}
#: Buckets of one tensor each; far more than are on their way at the same time.
TENSORS, NUMBERS = 12, 25_000


def state_of(sender: int, version: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * version + sender)
    return {
        f"{sender}.{n}": torch.randn(NUMBERS, generator=generator).to(torch.bfloat16)
        for n in range(TENSORS)
    }


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def lose_connections() -> None:
    """Shut down every connection of this process, as a network that is cut does after its timeouts."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as connection:
                    connection.getpeername()  # one that listens has none
                    connection.shutdown(socket.SHUT_RDWR)


def send(
    group: WeightGroup, number: int, version: int = 0, event: Callable[[], None] | None = None
) -> None:
    """Send a version; `event` in the middle."""

    def part() -> Iterator[tuple[str, Tensor]]:
        for place, entry in enumerate(state_of(number, version).items()):
            if place == TENSORS // 2 and event is not None:
                event()
            yield entry

    manifest = Manifest.of(state_of(number, version).items(), 1)
    more = {"bucket_bytes": 1} if group.ipc_ranks else {}
    with Membership().of(group, lambda: make_sender(group, number)) as sender:
        sender.send(version, part(), manifest, **more)


def receive(
    group: WeightGroup, number: int, version: int = 0, event: Callable[[], None] | None = None
) -> dict[str, Tensor]:
    """Receive a version; `event` in the middle."""
    found: dict[str, Tensor] = {}

    def take(bucket: Any) -> None:
        if len(found) == TENSORS // 2 and event is not None:
            event()
        found.update((name, tensor.clone()) for name, tensor in bucket)

    with Membership().of(group, lambda: make_receiver(group, number)) as receiver:
        receiver.barrier(version)
        receiver.receive(version, take)
    return found


def take_part(role: Callable[..., Any], group: WeightGroup, event: Callable[[], None]) -> None:
    """The body of a victim's process, which ends well with a `TransferError`."""
    # At its end the interpreter would abort because of threads that wait in torch.
    try:
        role(group, 1, 0, event)
    except TransferError:
        os._exit(0)
    os._exit(1)


def expected_by(receiver: int, way: str, version: int) -> dict[str, Tensor]:
    senders = (receiver,) if way == "IPC" else (0, 1)
    return {n: t for sender in senders for n, t in state_of(sender, version).items()}


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    yield open_store("127.0.0.1")


@pytest.mark.parametrize("event", [die, freeze, lose_connections])
@pytest.mark.parametrize("role", [send, receive])
@pytest.mark.parametrize("way", WAYS)
def test_the_others_end_when_it_is_called_off_and_get_the_version_from_a_new_group(
    store: dist.TCPStore, way: str, role: Callable[..., Any], event: Callable[[], None]
) -> None:
    _SERVER.set_forkserver_preload([__name__])
    place, answers = (store.host, store.port), _SERVER.SimpleQueue()
    others = _SERVER.Process(target=play, args=(place, way, role, event, answers))
    others.start()
    others.join(120)
    others.kill()
    assert not answers.empty(), "the others hang"
    assert answers.get() == ""


def play(
    place: tuple[str, int],
    way: str,
    role: Callable[..., Any],
    event: Callable[[], None],
    answers: Any,
) -> None:
    """All members but the victim, and the driver, in a process that ends without waiting for threads in torch."""
    found = ""
    try:
        lose_a_member(place, way, role, event)
    except BaseException:
        found = traceback.format_exc()
    answers.put(found)
    os._exit(0)


def lose_a_member(
    place: tuple[str, int], way: str, role: Callable[..., Any], event: Callable[[], None]
) -> None:
    group = WeightGroup(*place, "first", 2, 2, 60.0, **WAYS[way])
    victim = os.fork()
    if not victim:
        take_part(role, group, event)
    store = dist.TCPStore(*place, is_master=False)
    status = 0
    with ThreadPoolExecutor(4) as pool:
        other = receive if role is send else send
        calls = [pool.submit(send, group, 0), pool.submit(receive, group, 0)]
        calls.append(pool.submit(other, group, 1))
        survivors = driver_calls_off(store, group, victim, calls)
        assert any(survivors) and all(
            error is None or isinstance(error, TransferError) for error in survivors
        ), survivors
        if event is not lose_connections:
            os.kill(victim, signal.SIGKILL)
        _, status = os.waitpid(victim, 0)
        again = WeightGroup(*place, "again", 2, 2, 60.0, **WAYS[way])
        sent = [pool.submit(send, again, n, 1) for n in (0, 1)]
        received = [pool.submit(receive, again, n, 1) for n in (0, 1)]
        for call in sent:
            call.result(timeout=60)
        for number, receiver in enumerate(received):
            found, expected = receiver.result(timeout=60), expected_by(number, way, 1)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
    # One that was cut off has noticed it by itself.
    code = os.waitstatus_to_exitcode(status)
    assert code == (0 if event is lose_connections else -signal.SIGKILL), code
    assert not lent_files() and not in_shm(SimpleNamespace(pid=victim))


def driver_calls_off(
    store: dist.Store, group: WeightGroup, victim: int, calls: list[Future[Any]]
) -> list[BaseException | None]:
    """As the driver: call the transfer off when a member fails, ends or does not react; how the others end."""
    deadline = time.monotonic() + 60
    while state_of_process(victim) not in "TZ" and time.monotonic() < deadline:
        if wait(calls, timeout=0.05, return_when=FIRST_COMPLETED).done:
            break
    time.sleep(0.2)
    began = time.monotonic()
    abort(store, group, "engine 1 is lost")
    found = [call.exception(timeout=30) for call in calls]
    assert time.monotonic() - began < 5
    return found


def state_of_process(number: int) -> str:
    """T = stopped, Z = ended."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
