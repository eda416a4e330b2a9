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
from plugin.rollout.engines.weight_stream import (
    Membership,
    WeightGroup,
    WeightReceiver,
    WeightSender,
    call_off,
    forget_version,
    open_store,
)

FIRST_STAGE = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.arange(3, dtype=torch.bfloat16)}
LAST_STAGE = {
    "c": torch.arange(1000.0),
    "d": torch.tensor(2.5, dtype=torch.float16),
    "e": torch.zeros(0, 4),
}


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


def sent(group: WeightGroup, stage: int, tensors: dict[str, Tensor], versions: int = 1) -> Any:
    with Membership().of(group, lambda: WeightSender(group, stage)) as sender:
        return [sender.send(v, tensors.items(), bucket_bytes=32) for v in range(versions)]


def received(group: WeightGroup, number: int, versions: int = 1) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = [{} for _ in range(versions)]
    with Membership().of(group, lambda: WeightReceiver(group, number)) as receiver:
        for version, taken in enumerate(found):
            receiver.meet(version)
            receiver.receive(
                version, lambda bucket, taken=taken: taken.update({n: t.clone() for n, t in bucket})
            )
    return found


def test_every_worker_gets_what_every_stage_sends(store: dist.TCPStore) -> None:
    group = group_of(store, "all", senders=2, receivers=3)
    with started(
        lambda: sent(group, 0, FIRST_STAGE, versions=2),
        lambda: sent(group, 1, LAST_STAGE, versions=2),
        *(lambda number=number: received(group, number, versions=2) for number in range(3)),
    ) as (first, last, *receivers):
        # Buckets of 32 bytes: a has 24 and b 6; c is alone in one, d and e share the next.
        assert first.result() == [(30, 1)] * 2
        assert last.result() == [(4002, 2)] * 2
        for receiver in receivers:
            for version in receiver.result():
                assert list(version) == [*FIRST_STAGE, *LAST_STAGE]
                for name, tensor in {**FIRST_STAGE, **LAST_STAGE}.items():
                    assert version[name].dtype == tensor.dtype
                    assert torch.equal(version[name], tensor)


def test_a_complete_version_leaves_nothing_in_the_store(store: dist.TCPStore) -> None:
    group = group_of(store, "clean")
    keys = store.num_keys()
    with started(
        lambda: sent(group, 0, LAST_STAGE, versions=5), lambda: received(group, 0, versions=5)
    ) as (sender, receiver):
        counts, _ = sender.result(), receiver.result()
    before = store.num_keys()
    for version, (_, buckets) in enumerate(counts):
        forget_version(store, group, version, {0: buckets})
    # Two buckets with their end, the end of the stage and the meeting of each version.
    assert before - store.num_keys() == 5 * 5
    assert store.num_keys() > keys


def test_a_transfer_that_is_called_off_ends_on_every_member(store: dist.TCPStore) -> None:
    group, end = group_of(store, "lost", receivers=3), threading.Event()

    def hanging() -> None:
        """Meets the others and never takes part in the broadcast."""
        receiver = WeightReceiver(group, 0)
        receiver.meet(0)
        end.wait(30)

    with started(
        lambda: sent(group, 0, {"large": torch.zeros(1 << 22)}),
        lambda: received(group, 1),
        lambda: received(group, 2),
        hanging,
    ) as (sender, *receivers, _):
        time.sleep(0.5)
        began = time.monotonic()
        call_off(store, group, "engine 0 died")
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
        call_off(store, group, "engine 1 died")
        for member in members:
            with pytest.raises(TransferError, match="called off: engine 1 died"):
                member.result(timeout=10)


def test_a_membership_is_kept_for_its_group_and_ends_with_an_error() -> None:
    class Member:
        def __init__(self, group: str) -> None:
            self.group, self.closed = group, []

        def close(self, *, in_the_middle: bool = False) -> None:
            self.closed.append(in_the_middle)

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
