"""An hour of asynchronous training with something killed every minute: does every prompt add up at the end?

    python -m benchmarks.soak                      # what `make soak` runs: an hour
    python -m benchmarks.soak --minutes 5 --seconds-between-kills 20

Starts `megatron-tis train` as a user would and every minute kills, freezes or pauses a process of a random kind: engine,
trainer rank, reward worker, driver, the process that waits for it, Ray's raylet, GCS and agents. Where the job ends by
that, it goes on with `--resume`. Ends the job as Ctrl-C would, and prints what became of every prompt, which processes
outlived a job, how memory grew and how fast it went. It signals descendants of the job that it started, nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from plugin.config import JobConfig
from plugin.observe.run_record import read_prompts, read_run
from plugin.tasks.copy_digits import CopyDigitsTask

ENGINES = 2
JOB = [
    *("--async-rollouts", "--max-weight-staleness", "2"),
    *("--num-rollout-engines", str(ENGINES), "--num-gpus-per-node", "2"),
    *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
    *("--num-rollouts", "1000000", "--save-interval", "10", "--rollout-timeout", "30"),
    *("--step-timeout", "120", "--ray-timeout", "20"),
    *("--task-path", "benchmarks.soak:task", "--reward-workers", "1", "--reward-timeout", "20"),
    # Kills are not progress: on a slow machine several can hit the same engine before it has answered once.
    *("--max-restarts", "20"),
    *("--use-tis", "--rollout-quantization", "int8", "--lr", "1e-4"),
]
#: Role -> how the name of its program, module or Ray actor begins.
ROLES = {
    "engine": "ray::EngineActor",
    "trainer rank": "ray::TrainerRank",
    "reward worker": "plugin.rewards.pool",
    "raylet": "raylet",
    "GCS": "gcs_server",
    "Ray's agents": ("ray::DashboardAgent", "ray::RuntimeEnvAgent"),
}
How = Literal["killed", "frozen", "paused"]
#: All of them happen before one happens again. What is paused goes on after `PAUSE_SECONDS`, which no deadline of the
#: job is shorter than. Nobody but the user can tell a frozen driver from one that was stopped on purpose.
ATTACKS: tuple[tuple[str, How], ...] = (
    *(("engine", "killed"), ("engine", "killed"), ("engine", "frozen"), ("engine", "paused")),
    *(("trainer rank", "killed"), ("trainer rank", "frozen"), ("trainer rank", "paused")),
    *(("reward worker", "killed"), ("reward worker", "frozen")),
    *(("driver", "killed"), ("driver", "paused"), ("command", "killed")),
    *(("raylet", "killed"), ("raylet", "frozen"), ("raylet", "paused")),
    *(("GCS", "killed"), ("GCS", "frozen"), ("GCS", "paused")),
    ("Ray's agents", "killed"),
)
PAUSE_SECONDS = 5.0
#: Starts in a row that end before their first step.
MOST_FAILED_STARTS = 3
#: At the end, in which what the last attack did is found and mended.
QUIET_SECONDS = 120.0
SAMPLE_SECONDS = 10.0
#: What is left of a job so long after its end stays for good; Ray's agents take a minute.
LINGER_SECONDS = 90.0
#: From a start to its first step, on a busy machine.
START_SECONDS = 600.0
#: A process has a trend of its memory once it has been watched for so long after `SETTLE_SECONDS`.
TREND_SECONDS = 600.0
#: In which buffers and caches fill.
SETTLE_SECONDS = 120.0
MEGABYTE = 1 << 20


def task(config: JobConfig, tokenizer: Any) -> CopyDigitsTask:
    """The built-in task, as a user's own: its rewards are computed in a worker."""
    return CopyDigitsTask(tokenizer, seed=config.seed)


@dataclass
class Watch:
    """What was done to the job and what it used.

    attacks: how often, by role and way
    resumed: how often the job ended and was resumed
    memory: (seconds, process id, MB) per role, every few seconds
    family: the processes of the job that runs
    ended: families of jobs that ended, and when
    outlived: names of processes that were still there long after their job
    longest_stall: seconds without a step, restarts of the job included
    """

    attacks: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    memory: dict[str, list[tuple[float, int, float]]] = field(default_factory=dict)
    family: set[psutil.Process] = field(default_factory=set)
    ended: list[tuple[float, set[psutil.Process]]] = field(default_factory=list)
    outlived: list[str] = field(default_factory=list)
    longest_stall: float = 0.0


def name_of(process: psutil.Process) -> str:
    """Its actor, its module (after `-m`) or its program."""
    words = process.cmdline() or [process.name()]
    module = words.index("-m") + 1 if "-m" in words[:3] else 0
    return Path(words[module]).name


def members(job: psutil.Process) -> dict[str, list[psutil.Process]]:
    """The job's processes by role; `job` waits for the driver, its only child.

    Without a driver it reads the whole run to write the report: that is another role.
    """
    roles = ("command", "command that writes the report", "driver", *ROLES)
    found: dict[str, list[psutil.Process]] = {role: [] for role in roles}
    try:
        drivers = [p for p in job.children() if p.status() != psutil.STATUS_ZOMBIE]
        found["command" if drivers else "command that writes the report"] = [job]
        found["driver"] = drivers
        family = job.children(recursive=True)
    except psutil.Error:
        return found
    for process in family:
        try:
            name = name_of(process)
        except psutil.Error:
            continue
        for role, beginnings in ROLES.items():
            if name.startswith(beginnings):
                found[role].append(process)
    return found


