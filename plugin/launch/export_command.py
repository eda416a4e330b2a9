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
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="run directory with checkpoints, or one of its checkpoints/step_*",
    )
    parser.add_argument("target", metavar="TARGET", help="new directory for the model")
    parser.add_argument(
        "--checkpoint",
        metavar="STEP",
        help="of a run directory: such as step_0000012, or best (default: the latest)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the model."""
    from plugin.launch.console import Console, capture_warnings

    console = Console()
    with capture_warnings(console.warn):
        chosen = export(Path(args.source), Path(args.target), args.checkpoint)
    console.say(f"model of {chosen} written to {args.target}")
    return 0


def export(source: Path, target: Path, name: str | None = None) -> Path:
    """Write the model of a checkpoint to `target`; returns the checkpoint.

    source: the checkpoint, or a run directory, of which `name` or the latest is taken
    """
    from plugin.config import JobConfig
    from plugin.launch.model_source import policy_source
    from plugin.launch.resuming import find_source
    from plugin.megatron_backend.checkpoint.directory import read_metadata

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty; choose a new directory")
    run_dir, chosen = find_source(source, name)
    # Before anything asks for CUDA: one GPU might be too small for what several trained.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config = JobConfig.from_sources({}, run_dir / "config.yaml")
    policy = policy_source(config)
    _convert(chosen, target, read_metadata(chosen).dtype, policy.as_config(), config.hf_checkpoint)
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
