"""Starts a private Ray on this machine, or joins a running one.

The private one listens on loopback only: Ray binds to loopback when it believes that the platform
has no clusters, and the switch for that has to be in the environment before Ray is imported.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from plugin.cluster.interfaces import named_interfaces
from plugin.cluster.placement import environment_cpus, most_cpu_slots, plan_resources
from plugin.cluster.ray_watchdog import RayWatchdog
from plugin.config import JobConfig
from plugin.errors import ClusterError, ConfigError

#: What actors read of the driver's environment, by name and by prefix: threads, caches, offline
#: switches, and settings of the libraries that compute and communicate.
_PASSED_ON = {
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "XDG_CACHE_HOME"),
    *("HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "RAY_IGNORE_UNHANDLED_ERRORS"),
}
_PASSED_ON_PREFIXES = (
    *("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "NVSHMEM_", "NVTE_", "NVIDIA_TF32_"),
    *("TORCHINDUCTOR_", "TORCH_EXTENSIONS_", "TRITON_", "VLLM_"),
)
#: A node's own, and what Ray would show to everybody who can read its state.
_NEVER_PASSED_ON = ("VLLM_HOST_IP", "_KEY", "_TOKEN", "_SECRET", "_PASSWORD")

#: Where `ray job submit` puts the settings of a job.
_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_START_ATTEMPTS = 3
_CONNECT_SECONDS = 5.0
_REMOVAL_SECONDS = 5.0


def _end_without_ray(cause: str) -> NoReturn:
    """End this process, as Ray itself would a little later."""
    print(f"error: {cause}", file=sys.stderr)
    end_process(1)


@contextlib.contextmanager
def cluster(
    config: JobConfig, lost: Callable[[str], None] = _end_without_ray
) -> Iterator[Callable[[], None]]:
    """Connect to Ray for the duration of a job, in the background.

    Yields a function that waits until it is there, and raises what went wrong with it.

    lost: called from another thread with the cause when Ray dies or does not answer any more
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ranks fail together; the first one's error is shown, and not the tracebacks of the others.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Inherited by the actors: threads that wait for each other give up their core. Ranks, engines
    # and other jobs share the cores, and a thread that busy-waits slows down all the others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if config.address is None:
        # Ray starts workers with a niceness of 15: on a shared machine all of the job but its
        # driver would wait for everybody else.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # The GCS would keep an event of every call for a state API that nobody asks here.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        if "ray" not in sys.modules:
            os.environ[_LOOPBACK_SWITCH] = "0"
            # Loopback is open to all users of the machine. Ray's own token would be a file in the
            # home directory, as readable as the umask makes it, and for other clusters as well.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    slots = plan_resources(config, use_gpus=False).cpu_slots
    tried, over = threading.Event(), threading.Event()
    failures: list[BaseException] = []
    sessions: list[str] = []

    def connect() -> None:
        try:
            if config.address is None:
                sessions.append(_start_private(slots + environment_cpus(config)))
            else:
                _join(config.address, config.network_interface)
        except BaseException as error:
            failures.append(error)
        tried.set()
        # The processes of a private Ray die with the thread that started them.
        over.wait()

    thread = threading.Thread(target=connect, name="ray", daemon=True)
    watchdog = RayWatchdog(config.ray_timeout, lost)

    def connected() -> None:
        if not thread.ident:
            thread.start()
        tried.wait()
        if failures:
            raise failures[0]
        watchdog.start()

    # Ray starts a process per slot: of more than fit here, the checks of the job come first.
    if slots <= most_cpu_slots(os.cpu_count() or 1):
        thread.start()
    try:
        yield connected
    except Exception:
        sessions.clear()  # its logs may tell why
        raise
    finally:
        if thread.ident:
            tried.wait()
            watchdog.stop()
            if not failures:
                ray.shutdown()
            over.set()
            thread.join()
        for session in sessions:
            remove_session(Path(session))


def end_process(code: int) -> NoReturn:
    """End this process now, with a private Ray that is still starting or partly dead.

    Such a start cannot be interrupted and takes many seconds on a busy machine.
    """
    from ray._common.utils import get_default_ray_temp_dir

    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
    for session in Path(get_default_ray_temp_dir()).glob(f"session_*_{os.getpid()}"):
        remove_session(session)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def remove_session(session: Path) -> None:
    """Remove the directory of a private Ray that has ended, and kill what still writes to it.

    Ray's agents outlive it by seconds and would create the directory again.
    """
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while time.monotonic() < deadline:
        writers = _writers(session)
        for process in writers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(session, ignore_errors=True)
        if not writers and not session.exists():
            return
        time.sleep(0.01)


def _writers(directory: Path) -> list[int]:
    """The other processes of this user that hold a file below `directory` open for writing."""
    found = set()
    for files in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for file in files.iterdir():
                writable = file.lstat().st_mode & stat.S_IWUSR
                if writable and os.readlink(file).startswith(f"{directory}/"):
                    found.add(int(files.parent.name))
    return sorted(found - {os.getpid()})


