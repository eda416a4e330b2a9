"""Runs a program that a model wrote, away from its tests and from the job.

`sandbox.py ISOLATION MEGABYTES SECONDS DIRECTORY`: a script of its own, which imports the standard
library and `plain_calls.py` alone. It reads one JSON object: `program`, and either `tests` (Python
text) or `stdin` (what the program is to read). Its exit code is PASSED if the tests passed or the
program ended with 0, NOT_ISOLATED if the isolation could not be set up, else FAILED.

    this process      runs the tests and compares; the program has nothing of its memory and files
      keeper          process 1 of the namespaces: whatever is in them ends with it, and it with us
        program       without rights; answers calls over a socket (`plain_calls.py`)

ISOLATION, strongest first:

    namespaces   process, mount, network, IPC and user namespaces: no other process, network or
                 file is in reach but the system's and Python's, read only, and a directory in
                 memory that vanishes with the program; as root, it runs as `nobody`
    user         the program runs as `nobody`: for root in containers that allow no namespaces
    none         the program runs as the job's user
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import importlib
import json
import os
import platform
import re
import resource
import signal
import socket
import struct
import sys
import time
import types
from pathlib import Path
from typing import Any, NoReturn

PASSED, FAILED, NOT_ISOLATED = 0, 1, 3
ISOLATION = ("namespaces", "user", "none")

_NOBODY = 65534
_PROCESSES = 64
_FILE_BYTES = 16 << 20
_DIRECTORY_OPTIONS = "size=64m,nr_inodes=10000,mode=1777"
_SHOWN = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group"),
    *("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
)
# mount, prctl, sched and capability headers of Linux
_PRIVATE, _BIND, _NOSUID_NODEV, _DETACH = 0x44000, 0x5000, 0x6, 2
_MOUNT_SETATTR, _AT_FDCWD, _RECURSIVE, _RDONLY_NOSUID = 442, -100, 0x8000, 0x3
_PDEATHSIG, _SET_DUMPABLE, _CHILD_SUBREAPER, _NO_NEW_PRIVS = 1, 4, 36, 38
_NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_CAPABILITY_VERSION = 0x20080522
# seccomp: what is loaded from a system call, how it is compared, what becomes of it
_SET_SECCOMP, _FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOWED, _NOT_PERMITTED = 0x7FFF0000, 0x00050001
#: Machine -> its architecture for seccomp, and the calls that make memory which counts neither as
#: a file nor as mapped: shmget, msgget, memfd_create, memfd_secret, io_uring_setup.
_HIDDEN_MEMORY = {
    "x86_64": (0xC000003E, (29, 68, 319, 447, 425)),
    "aarch64": (0xC00000B7, (194, 186, 279, 447, 425)),
}
_OTHER_ABI = 0x40000000  # x86_64 numbers its calls once more from here
_LOOK_SECONDS = 0.05
_HELD = re.compile(r"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+) kB", re.MULTILINE)


def die_with_the_caller() -> None:
    """End when the process that started this one does; Linux only."""
    _prctl(_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents end, so that none gets lost; Linux only."""
    _prctl(_CHILD_SUBREAPER, 1)


def kill_descendants(root: int) -> None:
    """Kill everything that a process has started, whatever session it went to."""
    for _ in range(100):  # what was forked meanwhile is found in the next round
        found = _descendants(root)
        if not found:
            return
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = entry.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry.parent.name))
    found = [root]
    for process in found:
        found += children.get(process, ())
    return found[1:]


def remove_directory(top: str) -> None:
    """Remove a directory, however deep it is and whatever its modes."""
    os.chmod(top, 0o700)
    here, names = os.open(top, os.O_DIRECTORY), list[str]()
    while True:
        below = None
        with os.scandir(here) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    below = entry.name
                    break
                os.unlink(entry.name, dir_fd=here)
        if below is None and not names:
            break
        if below is not None:
            os.chmod(below, 0o700, dir_fd=here)
            names.append(below)
        other = os.open(below or "..", os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = other
        if below is None:
            os.rmdir(names.pop(), dir_fd=here)
    os.close(here)
    os.rmdir(top)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _libc(function: str, *args: Any) -> None:
    """Call a function of the C library; an `OSError` if it fails."""
    encoded = [os.fsencode(arg) if isinstance(arg, str) else arg for arg in args]
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*encoded) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def _limit(what: int, bound: int) -> None:
    _, hard = resource.getrlimit(what)
    bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
    resource.setrlimit(what, (bound, bound))


