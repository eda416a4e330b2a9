"""`megatron-tis export`: a checkpoint of a run as a Hugging Face directory.

One process on CPU loads the weights, whatever layout wrote them; it needs memory for one copy of
the model.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from plugin.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the target and optionally the checkpoint."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="run directory with checkpoints")
    parser.add_argument("target", metavar="TARGET", help="new directory for the model")
    parser.add_argument(
        "--checkpoint", metavar="STEP", help="such as step_0000012 (default: the latest)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the model."""
    from plugin.launch.console import Console, capture_warnings

    console = Console()
    with capture_warnings(console.warn):
        chosen = export(Path(args.run_dir), Path(args.target), args.checkpoint)
    console.say(f"model of {chosen} written to {args.target}")
    return 0


def export(run_dir: Path, target: Path, name: str | None = None) -> Path:
    """Write the model of a checkpoint of `run_dir` to `target`; returns the checkpoint."""
    from plugin.config import JobConfig
    from plugin.config.flags import read_yaml
    from plugin.launch.model_source import policy_source
    from plugin.launch.resuming import find_checkpoint
    from plugin.launch.run_directory import CHECKPOINTS

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty; choose a new directory")
    settings_file = run_dir / "config.yaml"
    read_yaml(settings_file, "RUN_DIR")
    chosen = find_checkpoint(run_dir / CHECKPOINTS, name, "--checkpoint")
    if chosen is None:
        raise ConfigError(
            f"{run_dir} holds no complete checkpoint; give the run directory of a job that saved "
            "one (--save-interval, or at the end)"
        )
    # Before anything asks for CUDA: one GPU might be too small for what several trained.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config = JobConfig.from_sources({}, settings_file)
    source = policy_source(config)
    _convert(chosen, target, config.train_dtype, source.as_config(), config.hf_checkpoint)
    return chosen


def _convert(
    checkpoint: Path, target: Path, dtype: str, hf_config: object, tokenizer_from: str | None
) -> None:
    import torch

    from plugin.config import TrainerConfig
    from plugin.megatron_backend.checkpoint.save_load import TrainerParts, load_checkpoint
    from plugin.megatron_backend.model.builder import build_model
    from plugin.megatron_backend.model.hf_weights import save_hf_checkpoint
    from plugin.megatron_backend.parallel_groups import destroy_parallel, init_parallel

    with tempfile.TemporaryDirectory(prefix="megatron_tis_") as meeting:
        groups = init_parallel(0, 1, init_method=f"file://{meeting}/rendezvous")
        try:
            config = TrainerConfig.from_sources({"train_dtype": dtype, "transformer_impl": "local"})
            chunks = build_model(hf_config, config, groups)
            parts = TrainerParts(chunks, None, hf_config, groups, torch.device("cpu"))
            load_checkpoint(checkpoint, parts)
            save_hf_checkpoint(target, chunks, groups, tokenizer_from=tokenizer_from)
        finally:
            destroy_parallel()
