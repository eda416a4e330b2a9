"""`megatron-tis export`: a checkpoint of a run as a Hugging Face directory.

One process on CPU loads the weights, whatever layout wrote them; it needs memory for one copy of
the model. Of a LoRA run it writes the adapters as a PEFT directory, or the model with the adapters
added to its weights.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plugin.errors import ConfigError

if TYPE_CHECKING:
    from plugin.cluster.model_source import ModelSource
    from plugin.config import JobConfig


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
    parser.add_argument(
        "--merge",
        action="store_true",
        help="of a LoRA run: write the whole model, its weights with the adapters added, instead "
        "of a PEFT adapter",
    )


def run(args: argparse.Namespace) -> int:
    """Write the model."""
    from plugin.observe.console import Console, capture_warnings

    console = Console()
    with capture_warnings(console.warn):
        what, chosen = export(Path(args.source), Path(args.target), args.checkpoint, args.merge)
    console.log(f"{what} of {chosen} written to {args.target}")
    return 0


def export(
    source: Path, target: Path, name: str | None = None, merge: bool = False
) -> tuple[str, Path]:
    """Write the model of a checkpoint to `target`; returns what was written, and the checkpoint.

    source: the checkpoint, or a run directory, of which `name` or the latest is taken
    merge: of a LoRA run, the model and not the adapters
    """
    from plugin.cluster.model_source import policy_source
    from plugin.config import JobConfig
    from plugin.controller.run_directory import find_source
    from plugin.megatron_backend.checkpoint.directory import read_metadata

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty; choose a new directory")
    run_dir, chosen = find_source(source, name)
    # Before anything asks for CUDA: one GPU might be too small for what several trained.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Where the adapters of a LoRA run began no longer matters.
    config = JobConfig.from_sources({"lora_path": None}, run_dir / "config.yaml")
    if merge and not config.lora_rank:
        raise ConfigError(f"--merge: {run_dir} has no adapters, all weights were trained; drop it")
    policy, dtype = policy_source(config), read_metadata(chosen).dtype
    with _loaded(chosen, dtype, policy, config) as (chunks, groups):
        if config.lora_rank and not merge:
            from plugin.megatron_backend.lora.adapters import lora_settings
            from plugin.megatron_backend.lora.peft import save_peft_directory

            settings = lora_settings(chunks)
            assert settings is not None
            save_peft_directory(target, chunks, settings, groups, policy.directory)
            return "adapter", chosen
        from plugin.megatron_backend.hf_weights.export import save_hf_checkpoint

        save_hf_checkpoint(target, chunks, groups, tokenizer_from=config.hf_checkpoint)
    return "model", chosen


@contextmanager
def _loaded(
    checkpoint: Path, dtype: str, policy: ModelSource, config: JobConfig
) -> Iterator[tuple[Any, Any]]:
    """The model of a checkpoint in this process, and its groups."""
    import torch

    from plugin.config import TrainerConfig
    from plugin.megatron_backend.checkpoint.loading import load_checkpoint
    from plugin.megatron_backend.checkpoint.saving import TrainerParts
    from plugin.megatron_backend.hf_weights.loading import load_hf_weights
    from plugin.megatron_backend.lora.adapters import attach_adapters
    from plugin.megatron_backend.model.builder import build_model
    from plugin.megatron_backend.parallel_groups import one_process

    lora = {name: getattr(config, name) for name in ("lora_rank", "lora_alpha", "lora_target")}
    given = {"train_dtype": dtype, "transformer_impl": "local"}
    settings = TrainerConfig.from_sources(given | lora)
    hf_config = policy.as_config()
    with one_process() as groups:
        chunks = build_model(hf_config, settings, groups)
        if settings.lora_rank:
            load_hf_weights(chunks, policy.directory or policy.random_weights(), groups)
            attach_adapters(chunks, settings, groups, seed=0)
        parts = TrainerParts(chunks, None, hf_config, groups, torch.device("cpu"))
        load_checkpoint(checkpoint, parts)
        yield chunks, groups
