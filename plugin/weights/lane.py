"""Process groups for weights: gloo on CPU, NCCL on CUDA; one per pipeline stage, or per sender.

Operations of a lane have one order, the same on all of its members. They run in a thread of their
own, two at a time, so that the next bucket is packed and the last one loaded beside them.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plugin.errors import TransferError
from plugin.weights.group import GroupStore, KeyStore, WeightGroup
from plugin.weights.waiting import Handover

#: Operations under way at the same time, and the buffers that keep them busy: one more is packed
#: or loaded meanwhile.
IN_FLIGHT = 2
BUFFERS = IN_FLIGHT + 1
#: What the buffers of all lanes together may take in a receiver.
_BUFFER_BYTES = 384 << 20
#: On a GPU an operation has to be large to fill the network, and a copy costs little. On CPU a copy
#: costs as much as a transfer between two processes, which is quick to begin.
_GPU_LEAST_BYTES = 64 << 20
_CPU_BUCKET_BYTES, _CPU_ALONE_BYTES = 8 << 20, 1 << 20

#: gloo cannot end an operation that is under way, and its group cannot be freed before.
_abandoned: list[Any] = []


def bucket_sizes(lanes: int, *, on_gpu: bool) -> tuple[int, int]:
    """How large buckets are, for a `Manifest`, and from which size on a tensor is one."""
    if not on_gpu:
        return _CPU_BUCKET_BYTES, _CPU_ALONE_BYTES
    size = max(_GPU_LEAST_BYTES, _BUFFER_BYTES // BUFFERS // lanes)
    return size, size


def group_backend() -> str:
    """The backend of the process groups."""
    return "nccl" if torch.cuda.is_available() else "gloo"


@dataclass(frozen=True)
class Payload:
    """Bytes of an operation.

    tensor: [nbytes] uint8
    after: what has to be done on the GPU before they may be used
    buffer: the memory to be used again afterwards
    """

    tensor: Tensor
    after: Any = None
    buffer: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor, buffer: Tensor | None = None) -> Payload:
        """`tensor` after what this thread has begun to do with it."""
        after = torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None
        return cls(tensor, after, buffer)


@dataclass(frozen=True)
class Step:
    """One operation of a lane.

    root: number of its sender in the lane
    payload: waits for the memory that is sent, or received into
    done: takes that memory when it has arrived
    """

    root: int
    payload: Callable[[], Payload]
    done: Callable[[Payload], None]


class Lane:
    """This process's place in a process group of some senders and all receivers."""

    def __init__(self, store: GroupStore, number: int, rank: int) -> None:
        self._waits, self._group = store.waits, store.group
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        name, size = self._group.lane_name(number), self._group.per_lane + self._group.receivers
        connection = store.store
        self._backend = self._waits.result_of(
            lambda: connect(connection, name, rank, size, self._group)
        )

    def run(self, steps: Iterable[Step]) -> threading.Event:
        """Begin the steps in a thread; the event of their end. Errors end the member's waits."""
        ended = threading.Event()

        def run() -> None:
            try:
                self._do(steps)
            except Exception as error:
                self._waits.end(str(error))
            ended.set()
            self._waits.wake()

        threading.Thread(target=run, daemon=True).start()
        return ended

    def run_to_end(self, steps: Iterable[Step]) -> None:
        """The steps, in a thread that is abandoned if the transfer ends before."""
        self._waits.result_of(lambda: self._do(steps))

    def empty(self, nbytes: int) -> Tensor:
        """Memory for an operation."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def on_device(self, message: bytes) -> Tensor:
        """A message as the bytes of an operation."""
        return torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)

    def _do(self, steps: Iterable[Step]) -> None:
        pending: deque[tuple[Any, Step, Payload]] = deque()

        def complete() -> None:
            work, step, payload = pending.popleft()
            self._finish(work)
            step.done(payload)

        with torch.cuda.stream(self._stream):
            for step in steps:
                if len(pending) == IN_FLIGHT:
                    complete()
                payload = step.payload()
                pending.append((self._begin(step.root, payload), step, payload))
            while pending:
                complete()

    def _begin(self, root: int, payload: Payload) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        if self._stream is not None and payload.after is not None:
            self._stream.wait_event(payload.after)
        try:
            return self._backend.broadcast([payload.tensor], options)
        except RuntimeError as error:
            raise TransferError(f"weights did not arrive: {error}") from error

    def _finish(self, work: Any) -> None:
        try:
            work.wait()
            if self._stream is not None:
                self._stream.synchronize()
        except RuntimeError as error:
            raise TransferError(f"weights did not arrive: {error}") from error

    def close(self, *, abort: bool) -> None:
        """Leave; `abort`: without waiting for an operation under way."""
        if abort and torch.cuda.is_available():
            self._backend.abort()
        elif abort:
            _abandoned.append(self._backend)
        self._backend = None


class Buffers:
    """Memory for the operations of a lane: a few buffers, used again and again.

    reuses: otherwise every bucket has memory of its own, and only their number is limited
    """

    def __init__(self, lane: Lane, store: KeyStore, *, reuses: bool = True) -> None:
        self._lane, self._reuses = lane, reuses
        self._free = Handover(store.waits, [Payload(lane.empty(0)) for _ in range(BUFFERS)])

    def take(self, nbytes: int) -> Payload:
        """Wait for a buffer; so many bytes of it."""
        free = self._free.get()
        buffer = free.tensor if free.tensor.numel() >= nbytes else self._lane.empty(nbytes)
        return Payload(buffer[:nbytes], free.after, buffer)

    def give_back(self, payload: Payload) -> None:
        """Let its buffer be used again, after what this thread has begun to do with it."""
        assert payload.buffer is not None
        self._free.put(Payload.of(payload.buffer if self._reuses else self._lane.empty(0)))

    def release(self) -> None:
        """Once all are free, let them go on a GPU, where memory is scarce."""
        buffers = [self._free.get() for _ in range(BUFFERS)]
        for buffer in buffers:
            self._free.put(Payload(self._lane.empty(0)) if torch.cuda.is_available() else buffer)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor, or of a copy if it is not in one piece: [nbytes] uint8."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def connect(store: dist.Store, name: str, rank: int, size: int, group: WeightGroup) -> Any:
    """A backend; its keys in the store are those of torch's groups, so that servers can join."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    store = dist.PrefixStore(name, store)
    store = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", store))
    timeout = timedelta(seconds=group.timeout)
    backends: Any = dist
    try:
        if device == "cuda":
            options = backends.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return backends.ProcessGroupNCCL(store, rank, size, options)
        options = backends.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._threads = IN_FLIGHT
        address = own_address(group.host)
        options._devices = [backends.ProcessGroupGloo.create_device(hostname=address)]
        return backends.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise TransferError(f"the members of {name} did not connect: {error}") from error


def own_address(host: str) -> str:
    """The address of this machine from which `host` is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return probe.getsockname()[0]