def _enter_namespaces() -> None:
    """Move this process into namespaces of its own; the next fork is their process 1."""
    root = os.getuid() == 0
    ready, go = os.pipe()
    mapper = os.fork()
    if mapper == 0:  # from outside: only there has root the right to map another user
        os.close(go)
        with contextlib.suppress(OSError):
            if not os.read(ready, 1):
                os._exit(1)
            process = Path(f"/proc/{os.getppid()}")
            if not root:
                (process / "setgroups").write_text("deny")
            for kind, own in (("uid_map", os.getuid()), ("gid_map", os.getgid())):
                also = f"{_NOBODY} {_NOBODY} 1\n" if root else ""
                (process / kind).write_text(f"{own} {own} 1\n{also}")
            os._exit(0)
        os._exit(1)
    _libc("unshare", _NEW_NAMESPACES)
    os.write(go, b"x")
    os.close(go)
    os.close(ready)
    if os.waitpid(mapper, 0)[1] != 0:
        raise PermissionError("no users can be mapped")


def _hide_files() -> None:
    """Leave nothing but the system and this Python, read only, and an empty directory /tmp."""
    shown: list[tuple[str, str]] = []
    for path in (*_SHOWN, sys.base_prefix, sys.prefix):
        if os.path.exists(path) and not any(Path(path).is_relative_to(other) for other, _ in shown):
            shown.append((path, os.path.realpath(path)))
    _libc("mount", "none", "/", None, _PRIVATE, None)
    _libc("mount", "tmpfs", "/tmp", "tmpfs", _NOSUID_NODEV, b"mode=755")
    os.mkdir("/tmp/old")
    _libc("pivot_root", "/tmp", "/tmp/old")
    os.chdir("/")
    os.mkdir("/tmp")
    _libc("mount", "tmpfs", "/tmp", "tmpfs", _NOSUID_NODEV, _DIRECTORY_OPTIONS.encode())
    read_only = (ctypes.c_uint64 * 4)(_RDONLY_NOSUID)
    for path, real in shown:
        if os.path.isdir(f"/old{real}"):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(path).touch()
        _libc("mount", f"/old{real}", path, None, _BIND, None)
        _libc("syscall", _MOUNT_SETATTR, _AT_FDCWD, path, _RECURSIVE, read_only, 32)
    os.symlink("/tmp", "/dev/shm")
    _libc("umount2", "/old", _DETACH)
    os.rmdir("/old")
    _libc("syscall", _MOUNT_SETATTR, _AT_FDCWD, "/", 0, read_only, 32)


def _drop_rights(isolation: str) -> None:
    if isolation != "none" and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _libc("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _libc("capset", header, none)
    if isolation != "none":  # else all processes of the job's user would count
        _limit(resource.RLIMIT_NPROC, _PROCESSES)


def _refuse_hidden_memory() -> None:
    """Take from this process and its children the calls in `_HIDDEN_MEMORY`, for good."""
    if platform.machine() not in _HIDDEN_MEMORY:
        return
    architecture, refused = _HIDDEN_MEMORY[platform.machine()]
    # Operation, jumps if it holds and if not, constant; the jumps lead to one of the last two.
    checks = [(_EQUAL, number) for number in refused] + [(_AT_LEAST, _OTHER_ABI)]
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 0, len(checks) + 2, architecture), (_LOAD, 0, 0, 0)]
    lines += [(kind, len(checks) - at, 0, value) for at, (kind, value) in enumerate(checks)]
    lines += [(_RETURN, 0, 0, _ALLOWED), (_RETURN, 0, 0, _NOT_PERMITTED)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
    with contextlib.suppress(OSError):  # a kernel without seccomp
        _libc("prctl", _SET_SECCOMP, _FILTER, program, 0, 0)


def _held_below(proc: int, root: int) -> int:
    """Bytes that the descendants of a process hold together; `proc` is /proc, opened.

    Pages that processes share after a fork count in each.
    """

    def read(path: str) -> str:
        with open(os.open(path, os.O_RDONLY, dir_fd=proc), encoding="utf-8", errors="replace") as f:
            return f.read()

    held, found = 0, [str(root)]
    for process in found:
        with contextlib.suppress(OSError):  # it has ended
            if process != found[0]:
                held += sum(map(int, _HELD.findall(read(f"{process}/status")))) << 10
            threads = os.open(f"{process}/task", os.O_DIRECTORY, dir_fd=proc)
            try:
                names = os.listdir(threads)
            finally:
                os.close(threads)
            for thread in names:
                found += read(f"{process}/task/{thread}/children").split()
    return held


def _keep_program() -> None:
    """As process 1 of the namespaces, start the program's process, and end when it ends.

    Returns in the program's process.
    """
    die_with_the_caller()
    _hide_files()
    program = os.fork()
    if program == 0:
        return
    while True:
        ended, status = os.wait()
        if ended == program:
            os._exit(PASSED if status == 0 else FAILED)


def _run_program(channel: socket.socket, directory: str) -> None:
    """In the program's process: run it, then answer calls of the tests, if there are any."""
    from plain_calls import OPERATIONS, Peer

    module = types.ModuleType("__main__")
    names = vars(module)

    def defined(wanted: list[str]) -> dict[str, Any]:
        return {name: names[name] for name in wanted if name in names}

    peer = Peer(channel, {**OPERATIONS, "defined": defined})
    peer.send(["ready", None, None])
    program, given, has_tests = peer.receive()
    os.chdir(directory)
    os.environ |= {"HOME": directory, "TMPDIR": directory}
    file = Path(directory, "program.py")
    file.write_text(program, encoding="utf-8", errors="replace")
    with os.fdopen(os.memfd_create("stdin"), "w+b") as stdin:
        stdin.write(given.encode(errors="replace"))
        stdin.seek(0)
        os.dup2(stdin.fileno(), 0)
    if has_tests:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    else:
        channel.close()
    sys.argv, sys.modules["__main__"], module.__file__ = [str(file)], module, str(file)
    _refuse_hidden_memory()
    exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), names)
    if has_tests:
        peer.send(["ready", None, None])
        peer.serve()


