"""Warm worker processes that run a function on N gloo ranks.

Importing torch, Megatron-Core and transformers takes seconds, so a fork server imports them once and each
worker is forked from it and kept for the whole test session. A job is a module-level function; every rank
joins a fresh process group, calls it with its `ParallelGroups`, and leaves the group again.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import psutil

POOL_SIZE = 4
_CONTEXT = multiprocessing.get_context("forkserver")
_SECONDS_FOR_OTHERS = 5.0
"""How long the other ranks may take to fail by themselves once one has failed."""


#: Three threads per gloo group, each of which wakes up all the time: hundreds slow down the whole machine. Groups of MoE
#: models stay, because Megatron-Core's token dispatchers keep tensors of their last graph, which Python cannot collect.
_MOST_THREADS = 200


class RankError(RuntimeError):
    """A rank raised, died or did not finish; the message carries its traceback."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class _Job:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    init_method: str
    timeout: float
    parallel_sizes: dict[str, Any]


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    failed_at: float = 0.0
    """Monotonic time, comparable between processes of one machine; 0 for a process that died."""
    needs_new_worker: bool = False


def _picklable(error: BaseException) -> BaseException | None:
    """The exception, if it survives the way to the test process."""
    with contextlib.suppress(Exception):
        return pickle.loads(pickle.dumps(error))
    return None


def _run_job(job: _Job) -> _Outcome:
    from plugin.megatron_backend.parallel_groups import destroy_parallel, init_parallel

    try:
        groups = init_parallel(
            job.rank,
            job.world_size,
            init_method=job.init_method,
            timeout_seconds=job.timeout,
            **job.parallel_sizes,
        )
        return _Outcome(value=job.fn(groups, *job.args))
    except BaseException as error:
        # Taken before the group is left, which makes the other ranks fail in turn.
        failed_at = time.monotonic()
        return _Outcome(None, _picklable(error), traceback.format_exc(), failed_at)
    finally:
        destroy_parallel()
        # Models and groups refer to each other in circles; the threads of a gloo group live until it is collected.
        gc.collect()


def _serve(pipe: multiprocessing.connection.Connection) -> None:
    """A worker's life: run one job after the other until the pool closes the pipe."""
    # A session of its own: killing it also ends helper processes, such as those of checkpoint writers.
    os.setsid()
    # Loopback only, also on a machine whose host name resolves to an outside address.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            try:
                outcome = _run_job(pickle.loads(pipe.recv_bytes()))
                worn_out = psutil.Process().num_threads() > _MOST_THREADS
                message = pickle.dumps(replace(outcome, needs_new_worker=worn_out))
            except EOFError:
                raise
            except Exception:
                message = pickle.dumps(_Outcome(trace=traceback.format_exc()))
            pipe.send_bytes(message)


class _Worker:
    def __init__(self) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        # Not a daemon: daemons may not start processes, and asynchronous checkpointing does.
        self.process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=False)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


class RankPool:
    """Up to `POOL_SIZE` warm workers; create one per test session and close it at the end."""

    def __init__(self) -> None:
        _CONTEXT.set_forkserver_preload(["tests.parallel.rank_imports"])
        self._workers: list[_Worker] = []
        self._directory = tempfile.TemporaryDirectory(prefix="rank_pool_")
        self._jobs = 0
        # Before multiprocessing's own exit handler, which would wait for the workers.
        atexit.register(self.close)

    def close(self) -> None:
        """Ends every worker."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._directory.cleanup()

    def run_ranks(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 180.0,
        **parallel_sizes: Any,
    ) -> list[Any]:
        """Calls `fn(groups, *args)` on `world_size` ranks and returns the results in rank order.

        `parallel_sizes` are `init_parallel`'s (tensor_model_parallel_size=2, ...). `fn` must be defined at
        the top of its module; arguments and results travel by pickle. The first rank that fails is raised as
        `RankError` with its traceback, caused by its exception; ranks that then hang are killed.
        """
        while len(self._workers) < world_size:
            self._workers.append(_Worker())
        workers = self._workers[:world_size]
        self._jobs += 1
        init_method = f"file://{self._directory.name}/rendezvous-{self._jobs}"
        for rank, worker in enumerate(workers):
            job = _Job(fn, args, rank, world_size, init_method, timeout, parallel_sizes)
            worker.pipe.send_bytes(pickle.dumps(job))
        outcomes, first_failure = self._collect(workers, timeout)
        self._replace_lost_workers(outcomes)
        if first_failure is not None:
            failed = outcomes[first_failure]
            raise RankError(_describe(first_failure, outcomes), first_failure) from failed.error
        return [outcomes[rank].value for rank in range(world_size)]

    def _collect(
        self, workers: list[_Worker], timeout: float
    ) -> tuple[dict[int, _Outcome], int | None]:
        """Outcomes by rank as far as they arrive in time, and the rank that failed first."""
        outcomes: dict[int, _Outcome] = {}
        deadline = time.monotonic() + timeout
        pending = {worker.pipe: rank for rank, worker in enumerate(workers)}
        while pending and time.monotonic() < deadline:
            ready = multiprocessing.connection.wait(
                list(pending), max(0.0, deadline - time.monotonic())
            )
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                outcomes[rank] = _receive(pipe)  # type: ignore[arg-type]
                if outcomes[rank].trace:
                    deadline = min(deadline, time.monotonic() + _SECONDS_FOR_OTHERS)
        failed = [rank for rank, outcome in outcomes.items() if outcome.trace]
        for rank in pending.values():
            trace = f"rank {rank} did not finish within {timeout} s"
            if failed:
                trace = f"rank {rank} hung after rank {failed[0]} had failed"
            outcomes[rank] = _Outcome(None, TimeoutError(trace), trace, time.monotonic(), True)
            failed.append(rank)
        return outcomes, min(failed, key=lambda rank: outcomes[rank].failed_at, default=None)

    def _replace_lost_workers(self, outcomes: dict[int, _Outcome]) -> None:
        for rank, outcome in outcomes.items():
            if outcome.needs_new_worker:
                self._workers[rank].kill()
                self._workers[rank] = _Worker()


def _receive(pipe: multiprocessing.connection.Connection) -> _Outcome:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        trace = "the worker process died without an answer"
        return _Outcome(None, RuntimeError(trace), trace, 0.0, True)


def _describe(first: int, outcomes: dict[int, _Outcome]) -> str:
    others = [rank for rank in sorted(outcomes) if rank != first and outcomes[rank].trace]
    lines = [f"rank {first} failed:", outcomes[first].trace]
    for rank in others:
        last_line = outcomes[rank].trace.strip().splitlines()[-1]
        lines.append(f"rank {rank} failed later: {last_line}")
    return "\n".join(lines)
