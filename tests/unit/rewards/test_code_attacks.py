"""Programs that try to earn `code_tests` without solving their task, or to leave their sandbox."""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from plugin.config.data import parse_rewards
from plugin.environments.deadline_calls import CallFailure
from plugin.rewards import sandbox
from plugin.rewards.code_tests import code_tests, directory_prefix, strongest_isolation
from plugin.rewards.pool import PoolScorer, RewardPool
from plugin.rewards.reward_set import RewardInput, RewardSet

pytestmark = [pytest.mark.hostile, pytest.mark.usefixtures("jumping_clock")]

SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture(autouse=True)
def python_of_nobody(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's Python where the user nobody cannot read the one that runs the tests, as below /root."""
    given = getattr(request.node, "callspec", None)
    if given is None or given.params.get("isolation") != "user" or os.getuid() != 0:
        return
    if not _probe("user") and os.path.exists(SYSTEM_PYTHON):
        monkeypatch.setattr(sys, "executable", SYSTEM_PYTHON)


ADD = "assert add(2, 3) == 5"
ALWAYS = "class E{base}:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    __hash__ = None\n"
# Finds a word that a tester might have put into the program's file, to be printed after the tests.
PROOF = r"""
import atexit, os, re, sys
proof = (re.findall(r"print\('(\w+)'\)", open(sys.argv[0]).read()) or ["none"])[-1]
def forge(*_):
    print(proof, flush=True)
    os._exit(0)
"""
# Frames as `plain_calls` sends them, on every descriptor that may be the socket.
FRAMES = """
import json, os, struct
def send(*messages):
    for message in messages:
        body = json.dumps(message).encode()
        for descriptor in range(3, 16):
            try: os.write(descriptor, struct.pack(">Q", len(body)) + body)
            except OSError: pass
"""

#: what a forger does -> the program, its tests
FORGERIES: dict[str, tuple[str, str]] = {
    "prints its own file": (PROOF + "forge()", ADD),
    "leaves with success": ("import os; os._exit(0)", ADD),
    "leaves with success when called": ("import os\ndef add(a, b): os._exit(0)", ADD),
    "raises SystemExit when called": ("def add(a, b): raise SystemExit(0)", ADD),
    "replaces the hook of exceptions": (
        PROOF + "sys.excepthook = forge\ndef add(a, b): raise ValueError", ADD),
    "leaves at exit": (PROOF + "atexit.register(forge)\ndef add(a, b): return 4", ADD),
    "returns an object that is always equal": (
        ALWAYS.format(base="") + "def add(a, b): return E()", ADD),
    "returns a number that is always equal": (
        ALWAYS.format(base="(int)") + "def add(a, b): return E(4)", ADD),
    "returns a list that is always equal": (
        ALWAYS.format(base="(list)") + "def add(a, b): return [E()]", "assert add(2, 3) == [5]"),
    "returns a mock": (
        "from unittest.mock import ANY\ndef add(a, b): return ANY", ADD),
    "returns what takes any difference for 0": (
        "class E:\n    def __sub__(s, o): return 0.0\ndef add(a, b): return E()",
        "assert abs(add(2, 3) - 5) < 1e-6"),
    "claims to contain anything": (
        "class E:\n    def __contains__(s, o): return True\n    def __iter__(s): return iter(())\ndef add(a, b): return E()",
        "assert 5 in add(2, 3)"),
    "replaces built-in functions": (
        "def add(a, b): return 4\ndef abs(x): return 0\ndef all(x): return True\ndef len(x): return 1",
        "assert abs(add(2, 3) - 5) < 1e-6 and all([add(2, 3) == 5])"),
    "replaces a module of the tests": (
        "class math:\n    isclose = staticmethod(lambda *_: True)\ndef add(a, b): return 4",
        "assert math.isclose(add(2, 3), 5)"),
    "changes what it is compared with": (
        "def put_in_order(x):\n    x.clear()\n    return []",
        "x = [3, 1, 2]\nassert put_in_order(x) == sorted(x)"),
    "looks for the tests in its memory": (
        "import gc, re, sys\ndef add(a, b):\n"
        "    found = [o for o in gc.get_objects() if isinstance(o, dict)]\n"
        "    text = ' '.join(str(v) for d in found for v in d.values() if isinstance(v, str))\n"
        "    m = re.search(r'add\\(2, 3\\) == (' + r'\\d)', text)\n    return int(m[1]) if m else 0",
        ADD),
    "looks for the tests in other processes": (
        "import glob, re\ndef add(a, b):\n    for f in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/fd/*'):\n"
        "        try: text = open(f, errors='replace').read(100000)\n        except OSError: continue\n"
        "        m = re.search(r'add\\(2, 3\\) == (' + r'\\d)', text)\n        if m: return int(m[1])",
        ADD),
    "kills the tests": ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef add(a, b): return 4", ADD),
    "patches its end of the connection": (
        "import plain_calls\nplain_calls.Remote.__eq__ = lambda *_: True\nplain_calls.Peer._encode = lambda *_, **__: True\n"
        "def add(a, b): return True", ADD),
    "answers in advance": (
        FRAMES + "send(['ready', None, None], ['value', {'dict': [['add', {'remote': 0}]]}, None], *[['value', True, None]] * 9)",
        ADD),
    "makes the tests build a class": (
        FRAMES + "def add(a, b):\n"
        "    send(['call', [{'type': 'type'}, 'E', {'tuple': []}, {'dict': [['__eq__', {'remote': 0}]]}], {}])\n"
        "    send(['call', [{'lent': 0}], {}], ['value', {'lent': 1}, None], ['value', True, None])\n    return 4",
        "def key(x): return x\nassert add(key, 3) == 5"),
    "makes the tests read an attribute": (
        FRAMES + "def add(a, b):\n    send(['getattr', [{'lent': 0}, '__globals__'], {}])\n    return 4",
        "def key(x): return x\nassert add(key, 3) == 5"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_program_that_forges_its_tests_earns_nothing(kind: str) -> None:
    program, tests = FORGERIES[kind]
    assert code_tests(program, {}, label=tests, timeout=20) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("isolation", sandbox.ISOLATION[1:])
@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forger_earns_nothing_in_a_weaker_isolation_either(kind: str, isolation: str) -> None:
    _need(isolation)
    program, tests = FORGERIES[kind]
    assert code_tests(program, {}, label=tests, timeout=20, isolation=isolation) == 0.0


HONEST = """
import collections, math, numpy
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
class Solution:
    def two_sum(self, numbers, target):
        return [(i, j) for i, a in enumerate(numbers) for j in range(i) if a + numbers[j] == target]
class OwnError(ValueError): pass
Point = collections.namedtuple("Point", "x y")
def add(a, b=1): return a + b
def evens(n): yield from range(0, n, 2)
def refuse(x): raise OwnError("no")
def turn(matrix): matrix[:] = [list(row) for row in zip(*matrix[::-1])]
def keep(test, items): return [item for item in items if test(item)]
def count(text): return collections.Counter(text)
def split(x): return {"a": {1, 2}, "b": (None, [x, b"x"]), 3: frozenset("z")}
def make_adder(n): return lambda x: x + n
def mean(numbers): return numpy.mean(numbers)
def largest(numbers): return numpy.array(numbers).max()
def kind(x): return type(x)
def point(): return Point(1, 2)
def huge(): return 7 ** 10_000
def counter():
    n = 0
    while True:
        yield (n := n + 1)
if __name__ == "__main__":
    print(add(1))
"""

HONEST_TESTS = '''
from collections import Counter
import itertools
def check(candidate):
    assert candidate(2, 3) == 5
    assert candidate(a=2, b=3) == 5 and candidate(2) == 3
check(add)
s = Stack(); s.push(3); s.push([4])
assert len(s) == 2 and s.pop() == [4] and s.items == [3]
assert Solution().two_sum([2, 7, 11], 9) == [(1, 0)]
assert list(evens(5)) == [0, 2, 4] and 4 in evens(5) and sum(evens(5)) == 6
assert list(itertools.islice(counter(), 3)) == [1, 2, 3]
try:
    refuse(1)
    raise AssertionError
except ValueError as error:
    assert str(error) == "no"
matrix = [[1, 2], [3, 4]]
turn(matrix)
assert matrix == [[3, 1], [4, 2]]
assert keep(lambda x: x > 1, [1, 2, 3]) == [2, 3] and keep(str.isdigit, ["a", "1"]) == ["1"]
assert count("aab") == Counter("aab") == {"a": 2, "b": 1} and type(count("a")) is Counter
assert split(2.5) == {"a": {1, 2}, "b": (None, [2.5, b"x"]), 3: frozenset("z")}
assert make_adder(3)(4) == 7
assert math.isclose(mean([1, 2]), 1.5) and largest([1, 5, 3]) == 5
assert kind(3) is int and isinstance(split(1), dict)
assert point() == (1, 2) and huge() == 7 ** 10_000
'''  # fmt: skip


@pytest.mark.parametrize("isolation", sandbox.ISOLATION)
def test_an_honest_program_passes_tests_of_every_documented_form(isolation: str) -> None:
    _need(isolation)
    program, tests = HONEST, HONEST_TESTS
    if sys.executable == SYSTEM_PYTHON:
        program = re.sub(r", numpy$|^def (mean|largest).*$", "", program, flags=re.MULTILINE)
        tests = re.sub(r"^.*mean.*$", "", tests, flags=re.MULTILINE)
    assert code_tests(program, {}, label=tests, timeout=60, isolation=isolation) == 1.0
    for line in ("assert Stack() == Stack()", "assert add(2) == 4", "raise SystemExit(0)"):
        label = tests + line
        if isolation == strongest_isolation():
            assert code_tests(program, {}, label=label, timeout=60, isolation=isolation) == 0.0


def _need(isolation: str) -> None:
    if isolation == "namespaces" and strongest_isolation() != "namespaces":
        pytest.skip("this machine makes no namespaces")
    if isolation == "user" and (os.getuid() != 0 or _probe("user") is False):
        pytest.skip("the user nobody cannot run this Python")


def _probe(isolation: str) -> bool:
    return code_tests("import colorsys", {}, label="assert 1", timeout=60, isolation=isolation) == 1


MARK = f"survivor_of_{os.getpid()}"  # other test processes have their own
SURVIVORS = {
    "a child in its own session": f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60) # {MARK}"], start_new_session=True)
""",
    "a grandchild that was orphaned": f"""
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60) # {MARK}"])
    os._exit(0)
""",
    "one that undoes the signal of its parent's death": f"""
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(1, 0)
subprocess.Popen([sys.executable, "-c", "import ctypes, time; ctypes.CDLL(None).prctl(1, 0); time.sleep(60) # {MARK}"], start_new_session=True)
""",
}  # fmt: skip


def _marked() -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if MARK.encode() in file.read_bytes():
                found.append(file.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("isolation", sandbox.ISOLATION)
@pytest.mark.parametrize("ending", ["in time", "too late"])
def test_nothing_that_a_program_starts_outlives_it(isolation: str, ending: str) -> None:
    _need(isolation)
    last, timeout = ("time.sleep(0.3)", 20) if ending == "in time" else ("time.sleep(60)", 1.2)
    program = "\n".join(SURVIVORS.values()) + f"\nimport time\n{last}"
    earned = code_tests(program, {}, label="assert True", timeout=timeout, isolation=isolation)
    assert earned == (ending == "in time")
    # Killed processes may take a moment to vanish; survivors would sleep for a minute.
    deadline = time.monotonic() + 10
    while _marked() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _marked() == []


REACH = """
import os, socket
def reached(pid, secret, port):
    found = []
    for what, act in {
        "signals": lambda: os.kill(pid, 0), "processes": lambda: os.listdir("/proc/1"), "environment": lambda: os.environ["SECRET"],
        "files": lambda: open(secret).read(), "root": lambda: open("/etc/shadow").read(), "system": lambda: open("/usr/x", "w"),
        "python": lambda: open(os.path.join(os.path.dirname(os.__file__), "x"), "w"), "home": lambda: os.listdir(os.path.expanduser("~root/.ssh")),
        "network": lambda: socket.create_connection(("127.0.0.1", port), 1), "user": lambda: os.setuid(0),
        "job's environment": lambda: open(f"/proc/{pid}/environ").read(), "job's memory": lambda: open(f"/proc/{pid}/mem", "rb"),
    }.items():
        try: act()
        except (OSError, KeyError): continue
        found.append(what)
    return found + [str(p) for p in range(1, 200) if p not in (1, os.getpid()) and alive(p)]
def alive(pid):
    try: os.kill(pid, 0)
    except OSError: return False
    return True
"""  # fmt: skip


@pytest.mark.parametrize(
    ("isolation", "within_reach"), [("namespaces", []), ("user", ["processes", "network"])]
)
def test_a_program_cannot_signal_or_read_the_job(
    isolation: str, within_reach: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _need(isolation)
    monkeypatch.setenv("SECRET", "key")
    (tmp_path / "secret").write_text("key")
    (tmp_path / "secret").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = (os.getpid(), str(tmp_path / "secret"), server.getsockname()[1])
        label = f"assert reached{given} == {within_reach}"
        assert code_tests(REACH, {}, label=label, timeout=20, isolation=isolation) == 1.0


BOMBS = {
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "starts threads": "import threading, time\nfor _ in range(10_000): threading.Thread(target=time.sleep, args=(60,)).start()",
    "fills the directory": "for i in range(20):\n    with open(str(i), 'wb') as f: f.write(bytes(10 << 20))",
    "makes files": "for i in range(30_000): open(str(i), 'w').close()",
    "prints gigabytes": "import sys\nwhile True: sys.stdout.write('x' * 1000000)",
    "answers with gigabytes": "def add(a, b): return 'x' * (200 << 20)",
    "answers without end": "def add(a, b):\n    while True: yield 1",
    "nests its answer": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
}  # fmt: skip


@pytest.mark.parametrize("kind", BOMBS)
def test_a_program_that_asks_for_everything_gets_its_limits(kind: str) -> None:
    _need("namespaces")
    label = "assert sum(add(1, 2)) == 3" if kind == "answers without end" else ADD
    label = label if "def add" in BOMBS[kind] else {"inputs": [""], "outputs": [""]}
    began = time.monotonic()
    assert code_tests(BOMBS[kind], {}, label=label, timeout=1.0) == 0.0
    assert time.monotonic() - began < 10


FIVE_CHILDREN = """
import os, time
filled, fill = os.pipe()
for _ in range(5):
    if os.fork() == 0:
        held = b"x" * (MEGABYTES << 20)
        os.write(fill, b".")
        time.sleep(60)
for _ in range(5):
    os.read(filled, 1)
time.sleep(1)
"""


@pytest.mark.parametrize("isolation", sandbox.ISOLATION)
@pytest.mark.parametrize(("megabytes", "earned"), [(250, 0.0), (50, 1.0)])
def test_the_processes_of_a_program_share_one_limit_of_memory(
    isolation: str, megabytes: int, earned: float
) -> None:
    _need(isolation)
    program = FIVE_CHILDREN.replace("MEGABYTES", str(megabytes))
    label = "assert True"
    assert code_tests(program, {}, label=label, timeout=20, isolation=isolation) == earned


HIDDEN_MEMORY = """
import ctypes, os
libc = ctypes.CDLL(None)
def can_be_had():
    # System V memory and queues stay when nobody has them mapped; 0o1600: new, for its owner
    had = [name for name, made in {"shared": libc.shmget(0, 1 << 20, 0o1600), "queue": libc.msgget(0, 0o1600)}.items() if made != -1]
    try: return had + ["file", os.memfd_create("x")]
    except OSError: return had
"""  # fmt: skip


@pytest.mark.parametrize("isolation", sandbox.ISOLATION)
def test_memory_that_no_limit_counts_cannot_be_had(isolation: str) -> None:
    _need(isolation)
    label = "assert can_be_had() == []"
    assert code_tests(HIDDEN_MEMORY, {}, label=label, timeout=20, isolation=isolation) == 1.0


@pytest.mark.parametrize("isolation", sandbox.ISOLATION)
def test_no_directory_stays_behind(isolation: str) -> None:
    _need(isolation)
    deep = "import os\nfor _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')\nos.mkdir('x')\nos.chmod('.', 0)"
    assert code_tests(deep, {}, label="assert True", timeout=20, isolation=isolation) == 1.0
    here = Path(tempfile.gettempdir())
    assert list(here.glob(f"{directory_prefix(os.getpid())}*")) == []


OWN = f"""
import os, subprocess, sys, tempfile, time
from plugin.rewards.code_tests import directory_prefix

def leaves(response, row):
    tempfile.mkdtemp(prefix=directory_prefix(os.getpid()))
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60) # {MARK}"], start_new_session=True)
    open(row["file"], "w").write(str(os.getpid()))
    time.sleep(60)
"""


def test_a_worker_that_is_killed_leaves_no_child_and_no_directory(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    chosen = RewardSet(parse_rewards((f"{tmp_path / 'own.py'}:leaves",)))
    with RewardPool(chosen, workers=1, seconds=1.5, memory_mb=256) as pool:
        box = PoolScorer(pool)
        box.enqueue(RewardInput("text", {"file": str(tmp_path / "pid")}))
        ((_, answer),) = box.finished(wait_seconds=60)
    assert isinstance(answer, CallFailure)
    worker = int((tmp_path / "pid").read_text())
    assert _marked() == []
    assert list(Path(tempfile.gettempdir()).glob(f"{directory_prefix(worker)}*")) == []


def test_a_sandbox_that_cannot_be_set_up_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from plugin.errors import EngineError
    from plugin.rewards import code_tests as module

    ran: list[Any] = []
    real = module.subprocess.Popen

    def started(command: list[str], **settings: Any) -> Any:
        ran.append(command)
        script = "import sys; sys.exit(3)"
        return real([command[0], "-c", script], **settings)

    monkeypatch.setattr(module.subprocess, "Popen", started)
    with pytest.raises(EngineError, match="'namespaces' could not be set up"):
        code_tests("pass", {}, label="assert True", timeout=5, isolation="namespaces")
    assert len(ran) == 1


def test_the_job_says_at_the_start_what_programs_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    from plugin.rewards import reward_set

    chosen = RewardSet(parse_rewards(("code_tests",)))
    for isolation, words in {
        "namespaces": "without network",
        "user": "NETWORK and files that everybody may read ARE IN REACH",
        "none": "PROCESSES of this user ARE IN REACH",
    }.items():
        monkeypatch.setattr(reward_set, "strongest_isolation", lambda found=isolation: found)
        assert re.search(words, reward_set.enforced_limits(chosen) or "")