def _status(process: int) -> int:
    """Wait for a process; it keeps its number until `end` has killed what is left."""
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    return ended.si_status if ended else FAILED


def _run_tests(peer: Any, tests: str) -> None:
    """Run the tests here; names that they neither define nor import are the program's.

    Built-in names are Python's, and so is `math` in `math.isclose`: a program does not get to say
    what `len`, `abs` or `sorted` are.
    """
    tree = ast.parse(tests)
    nodes = list(ast.walk(tree))
    used = {node.id for node in nodes if isinstance(node, ast.Name)} - set(dir(builtins))
    modules = sys.stdlib_module_names & {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    names: dict[str, Any] = {}
    for name in modules:
        with contextlib.suppress(ImportError):
            names[name] = importlib.import_module(name)
    names |= peer.request("defined", sorted(used - modules))
    code = compile(tree, "tests", "exec", dont_inherit=True)
    exec(code, {**names, "__name__": "__main__"})


def main(isolation: str, memory_mb: int, seconds: float, directory: str) -> None:
    """Run what standard input says; see the top of this file."""
    caller = os.getppid()
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from plain_calls import Broken, Peer

    sys.path.pop()
    os.umask(0o022)
    with contextlib.suppress(OSError):  # short of memory, the kernel ends this first
        Path("/proc/self/oom_score_adj").write_text("1000")
    _limit(resource.RLIMIT_AS, memory_mb << 20)
    _limit(resource.RLIMIT_CPU, int(seconds) + 1)
    _limit(resource.RLIMIT_FSIZE, _FILE_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    if isolation == "user" and os.getuid() != 0:
        os._exit(NOT_ISOLATED)
    if isolation == "namespaces":
        try:
            _enter_namespaces()
        except OSError:
            os._exit(NOT_ISOLATED)
    die_with_the_caller()  # after the namespaces, whose new rights would undo it
    adopt_orphans()
    _prctl(_SET_DUMPABLE, 0)  # the program's user may not look into this process
    proc = os.open("/proc", os.O_DIRECTORY)  # in namespaces it is soon hidden
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        os.close(proc)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # before the tests are read from it
        if isolation == "namespaces":
            _keep_program()
        _drop_rights(isolation)
        _run_program(theirs, directory)
        return
    theirs.close()

    def end(code: int) -> NoReturn:
        # Waits until process 1 is gone, which it is when its namespace is empty.
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if isolation != "namespaces":
            kill_descendants(os.getpid())
        os._exit(code)

    deadline = time.monotonic() + seconds

    def look(*_: object) -> None:
        if time.monotonic() > deadline or _held_below(proc, os.getpid()) > memory_mb << 20:
            end(FAILED)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS)
    peer = Peer(ours)
    try:
        peer.receive()
    except Broken:
        end(NOT_ISOLATED)
    if os.getppid() != caller:
        end(FAILED)
    job, code = json.load(sys.stdin.buffer), FAILED
    try:
        peer.send([job["program"], job.get("stdin", ""), "tests" in job])
        if "tests" in job:
            peer.receive()
            _run_tests(peer, job["tests"])
            code = PASSED
        elif _status(child) == 0:
            code = PASSED
    except BaseException:  # also SystemExit: tests that end early have not passed
        pass
    end(code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
