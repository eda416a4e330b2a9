"""Plants every fault into real rollouts and counts what the detectors say: `python -m benchmarks.detector_confusion`.

Prints a Markdown table (rows: what was planted, columns: what was found, over the seeds) and, with `--write FILE`,
puts it between the two confusion-table markers of that file. About five minutes on one core.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import mismatch_data as data
from benchmarks.mismatch_data import Rollouts
from plugin.engines.transformers.linear_layers import quantize_linears
from plugin.observe.detectors import DETECTORS, MismatchDetectors

MARKERS = ("<!-- confusion table: begin -->", "<!-- confusion table: end -->")


class Models:
    """The trained models that all cases share, and their low-precision copies."""

    def __init__(self) -> None:
        self.dense = data.small_model()
        data.pretrain(self.dense, 300)
        self.bf16 = data.in_bfloat16(self.dense)
        self.int8 = copy.deepcopy(self.dense)
        quantize_linears(self.int8)
        self.int8_bf16 = copy.deepcopy(self.bf16)
        quantize_linears(self.int8_bf16)
        self.newer = [self.dense]
        for step in range(16):
            model = copy.deepcopy(self.newer[-1])
            data.pretrain(model, 1, rate=3e-4, seed=100 + step)
            self.newer.append(model)
        self.moe = data.small_model(moe=True)
        data.pretrain(self.moe, 200)
        self.moe_bf16 = data.in_bfloat16(self.moe)
        self.newer_bf16 = [data.in_bfloat16(model) for model in self.newer]
        self._sampled: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def sampled(
        self, engine: torch.nn.Module, seed: int, samples: int, options: dict[str, float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rollouts of an engine; cases that differ only in the trainer or in what they damage share them."""
        key = (id(engine), seed, samples, tuple(sorted(options.items())))
        if key not in self._sampled:
            self._sampled[key] = data.sample_corpus(engine, samples=samples, seed=seed, **options)
        return self._sampled[key]


Steps = list[Rollouts]
Case = Callable[[Models, int], Steps]


def clean(trainer: str, engine: str) -> Case:
    return lambda m, seed: [_dense(m, seed, getattr(m, trainer), getattr(m, engine))]


def sampled(**options: float) -> Case:
    return lambda m, seed: [_dense(m, seed, m.dense, m.bf16, **options)]


def int8(trainer: str, engine: str, steps: int = 1) -> Case:
    return lambda m, seed: [
        _dense(m, seed * 100 + i if steps > 1 else seed, getattr(m, trainer), getattr(m, engine))
        for i in range(steps)
    ]


def shifted(by: int) -> Case:
    def make(m: Models, seed: int) -> Steps:
        step = _dense(m, seed, m.dense, m.bf16)
        step.columns["rollout_log_probs"] = [
            value.roll(by) for value in step.columns["rollout_log_probs"]
        ]
        return [step]

    return make


def zero_filled(share: float) -> Case:
    def make(m: Models, seed: int) -> Steps:
        step = _dense(m, seed, m.dense, m.bf16)
        values = step.columns["rollout_log_probs"]
        for i in range(round(share * len(values))):
            values[i] = torch.zeros_like(values[i])
        return [step]

    return make


def stale(versions: int) -> Case:
    def make(m: Models, seed: int) -> Steps:
        trainer = m.newer[versions]
        return [_dense(m, seed, trainer, m.bf16, trainer_version=versions)]

    return make


def run_of_steps(count: int, *, version_moves: bool, known_versions: bool = True) -> Case:
    """Steps in which the trainer moves on and the engine does not; the versions may pretend otherwise."""

    def make(m: Models, seed: int) -> Steps:
        steps = []
        for i in range(count):
            step = _dense(m, seed * 100 + i, m.newer[i], m.bf16, samples=32, trainer_version=i)
            if version_moves:
                step.columns["weight_versions"] = [i] * 32
            if not known_versions:
                del step.columns["weight_versions"]
            steps.append(step)
        return steps

    return make


def healthy_run(count: int) -> Case:
    def make(m: Models, seed: int) -> Steps:
        steps = []
        for i in range(count):
            engine = m.newer_bf16[i]
            step = _dense(m, seed * 100 + i, m.newer[i], engine, samples=32, trainer_version=i)
            step.columns["weight_versions"] = [i] * 32
            steps.append(step)
        return steps

    return make


def routed(*, swap: tuple[int, int] | None = None, shift: int = 0) -> Case:
    def make(m: Models, seed: int) -> Steps:
        step = data.rollouts(m.moe, m.moe_bf16, seed=seed, samples=32)
        tokens = torch.stack(step.columns["unconcat_tokens"])
        engine = data.routed_experts(m.moe_bf16, tokens)
        if swap:
            order = list(range(engine.shape[2]))
            order[swap[0]], order[swap[1]] = order[swap[1]], order[swap[0]]
            engine = engine[:, :, order]
        step.columns["rollout_routed_experts"] = list(engine.roll(shift, 1))
        step.columns["train_routed_experts"] = list(data.routed_experts(m.moe, tokens))
        return [step]

    return make


