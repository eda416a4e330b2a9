"""An hour of asynchronous training with something killed every minute: does every prompt add up at the end?

    python -m benchmarks.soak                      # what `make soak` runs: an hour
    python -m benchmarks.soak --minutes 5 --seconds-between-kills 20

Starts `megatron-tis train` as a user would, kills or freezes a process of any kind (engine, trainer rank, driver, Ray's
raylet and GCS) at random times, goes on with `--resume` where the job ends by that, ends it as Ctrl-C would, and prints
what became of every prompt, how memory grew and how fast it went.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from plugin.observe.run_record import read_prompts, read_run

ENGINES = 2
JOB = [
    *("--async-rollouts", "--max-weight-staleness", "2"),
    *("--num-rollout-engines", str(ENGINES), "--num-gpus-per-node", "2"),
    *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
    *("--num-rollouts", "1000000", "--save-interval", "10", "--rollout-timeout", "30"),
    *("--step-timeout", "120", "--ray-timeout", "20"),
    # Kills are not progress: on a slow machine several can hit the same engine before it has answered once.
    *("--max-restarts", "20"),
    *("--use-tis", "--rollout-quantization", "int8", "--lr", "1e-4"),
]
ROLES = {
    "engine": "ray::EngineActor",
    "trainer rank": "ray::TrainerRank",
    "raylet": "raylet",
    "GCS": "gcs_server",
}
#: An engine is lost most often: there are most of them.
ATTACKS = (
    *(("engine", signal.SIGKILL),) * 3,
    *(("engine", signal.SIGSTOP),) * 2,
    *(("trainer rank", signal.SIGKILL),) * 2,
    ("trainer rank", signal.SIGSTOP),
    ("driver", signal.SIGKILL),
    ("raylet", signal.SIGKILL),
    ("raylet", signal.SIGSTOP),
    ("GCS", signal.SIGKILL),
    ("GCS", signal.SIGSTOP),
)
#: Starts in a row that end before their first step.
MOST_FAILED_STARTS = 3
#: At the end, in which what the last attack did is found and mended.
QUIET_SECONDS = 120.0
SAMPLE_SECONDS = 10.0
MEGABYTE = 1 << 20


@dataclass
class Watch:
    """What was done to the job and what it used.

    memory: (seconds, process id, MB) per role, every few seconds
    resumed: how often the job ended and was resumed
    """

    kills: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    memory: dict[str, list[tuple[float, int, float]]] = field(default_factory=dict)


def members(job: psutil.Process) -> dict[str, list[psutil.Process]]:
    """The job's processes by role; the process that the user started waits for the driver, its only child."""
    found: dict[str, list[psutil.Process]] = {"driver": [], **{role: [] for role in ROLES}}
    try:
        found["driver"] = job.children()
        family = job.children(recursive=True)
    except psutil.Error:
        return found
    for process in family:
        try:
            title = Path(" ".join(process.cmdline()[:1])).name
        except psutil.Error:
            continue
        for role, name in ROLES.items():
            if title.startswith(name):
                found[role].append(process)
    return found


def sample_memory(job: psutil.Process, watch: Watch, seconds: float) -> None:
    """Adds the memory each process holds for itself; what is shared between processes is not counted twice."""
    for role, processes in members(job).items():
        for process in processes:
            try:
                used = process.memory_full_info().uss / MEGABYTE
            except psutil.Error:
                continue
            watch.memory.setdefault(role, []).append((seconds, process.pid, used))


def kill_something(job: psutil.Process, watch: Watch, draw: random.Random) -> None:
    """Kills or freezes one process, if the chosen role has one that runs."""
    role, how = draw.choice(ATTACKS)
    running = [p for p in members(job)[role] if p.is_running()]
    running = [p for p in running if p.status() != psutil.STATUS_STOPPED]
    if running:
        os.kill(draw.choice(running).pid, how)
        watch.kills[f"{role} {'frozen' if how == signal.SIGSTOP else 'killed'}"] += 1


def start(run_dir: Path, *more: str) -> subprocess.Popen[bytes]:
    """The job, which adds to its log."""
    command = [sys.executable, "-m", "plugin", "train", "--run-dir", str(run_dir), *JOB, *more]
    with (run_dir.parent / f"{run_dir.name}.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def resume(run_dir: Path, watch: Watch) -> subprocess.Popen[bytes]:
    """The job again after it has ended, with its first step made; it may need several starts."""
    for _ in range(MOST_FAILED_STARTS):
        watch.resumed += 1
        process = start(run_dir, "--resume")
        wait_for_step(process, run_dir, steps_made(run_dir) + 1)
        if process.poll() is None:
            break
    return process


def run(minutes: float, between: float, run_dir: Path, seed: int) -> tuple[Watch, float, int]:
    """Runs the job for so long: what was done to it, how long it took, and its exit code."""
    process, watch, draw = start(run_dir), Watch(), random.Random(seed)
    wait_for_step(process, run_dir, 1)  # start-up is not part of the hour
    began = time.monotonic()
    next_kill, next_sample = began + between, began
    while (now := time.monotonic()) < began + minutes * 60:
        if process.poll() is not None:
            process = resume(run_dir, watch)
            if process.poll() is not None:
                break
            next_kill = time.monotonic() + between
        job = psutil.Process(process.pid)
        # It is to end by Ctrl-C, not by the last attack.
        if now >= next_kill and now < began + minutes * 60 - QUIET_SECONDS:
            kill_something(job, watch, draw)
            next_kill += between
        if now >= next_sample:
            sample_memory(job, watch, now - began)
            next_sample += SAMPLE_SECONDS
            show_progress(now - began, minutes * 60, run_dir, watch)
        time.sleep(0.2)
    elapsed = time.monotonic() - began
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    # As Ctrl-C, which a process in the background of a shell never sees.
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=300)
    _, left = psutil.wait_procs(family, timeout=120)
    print(f"\nended with exit code {code}; {len(left)} processes left behind")
    return watch, elapsed, code


