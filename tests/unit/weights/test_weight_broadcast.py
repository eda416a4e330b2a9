"""Weights over process groups: every receiver gets every stage's tensors, and nobody waits for the dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import TransferError
from plugin.weights import broadcast as weight_stream
from plugin.weights.broadcast import BroadcastReceiver, BroadcastSender
from plugin.weights.group import (
    GroupStore,
    Membership,
    WeightGroup,
    abort,
    forget_version,
    open_store,
)

pytestmark = pytest.mark.usefixtures("jumping_clock")

FIRST_STAGE = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.arange(3, dtype=torch.bfloat16)}
LAST_STAGE = {
    "c": torch.arange(1000.0),
    "d": torch.tensor(2.5, dtype=torch.float16),
    "e": torch.zeros(0, 4),
}


@pytest.fixture(autouse=True)
def small_below_100_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that buckets have large tensors too."""
    monkeypatch.setattr(weight_stream, "_SMALL_BYTES", 100)


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return open_store("127.0.0.1")


@contextmanager
def started(*members: Callable[[], Any]) -> Iterator[list[Future[Any]]]:
    """Each member in a thread of its own."""
    with ThreadPoolExecutor(len(members)) as pool:
        yield [pool.submit(member) for member in members]


def group_of(store: dist.TCPStore, name: str, **sizes: int) -> WeightGroup:
    settings = {"senders": 1, "receivers": 1, "timeout": 30.0} | sizes
    return WeightGroup(store.host, store.port, name, **settings)  # type: ignore[arg-type]


def sent(group: WeightGroup, number: int, tensors: dict[str, Tensor], versions: int = 1) -> Any:
    with Membership().of(group, lambda: BroadcastSender(group, number)) as sender:
        return [sender.send(v, tensors.items(), bucket_bytes=32) for v in range(versions)]


def received(group: WeightGroup, number: int, versions: int = 1) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = [{} for _ in range(versions)]
    with Membership().of(group, lambda: BroadcastReceiver(group, number)) as receiver:
        for version, taken in enumerate(found):
            receiver.barrier(version)
            receiver.receive(
                version, lambda bucket, taken=taken: taken.update({n: t.clone() for n, t in bucket})
            )
    return found


@pytest.mark.parametrize("coalesces", [True, False])
def test_every_worker_gets_what_every_stage_sends(store: dist.TCPStore, coalesces: bool) -> None:
    group = group_of(store, f"all, {coalesces}", senders=2, receivers=3, coalesces=coalesces)
    with started(
        lambda: sent(group, 0, FIRST_STAGE, versions=2),
        lambda: sent(group, 1, LAST_STAGE, versions=2),
        *(lambda number=number: received(group, number, versions=2) for number in range(3)),
    ) as (first, last, *receivers):
        # Buckets of 32 bytes: a has 24 and b 6; c is alone in one, d and e share the next.
        # The end is a message as well.
        assert first.result() == [(30, 2)] * 2
        assert last.result() == [(4002, 3)] * 2
        for receiver in receivers:
            for version in receiver.result():
                assert list(version) == [*FIRST_STAGE, *LAST_STAGE]
                for name, tensor in {**FIRST_STAGE, **LAST_STAGE}.items():
                    assert version[name].dtype == tensor.dtype
                    assert torch.equal(version[name], tensor)


def test_the_senders_of_a_stage_take_turns_round_by_round(store: dist.TCPStore) -> None:
    group = group_of(store, "turns", senders=4, per_stage=2)

    def part(number: int) -> Any:
        # Two rounds of two tensors; the last sender has nothing in its second round.
        names = [f"{number}{layer}" for layer in "abcd"[: 2 if number == 3 else 4]]
        tensors = [(name, torch.full((3,), float(number))) for name in names]
        return [*tensors[:2], None, *tensors[2:], None]

    def send(number: int) -> Any:
        with Membership().of(group, lambda: BroadcastSender(group, number)) as sender:
            return sender.send(0, part(number))

    with started(*(lambda n=n: send(n) for n in (3, 2, 1, 0)), lambda: received(group, 0)) as (
        *_,
        receiver,
    ):
        [found] = receiver.result()
    first, second = "0a 0b 1a 1b 0c 0d 1c 1d", "2a 2b 3a 3b 2c 2d"
    assert list(found) == [*first.split(), *second.split()]
    assert all(bool((tensor == float(name[0])).all()) for name, tensor in found.items())


