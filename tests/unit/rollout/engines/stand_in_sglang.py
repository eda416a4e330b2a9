"""A package `sglang` whose `launch_server` is the stand-in server of these tests, for real processes."""

from __future__ import annotations

from pathlib import Path

_LAUNCH = """
import json, subprocess, sys, threading
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.unit.rollout.engines.misbehaving_server import Handler, MisbehavingServer

def load(self, directory):
    assert list(Path(directory).glob("*.safetensors")), directory
    print("loaded", directory, flush=True)

Handler.load = load

def main():
    given = sys.argv[1:]
    port = int(given[given.index("--port") + 1])
    model = Path(given[given.index("--model-path") + 1])
    if "--mem-fraction-static" in given:
        print("CUDA out of memory, says the stand-in", flush=True)
        sys.exit(3)
    # A scheduler process that would outlive a careless owner.
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"], start_new_session=True)
    print(json.dumps(dict(arguments=given, child=child.pid, config=json.loads((model / "config.json").read_text())["model_type"])), flush=True)
    server = MisbehavingServer(port=port)
    threading.Event().wait()

main()
"""


def install(directory: Path) -> Path:
    """Writes the package into `directory`, which belongs on PYTHONPATH."""
    package = directory / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(_LAUNCH.format(root=str(Path(__file__).parents[4])))
    fields = ("model_path", "mem_fraction_static", "attention_backend", "chunked_prefill_size")
    (package / "srt" / "server_args.py").write_text(
        "class ServerArgs:\n" + "".join(f"    {name}: str = ''\n" for name in fields)
    )
    return directory