def steps_made(run_dir: Path) -> int:
    """Lines of the run's metrics so far."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for_step(process: subprocess.Popen[bytes], run_dir: Path, steps: int) -> None:
    """Waits until the run has so many lines of metrics, or the job has ended."""
    while steps_made(run_dir) < steps and process.poll() is None:
        time.sleep(0.2)


def show_progress(seconds: float, total: float, run_dir: Path, watch: Watch) -> None:
    """One line that is rewritten."""
    steps = steps_made(run_dir)
    done = int(30 * seconds / total)
    bar = "#" * done + "." * (30 - done)
    text = f"[{bar}] {seconds / 60:5.1f} min  {steps} steps  {sum(watch.kills.values())} kills"
    print("\r" + text, end="", file=sys.stderr, flush=True)


def prompt_account(run_dir: Path) -> dict[str, Any]:
    """What became of the prompts, from prompts.jsonl, against the counters of the last step."""
    rollouts = read_prompts(run_dir)
    last = read_run(run_dir).steps[-1]
    log = (run_dir.parent / f"{run_dir.name}.log").read_text(errors="replace")
    trained = [index for rollout in rollouts for index in rollout["trained"]]
    dropped: Counter[str] = Counter()
    for rollout in rollouts:
        for cause, indices in rollout["dropped"].items():
            dropped[cause] += len(indices)
    dropped_in_all = sum(last[f"dropped_{cause}"] for cause in ("stale", "failed", "uniform"))
    accounted = last["prompts_trained"] + dropped_in_all
    return {
        "issued": last["prompts_issued"],
        "trained": len(trained),
        "trained_twice": len(trained) - len(set(trained)),
        "dropped": {"stale": last["dropped_stale"], "failed": last["dropped_failed"]},
        "under_way_at_the_end": last["prompts_under_way"],
        "adds_up": last["prompts_issued"] == accounted + last["prompts_under_way"]
        and len(trained) == last["prompts_trained"],
        "engine_restarts": log.count(" is replaced: "),
        "trainer_restarts": log.count("the trainer is restarted"),
        "steps": last["step"],
        "steps_computed": steps_made(run_dir),
    }


def memory_growth(samples: list[tuple[float, int, float]]) -> dict[str, float]:
    """MB at the start and at the most, and MB per hour within the life of a process (least squares, longest lives).

    The first two minutes of a process are left out: buffers and caches fill.
    """
    lives: dict[int, list[tuple[float, float]]] = {}
    for seconds, pid, megabytes in samples:
        lives.setdefault(pid, []).append((seconds, megabytes))
    slopes, weights = [], []
    for life in lives.values():
        settled = [(s, m) for s, m in life if s > life[0][0] + 120]
        if len(settled) > 5:
            slope = statistics.linear_regression(*zip(*settled, strict=True)).slope
            slopes.append(slope * 3600)
            weights.append(settled[-1][0] - settled[0][0])
    total = sum(weights)
    per_hour = sum(s * w for s, w in zip(slopes, weights, strict=True)) / total if total else 0.0
    return {
        "first": samples[0][2],
        "most": max(megabytes for _, _, megabytes in samples),
        "per_hour": per_hour,
    }


def summary(watch: Watch, elapsed: float, run_dir: Path) -> str:
    """The figures as Markdown."""
    account = prompt_account(run_dir)
    rate = account["steps"] / (elapsed / 60)
    lines = [
        "| | |",
        "|---|---|",
        f"| time | {elapsed / 60:.0f} minutes after start-up |",
        *(f"| {what} | {count} times |" for what, count in sorted(watch.kills.items())),
        f"| restarts | {account['engine_restarts']} of engines, {account['trainer_restarts']} of the trainer, "
        f"{watch.resumed} of the job (`--resume`) |",
        f"| prompts issued | {account['issued']} |",
        f"| trained on | {account['trained']} ({account['trained_twice']} twice) |",
        f"| dropped | {account['dropped']['stale']} too old, {account['dropped']['failed']} failed |",
        f"| under way at the end | {account['under_way_at_the_end']} |",
        f"| adds up | {'yes' if account['adds_up'] else 'NO'} |",
        f"| steps that count | {account['steps']} ({rate:.1f} a minute; {account['steps_computed']} were computed, "
        "the others after a checkpoint that a rank's death sent the job back to) |",
    ]
    for role, samples in watch.memory.items():
        growth = memory_growth(samples)
        lines.append(
            f"| memory of {role} | {growth['first']:.0f} MB at first, {growth['most']:.0f} MB at most, "
            f"{growth['per_hour']:+.0f} MB per hour |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seconds-between-kills", type=float, default=60)
    parser.add_argument("--run-dir", type=Path, default=Path(f"runs/soak-{int(time.time())}"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.run_dir.parent.mkdir(parents=True, exist_ok=True)
    watch, elapsed, code = run(
        options.minutes, options.seconds_between_kills, options.run_dir, options.seed
    )
    print(summary(watch, elapsed, options.run_dir))
    return 0 if code == 130 and prompt_account(options.run_dir)["adds_up"] else 1


if __name__ == "__main__":
    sys.exit(main())
