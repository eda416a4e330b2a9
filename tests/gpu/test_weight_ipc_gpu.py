"""CUDA IPC between two processes on one GPU: what a rank lends arrives, and a dead worker releases the rank.

The bodies are those of `tests/unit/weights/test_weight_ipc.py`, with the borrower in a process of its own: CUDA does not
open a handle in the process that made it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from plugin.errors import TransferError
from plugin.weights.group import WeightGroup, abort, open_store
from plugin.weights.ipc import IpcReceiver, IpcSender, device_id

NUM_GPUS = 1

VERSIONS = 3
_SPAWN = multiprocessing.get_context("spawn")


def state_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "a": torch.randn(300, 200, generator=generator).bfloat16().t(),
        "b": torch.randn(1000, generator=generator),
        "c": torch.zeros(0, 4),
    }


def _keep(found: dict[str, torch.Tensor], bucket: Any) -> None:
    found.update({name: tensor.cpu() for name, tensor in bucket})


def _receive(group: WeightGroup, answers: Any) -> None:
    receiver = IpcReceiver(group, 0)
    equal = []
    for version in range(VERSIONS):
        found: dict[str, torch.Tensor] = {}
        receiver.barrier(version)
        receiver.receive(version, partial(_keep, found))
        expected = state_of(version)
        equal.append(all(torch.equal(found[name], t) for name, t in expected.items()))
    answers.put((device_id(), equal))


def _die(group: WeightGroup, answers: Any) -> None:
    receiver = IpcReceiver(group, 0)
    receiver.barrier(0)
    receiver.receive(0, lambda bucket: os.kill(os.getpid(), signal.SIGKILL))


def test_a_process_on_the_same_gpu_reads_what_a_rank_lends() -> None:
    store, answers = open_store("127.0.0.1"), _SPAWN.Queue()
    group = WeightGroup(store.host, store.port, "gpu", 1, 1, timeout=60.0, ipc_ranks=(0,))
    worker = _SPAWN.Process(target=_receive, args=(group, answers))
    worker.start()
    sender = IpcSender(group, 0)
    for version in range(VERSIONS):
        tensors = [(name, tensor.cuda()) for name, tensor in state_of(version).items()]
        sender.send(version, tensors, bucket_bytes=1 << 10)
    device, equal = answers.get(timeout=60)
    worker.join(60)
    assert device == device_id() and equal == [True] * VERSIONS


def test_a_worker_that_dies_with_the_memory_open_releases_the_rank() -> None:
    store = open_store("127.0.0.1")
    group = WeightGroup(store.host, store.port, "gpu-dead", 1, 1, timeout=60.0, ipc_ranks=(0,))
    worker = _SPAWN.Process(target=_die, args=(group, None))
    worker.start()
    tensors = [(name, tensor.cuda()) for name, tensor in state_of(0).items()]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: IpcSender(group, 0).send(0, tensors))
        worker.join(60)
        abort(store, group, "engine 0 died")
        with pytest.raises(TransferError, match="engine 0 died"):
            sent.result(timeout=10)
