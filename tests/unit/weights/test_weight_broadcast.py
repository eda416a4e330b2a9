"""Weights over process groups: every receiver gets every stage's tensors, and nobody waits for the dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import TransferError
from plugin.weights import lane as weight_lane
from plugin.weights.broadcast import BroadcastReceiver, BroadcastSender
from plugin.weights.group import (
    GroupStore,
    Membership,
    WeightGroup,
    abort,
    forget_version,
    open_store,
)
from plugin.weights.manifest import Manifest

pytestmark = pytest.mark.usefixtures("jumping_clock")

FIRST_STAGE = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.arange(3, dtype=torch.bfloat16)}
LAST_STAGE = {
    "c": torch.arange(1000.0),
    "d": torch.tensor(2.5, dtype=torch.float16),
    "e": torch.zeros(0, 4),
}


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    opened = open_store("127.0.0.1")
    yield opened
    for group in GROUPS:
        abort(opened, group, "the test has ended")
    GROUPS.clear()


GROUPS: list[WeightGroup] = []


@contextmanager
def started(*members: Callable[[], Any]) -> Iterator[list[Future[Any]]]:
    """Each member in a thread of its own."""
    with ThreadPoolExecutor(len(members)) as pool:
        yield [pool.submit(member) for member in members]


def group_of(store: dist.TCPStore, name: str, **sizes: int) -> WeightGroup:
    settings = {"senders": 1, "receivers": 1, "timeout": 30.0} | sizes
    GROUPS.append(WeightGroup(store.host, store.port, name, **settings))  # type: ignore[arg-type]
    return GROUPS[-1]


def sent(group: WeightGroup, number: int, tensors: dict[str, Tensor], versions: int = 1) -> Any:
    with Membership().of(group, lambda: BroadcastSender(group, number)) as sender:
        manifest = Manifest.of(tensors.items(), 200)
        return [sender.send(v, tensors.items(), manifest) for v in range(versions)]


def received(group: WeightGroup, number: int, versions: int = 1) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = [{} for _ in range(versions)]
    with Membership().of(group, lambda: BroadcastReceiver(group, number)) as receiver:
        for version, taken in enumerate(found):
            receiver.barrier(version)
            receiver.receive(
                version, lambda bucket, taken=taken: taken.update({n: t.clone() for n, t in bucket})
            )
    return found


@pytest.mark.parametrize("per_lane", [1, 2])
def test_every_worker_gets_what_every_stage_sends(store: dist.TCPStore, per_lane: int) -> None:
    group = group_of(
        store, f"all, {per_lane}", senders=2, receivers=3, per_stage=per_lane, per_lane=per_lane
    )
    with started(
        lambda: sent(group, 0, FIRST_STAGE, versions=2),
        lambda: sent(group, 1, LAST_STAGE, versions=2),
        *(lambda number=number: received(group, number, versions=2) for number in range(3)),
    ) as (first, last, *receivers):
        # Buckets of 200 bytes: a and b share one, c is alone, d and e share the next.
        assert first.result() == [(30, 0)] * 2
        assert last.result() == [(4002, 0)] * 2
        for receiver in receivers:
            for version in receiver.result():
                # A bucket of every stage in turns; in one stage the order is the same.
                assert list(version) == ["a", "b", "c", "d", "e"]
                for name, tensor in {**FIRST_STAGE, **LAST_STAGE}.items():
                    assert version[name].dtype == tensor.dtype
                    assert torch.equal(version[name], tensor)


@pytest.mark.parametrize("per_lane", [1, 2])
def test_stages_send_at_once_and_the_senders_of_a_stage_in_turns_round_by_round(
    store: dist.TCPStore, per_lane: int
) -> None:
    group = group_of(store, f"turns, {per_lane}", senders=4, per_stage=2, per_lane=per_lane)

    def part(number: int) -> Any:
        # Two rounds of two tensors; the last sender has nothing in its second round.
        names = [f"{number}{layer}" for layer in "abcd"[: 2 if number == 3 else 4]]
        tensors = [(name, torch.full((3,), float(number))) for name in names]
        return [*tensors[:2], None, *tensors[2:], None]

    def send(number: int) -> Any:
        with Membership().of(group, lambda: BroadcastSender(group, number)) as sender:
            # A bucket for every tensor.
            return sender.send(0, part(number), Manifest.of(part(number), 1))

    with started(*(lambda n=n: send(n) for n in (3, 2, 1, 0)), lambda: received(group, 0)) as (
        *_,
        receiver,
    ):
        [found] = receiver.result()
    of_first, of_second = "0a 1a 0b 1b 0c 1c 0d 1d", "2a 3a 2b 3b 2c 2d"
    turns = zip_longest(of_first.split(), of_second.split())
    assert list(found) == [name for turn in turns for name in turn if name]
    assert all(bool((tensor == float(name[0])).all()) for name, tensor in found.items())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every operation that is begun."""
    sizes: list[int] = []
    plain = weight_lane.Lane._begin

    def counting(lane: Any, root: int, payload: Any) -> Any:
        sizes.append(payload.tensor.nbytes)
        return plain(lane, root, payload)

    monkeypatch.setattr(weight_lane.Lane, "_begin", counting)
    return sizes


