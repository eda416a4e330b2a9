"""Where each second of a job's start goes: `python -m benchmarks.startup_profile [--engines transformers vllm]`.

Runs a job of two rollouts on SmolLM2-135M-Instruct for each engine, one after the other, and prints Markdown: the
phases that the job itself reports, up to its first step, with the processor seconds that each kind of process took in
them. Then what the largest parts take alone, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.peer_environment import ROOT
from benchmarks.real_jobs import MODEL, VLLM_PYTHON, Batch, sums

_SECONDS_BETWEEN_LOOKS = 0.05
_PHASE = re.compile(r"(.+) took ([0-9.]+) s$")
#: The title of a process contains one of these; the first that fits counts.
KINDS = {
    "rank": "ray::TrainerRank",
    "engine": "ray::EngineActor",
    "driver": "plugin train",
    "Ray": "ray",
    "other": "",
}
FIRST_STEP = {
    "seconds_waiting": "first step: responses and rewards",
    "seconds_preparing": "first step: verifying the engines, preparing the batch",
    "seconds_training": "first step: update",
}

#: Code by what it stands for, run alone; {model} is the model's directory.
ALONE = {
    "import torch": "import torch",
    "import transformers' Llama": "from transformers import LlamaForCausalLM",
    "import ray": "import ray",
    "rank: all imports": (
        "import plugin.cluster.trainer_actor as actor; actor.import_megatron()\n"
        "import plugin.megatron_backend.trainer, plugin.megatron_backend.checkpoint.saving"
    ),
    "engine: all imports": "import plugin.cluster.engine_actor, plugin.engines.transformers.engine",
}
ALONE_VLLM = {
    "import vllm": "import vllm.entrypoints.llm",
    "engine: vLLM's imports and start": (
        "from transformers import AutoConfig\n"
        "from plugin.config import JobConfig\n"
        "from plugin.engines.vllm.engine import VllmEngine\n"
        "config = JobConfig().unchecked_copy(rollout_engine='vllm', max_context_length=512)\n"
        "VllmEngine(config, AutoConfig.from_pretrained('{model}').to_dict(), 'engine')"
    ),
}


class Phase(NamedTuple):
    """A part of the start: wall seconds, and processor seconds by kind of process."""

    name: str
    seconds: float
    processor: dict[str, float]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--no-parts", action="store_true", help="without the parts alone")
    options = parser.parse_args()
    for engine in options.engines:
        python = str(VLLM_PYTHON) if engine == "vllm" else sys.executable
        print(f"\n{table(engine, list(start_of_a_job(engine, options.dtype, python)))}")
        if not options.no_parts:
            for name, code in (ALONE_VLLM if engine == "vllm" else ALONE).items():
                print(f"{name}: {seconds_alone(code, python):.1f} s alone")
    print(f"\nload of the machine: {os.getloadavg()[0]:.1f}")


def start_of_a_job(engine: str, dtype: str, python: str) -> Iterator[Phase]:
    """The phases of a job up to the end of its first step."""
    with tempfile.TemporaryDirectory(prefix="startup_") as root:
        rows, run_dir = Path(root) / "rows.jsonl", Path(root) / "run"
        batch = Batch()
        rows.write_text("".join(json.dumps(row) + "\n" for row in sums(2 * batch.prompts)))
        flags = [
            *(
                "--hf-checkpoint",
                str(MODEL),
                "--prompt-data",
                str(rows),
                "--prompt-key",
                "messages",
            ),
            *("--label-key", "answer", "--apply-chat-template", "--reward", "numeric", "--use-tis"),
            *("--rollout-batch-size", str(batch.prompts), "--n-samples-per-prompt", "8"),
            *("--max-response-length", str(batch.response), "--num-rollouts", "2"),
            *("--rollout-engine", engine, "--train-dtype", dtype, "--run-dir", str(run_dir)),
        ]
        began = last = time.monotonic()
        used = dict.fromkeys(KINDS, 0.0)
        with (Path(root) / "log").open("w+") as log:
            command = [python, "-u", "-m", "plugin", "train", *flags]
            job = subprocess.Popen(command, stdout=log.fileno(), stderr=log.fileno(), cwd=ROOT)
            meter = ProcessorMeter(job.pid)
            for line in _lines(Path(log.name), job):
                meter.look()
                found = _PHASE.match(line)
                if found or line.startswith("step "):
                    now, total = time.monotonic(), meter.by_kind()
                    name = found.group(1) if found else "first step"
                    yield Phase(
                        name, now - last, {kind: total[kind] - used[kind] for kind in KINDS}
                    )
                    last, used = now, total
                    if not found:
                        break
            if job.wait():
                raise RuntimeError(f"the job ended early:\n{Path(log.name).read_text()[-4000:]}")
        first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
        for metric, name in FIRST_STEP.items():
            yield Phase(f"({name})", float(first[metric]), {})
        yield Phase("**until the end of the first step**", last - began, used)


def _lines(log: Path, job: subprocess.Popen[bytes]) -> Iterator[str]:
    """Lines as they are written, and an empty one now and then, until the job has ended."""
    with log.open() as file:
        text, over = "", False
        while not over:
            over = job.poll() is not None
            *lines, text = (text + file.read()).split("\n")
            yield from lines
            yield ""
            time.sleep(_SECONDS_BETWEEN_LOOKS)


class ProcessorMeter:
    """Processor seconds of a process and all of its descendants, by the kind of process."""

    def __init__(self, root: int) -> None:
        self._own = {root}
        self._read: dict[int, float] = {}
        self._used = dict.fromkeys(KINDS, 0.0)

    def look(self) -> None:
        """Add what each process has used since; Ray's idle ones become ranks and engines."""
        tick = os.sysconf("SC_CLK_TCK")
        for directory in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
            try:
                fields = (directory / "stat").read_text().rsplit(")", 1)[1].split()
                title = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, IndexError):
                continue
            process = int(directory.name)
            if int(fields[1]) in self._own:
                self._own.add(process)
            if process in self._own:
                kind = next(kind for kind, part in KINDS.items() if part in title)
                seconds = (int(fields[11]) + int(fields[12])) / tick
                self._used[kind] += seconds - self._read.get(process, 0.0)
                self._read[process] = seconds

    def by_kind(self) -> dict[str, float]:
        """Seconds so far by kind of process."""
        return dict(self._used)


def table(engine: str, phases: list[Phase]) -> str:
    """Markdown: a row per phase."""
    lines = [
        f"| {engine} engine: phase | seconds | processor: {' | '.join(KINDS)} |",
        f"|---|---|{'---|' * len(KINDS)}",
    ]
    for phase in phases:
        cells = [f"{phase.processor[kind]:.1f}" if phase.processor else "" for kind in KINDS]
        lines.append(f"| {phase.name} | {phase.seconds:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def seconds_alone(code: str, python: str) -> float:
    """Seconds of a process that runs `code`; the interpreter's own start included."""
    began = time.monotonic()
    command = [python, "-c", code.replace("{model}", str(MODEL))]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
