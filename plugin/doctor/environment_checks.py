"""What `megatron-tis doctor` looks at before it runs anything: versions, devices, backends, hook, configuration."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report; `fix` says what to do unless all is well."""

    name: str
    status: Status
    detail: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

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


def environment_checks(hook_path: str | None, config_file: str | None) -> list[Check]:
    """All checks; none of them raises."""
    checks = [_python(), *_packages()]
    if not importlib.util.find_spec("torch"):
        return checks
    for look in (_devices, _transformer_engine, _process_groups, _routing_replay, _memory):
        checks.append(_guarded(look))
    checks.append(_guarded(lambda: _hook(hook_path)))
    checks.append(_guarded(lambda: _configuration(config_file)))
    return checks


def _guarded(look: Callable[[], Check]) -> Check:
    """A check that breaks is a failed check, not a broken doctor."""
    try:
        return look()
    except Exception as error:
        name = getattr(look, "__name__", "check").strip("_<>")
        return Check(name, "fail", f"{type(error).__name__}: {error}", "see the message")


def _python() -> Check:
    found = platform.python_version()
    return Check("python", "ok", f"{found} on {platform.machine()}, {os.cpu_count()} cores")


def _packages() -> Iterator[Check]:
    for name, (lowest, needed, purpose) in _PACKAGES.items():
        wanted = f"{name}>={lowest}" if lowest else name
        fix = f"pip install '{wanted}'"
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
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = "".join(character for character in part if character.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _devices() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("devices", "note", "no CUDA device; everything runs on CPU with gloo")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("devices", "ok", f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}")


def _transformer_engine() -> Check:
    import torch

    present = importlib.util.find_spec("transformer_engine") is not None
    if present:
        try:
            version = importlib.metadata.version("transformer-engine")
        except importlib.metadata.PackageNotFoundError:
            version = "version unknown"
        return Check("transformer engine", "ok", version)
    if torch.cuda.is_available():
        return Check(
            "transformer engine",
            "note",
            "not installed; the local layers are used, without context parallel attention kernels",
            "pip install 'transformer-engine[pytorch]'",
        )
    return Check("transformer engine", "ok", "not installed and not needed on CPU")


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


def _memory() -> Check:
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
    from plugin.errors import MegatronTisError
    from plugin.loss.hook_loading import load_hook

    names = (path or "plugin.ppo_utils.vanilla_tis_function").split(",")
    try:
        for name in names:
            load_hook(name.strip())
    except MegatronTisError as error:
        return Check("hook", "fail", str(error), "correct --custom-tis-function-path")
    return Check(
        "hook", "ok", f"{', '.join(names)} loads and takes the arguments it is called with"
    )


def _configuration(file: str | None) -> Check:
    if file is None:
        return Check("configuration", "ok", "none given; --config FILE checks one")
    from plugin.config import JobConfig
    from plugin.errors import MegatronTisError

    try:
        config: Any = JobConfig.from_sources({}, file)
    except MegatronTisError as error:
        return Check("configuration", "fail", str(error), f"correct {file}")
    return Check(
        "configuration",
        "ok",
        f"{file} is valid: --policy-loss {config.policy_loss}, {config.smallest_world_size} ranks at least",
    )
