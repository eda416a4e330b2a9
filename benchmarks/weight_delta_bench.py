"""Weights as deltas on a real model: the share of elements that a step changes, bytes, seconds.

`shares` runs jobs of a few steps with `--weight-sync delta` and prints what each version changed. A checkpoint in
bfloat16 is a special start: the trainer's float32 weights are then in the middle between two roundings, and small
steps do not leave it. `--spread` starts from weights that are anywhere between two roundings, as after a long time.
`cost` times both ends in this process, at shares of its own, beside a copy of the same tensors.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

_ROWS = [f"{a} + {b}" for a, b in ((3, 4), (2, 2), (48, 37), (59, 26), (7, 5), (31, 8))]


def shares(model: str, steps: int, spread: bool, settings: dict[str, str]) -> list[dict[str, Any]]:
    """The metrics of a job's steps."""
    with tempfile.TemporaryDirectory(prefix="weight_delta_bench_") as directory:
        root = Path(directory)
        rows = [{"prompt": f"What is {text}?", "answer": str(eval(text))} for text in _ROWS]
        (root / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
        if spread:
            model = save_spread(model, root / "model")
        flags = {
            "hf-checkpoint": model,
            "prompt-data": root / "sums.jsonl",
            "run-dir": root / "run",
            "reward": "numeric",
            "train-dtype": "float32" if spread else "bfloat16",
            "rollout-dtype": "bfloat16",
            "advantage-estimator": "reinforce_plus_plus",
            "rollout-batch-size": len(_ROWS),
            "n-samples-per-prompt": 4,
            "max-response-length": 24,
            "num-rollouts": steps,
            "weight-sync": "delta",
            "full-weights-every": 1000,
            "verify-weights": "every:1",
            "max-tokens-per-gpu": 800,
            "start-timeout": 900,
            "step-timeout": 900,
            **settings,
        }
        command = [sys.executable, "-m", "plugin", "train", "--apply-chat-template"]
        command += ["--no-save-at-end"]
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=root)
        if done.returncode:
            sys.exit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return [json.loads(line) for line in (root / "run" / "metrics.jsonl").open()]


def save_spread(model: str, directory: Path) -> str:
    """The model in float32, every weight moved to anywhere that rounds to what it is in bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in loaded.parameters():
            bits = parameter.view(torch.int32)
            # bfloat16 is the upper half of float32's bits; the lower half says where in between.
            moved = bits + torch.randint(
                -32767, 32768, bits.shape, generator=draw, dtype=torch.int32
            )
            parameter.copy_(torch.where(bits == 0, bits, moved).view(torch.float32))
    loaded.save_pretrained(directory)
    AutoTokenizer.from_pretrained(model).save_pretrained(directory)
    return str(directory)


def cost(model: str, share: float, rounds: int) -> dict[str, float]:
    """Bytes and seconds of both ends, of the model's tensors in bfloat16 of which a share changes."""
    from safetensors.torch import load_file

    from plugin.weights.delta import DeltaReader, SentCopy
    from plugin.weights.tensor_layout import TensorSpec

    state = {
        name: tensor.bfloat16()
        for file in sorted(Path(model).glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    engine = {name: tensor.clone() for name, tensor in state.items()}
    copy, draw = SentCopy(torch.bfloat16), torch.Generator().manual_seed(0)
    for _ in copy.remembered(0, state.items()):
        pass

    def place_of(spec: TensorSpec) -> torch.Tensor:
        return engine[spec.name]

    found: dict[str, list[float]] = {"encode": [], "apply": [], "copy": []}
    size = 0
    for version in range(rounds):
        for tensor in state.values():
            # The last bit of some elements.
            bits = tensor.view(torch.int16)
            bits ^= (torch.rand(bits.shape, generator=draw) < share).to(torch.int16)
        began = time.process_time()
        chunks = copy.delta(version + 1, version, state.items())
        found["encode"].append(time.process_time() - began)
        reader, began = DeltaReader(place_of, version), time.process_time()
        reader.take(chunks)
        found["apply"].append(time.process_time() - began)
        reader.require_exact()
        began = time.process_time()
        for name, tensor in state.items():
            engine[name].copy_(tensor)
        found["copy"].append(time.process_time() - began)
        size = sum(chunk.nbytes for _, chunk in chunks)
    total = sum(tensor.nbytes for tensor in state.values())
    medians = {name: sorted(values)[len(values) // 2] for name, values in found.items()}
    return {"share": share, "of_bytes": size / total, "mb": total / 2**20, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("shares", "cost"))
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--spread", action="store_true")
    parser.add_argument("further", nargs="*", help="of the job, as name=value")
    options = parser.parse_intermixed_args()
    if options.what == "cost":
        torch.set_num_threads(1)
        for share in (0.0, 0.001, 0.01, 0.03, 0.1, 0.5):
            print(json.dumps(cost(options.hf_checkpoint, share, rounds=3)), flush=True)
        return
    further = dict(item.split("=", 1) for item in options.further)
    names = ("weight_sync_bytes", "weight_changed_share", "seconds_weight_sync", "weight_repairs")
    for step in shares(
        str(Path(options.hf_checkpoint).resolve()), options.steps, options.spread, further
    ):
        print(json.dumps({name: step.get(name) for name in ("step", *names)}), flush=True)


if __name__ == "__main__":
    main()