def private_ray_is_gone() -> bool:
    """Whether Ray was started by this process and has died: a signal to a process group kills it.

    Whoever calls Ray then waits a minute, and is ended by it.
    """
    import ray._private.worker

    node = ray._private.worker._global_node
    return node is not None and bool(node.dead_processes())


def _start_private(cpu_slots: int) -> str:
    """Start Ray with at least `cpu_slots` slots, however few cores the machine has.

    Returns the directory of its logs and sockets.
    """
    import ray

    if ray.is_initialized():
        raise ClusterError(
            "this process already talks to a Ray cluster; call ray.shutdown() or pass --address"
        )
    for attempt in range(_START_ATTEMPTS):
        try:
            with _private_settings():
                context: Any = ray.init(
                    address="local",
                    num_cpus=max(cpu_slots, os.cpu_count() or 1),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            break
        except Exception as error:
            # Ray gives itself 30 seconds and raises a bare Exception; a busy machine needs more.
            ray.shutdown()
            if "timed out" not in str(error) or attempt + 1 == _START_ATTEMPTS:
                raise ClusterError(
                    f"Ray did not start on this machine: {error}; is it overloaded, or /tmp full?"
                ) from error
    addresses = [node["NodeManagerAddress"] for node in ray.nodes()]
    outside = [address for address in addresses if not address.startswith("127.")]
    if outside and os.environ.get(_LOOPBACK_SWITCH) != "1":
        warnings.warn(
            f"Ray was imported before megatron-tis could restrict it and listens on {outside[0]}; "
            f"set {_LOOPBACK_SWITCH}=0 before importing ray to keep it on loopback",
            stacklevel=4,
        )
    return str(context.address_info["session_dir"])


@contextlib.contextmanager
def _private_settings() -> Iterator[None]:
    """Start Ray without its autoscaler, log forwarder and dashboard server, on free ports only.

    A private Ray uses none of them, and each is a Python process that imports Ray while the ranks
    and engines want to import theirs. Its node agent would listen on Ray's well-known port 52365:
    `ray start --head` on this machine then has no job agent, and `ray job submit` fails.
    Not needed any more once `ray.init` has arguments for these.
    """
    from ray._private import parameter, worker
    from ray._private.node import Node

    unused = ("start_monitor", "start_log_monitor", "start_api_server")
    changes: list[tuple[Any, str, Any]] = [
        (Node, name, lambda *_, **__: None) for name in unused if hasattr(Node, name)
    ]
    params = functools.partial(parameter.RayParams, dashboard_agent_listen_port=0)
    changes.append((parameter, "RayParams", params))
    # What Ray prints of its own death is the log of its raylet; see `ray_watchdog`.
    changes.append((worker, "listen_error_messages", lambda *_: None))
    stock = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in stock:
            setattr(owner, name, value)


def check_address(address: str) -> None:
    """Refuse an address where nothing listens; Ray itself would try for more than a minute."""
    import ray
    from ray._private.services import canonicalize_bootstrap_address

    if ray.is_initialized():
        return
    try:
        # What `ray.init` makes of it: RAY_ADDRESS, the newest cluster of this machine, its address.
        found = canonicalize_bootstrap_address(address.removeprefix("ray://"))
        if found is None:
            raise ConnectionError("no cluster runs on this machine, and RAY_ADDRESS is not set")
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ConfigError(_no_cluster(address, error)) from error


def _join(address: str, interface: str | None = None) -> None:
    import ray

    if ray.is_initialized():
        return
    check_address(address)
    # Also for workers that an engine starts itself.
    named = {} if interface is None else named_interfaces(interface)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": actor_environment({**os.environ, **named})},
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ClusterError(_no_cluster(address, error)) from error


def actor_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that actors on a running cluster need from the driver.

    There they inherit the environment of `ray start`, not that of the job. Those that `ray job
    submit --runtime-env` sets reach them anyway, and Ray refuses to be given one twice.
    """
    submitted = json.loads(environment.get(_SUBMITTED, "{}")).get("runtime_env") or {}
    return {
        name: value
        for name, value in environment.items()
        if (name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES))
        and not name.endswith(_NEVER_PASSED_ON)
        and name not in (submitted.get("env_vars") or {})
    }


def object_stores() -> dict[str, int]:
    """Bytes of the object store of every node, by address; the smallest of an address."""
    import ray

    found: dict[str, int] = {}
    for node in ray.nodes():
        if node["Alive"]:
            size = int(node["Resources"].get("object_store_memory", 0))
            address = node["NodeManagerAddress"]
            found[address] = min(size, found.get(address, size))
    return found


def spill_directory() -> Path:
    """Where Ray writes objects that do not fit into its store on this machine."""
    import ray._private.worker

    node = ray._private.worker._global_node
    return Path(tempfile.gettempdir() if node is None else node.get_session_dir_path())


def _no_cluster(address: str, error: Exception) -> str:
    return (
        f"--address {address}: no Ray cluster answers there ({error}); start one with "
        "`ray start --head`, or drop --address for a private one"
    )
