"""What `megatron-tis doctor` checks before it trains: packages, devices, hook, a configuration."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from plugin.config import JobConfig
from plugin.errors import MegatronTisError

Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report; `fix`: what to do unless the status is ok."""

    name: str
    status: Status
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.status:>4}  {self.name}: {self.detail}"
        return f"{line}\n      -> {self.fix}" if self.fix else line


#: package -> (lowest version or None, needed for everything?, what it is for)
_PACKAGES: dict[str, tuple[str | None, bool, str]] = {
    "torch": ("2.6", True, "everything"),
    "megatron-core": ("0.16.1", True, "training"),
    "transformers": ("5", True, "reading models and the built-in rollout engine"),
    "safetensors": (None, True, "weights"),
    "mbridge": ("0.15.1", False, "weight names of further model families"),
    "ray": ("2.40", False, "megatron-tis train"),
    "pyarrow": (None, False, "--dump-log-probs and compare"),
    "tensorboard": (None, False, "TensorBoard events of a run"),
}


def environment_checks(hook_path: str | None) -> list[Check]:
    """Check the machine and the hook; none of the checks raises."""
    python = f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores"
    checks = [Check("python", "ok", python), *_packages()]
    if not importlib.util.find_spec("torch"):
        return checks
    looks: dict[str, Callable[[], Check]] = {
        "devices": _devices,
        "transformer engine": _transformer_engine,
        "process groups": _process_groups,
        "routing replay": _routing_replay,
        "shared memory": _shared_memory,
        "hook": lambda: _hook(hook_path),
    }
    for name, look in looks.items():
        try:
            checks.append(look())
        except Exception as error:
            # A check that breaks is a failed check, not a broken doctor.
            detail = f"{type(error).__name__}: {error}"
            checks.append(Check(name, "fail", detail, "see the message"))
    return checks


def _packages() -> Iterator[Check]:
    for name, (lowest, needed, purpose) in _PACKAGES.items():
        fix = f"pip install '{name}>={lowest}'" if lowest else f"pip install '{name}'"
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            status: Status = "fail" if needed else "note"
            yield Check(name, status, f"not installed; needed for {purpose}", fix)
            continue
        if lowest and _numbers(found) < _numbers(lowest):
            yield Check(name, "fail", f"{found} is older than {lowest}", fix)
        else:
            yield Check(name, "ok", found)


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: '2.13.0+cpu' -> (2, 13, 0)."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, leading.group().split("."))) if leading else ()


def _devices() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("devices", "note", "no CUDA device; everything runs on CPU with gloo")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("devices", "ok", f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}")


def _transformer_engine() -> Check:
    import torch

    name = "transformer engine"
    if importlib.util.find_spec("transformer_engine") is not None:
        try:
            return Check(name, "ok", importlib.metadata.version("transformer-engine"))
        except importlib.metadata.PackageNotFoundError:
            return Check(name, "ok", "version unknown")
    if not torch.cuda.is_available():
        return Check(name, "ok", "not installed and not needed on CPU")
    return Check(
        name,
        "note",
        "not installed; the local layers are used, without context parallel attention kernels",
        "pip install 'transformer-engine[pytorch]'",
    )


def _process_groups() -> Check:
    import torch
    import torch.distributed as dist

    gloo = dist.is_available() and dist.is_gloo_available()
    nccl = dist.is_available() and dist.is_nccl_available()
    detail = f"gloo {'yes' if gloo else 'no'}, nccl {'yes' if nccl else 'no'}"
    needed = nccl if torch.cuda.is_available() else gloo
    if not needed:
        return Check("process groups", "fail", detail, "install a torch build with this backend")
    return Check("process groups", "ok", detail)


def _routing_replay() -> Check:
    name = "megatron.core.transformer.moe.router_replay"
    try:
        present = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        present = False
    if not present:
        return Check(
            "routing replay",
            "note",
            f"{name} is missing; MoE routes cannot be replayed",
            "pip install 'megatron-core>=0.16.1'",
        )
    return Check(
        "routing replay", "ok", "available; keep --moe-router-fusion off, it refuses replay"
    )


def _shared_memory() -> Check:
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    if shared is None:
        return Check("shared memory", "note", "no /dev/shm; Ray will use the disk")
    free = shared.f_bavail * shared.f_frsize / 2**30
    if free < 1:
        return Check(
            "shared memory",
            "note",
            f"{free:.1f} GiB free in /dev/shm; Ray's object store wants more",
            "in a container: --shm-size=8g",
        )
    return Check("shared memory", "ok", f"{free:.1f} GiB free in /dev/shm")


def _hook(path: str | None) -> Check:
    from plugin.config import LossConfig
    from plugin.loss.objective import check_loss

    settings = LossConfig(
        use_tis=True, policy_loss="reinforce", custom_tis_function_path=path or None
    )
    try:
        check_loss(settings)
    except MegatronTisError as error:
        return Check("hook", "fail", str(error), "correct --custom-tis-function-path")
    names = ", ".join(settings.hook_names())
    return Check("hook", "ok", f"{names} loads and returns valid results on an example")


def configuration_checks(file: str | None) -> list[Check]:
    """What `train` checks before anything starts, up to the first thing that cannot work."""
    if file is None:
        return [Check("configuration", "ok", "none given; --config FILE checks one")]
    import torch

    from plugin.cluster.placement import on_this_machine, plan_on_cluster
    from plugin.cluster.ray_cluster import cluster
    from plugin.controller.preflight.job_checks import check_job

    begun = ["configuration"]
    try:
        config = JobConfig.from_sources({}, file).with_absolute_paths()
        config = on_this_machine(config, gpus=torch.cuda.device_count())
        check_job(config, log=lambda _: None, begin=begun.append)
        if config.address is not None:
            begun.append("room in the cluster")
            with cluster(config) as connected:
                connected()
                plan_on_cluster(config)
    except Exception as error:
        # The user's own task or engine may raise anything.
        known = isinstance(error, MegatronTisError)
        detail = str(error) if known else f"{type(error).__name__}: {error}"
        passed, failed = begun[:-1], [Check(begun[-1], "fail", detail, f"correct {file}")]
    else:
        passed, failed = begun, []
    details = {} if failed else {"configuration": _described(config, file)}
    return [Check(name, "ok", details.get(name, f"{file} passes")) for name in passed] + failed


def _described(config: JobConfig, file: str) -> str:
    engines = f"{config.num_rollout_engines} x {config.rollout_engine}"
    return (
        f"{file} is valid: --policy-loss {config.policy_loss}, {config.world_size} trainer ranks, "
        f"engines {engines}"
    )