def test_small_tensors_of_a_bucket_are_one_broadcast(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[list[int]] = []
    plain = weight_stream._Channel.broadcast

    def counting(channel: Any, pieces: list[Tensor]) -> None:
        sizes.append([piece.nbytes for piece in pieces])
        plain(channel, pieces)

    monkeypatch.setattr(weight_stream._Channel, "broadcast", counting)
    group, state = group_of(store, "joined"), {**FIRST_STAGE, **LAST_STAGE}

    def send() -> None:
        with Membership().of(group, lambda: BroadcastSender(group, 0)) as sender:
            sender.send(0, state.items())

    with started(send, lambda: received(group, 0)) as (sender, receiver):
        [found] = receiver.result()
        sender.result()
    # c has 4,000 bytes; a, b, d and e have 24, 6, 2 and 0, in 64 each but the last.
    assert sizes == [[4000, 192]] * 2
    assert list(found) == list(state)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_complete_version_leaves_nothing_in_the_store(store: dist.TCPStore) -> None:
    group = group_of(store, "clean")
    keys = store.num_keys()
    with started(
        lambda: sent(group, 0, LAST_STAGE, versions=5), lambda: received(group, 0, versions=5)
    ) as (sender, receiver):
        counts, _ = sender.result(), receiver.result()
    before = store.num_keys()
    for version, (_, messages) in enumerate(counts):
        forget_version(store, group, version, {0: messages})
    # Two buckets with their end and the meeting of each version.
    assert before - store.num_keys() == 5 * 4
    assert store.num_keys() > keys


def test_a_transfer_that_is_called_off_ends_on_every_member(store: dist.TCPStore) -> None:
    group, end = group_of(store, "lost", receivers=3), threading.Event()

    def hanging() -> None:
        """Meets the others and never takes part in the broadcast."""
        receiver = BroadcastReceiver(group, 0)
        receiver.barrier(0)
        end.wait(30)

    with started(
        lambda: sent(group, 0, {"large": torch.zeros(1 << 22)}),
        lambda: received(group, 1),
        lambda: received(group, 2),
        hanging,
    ) as (sender, *receivers, _):
        time.sleep(0.5)
        began = time.monotonic()
        abort(store, group, "engine 0 died")
        try:
            # Another receiver may have got its part and not need the one that hangs.
            errors = [member.exception(timeout=10) for member in (sender, *receivers)]
        finally:
            end.set()
        assert time.monotonic() - began < 5
        assert all(e is None or isinstance(e, TransferError) for e in errors)
        assert "engine 0 died" in str(errors[0]) and any(errors[1:])


def test_members_that_wait_for_one_that_never_comes_are_released(store: dist.TCPStore) -> None:
    group = group_of(store, "absent", receivers=2)
    with started(lambda: sent(group, 0, FIRST_STAGE), lambda: received(group, 0)) as members:
        time.sleep(0.2)
        abort(store, group, "engine 1 died")
        for member in members:
            with pytest.raises(TransferError, match="called off: engine 1 died"):
                member.result(timeout=10)


def test_members_that_connect_to_one_that_died_are_released(store: dist.TCPStore) -> None:
    """It has come to the meeting, and so the others begin to form a process group with it."""
    group = group_of(store, "died at the meeting", receivers=2)
    with started(
        lambda: sent(group, 0, FIRST_STAGE),
        lambda: received(group, 0),
        lambda: GroupStore(group).barrier("joined"),
    ) as (*members, dead):
        dead.result(timeout=30)
        began = time.monotonic()
        abort(store, group, "engine 1 died")
        for member in members:
            with pytest.raises(TransferError, match="called off: engine 1 died"):
                member.result(timeout=30)
        # The group's own timeout is 30 s.
        assert time.monotonic() - began < 15


def test_a_membership_is_kept_for_its_group_and_ends_with_an_error() -> None:
    class Member:
        def __init__(self, group: str) -> None:
            self.group, self.closed = group, []

        def close(self, *, abort: bool = False) -> None:
            self.closed.append(abort)

    membership, made = Membership(), []

    def member(group: str) -> Any:
        def join() -> Member:
            made.append(Member(group))
            return made[-1]

        return membership.of(group, join)  # type: ignore[arg-type]

    for group in ("one", "one", "two"):
        with member(group) as found:
            assert found is made[-1]
    assert [m.closed for m in made] == [[False], []]
    with pytest.raises(TransferError), member("two"):
        raise TransferError("lost")
    with member("two"):
        assert [m.closed for m in made] == [[False], [True], []]