#: name -> (how to make it, what must be found or None)
CASES: dict[str, tuple[Case, str | None]] = {
    "clean: float32 engine, float32 trainer": (clean("dense", "dense"), None),
    "clean: bfloat16 engine, float32 trainer": (clean("dense", "bf16"), None),
    "clean: bfloat16 engine, bfloat16 trainer": (clean("bf16", "bf16"), None),
    "clean: MoE, bfloat16 engine": (routed(), None),
    "clean: 16 steps, weights synced each step": (healthy_run(16), None),
    "shifted by one": (shifted(1), "one_token_shift"),
    "shifted by minus one": (shifted(-1), "one_token_shift"),
    "zero-filled": (zero_filled(1.0), "zero_filled"),
    "zero-filled, one sample in 16": (zero_filled(1 / 16), "zero_filled"),
    "temperature 0.7 against 1.0": (sampled(temperature=0.7), "temperature"),
    "temperature 1.0 against 0.7": (sampled(trainer_temperature=0.7), "temperature"),
    "temperature 0.9 against 1.0": (sampled(temperature=0.9), "temperature"),
    "top-p 0.9": (sampled(top_p=0.9), "truncation"),
    "top-p 0.95": (sampled(top_p=0.95), "truncation"),
    "top-k 20": (sampled(top_k=20), "truncation"),
    "int8 weights, float32 trainer": (int8("dense", "int8"), "different_weights"),
    "int8 weights, bfloat16 trainer": (int8("bf16", "int8_bf16"), "different_weights"),
    "int8 weights, bfloat16 trainer, 3 steps": (int8("bf16", "int8_bf16", 3), "different_weights"),
    "staleness 8": (stale(8), "staleness"),
    "engine never updated, 8 steps": (run_of_steps(8, version_moves=False), "frozen_weights"),
    "engine never updated, versions unknown, 16 steps": (
        run_of_steps(16, version_moves=False, known_versions=False),
        "growing_mismatch",
    ),
    "swapped routes (layers 1 and 2)": (routed(swap=(1, 2)), "routing"),
    "routes shifted by one token": (routed(shift=1), "routing"),
}


def detected(steps: Steps) -> set[str]:
    """Names of the detectors that spoke during a run."""
    detectors = MismatchDetectors()
    return {
        finding.detector
        for number, step in enumerate(steps)
        for finding in detectors.check(
            step.columns, step=number, trainer_version=step.trainer_version
        )
    }


def confusion(seeds: int, only: str = "") -> list[tuple[str, str | None, Counter[str], int]]:
    """(case, expected, how often each detector spoke, how often none did)."""
    models, rows = Models(), []
    for name, (make, expected) in CASES.items():
        if only not in name:
            continue
        counts: Counter[str] = Counter()
        silent = 0
        for seed in range(seeds):
            found = detected(make(models, seed))
            counts.update(found)
            silent += not found
        rows.append((name, expected, counts, silent))
        print(f"{name}: {dict(counts) or 'nothing'}", file=sys.stderr, flush=True)
    return rows


def markdown(rows: list[tuple[str, str | None, Counter[str], int]], seeds: int) -> str:
    """The table; the detector that should speak is in bold."""
    header = ["planted", "nothing", *(detector.name.replace("_", " ") for detector in DETECTORS)]
    lines = [
        f"{seeds} seeds per row; the cell that should hold {seeds} is bold.",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
    ]
    for name, expected, counts, silent in rows:
        cells = [_cell(silent, expected is None)]
        cells += [_cell(counts[d.name], d.name == expected) for d in DETECTORS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_table(path: Path, table: str) -> None:
    """Put a table between the markers; rows of cases that were not run again stay as they are."""
    text = path.read_text()
    start, end = (text.index(marker) for marker in MARKERS)
    old = {_row_name(line): line for line in text[start:end].splitlines() if _row_name(line)}
    new = {_row_name(line): line for line in table.splitlines() if _row_name(line)}
    head = [line for line in table.splitlines() if not _row_name(line)]
    rows = [new.get(name) or old.get(name) for name in CASES]
    body = "\n".join([*head, *(row for row in rows if row)])
    path.write_text(f"{text[: start + len(MARKERS[0])]}\n{body}\n{text[end:]}")


def _row_name(line: str) -> str:
    """The case of a table row; empty for any other line."""
    name = line.split("|")[1].strip() if line.startswith("| ") else ""
    return name if name in CASES else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases whose name has TEXT in it"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = confusion(args.seeds, args.only)
    table = markdown(rows, args.seeds)
    print(table)
    if args.write:
        write_table(args.write, table)
    wrong = [
        name
        for name, expected, counts, silent in rows
        if (silent if expected is None else counts[expected]) < args.seeds
    ]
    print(f"cases with a miss or a false alarm: {', '.join(wrong) or 'none'}", file=sys.stderr)
    return 1 if wrong else 0


def _dense(
    m: Models,
    seed: int,
    trainer: torch.nn.Module,
    engine: torch.nn.Module,
    *,
    samples: int = 128,
    **options: Any,
) -> Rollouts:
    sampling = {
        name: options.pop(name) for name in ("temperature", "top_p", "top_k") if name in options
    }
    sampled = m.sampled(engine, seed, samples, sampling)
    return data.rollouts(trainer, engine, seed=seed, samples=samples, sampled=sampled, **options)


def _cell(count: int, bold: bool) -> str:
    if bold:
        return f"**{count}**"
    return str(count) if count else ""


if __name__ == "__main__":
    sys.exit(main())
