"""Weights in memory that a rank lends: what arrives, how long it is lent, and what the dead leave behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import TransferError
from plugin.weights.group import Membership, WeightGroup, abort, open_store
from plugin.weights.ipc import IpcBuffer, IpcReceiver, IpcSender, device_id

STATE = {
    "a": torch.arange(6.0).view(2, 3).t(),
    "b": torch.arange(3, dtype=torch.bfloat16),
    "c": torch.arange(1000.0),
    "d": torch.tensor(2.5, dtype=torch.float16),
    "e": torch.zeros(0, 4),
}
_SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    opened = open_store("127.0.0.1")
    yield opened
    for group in GROUPS:
        abort(opened, group, "the test has ended")
    GROUPS.clear()


GROUPS: list[WeightGroup] = []


def group_of(store: dist.TCPStore, name: str, *lenders: int) -> WeightGroup:
    senders, place = len(set(lenders)), (store.host, store.port, name)
    GROUPS.append(WeightGroup(*place, senders, len(lenders), timeout=30.0, ipc_ranks=lenders))
    return GROUPS[-1]


def lent_files() -> list[str]:
    """Files of lent memory that this process has open or mapped."""
    links = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _exists(n)]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in (*links, *maps) if "megatron-tis-weights" in line]


def in_shm(process: Any) -> list[str]:
    """Files of lent memory that a process made in /dev/shm, where other suites have theirs.

    torch names shared memory after the process.
    """
    names = ("megatron-tis-weights", f"_{process.pid}_")
    return [file for file in os.listdir("/dev/shm") if any(name in file for name in names)]


def _exists(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def send(group: WeightGroup, rank: int, versions: int = 1) -> list[tuple[int, int]]:
    with Membership().of(group, lambda: IpcSender(group, rank)) as sender:
        return [
            sender.send(version, [*STATE.items(), None], bucket_bytes=32)
            for version in range(versions)
        ]


def receive(
    group: WeightGroup, number: int, versions: int = 1, *, keeps: bool = False
) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = [{} for _ in range(versions)]

    def join() -> IpcReceiver:
        return IpcReceiver(group, number, keeps=keeps)

    with Membership().of(group, join) as receiver:
        for version, taken in enumerate(found):
            receiver.barrier(version)
            receiver.receive(
                version,
                lambda bucket, taken=taken: taken.update(
                    {name: tensor if keeps else tensor.clone() for name, tensor in bucket}
                ),
            )
    return found


def test_every_worker_reads_what_the_rank_on_its_device_lends(store: dist.TCPStore) -> None:
    group, before = group_of(store, "lent", 1, 0, 1), store.num_keys()
    with ThreadPoolExecutor(5) as pool:
        sent = [pool.submit(send, group, rank, 2) for rank in (0, 1)]
        received = [pool.submit(receive, group, n, 2, keeps=n == 0) for n in range(3)]
        # Nothing of that is in the driver's store.
        assert [call.result() for call in sent] == [[(4032, 0)] * 2] * 2
        for call in received:
            for version in call.result():
                assert list(version) == list(STATE)
                for name, tensor in STATE.items():
                    assert version[name].dtype == tensor.dtype
                    assert torch.equal(version[name], tensor), name
    assert not lent_files(), "memory is lent only while a version is sent"
    # The meeting, where the stores of both ranks are, and for each version that all are ready.
    assert store.num_keys() - before == 1 + 2 + 2


def test_a_rank_forgets_what_it_announced(store: dist.TCPStore) -> None:
    group, keys = group_of(store, "forgets", 0), []

    def send_versions() -> None:
        with Membership().of(group, lambda: IpcSender(group, 0)) as sender:
            for version in range(20):
                sender.send(version, STATE.items(), bucket_bytes=32)
                keys.append(sender._own.num_keys())

    with ThreadPoolExecutor(2) as pool:
        sent, received = pool.submit(send_versions), pool.submit(receive, group, 0, 20)
        sent.result(), received.result()
    # What torch keeps itself.
    assert len(set(keys)) == 1 and keys[0] <= 1


def test_what_a_borrower_writes_is_not_seen_by_the_lender() -> None:
    lent = IpcBuffer(8)
    lent.tensor.fill_(1)
    taken = IpcBuffer.open(lent.handle)
    taken.fill_(2)
    assert lent.tensor.tolist() == [1] * 8
    lent.close()
    assert taken.tolist() == [2] * 8, "an open borrower keeps its memory"
    with pytest.raises(TransferError, match="lends no memory"):
        IpcBuffer.open(lent.handle)
    del taken
    assert not lent_files()


def _join_and_die(group: WeightGroup) -> None:
    """A worker that dies when it has opened the memory, before it has loaded."""
    receiver = IpcReceiver(group, 0)
    receiver.barrier(0)
    receiver.receive(0, lambda bucket: os.kill(os.getpid(), signal.SIGKILL))


def test_a_worker_that_dies_before_it_has_loaded_releases_the_rank_and_its_memory(
    store: dist.TCPStore,
) -> None:
    group = group_of(store, "dead worker", 0)
    worker = _SPAWN.Process(target=_join_and_die, args=(group,))
    worker.start()
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, group, 0)
        worker.join(60)
        assert worker.exitcode == -signal.SIGKILL
        time.sleep(0.2)
        assert not sent.done() and lent_files(), "the rank waits for the worker"
        abort(store, group, "engine 0 died")
        with pytest.raises(TransferError, match="aborted: engine 0 died"):
            sent.result(timeout=10)
    assert not lent_files()
    assert not in_shm(worker)


def _lend_and_die(group: WeightGroup) -> None:
    """A rank that dies when it has announced a bucket."""
    sender = IpcSender(group, 0)
    sender._announcements.wait_for_acks = lambda *_: os.kill(  # type: ignore[method-assign]
        os.getpid(), signal.SIGKILL
    )
    sender.send(0, STATE.items())


def test_a_rank_that_dies_leaves_no_memory_and_its_worker_half_a_version(
    store: dist.TCPStore,
) -> None:
    group = group_of(store, "dead rank", 0)
    rank = _SPAWN.Process(target=_lend_and_die, args=(group,))
    rank.start()
    taken: list[Any] = []
    receiver = IpcReceiver(group, 0)
    receiver.barrier(0)
    rank.join(60)
    assert rank.exitcode == -signal.SIGKILL
    # Where it announced its memory is gone with it.
    with pytest.raises(TransferError, match="store of the transfer cannot be reached"):
        receiver.receive(0, taken.append)
    assert not taken and not lent_files()
    assert not in_shm(rank)


def _own_device(answers: Any) -> None:
    answers.put(device_id())


def test_processes_of_one_machine_know_each_other() -> None:
    answers = _SPAWN.Queue()
    other = _SPAWN.Process(target=_own_device, args=(answers,))
    other.start()
    assert answers.get(timeout=60) == device_id()
    other.join()
