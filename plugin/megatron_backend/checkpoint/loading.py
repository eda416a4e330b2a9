"""Resuming a trainer on any layout from Megatron-Core's distributed checkpoints."""

from __future__ import annotations

import io
import logging
import pickle
import zlib
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from plugin.errors import CheckpointError
from plugin.megatron_backend.checkpoint import directory as directories
from plugin.megatron_backend.checkpoint.directory import USE_ANOTHER, CheckpointMetadata
from plugin.megatron_backend.checkpoint.rng_state import reseed, set_rng_state
from plugin.megatron_backend.checkpoint.saving import (
    TENSORS,
    CheckpointErrors,
    TrainerParts,
    rng_file,
)
from plugin.megatron_backend.checkpoint.sharded_state import (
    adapter_record,
    load_sharded_state,
    set_optimizer_step,
    sharded_state,
)
from plugin.megatron_backend.model.families import model_shape

logger = logging.getLogger(__name__)

_INDEX_FILE = ".metadata"

# What `.metadata` of a checkpoint without pickled objects is made of; nothing here runs code.
_INDEX_CLASSES = {
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "torch": {
        *("Size", "float32", "bfloat16", "float16"),
        *("strided", "preserve_format", "contiguous_format"),
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}


def load_checkpoint(
    directory: str | Path, parts: TrainerParts
) -> tuple[CheckpointMetadata, dict[str, Any]]:
    """Load the latest checkpoint under `directory`, or itself; return its metadata and user state.

    A collective of all ranks. Everything that can be checked is checked before the first weight
    changes. Generators are restored exactly on the layout of the save; on another one they are
    seeded from it, the same way every time.
    """
    groups, chosen = parts.groups, Path()
    errors = CheckpointErrors(
        parts.device,
        f"load it with the model it was saved from, or {USE_ANOTHER}",
    )
    with errors.collecting():
        if groups.rank == 0:
            chosen = directories.resolve(Path(directory))
    chosen = errors.agree_on_first_rank(f"looking for a checkpoint in {directory}", chosen)
    lora = adapter_record(parts.chunks, groups)
    with errors.agreeing(f"checking the checkpoint {chosen}"):
        metadata = directories.read_metadata(chosen)
        _check_fits(chosen, metadata, parts)
        _check_adapters_fit(chosen, metadata.lora, lora)
        names = sorted(metadata.files)
        directories.check_files(chosen, metadata.files, names[groups.rank :: groups.world_size])
        check_index(chosen / TENSORS)
        user_state = directories.read_json(chosen / directories.USER_STATE_FILE)
    wanted, found, doing = {}, {}, f"loading the checkpoint {chosen}"
    with errors.agreeing(doing, groups.world_size):
        wanted = sharded_state(parts.chunks, parts.optimizer, groups, loading=True)
    with errors.agreeing(doing, groups.world_size):
        found = dist_checkpointing.load(wanted, str(chosen / TENSORS))
    with errors.agreeing(doing):
        load_sharded_state(found, parts.chunks, parts.optimizer)
        if parts.optimizer is not None and metadata.optimizer_step is not None:
            set_optimizer_step(parts.optimizer, metadata.optimizer_step)
        _restore_rng(chosen, metadata, parts)
    return metadata, user_state


def _check_fits(directory: Path, metadata: CheckpointMetadata, parts: TrainerParts) -> None:
    ours, theirs = model_shape(parts.hf_config), metadata.model
    differing = sorted(name for name in ours.keys() | theirs if ours.get(name) != theirs.get(name))
    if differing:
        pairs = ", ".join(
            f"{name} {theirs.get(name)} (here {ours.get(name)})" for name in differing
        )
        raise CheckpointError(
            f"{directory} was saved from another model: {pairs}; load it with the model it was "
            "saved from"
        )
    if metadata.dtype != parts.dtype:
        raise CheckpointError(
            f"{directory} holds {metadata.dtype} weights but the model has {parts.dtype}; "
            f"use --train-dtype {metadata.dtype}"
        )
    if parts.optimizer is not None and metadata.optimizer_step is None:
        raise CheckpointError(
            f"{directory} was saved without an optimizer, and this trainer has one; {USE_ANOTHER}"
        )


def _check_adapters_fit(directory: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    if bool(theirs) != bool(ours):
        held, here = ("adapters", "trains all weights") if theirs else ("a whole model", "has LoRA")
        fix = f"set --lora-rank {theirs.get('rank')}" if theirs else "drop --lora-rank"
        raise CheckpointError(f"{directory} holds {held}, and this run {here}; {fix}")
    for name, fix in (
        ("rank", "--lora-rank"),
        ("alpha", "--lora-alpha"),
        ("targets", "--lora-target"),
    ):
        if theirs.get(name) != ours.get(name):
            raise CheckpointError(
                f"{directory} holds adapters of {name} {theirs.get(name)}, here {ours.get(name)}; "
                f"set {fix} as it was"
            )
    if theirs.get("base") != ours.get("base"):
        raise CheckpointError(
            f"{directory} holds adapters of a base with fingerprint {theirs.get('base')}, here it "
            f"is {ours.get('base')}; load them with the weights that they were trained on "
            "(--hf-checkpoint, or --seed of the built-in model)"
        )


class _IndexReader(pickle.Unpickler):
    """Builds the classes of torch's index of tensors and refuses every other one."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, if an index needs it."""
        if name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants to build {module}.{name}")


def check_index(directory: Path) -> None:
    """Make sure that the two pickled files of a checkpoint hold only tensors and their names.

    Megatron reads `.metadata` with plain pickle, and objects that it lists likewise; so neither an
    unknown class nor any object may be in it.
    """
    path = directory / _INDEX_FILE
    try:
        index = _IndexReader(io.BytesIO(path.read_bytes())).load()
        torch.load(directory / COMMON_STATE_FNAME, map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the index of {directory} cannot be read safely: {error}; it is corrupt or was not "
            f"written by this software, so do not load it; {USE_ANOTHER}"
        ) from None
    if not isinstance(index, Metadata):
        raise CheckpointError(f"{path} holds a {type(index).__name__} instead of torch's index")
    entries = index.state_dict_metadata.items()
    objects = [name for name, entry in entries if isinstance(entry, BytesStorageMetadata)]
    if objects:
        raise CheckpointError(
            f"{path} lists pickled objects ({objects[0]}), which this software never writes; do "
            "not load it"
        )


def _restore_rng(directory: Path, metadata: CheckpointMetadata, parts: TrainerParts) -> None:
    groups = parts.groups
    if metadata.layout == parts.layout:
        set_rng_state(load_file(rng_file(directory, groups.rank)))
        return
    first = load_file(rng_file(directory, 0))["torch"]
    # 31 bits: Megatron adds small numbers to the seed, and numpy takes 32.
    reseed(zlib.crc32(first.numpy().tobytes()) >> 1, groups)
    if groups.rank == 0 and parts.optimizer is not None:  # else nothing is resumed
        logger.warning(
            "%s was saved on layout %s and is resumed on %s: random generators start anew from a "
            "seed taken from the checkpoint",
            directory,
            metadata.layout,
            parts.layout,
        )