def note_family(job: psutil.Process, watch: Watch) -> None:
    """Adds processes that have come since the last look."""
    with contextlib.suppress(psutil.Error):
        watch.family |= {job, *job.children(recursive=True)}


def end_family(watch: Watch) -> None:
    """The job has ended: what it has left behind is looked at later."""
    watch.ended.append((time.monotonic(), watch.family))
    watch.family = set()


def note_outlived(watch: Watch) -> None:
    """Names and ends what outlived its job by `LINGER_SECONDS`."""
    while watch.ended and time.monotonic() > watch.ended[0][0] + LINGER_SECONDS:
        for process in watch.ended.pop(0)[1]:
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    watch.outlived.append(f"{name_of(process)} ({process.status()})")
                    process.kill()
            except psutil.Error:
                continue


def sample_memory(job: psutil.Process, watch: Watch, seconds: float) -> None:
    """Adds the memory each process holds for itself; what is shared between processes is not counted twice."""
    for role, processes in members(job).items():
        for process in processes:
            try:
                used = process.memory_full_info().uss / MEGABYTE
            except psutil.Error:
                continue
            watch.memory.setdefault(role, []).append((seconds, process.pid, used))


def attack(job: psutil.Process, role: str, how: How, draw: random.Random) -> tuple[int, str] | None:
    """Kills, freezes or pauses one process of a role; its id and name, or None if none runs."""
    try:
        running = [p for p in members(job)[role] if p.status() not in ("stopped", "zombie")]
        if not running:
            return None
        target = draw.choice(running)
        name = name_of(target)
        # psutil checks that the number still belongs to this process.
        target.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    except psutil.Error:
        return None
    if how == "paused":
        threading.Timer(PAUSE_SECONDS, resume_process, (target,)).start()
    return target.pid, name


def resume_process(process: psutil.Process) -> None:
    """Lets a paused process go on, if it is still there."""
    with contextlib.suppress(psutil.Error):
        process.resume()


def attack_something(
    job: psutil.Process, watch: Watch, deck: list[tuple[str, How]], draw: random.Random
) -> str | None:
    """Attacks what comes next in `deck`, which is refilled when it is empty; says what was done."""
    if not deck:
        deck += ATTACKS
        draw.shuffle(deck)
    note_family(job, watch)
    role, how = deck.pop()
    done = attack(job, role, how, draw)
    if done is None:
        return None
    watch.attacks[f"{role} {how}"] += 1
    return f"{role} {how}: process {done[0]}, {done[1]}"


def start(run_dir: Path, *more: str) -> subprocess.Popen[bytes]:
    """The job, which adds to its log."""
    command = [sys.executable, "-m", "plugin", "train", "--run-dir", str(run_dir), *JOB, *more]
    with log_of(run_dir).open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def resume(run_dir: Path, watch: Watch) -> subprocess.Popen[bytes]:
    """The job again after it has ended, with its first step made; it may need several starts."""
    for _ in range(MOST_FAILED_STARTS):
        end_family(watch)
        watch.resumed += 1
        process = start(run_dir, "--resume")
        wait_for_step(process, run_dir, steps_made(run_dir) + 1, watch)
        if process.poll() is None:
            break
    return process


def run(minutes: float, between: float, run_dir: Path, seed: int) -> tuple[Watch, float, int]:
    """Runs the job for so long: what was done to it, how long it took, and its exit code."""
    process, watch, draw = start(run_dir), Watch(), random.Random(seed)
    deck: list[tuple[str, How]] = []
    wait_for_step(process, run_dir, 1, watch)  # start-up is not part of the hour
    began = time.monotonic()
    next_attack, next_sample = began + between, began
    size, stepped = 0, began
    while (now := time.monotonic()) < began + minutes * 60:
        if process.poll() is not None:
            process = resume(run_dir, watch)
            if process.poll() is not None:
                break
            next_attack = time.monotonic() + between
        job = psutil.Process(process.pid)
        # It is to end by Ctrl-C, not by the last attack.
        if now >= next_attack and now < began + minutes * 60 - QUIET_SECONDS:
            said = attack_something(job, watch, deck, draw)
            if said is not None:
                note(run_dir, f"{(now - began) / 60:.1f} min: {said}")
                next_attack = time.monotonic() + between
        if now >= next_sample:
            note_family(job, watch)
            sample_memory(job, watch, now - began)
            note_outlived(watch)
            next_sample += SAMPLE_SECONDS
            show_progress(now - began, minutes * 60, run_dir, watch)
        if (grown := (run_dir / "metrics.jsonl").stat().st_size) != size:
            watch.longest_stall = max(watch.longest_stall, time.monotonic() - stepped)
            size, stepped = grown, time.monotonic()
        time.sleep(0.2)
    elapsed = time.monotonic() - began
    if process.poll() is None:
        note_family(psutil.Process(process.pid), watch)
    # As Ctrl-C, which a process in the background of a shell never sees.
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=300)
    end_family(watch)
    while watch.ended:
        time.sleep(1)
        note_outlived(watch)
    print(f"\nended with exit code {code}")
    return watch, elapsed, code


