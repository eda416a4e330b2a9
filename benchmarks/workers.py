"""Fresh processes for one measurement each: their peak memory, threads and process group are their own."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_in_ranks(
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    ranks: int,
    threads: int,
    seconds: float,
    tensor_parallel: bool = True,
) -> Any:
    """What rank 0 returns from `body(group, *arguments)`; `group` is Megatron's tensor parallel group of all ranks.

    tensor_parallel: False leaves Megatron's groups to the body, which then gets None
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [
        context.Process(
            target=_main, args=(rank, ranks, port, threads, queue, body, arguments, tensor_parallel)
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        return _wait(queue, processes, seconds)
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def _wait(queue: Any, processes: list[Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while queue.empty():
        if time.monotonic() > deadline or any(p.exitcode not in (None, 0) for p in processes):
            raise RuntimeError("a benchmark worker failed or took too long; its output is above")
        time.sleep(0.05)
    failed, result = queue.get()
    if failed:
        raise RuntimeError(result)
    return result


def _main(
    rank: int,
    ranks: int,
    port: int,
    threads: int,
    queue: Any,
    body: Any,
    arguments: tuple[Any, ...],
    tensor_parallel: bool,
) -> None:
    warnings.simplefilter(
        "ignore"
    )  # imports of Megatron-Core without Transformer Engine fill pages
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(threads)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=20),
    )
    try:
        from megatron.core import parallel_state

        group = None
        if tensor_parallel:
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
            group = parallel_state.get_tensor_model_parallel_group()
        result = body(group, *arguments)
        if rank == 0:
            queue.put((False, result))
    except Exception:
        queue.put((True, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def _end_with_parent(parent: int) -> None:
    """A worker whose benchmark was interrupted must not keep measuring, and disturbing, on its own."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
