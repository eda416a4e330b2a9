"""Locks on directories that one process at a time may write.

A lock is an `flock` on the file `lock` in the directory, on NFS too. It ends with its process,
however that ends, so the file that a killed process leaves is no obstacle; its text says who holds
the lock, or held it last.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import time
import warnings
from pathlib import Path
from typing import TextIO

from plugin.errors import ConfigError

LOCK_FILE = "lock"
_REMOVAL_SECONDS = 5.0
#: A killed process holds its locks until the kernel has taken its memory back.
_DYING_SECONDS = 2.0


def lock_directory(directory: Path, option: str, mode: int = 0o777) -> TextIO:
    """Make and lock a directory until the returned file is closed or this process ends.

    option: the flag that named the directory, for the `ConfigError` that says who holds it
    """
    path = directory / LOCK_FILE
    try:
        directory.mkdir(mode, parents=True, exist_ok=True)
        # Through no link: what it leads to would be overwritten.
        number = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        file = open(number, "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise _unwritable(directory, option, error) from error
    try:
        _lock(file, fcntl.LOCK_EX)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise _in_use(directory, option, holder) from None
    except OSError as error:
        warnings.warn(
            f"{path} cannot be locked ({error.strerror}); nothing keeps a second job out of this "
            "directory",
            stacklevel=2,
        )
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
        file.flush()
    except OSError as error:
        raise _unwritable(directory, option, error) from error
    return file


def _lock(file: TextIO, kind: int) -> None:
    deadline = time.monotonic() + _DYING_SECONDS
    while True:
        try:
            return fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def refuse_locked(directory: Path, option: str) -> None:
    """Raise a `ConfigError` that says who holds a directory, if somebody does; changes nothing."""
    with contextlib.suppress(OSError), open(directory / LOCK_FILE, encoding="utf-8") as file:
        try:
            _lock(file, fcntl.LOCK_SH)
        except BlockingIOError:
            raise _in_use(directory, option, file.read().strip()) from None


def _unwritable(directory: Path, option: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{option} {directory} cannot be written ({error.strerror}); choose another directory"
    )


def _in_use(directory: Path, option: str, holder: str) -> ConfigError:
    return ConfigError(
        f"{option} {directory} is in use by {holder or 'a process that has just started'}; wait "
        "for it, end it, or choose another directory"
    )


class OwnedDirectory:
    """A new directory `<root>/<prefix><random>` that is removed with its owner.

    The owner removes it with `remove`. One whose owner was killed is removed when the next one is
    made under the same root.
    """

    def __init__(self, root: Path, prefix: str, option: str, mode: int = 0o777) -> None:
        _remove_abandoned(root, prefix)
        self.path = root / f"{prefix}{secrets.token_hex(6)}"
        # Locked under another name: nobody may find it unlocked and take it for abandoned.
        draft = self.path.with_name(f".{self.path.name}")
        self._lock = lock_directory(draft, option, mode)
        draft.rename(self.path)

    def remove(self) -> None:
        """Remove the directory and its contents, also what a dying process still writes."""
        deadline = time.monotonic() + _REMOVAL_SECONDS
        while self.path.exists() and time.monotonic() < deadline:
            shutil.rmtree(self.path, ignore_errors=True)
            time.sleep(0.01)
        self._lock.close()


def _remove_abandoned(root: Path, prefix: str) -> None:
    for path in root.glob(f"{prefix}*/{LOCK_FILE}"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid != os.getuid():
                continue
            with open(path, "a+", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