def log_of(run_dir: Path) -> Path:
    """What the job prints, and the attacks between."""
    return run_dir.parent / f"{run_dir.name}.log"


def note(run_dir: Path, text: str) -> None:
    """Writes a line of the soak into the log of the job."""
    with log_of(run_dir).open("a") as log:
        log.write(f"\n[soak] {time.strftime('%H:%M:%S')} {text}\n")


def steps_made(run_dir: Path) -> int:
    """Lines of the run's metrics so far."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for_step(
    process: subprocess.Popen[bytes], run_dir: Path, steps: int, watch: Watch
) -> None:
    """Waits until the run has so many lines of metrics, or the job has ended."""
    deadline = time.monotonic() + START_SECONDS
    while steps_made(run_dir) < steps and process.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step within {START_SECONDS:g} s; see {log_of(run_dir)}")
        time.sleep(0.2)
    if process.poll() is None:
        note_family(psutil.Process(process.pid), watch)


def show_progress(seconds: float, total: float, run_dir: Path, watch: Watch) -> None:
    """One line that is rewritten."""
    steps = steps_made(run_dir)
    done = int(30 * seconds / total)
    bar = "#" * done + "." * (30 - done)
    text = f"[{bar}] {seconds / 60:5.1f} min  {steps} steps  {watch.attacks.total()} attacks"
    print("\r" + text, end="", file=sys.stderr, flush=True)


def prompt_account(run_dir: Path) -> dict[str, Any]:
    """What became of the prompts, from prompts.jsonl, against the counters of the last step."""
    rollouts = read_prompts(run_dir)
    last = read_run(run_dir).steps[-1]
    log = log_of(run_dir).read_text(errors="replace")
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


def memory_growth(samples: list[tuple[float, int, float]]) -> dict[str, float | None]:
    """MB at the start and at the most, and MB per hour within the life of a process.

    The trend is that of least squares, averaged over lives by their length; None if no process
    lived long enough: what grows in the minutes between two restarts is start-up.
    """
    lives: dict[int, list[tuple[float, float]]] = {}
    for seconds, pid, megabytes in samples:
        lives.setdefault(pid, []).append((seconds, megabytes))
    slopes, weights = [], []
    for life in lives.values():
        settled = [(s, m) for s, m in life if s > life[0][0] + SETTLE_SECONDS]
        if settled and settled[-1][0] - settled[0][0] >= TREND_SECONDS:
            slope = statistics.linear_regression(*zip(*settled, strict=True)).slope
            slopes.append(slope * 3600)
            weights.append(settled[-1][0] - settled[0][0])
    weighted = sum(s * w for s, w in zip(slopes, weights, strict=True))
    return {
        "first": samples[0][2],
        "most": max(megabytes for _, _, megabytes in samples),
        "per_hour": weighted / sum(weights) if weights else None,
    }


def summary(watch: Watch, elapsed: float, run_dir: Path) -> str:
    """The figures as Markdown."""
    account = prompt_account(run_dir)
    rate = account["steps"] / (elapsed / 60)
    lines = [
        "| | |",
        "|---|---|",
        f"| time | {elapsed / 60:.0f} minutes after start-up |",
        *(f"| {what} | {count} times |" for what, count in sorted(watch.attacks.items())),
        f"| restarts | {account['engine_restarts']} of engines, {account['trainer_restarts']} of the trainer, "
        f"{watch.resumed} of the job (`--resume`) |",
        f"| prompts issued | {account['issued']} |",
        f"| trained on | {account['trained']} ({account['trained_twice']} twice) |",
        f"| dropped | {account['dropped']['stale']} too old, {account['dropped']['failed']} failed |",
        f"| under way at the end | {account['under_way_at_the_end']} |",
        f"| adds up | {'yes' if account['adds_up'] else 'NO'} |",
        f"| longest time without a step | {watch.longest_stall:.0f} s |",
        f"| processes that outlived their job by {LINGER_SECONDS:g} s | "
        f"{', '.join(watch.outlived) or 'none'} |",
        f"| steps that count | {account['steps']} ({rate:.1f} a minute; {account['steps_computed']} were computed, "
        "the others after a checkpoint that a rank's death sent the job back to) |",
    ]
    for role, samples in watch.memory.items():
        growth = memory_growth(samples)
        trend = "" if growth["per_hour"] is None else f", {growth['per_hour']:+.0f} MB per hour"
        lines.append(
            f"| memory of {role} | {growth['first']:.0f} MB at first, {growth['most']:.0f} MB at most{trend} |"
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
    adds_up = prompt_account(options.run_dir)["adds_up"]
    return 0 if code == 130 and adds_up and not watch.outlived else 1


if __name__ == "__main__":
    sys.exit(main())
