"""`megatron-tis eval`: evaluate a run, a checkpoint or a Hugging Face directory by itself.

One engine in this process, without Ray and without a trainer. The weights of a checkpoint are
first written as a Hugging Face model to a temporary directory, by a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plugin.config import JobConfig
from plugin.errors import CheckpointError, ConfigError
from plugin.observe.console import text_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and one argument per setting."""
    parser.usage = "megatron-tis eval [-h | --help-all] SOURCE [--eval-data NAME:PATH] [--FLAG ...]"
    parser.epilog = (
        "A run brings its own settings, its --eval-data among them; flags win over them. "
        "--help-all shows every flag."
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="run directory, one of its checkpoints/step_*, or a Hugging Face model directory",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="STEP",
        help="of a run directory: such as step_0000012, or best (default: the latest)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    JobConfig.add_arguments(parser, in_short_help=JobConfig.common_flags("eval"))


def run(args: argparse.Namespace) -> int:
    """Print the scores."""
    from plugin.observe.console import Console, capture_warnings

    # With --json there is nothing but the object on standard output.
    console = Console(stream=sys.stderr) if args.json else Console()
    flags = JobConfig.given_in(args)
    with capture_warnings(console.warn):
        metrics = evaluate(Path(args.source), args.checkpoint, flags, console)
    if args.json:
        print(json.dumps(metrics, indent=1))
    else:
        print(as_table(metrics))
    return 0


def evaluate(
    source: Path, checkpoint: str | None, flags: Mapping[str, Any], console: Any
) -> dict[str, Any]:
    """The metrics of every set, with `source` and, of a run, `checkpoint`."""
    from plugin.cluster.model_source import policy_source
    from plugin.controller.evaluation import Evaluator
    from plugin.controller.local_engine import LocalEngine, load_directory
    from plugin.controller.preflight.job_checks import check_lengths
    from plugin.controller.preflight.task_checks import evaluation_parts
    from plugin.controller.run_directory import find_source
    from plugin.engines.choice import check_engine, check_engine_model, make_engine
    from plugin.rewards.scorers import make_scorer, scorer_for

    with contextlib.ExitStack() as cleanup:
        if (source / "config.json").is_file():
            chosen, config, weights = None, _config_of_model(source, flags), source
        else:
            run_dir, chosen = find_source(source, checkpoint)
            # Where the adapters of a LoRA run began no longer matters.
            config = JobConfig.from_sources({"lora_path": None, **flags}, run_dir / "config.yaml")
        config = config.with_absolute_paths()
        if not config.eval_data:
            raise ConfigError(
                f"{source} does not say what to evaluate on; add --eval-data NAME:PATH"
            )
        check_engine(config)
        policy = policy_source(config)
        check_engine_model(config, policy.hf_config)
        check_lengths(config, policy)
        sets, sampling = evaluation_parts(config, policy.hf_config["vocab_size"], console.log)
        if chosen is not None:
            with console.phase(f"reading {chosen.name}"):
                scratch = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="megatron_tis_"))
                weights = _exported(chosen, Path(scratch), merge=config.lora_rank > 0)
        # The exported weights have the adapters in them.
        config = config.unchecked_copy(lora_rank=0)
        with console.phase("loading the model"):
            engine = make_engine(config, policy.hf_config, "engine")
            load_directory(engine, weights)
        with console.phase("evaluating"):
            scorer = make_scorer(config, sets[0].task)
            cleanup.callback(scorer.close)
            metrics = Evaluator(
                *(config, sets, LocalEngine(engine, config), sampling, console.log),
                scorer_of=lambda task: scorer_for(task, scorer, config),
            ).run(0)
    about = {"source": str(source)} | ({} if chosen is None else {"checkpoint": chosen.name})
    return {**about, **metrics}


def _config_of_model(directory: Path, flags: Mapping[str, Any]) -> JobConfig:
    """Settings for a Hugging Face directory: the rewards of --prompt-data score its responses."""
    given = {"hf_checkpoint": str(directory), **flags}
    paths = [
        path
        for text in flags.get("eval_data", ())
        if not (path := text.partition(":")[2]).isdecimal()
    ]
    if paths and flags.get("task_path") is None:
        given.setdefault("prompt_data", paths[0])
    return JobConfig.from_sources(given)


def _exported(checkpoint: Path, scratch: Path, *, merge: bool) -> Path:
    """The checkpoint as a Hugging Face model, written by a process that then frees its memory."""
    target = scratch / "model"
    command = [sys.executable, "-m", "plugin", "export", str(checkpoint), str(target)]
    command += ["--merge"] if merge else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CheckpointError(f"{checkpoint} cannot be evaluated: {done.stderr.strip()}")
    return target


def as_table(metrics: Mapping[str, Any]) -> str:
    """One line per score: the set, the metric, its value and its interval."""
    rows = [("set", "metric", "value", "95 % interval")]
    for key, value in metrics.items():
        if not key.startswith("eval/") or key.endswith(("/ci_low", "/ci_high")):
            continue
        _, name, metric = key.split("/", 2)
        low, high = metrics.get(f"{key}/ci_low"), metrics.get(f"{key}/ci_high")
        bounds = "" if low is None else f"{low:.4f} to {high:.4f}"
        shown = f"{value:.0f}" if metric.endswith("prompts") else f"{value:.4f}"
        rows.append((name, metric, shown, bounds))
    return "\n".join(text_table(rows, left=(0, 1, 3)))
