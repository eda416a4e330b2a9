"""A package `sglang` whose `launch_server` is the stand-in server of these tests, for real processes."""

from __future__ import annotations

from pathlib import Path

_LAUNCH = """
import json, os, subprocess, sys, threading, yaml
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.unit.engines.servers.stand_in_weights import ReceivingHandler, ReceivingServer

class Handler(ReceivingHandler):
    def load(self, directory):
        assert list(Path(directory).glob("*.safetensors")), directory
        print("loaded", directory, flush=True)

def sampler(directory):
    # Samples from the model with the weights that were received, all of them.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(directory)
    model, lock = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), threading.Lock()

    @torch.no_grad()
    def sample(handler):
        sampling, prompt = handler.payload["sampling_params"], handler.payload["input_ids"]
        random = torch.Generator().manual_seed(sampling["sampling_seed"])
        tokens, log_probs, reason = [], [], "length"
        with lock:
            model.load_state_dict(handler.server.loaded)
            while reason == "length" and len(tokens) < sampling["max_new_tokens"]:
                logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
                row = (logits / sampling["temperature"]).log_softmax(-1)
                tokens.append(int(row.exp().multinomial(1, generator=random)))
                log_probs.append(float(row[tokens[-1]]))
                reason = "stop" if tokens[-1] in sampling["stop_token_ids"] else "length"
        handler.answer_with(tokens, log_probs, reason)

    return sample

def main():
    given = sys.argv[1:]
    port = int(given[given.index("--port") + 1])
    model = Path(given[given.index("--model-path") + 1])
    # As SGLang v0.5.18 reads `--config`; its key opens everything but /health.
    file = given[given.index("--config") + 1] if "--config" in given else None
    settings = yaml.safe_load(Path(file).read_text()) if file else dict()
    if "--mem-fraction-static" in given:
        print("CUDA out of memory, says the stand-in", flush=True)
        sys.exit(3)
    # A scheduler process that would outlive a careless owner.
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
    config = json.loads((model / "config.json").read_text())
    about = dict(arguments=given, pid=os.getpid(), child=child.pid, config=config["model_type"])
    about["config_file"] = file
    print(json.dumps(about), flush=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    size = int(given[given.index("--tp-size") + 1]) if "--tp-size" in given else 1
    # By this argument a test asks for it.
    always = sampler(model) if "--chunked-prefill-size" in given else None
    server = ReceivingServer(port, Handler, model_path=str(model), tp_size=size)
    server.always = always
    server.key = settings.get("api-key")
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
