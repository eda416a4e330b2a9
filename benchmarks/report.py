"""Turns measurements into `results.md`: ratios, the targets they answer, the machine they were made on."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "megatron-core", "verl", "trl", "liger-kernel")


def render(parts: dict[str, dict[str, Any]]) -> str:
    """The whole report as Markdown, from the parts measured so far."""
    sections = ["# Measured ratios", _machine(parts)]
    absent: set[str] = set()
    for name, part in parts.items():
        sections += [text + _made(part) for text in SECTIONS[name](part["data"])]
        if name in ("targets", "grid"):
            absent |= {line for case in part["data"] for line in case["absent"]}
        if name == "lm-head":
            absent |= {f"LM head of {line}" for line in part["data"]["absent"]}
        if name == "jobs":
            absent |= set(part["data"]["absent"])
    missing = [f"part {name}" for name in SECTIONS if name not in parts]
    if absent or missing:
        lines = [*sorted(absent), *missing]
        sections.append("## Not measured\n\n" + "\n".join(f"- {line}" for line in lines))
    return "\n\n".join(sections) + "\n"


def _made(part: dict[str, Any]) -> str:
    small = " Small shapes, to see that it runs: not a measurement." if part["quick"] else ""
    return f"\n\n*{part['made']}, {part['seconds']:.0f} s, load before {part['load_before']:.1f}.{small}*"


def _machine(parts: dict[str, dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    minutes = sum(part["seconds"] for part in parts.values()) / 60
    return (
        f"Made by `make bench` (`python -m benchmarks`) in {minutes:.0f} min on {_processor()}, 2 threads in all (two ranks: "
        f"one each), Python {platform.python_version()}; {versions}.\n\n"
        "Forward plus backward. Candidates take turns and the best time of each counts. On a shared "
        "machine single times vary by a factor of 2 or more and unevenly, so read ratios of less than 1.3 as equal. "
        "*x floor*: time in units of 1.5 copies of the logits between existing buffers, which is one read forward and one "
        "read and one write backward. *x ours*: time in units of ours, in place; *processor x ours*: the same of the processor time of all "
        "threads, which is less disturbed by other work. *memory*: growth of the resident set at "
        "its peak, in units of the logits. *errors*: largest absolute difference to float64 on 64 rows; the "
        "gradient's relative to what arrives at its row."
    )


def _targets_section(cases: list[dict[str, Any]]) -> list[str]:
    return [_targets(cases[0]), _case_table(cases[0])]


def _profile_section(data: dict[str, Any]) -> list[str]:
    seconds = data["seconds"]
    copy = seconds["bound: copy the logits into a buffer that exists"]
    lines = [
        f"## Where the time goes, {data['rows']} x {data['columns']}, float32, kernels {data['kernels']}\n",
        "In units of one copy of the logits between existing buffers.\n",
        "| pass | time |",
        "|---|---|",
        *(f"| {name} | {value / copy:.2f} |" for name, value in seconds.items()),
    ]
    return ["\n".join(lines)]


def _sampling_mask_section(data: dict[str, Any]) -> list[str]:
    lines = [
        f"## A sampling mask of {data['kept']} ids per token, {data['rows']} x {data['columns']}\n",
        "Time with the mask in units of the same pass without it; wanted: at most 1.10. A log-prob pass that reports no "
        "entropy reads the kept ids alone. Both ways took turns.\n",
        "| pass | dtype | threads | x without | processor x without |",
        "|---|---|---|---|---|",
    ]
    for row in data["results"]:
        wall = row["with"] / row["without"]
        processor = row["with_processor"] / row["without_processor"]
        lines.append(
            f"| {row['pass']} | {row['dtype']} | {row['threads']} | {wall:.2f} | {processor:.2f} |"
        )
    return ["\n".join(lines)]


def _generation_section(data: dict[str, Any]) -> list[str]:
    seconds, processor = data["seconds"], data["processor"]
    shortest, median, longest = data["lengths"]
    lines = [
        f"## Generation: {data['responses']} responses of {shortest} to {longest} tokens, {data['max_batch']} at once\n",
        f"The transformers engine on one thread; half of the responses have at most {median} tokens, {data['tokens']} tokens "
        "in all. In chunks nothing joins before the longest response of a chunk has ended. Tokens per second in units of "
        "those of chunks; wanted: at least 1.5. Both ways took turns.\n",
        "| way | tokens per second | per processor second |",
        "|---|---|---|",
    ]
    for way, taken in seconds.items():
        wall, busy = seconds["chunks"] / taken, processor["chunks"] / processor[way]
        lines.append(f"| {way} | {wall:.2f} | {busy:.2f} |")
    return ["\n".join(lines)]


def _batch_statistics_section(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Thresholds over the whole batch\n",
        "What finding the statistics of a correction over all microbatches and ranks adds before the training pass, as a share of the "
        "step; wanted: at most 3 %. Both log-probs are columns of the batch, no forward pass is run for it.\n",
        "| model | tokens | per microbatch | ranks | correction | whole batch |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        step = row["step"]
        shown = ", ".join(f"{name} {value}" for name, value in step["settings"])
        lines.append(
            f"| {step['model']['name']}, V {step['model']['vocabulary']} | {step['tokens']} | {step['microbatch']} "
            f"| {step['ranks']} | {shown} | {row['spent'].get('whole batch', 0.0) / row['seconds']:.2%} |"
        )
    return ["\n".join(lines)]


def _steps_section(rows: list[dict[str, Any]]) -> list[str]:
    first = rows[0]["seconds"]
    lines = [
        "## Training steps, and the share of loss and hook\n",
        "The real trainer on Megatron-Core with DDP and Adam, ppo with truncated importance sampling, three quarters of the tokens carry loss. *time*: in units "
        "of the first line; *loss and hook*: everything between the logits and their gradient, as a share of the step, on the rank where it "
        "is largest; for the fused head of two phases it contains the head's matrix products. Two ranks have one thread each, one rank has two. *detectors*: "
        "the driver's search for a mismatch in the step's log-probs, as a share of the step.\n",
        "| model | tokens | per microbatch | ranks | settings | time | loss and hook | of which | detectors |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        step = row["step"]
        spent = sum(row["spent"].values())
        sizes = {name.split("_model")[0]: size for name, size in step["sizes"]}
        settings = {**sizes, **dict(step["settings"])}
        inside = ", ".join(
            f"{name} {value / row['seconds']:.1%}" for name, value in row["spent"].items()
        )
        lines.append(
            f"| {step['model']['name']}, V {step['model']['vocabulary']} ({row['parameters'] / 1e6:.0f} M) | {step['tokens']} "
            f"| {step['microbatch']} | {step['ranks']} | {', '.join(f'{k} {v}' for k, v in settings.items()) or 'default'} "
            f"| {row['seconds'] / first:.2f} | {spent / row['seconds']:.1%} | {inside} "
            f"| {row['detectors'] / row['seconds']:.2%} |"
        )
    return ["\n".join(lines)]


def _batching_section(data: dict[str, Any]) -> list[str]:
    lines = [
        f"## Batching: {data['samples']:,} samples, {data['tokens']:,} tokens, {data['ranks']} ranks\n",
        "Lognormal lengths, median 2,000, at most 32,768. *padding*: share of microbatches that are padding. A "
        "sample longer than the budget gets a microbatch of its own.\n",
        "| token budget | microbatches per rank | tokens / (budget x ranks), rounded up | padding | max / mean cost | ms to plan |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['budget']:,} | {row['microbatches']} | {row['least']} | {row['padding']:.2%} | {row['spread']:.4f} "
        f"| {row['seconds'] * 1000:.0f} |"
        for row in data["rows"]
    ]
    return ["\n".join(lines)]


PHASES = {
    "waiting": "generation",
    "preparing": "preparing",
    "log_probs": "log-probs",
    "training": "training",
    "weight_sync": "weight sync",
}


def phase_shares(row: dict[str, Any]) -> dict[str, float]:
    """The phases of a job's step as shares of it; `other` is what no phase covers. TRL's training is the rest."""
    shares = {
        title: row["phases"].get(name, 0.0) / row["seconds"] for name, title in PHASES.items()
    }
    rest = max(0.0, 1 - sum(shares.values()))
    return shares | ({"training": rest, "other": 0.0} if row["kind"] == "TRL" else {"other": rest})


def _jobs_section(data: dict[str, Any]) -> list[str]:
    lines = [
        "## Whole steps of a job, against TRL\n",
        f"`megatron-tis train` and TRL's `GRPOTrainer` (transformers' generate, one process) on {data['cores']} cores: the same Qwen3 and "
        f"initial weights in float32, prompts, reward, batch ({data['samples_per_prompt']} responses per prompt), microbatches, sampling, loss "
        "(clipped, one token denominator), AdamW and clipping. Nothing ends a response early, so all generate the same number of tokens. "
        "Jobs take turns; medians of whole steps, from the end of one to the end of the next. *speed*: TRL's time divided by this one's. "
        "The phases are shares of the step; *generation* is for ours the time that the driver waits for it. *reward*: of the first and the last "
        "step, to see that both learn.\n",
        "| model | prompts | response | microbatch | job | speed | least to most | "
        + " | ".join(PHASES.values())
        + " | other | reward |",
        "|" + "---|" * (8 + len(PHASES) + 1),
    ]
    for case in data["sizes"]:
        size, rows = case["size"], case["rows"]
        peer = next((row for row in rows if row["kind"] == "TRL"), None)
        for row in rows:
            speed = "-" if peer is None else f"{peer['seconds'] / row['seconds']:.2f}"
            low, high = (value / row["seconds"] for value in row["range"])
            shares = " | ".join(f"{share:.0%}" for share in phase_shares(row).values())
            first, last = row["rewards"]
            lines.append(
                f"| {size['name']} | {size['prompts']} | {size['response']} | {size['microbatch']} | {row['kind']} | {speed} "
                f"| {low:.2f} to {high:.2f} | {shares} | {first:.3f}, {last:.3f} |"
            )
    return ["\n".join(lines)]


def _job_growth_section(data: dict[str, Any]) -> list[str]:
    return [_grown_jobs(data["jobs"]), _grown_driver(data["driver"])]


def _grown_jobs(jobs: list[dict[str, Any]]) -> str:
    base = jobs[0]
    lines = [
        "## Growth of a job's step\n",
        "Synchronous jobs of the quick start's model. All times in units of the first line; *per token*: the step divided by the tokens "
        "generated. Ranks share the cores of one machine, so more of them cannot be faster.\n",
        "| samples | response | ranks | step | per token | preparing | training | weight sync |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in jobs:
        per_token = row["seconds"] / row["tokens"] / (base["seconds"] / base["tokens"])
        phases = " | ".join(
            f"{row['phases'].get(name, 0.0) / max(base['phases'].get(name, 0.0), 1e-9):.2f}"
            for name in ("preparing", "training", "weight_sync")
        )
        lines.append(
            f"| {row['samples']:,} | {row['response']} | {row['ranks']} | {row['seconds'] / base['seconds']:.2f} "
            f"| {per_token:.2f} | {phases} |"
        )
    return "\n".join(lines)


def _grown_driver(rows: list[dict[str, Any]]) -> str:
    lines = [
        "## Growth of the batch's way to a rank\n",
        "Without models: from the engines' answers to one rank's microbatches of 64 samples; prompts of 4 tokens. *preparing*: checks, advantages and "
        "description on the driver; *cutting*: the plan and one share per rank for the object store; *a rank*: what one rank does to get its microbatches, and the "
        "bytes that it gets.\n",
        "| samples | response | ranks | preparing, us per sample | cutting, us per sample | a rank, ms | a rank gets, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['samples']:,} | {row['length']:,} | {row['ranks']} | {row['preparing'] / row['samples'] * 1e6:.1f} "
        f"| {row['cutting'] / row['samples'] * 1e6:.1f} | {row['rank'] * 1e3:.1f} | {row['rank_bytes'] / 1e6:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def _targets(case: dict[str, Any]) -> str:
    rows = {row["name"]: row for row in case["rows"] if row["mode"] == "entropy_grad"}
    plain = {row["name"]: row for row in case["rows"] if row["mode"] == "log_prob"}
    fast, fresh = rows["ours, in place"], rows["ours"]
    wanted = [("eager log_softmax", 12), ("saved softmax", 6), ("torch.compile, plain formula", 5)]
    lines = [
        "| target, log-prob and entropy gradient | wanted | in place | not in place (half) |",
        "|---|---|---|---|",
    ]
    for name, factor in wanted:
        ratios = [rows[name]["seconds"] / ours["seconds"] for ours in (fast, fresh)]
        lines.append(f"| faster than {name} | {factor}x | {ratios[0]:.1f}x | {ratios[1]:.1f}x |")
    floors = [ours["seconds"] / ours["floor"] for ours in (fast, fresh)]
    lines.append(f"| time in units of the floor | at most 4 | {floors[0]:.1f} | {floors[1]:.1f} |")
    lines.append(
        f"| extra memory, in logits | 0 / 1 | {fast['memory']:.2f} | {fresh['memory']:.2f} |"
    )
    peer = plain.get("Megatron-Core cross entropy")
    if peer is not None:
        ratios = [peer["seconds"] / plain[name]["seconds"] for name in ("ours, in place", "ours")]
        lines.append(
            f"| log-prob only: faster than Megatron-Core's cross entropy | 1x | {ratios[0]:.1f}x | {ratios[1]:.1f}x |"
        )
    return f"## Targets, {_title(case['case'])}\n\n" + "\n".join(lines)


def _case_table(case: dict[str, Any]) -> str:
    lines = [
        f"## {_title(case['case'])}\n",
        "| mode | implementation | x ours | processor x ours | x floor | memory | error log-prob | entropy | gradient |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in case["rows"]:
        ours = next(
            other
            for other in case["rows"]
            if other["mode"] == row["mode"] and other["name"] == "ours, in place"
        )
        errors = " | ".join(
            f"{row['errors'][key]:.1e}" if key in row["errors"] else "-"
            for key in ("log_prob", "entropy", "gradient")
        )
        lines.append(
            f"| {row['mode']} | {row['name']} | {row['seconds'] / ours['seconds']:.2f} "
            f"| {row['processor_seconds'] / ours['processor_seconds']:.2f} | {row['seconds'] / row['floor']:.2f} "
            f"| {row['memory']:.2f} | {errors} |"
        )
    return "\n".join(lines)


def _weight_sync_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "## Weight sync\n",
        "One trainer rank and transformers engines on one machine, float32. *time*: in units of the object store's for the same model and "
        "engines, and per MB in units of the first line; *rank*, *engine*: growth of private memory at its peak, in MB; *shared*: that of "
        "/dev/shm, where the object store is. `directory`: of one server, written and read back.\n",
        "| model, MB | engines | way | time | per MB | rank | engine | shared |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = rows[0]["seconds"] / rows[0]["mb"]
    old = {(r["mb"], r["engines"]): r["seconds"] for r in rows if r["way"] == "object-store"}
    for row in rows:
        ratio = row["seconds"] / old[row["mb"], row["engines"]]
        lines.append(
            f"| {row['mb']:.0f} | {row['engines']} | {row['way']} | {ratio:.2f} "
            f"| {row['seconds'] / row['mb'] / first:.2f} "
            f"| {row['rank']:.0f} | {row['engine']:.0f} | {row['shared']:.0f} |"
        )
    return "\n".join(lines)


def _growth_table(growth: list[dict[str, Any]]) -> str:
    lines = [
        "## Growth with T, V and ranks\n",
        "Ours, in place, log-prob and entropy gradient, float32, one thread per rank. *time*: in units of the first line; "
        "*per logit*: the same divided by T x V. With two ranks each holds half of V, so the ideal is one half.\n",
        "| T | V | ranks | time | per logit |",
        "|---|---|---|---|---|",
    ]
    first = growth[0]
    for row in growth:
        ratio = row["seconds"] / first["seconds"]
        size = row["rows"] * row["columns"] / (first["rows"] * first["columns"])
        lines.append(
            f"| {row['rows']} | {row['columns']} | {row['ranks']} | {ratio:.2f} | {ratio / size:.2f} |"
        )
    return "\n".join(lines)


def _head_table(heads: dict[str, Any]) -> str:
    sizes, base = heads["sizes"], heads["rows"][0]
    logits = sizes["rows"] * sizes["columns"] * 4
    gradients = heads["gradient_bytes"]
    lines = [
        f"## LM head, {sizes['rows']} x {sizes['columns']}, hidden {sizes['hidden']}, float32, TP1\n",
        "Time and memory in units of the first line; *memory* includes the gradients of weight and hidden states "
        f"({gradients / logits:.2f} of the logits), which every line has to produce; *without them* leaves those out.\n",
        "| implementation | time | memory | without them |",
        "|---|---|---|---|",
    ]
    for row in heads["rows"]:
        beyond = max(0, row["bytes"] - gradients) / max(1, base["bytes"] - gradients)
        lines.append(
            f"| {row['name']} | {row['seconds'] / base['seconds']:.2f} | {row['bytes'] / base['bytes']:.3f} "
            f"| {beyond:.3f} |"
        )
    return "\n".join(lines)


def _gpu_kernels_section(data: dict[str, Any]) -> list[str]:
    if not data["rows"]:
        return ["## Triton kernels, compiled ahead of time\n\nNo environment here has Triton."]
    groups: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for row in data["rows"]:
        key = row["kernel"], row["variant"], row["dtype"]
        groups.setdefault(key, {})[row["capability"]] = row
    gpus = sorted({row["capability"] for row in data["rows"]})
    lines = [
        f"| kernel | variant | logits | {' | '.join(f'sm_{gpu}' for gpu in gpus)} |",
        f"|---|---|---|{'---|' * len(gpus)}",
    ]
    for (kernel, variant, dtype), found in groups.items():
        cells = (
            f"{r['registers']} / {r['spilled']} / {r['shared']}" for r in map(found.get, gpus) if r
        )
        lines.append(f"| {kernel} | {variant} | {dtype} | {' | '.join(cells)} |")
    return [
        "## Triton kernels, compiled ahead of time\n\n"
        f"Registers per thread / bytes spilled / bytes of shared memory, by Triton {data['triton']}'s compiler for GPUs that "
        "were not there; nothing was run. 256 threads per row.\n\n" + "\n".join(lines)
    ]


SECTIONS: dict[str, Callable[[Any], list[str]]] = {
    "targets": _targets_section,
    "profile": _profile_section,
    "growth": lambda rows: [_growth_table(rows)],
    "sampling-mask": _sampling_mask_section,
    "batch-statistics": _batch_statistics_section,
    "lm-head": lambda heads: [_head_table(heads)],
    "steps": _steps_section,
    "batching": _batching_section,
    "generation": _generation_section,
    "jobs": _jobs_section,
    "weight-sync": lambda rows: [_weight_sync_table(rows)],
    "job-growth": _job_growth_section,
    "gpu-kernels": _gpu_kernels_section,
    "grid": lambda cases: [_case_table(case) for case in cases],
}


def _title(case: dict[str, Any]) -> str:
    return f"{case['rows']} x {case['columns']}, {case['dtype']}, TP{case['ranks']}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor()
