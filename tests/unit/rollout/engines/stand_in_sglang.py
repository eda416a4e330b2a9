"""A package `sglang` whose `launch_server` is the stand-in server of these tests, for real processes."""

from __future__ import annotations

from pathlib import Path

_LAUNCH = """
import json, os, random, subprocess, sys, threading
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.unit.rollout.engines.stand_in_weights import ReceivingHandler, ReceivingServer

class Handler(ReceivingHandler):
    def load(self, directory):
        assert list(Path(directory).glob("*.safetensors")), directory
        print("loaded", directory, flush=True)

    def answer_update(self, success, message, **more):
        if "new_version" in more:
            print("received", len(self.server.loaded), "tensors", self.server.label, flush=True)
        super().answer_update(success, message, **more)

def sample(handler):
    # Other tokens for every seed, of the whole vocabulary.
    sampling = handler.payload["sampling_params"]
    draw = random.Random(sampling["sampling_seed"])
    tokens = [draw.randrange(vocabulary) for _ in range(sampling["max_new_tokens"])]
    stops = [n for n, token in enumerate(tokens) if token in sampling["stop_token_ids"]]
    tokens = tokens[: stops[0] + 1] if stops else tokens
    handler.answer_with(tokens, [-3.0] * len(tokens), "stop" if stops else "length")

def main():
    global vocabulary
    given = sys.argv[1:]
    port = int(given[given.index("--port") + 1])
    model = Path(given[given.index("--model-path") + 1])
    if "--mem-fraction-static" in given:
        print("CUDA out of memory, says the stand-in", flush=True)
        sys.exit(3)
    # A scheduler process that would outlive a careless owner.
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
    config = json.loads((model / "config.json").read_text())
    about = dict(arguments=given, pid=os.getpid(), child=child.pid, config=config["model_type"])
    print(json.dumps(about), flush=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    size = int(given[given.index("--tp-size") + 1]) if "--tp-size" in given else 1
    server = ReceivingServer(port, Handler, model_path=str(model), tp_size=size)
    if "--chunked-prefill-size" in given:  # by this argument a test asks for it
        vocabulary = config["vocab_size"]
        server.always = sample
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