def test_tensors_of_a_bucket_are_one_operation_and_the_manifest_is_sent_once(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = counted(monkeypatch)
    group, state = group_of(store, "joined"), {**FIRST_STAGE, **LAST_STAGE}
    manifest = Manifest.of(state.items(), 1000)

    def send() -> None:
        with Membership().of(group, lambda: BroadcastSender(group, 0)) as sender:
            for version in range(3):
                sender.send(version, state.items(), manifest)

    with started(send, lambda: received(group, 0, versions=3)) as (sender, receiver):
        versions = receiver.result()
        sender.result()
    # a, b, d and e have 24, 6, 2 and 0 bytes, in 64 each but the last; c has 4,000 and is alone.
    # Header and manifest are first.
    first = [16, len(manifest.encoded()), 4000, 192]
    assert sorted(sizes) == sorted(2 * (first + [16, 4000, 192] * 2))
    for found in versions:
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_version_is_a_message_per_engine_and_one_per_stage_in_the_store(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two engines of two workers each, two stages.
    group = group_of(store, "few messages", senders=2, receivers=4, firsts=(0, 2))  # type: ignore[arg-type]
    calls: list[str] = []

    def counting(name: str) -> None:
        plain = getattr(dist.TCPStore, name)

        def call(store: Any, *arguments: Any) -> Any:
            calls.append(name)
            return plain(store, *arguments)

        monkeypatch.setattr(dist.TCPStore, name, call)

    met = threading.Barrier(6, action=lambda: [counting(n) for n in ("add", "set", "wait", "get")])

    def send(number: int, tensors: dict[str, Tensor]) -> None:
        manifest = Manifest.of(tensors.items(), 200)
        with Membership().of(group, lambda: BroadcastSender(group, number)) as sender:
            sender.send(0, tensors.items(), manifest)
            met.wait(30)
            for version in range(1, 11):
                sender.send(version, tensors.items(), manifest)

    def receive(number: int) -> None:
        with Membership().of(group, lambda: BroadcastReceiver(group, number)) as receiver:
            for version in range(11):
                if version == 1:
                    met.wait(30)
                receiver.barrier(version)
                receiver.receive(version, lambda bucket: None)

    with started(
        lambda: send(0, FIRST_STAGE),
        lambda: send(1, LAST_STAGE),
        *(lambda number=number: receive(number) for number in range(4)),
    ) as members:
        for member in members:
            member.result(timeout=60)
    # Of a version: both engines count themselves, the second writes the key, both stages wait for it.
    assert {name: calls.count(name) for name in set(calls)} == {
        "add": 20,
        "set": 10,
        "wait": 20,
        "get": 20,
    }


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
    # That the engines were ready for each version.
    assert before - store.num_keys() == 5
    assert store.num_keys() > keys


def test_twenty_versions_are_equal_to_the_bit_over_one_lane_and_over_several(
    store: dist.TCPStore,
) -> None:
    def state(version: int, sender: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(2 * version + sender)
        kinds = (torch.float32, torch.bfloat16, torch.float16)
        return {
            f"{sender}.{n}": torch.randn(7, 3 + 11 * n, generator=generator).to(kinds[n % 3])
            for n in range(9)
        }

    for per_lane in (1, 2):
        group = group_of(
            store, f"twenty, {per_lane}", senders=2, receivers=2, per_stage=2, per_lane=per_lane
        )

        def send(number: int, group: WeightGroup = group) -> None:
            with Membership().of(group, lambda: BroadcastSender(group, number)) as sender:
                for version in range(20):
                    tensors = state(version, number)
                    sender.send(version, tensors.items(), Manifest.of(tensors.items(), 1000))

        with started(
            lambda: send(0),
            lambda: send(1),
            lambda group=group: received(group, 0, versions=20),  # type: ignore[misc]
            lambda group=group: received(group, 1, versions=20),  # type: ignore[misc]
        ) as (first, second, *receivers):
            for receiver in receivers:
                for version, found in enumerate(receiver.result()):
                    expected = state(version, 0) | state(version, 1)
                    assert found.keys() == expected.keys()
                    assert all(torch.equal(found[name], t) for name, t in expected.items())
            first.result(), second.result()


def test_a_tensor_that_the_receivers_do_not_expect_ends_the_transfer(store: dist.TCPStore) -> None:
    group = group_of(store, "unexpected")
    manifest = Manifest.of(FIRST_STAGE.items(), 200)

    def send(tensors: dict[str, Tensor]) -> None:
        with Membership().of(group, lambda: BroadcastSender(group, 0)) as sender:
            try:
                sender.send(0, tensors.items(), manifest)
            except TransferError as error:
                abort(store, group, str(error))
                raise

    wrong = {**FIRST_STAGE, "b": torch.zeros(4)}
    with started(lambda: send(wrong), lambda: received(group, 0)) as (sender, receiver):
        with pytest.raises(TransferError, match=r"'b'.*\(4,\).* is to be sent where .*\(3,\)"):
            sender.result(timeout=30)
        with pytest.raises(TransferError, match="is to be sent where"):
            receiver.result(timeout=30)


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
            with pytest.raises(TransferError, match="aborted: engine 1 died"):
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
            with pytest.raises(TransferError, match="aborted: engine 1 died"):
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
