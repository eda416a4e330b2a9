"""Saving and resuming a trainer, on any layout, with Megatron-Core's distributed checkpoints."""

from __future__ import annotations

import io
import logging
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.optimizer import MegatronOptimizer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from plugin.errors import CheckpointError
from plugin.megatron_backend.checkpoint import directory as directories
from plugin.megatron_backend.checkpoint.directory import CheckpointMetadata
from plugin.megatron_backend.checkpoint.rng_state import reseed, rng_state, set_rng_state
from plugin.megatron_backend.checkpoint.sharded_state import (
    load_sharded_state,
    optimizer_step,
    set_optimizer_step,
    sharded_state,
)
from plugin.megatron_backend.model.families import model_shape
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step.rank_agreement import ErrorCollector

logger = logging.getLogger(__name__)

_TENSORS = "model"
_INDEX_FILE = ".metadata"

# What `.metadata` of a checkpoint without pickled objects is made of. Nothing here runs code when it is built.
_INDEX_CLASSES = {
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "torch": {
        "Size",
        "float32",
        "bfloat16",
        "float16",
        "strided",
        "preserve_format",
        "contiguous_format",
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


@dataclass(frozen=True)
class TrainerParts:
    """What a checkpoint is made from and loaded into.

    chunks: this rank's model chunks, wrapped in DDP or not; optimizer: None saves or loads the model alone
    """

    chunks: Sequence[Any]
    optimizer: MegatronOptimizer | None
    hf_config: Any
    groups: ParallelGroups
    device: torch.device


@dataclass(frozen=True)
class TrainerState:
    """Everything else a resumed run needs: counters, and the driver's own JSON object."""

    step: int
    trainer_version: int
    skipped_steps: int
    user_state: dict[str, Any]


def save_checkpoint(
    root: str | Path, parts: TrainerParts, state: TrainerState, *, keep_last: int | None = None
) -> Path:
    """Write `<root>/step_<step>` and make it the latest; a collective of all ranks.

    `root` must be one file system that every rank sees. Until the last moment the directory is named
    `.incomplete`, so a save that dies leaves the checkpoints before it as they were.
    """
    root, groups = Path(root), parts.groups
    errors = _CheckpointErrors(
        parts.device, "check space and permissions; the checkpoints before it are untouched"
    )
    incomplete = _on_first_rank(groups, errors, lambda: _begin(root, state, keep_last))
    doing = f"writing {incomplete}"
    with errors.collecting():
        save_file(rng_state(), _rng_file(incomplete, groups.rank))
    # Before the next call, which is collective: a rank that failed here must not leave the others in it.
    errors.agree(doing)
    with errors.collecting():
        tensors = _tensors_to_write(sharded_state(parts.chunks, parts.optimizer, groups))
    errors.agree(doing)
    with errors.collecting():
        _write_tensors(tensors, incomplete / _TENSORS)
    errors.agree(doing)
    _on_first_rank(groups, errors, lambda: _complete_for_megatron(incomplete / _TENSORS))
    files: dict[str, list[int]] = {}
    with errors.collecting():
        mine = _written_by(groups.rank, directories.files_of(incomplete))
        files = directories.seal_files(incomplete, mine)
    errors.agree(doing)
    metadata = _metadata(parts, state, _merged(files, groups))
    return _on_first_rank(groups, errors, lambda: _publish(incomplete, metadata, keep_last))


class _CheckpointErrors(ErrorCollector):
    """Collects errors, and says what to do about those of files and of the libraries that write them."""

    def __init__(self, device: torch.device, fix: str) -> None:
        super().__init__(device)
        self._fix = fix

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Catch an error of the body and remember it."""
        with super().collecting():
            try:
                yield
            # torch derives its own from BaseException, which would pass by every other handler.
            except (OSError, SafetensorError, CheckpointException, CheckpointingException) as error:
                raise CheckpointError(f"{type(error).__name__}: {error}\n{self._fix}") from error


def _begin(root: Path, state: TrainerState, keep_last: int | None) -> Path:
    incomplete = directories.begin(root, state.step, keep_last)
    directories.write_json(incomplete / directories.USER_STATE_FILE, state.user_state)
    (incomplete / _TENSORS).mkdir()
    (incomplete / "rng").mkdir()
    return incomplete


def _publish(incomplete: Path, metadata: CheckpointMetadata, keep_last: int | None) -> Path:
    directories.write_metadata(incomplete, metadata)
    final = directories.publish(incomplete)
    directories.prune(final.parent, keep_last)
    return final


def _on_first_rank(
    groups: ParallelGroups, errors: _CheckpointErrors, act: Callable[[], Path]
) -> Path:
    """What `act` returns on rank 0, on every rank."""
    result: list[Path | None] = [None]
    with errors.collecting():
        if groups.rank == 0:
            result = [act()]
    errors.agree("rank 0's part of the checkpoint")
    dist.broadcast_object_list(result, src=0)
    assert result[0] is not None
    return result[0]


def _rng_file(directory: Path, rank: int) -> Path:
    return directory / "rng" / f"rank_{rank:05d}.safetensors"


def _tensors_to_write(state: ShardedStateDict) -> ShardedStateDict:
    """The tensors of a state, after the check of all ranks that together they hold each one exactly once."""
    tensors, rest = save_preprocess(state)
    if list(nested_values(rest)):
        raise CheckpointError(
            f"{list(rest)} hold something besides tensors, which would be pickled; wrap it in "
            "LocalNonpersistentObject"
        )
    return tensors


def _write_tensors(tensors: ShardedStateDict, directory: Path) -> None:
    """Write this rank's share as torch_dist; torch gathers failures, so all ranks raise or none does.

    Stands in for `dist_checkpointing.save`. That starts processes even for a synchronous save; a daemonic process
    may not, and forking one that runs gloo, NCCL or Ray threads is a gamble. And from megatron-core 0.19 on it puts
    a pickled object among the tensors.
    """
    by_key, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(tensors, True)
    torch_checkpoint.save(
        torch_strategies.mcore_to_pyt_state_dict(by_key, False),
        # With more threads torch loses the errors of all but one. Files are synced when they are sealed.
        storage_writer=torch_checkpoint.FileSystemWriter(
            directory, thread_count=1, sync_files=False
        ),
        planner=torch_strategies.MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False
        ),
    )


def _complete_for_megatron(directory: Path) -> Path:
    """Add the two files that make it a checkpoint which every version of `dist_checkpointing.load` accepts.

    Version 0.16 needs common.pt; 0.19 would otherwise look for a pickled object instead.
    """
    torch.save({}, directory / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))
    return directory


def _written_by(rank: int, names: Sequence[str]) -> list[str]:
    """The files that a rank wrote: those with its number in their names, and on rank 0 the common ones."""
    own = (f"{_TENSORS}/__{rank}_", f"rng/rank_{rank:05d}.")
    numbered = (f"{_TENSORS}/__", "rng/rank_")
    return [
        name
        for name in names
        if name.startswith(own) or (rank == 0 and not name.startswith(numbered))
    ]


def _merged(files: dict[str, list[int]], groups: ParallelGroups) -> dict[str, list[int]]:
    gathered: list[dict[str, list[int]]] = [{} for _ in range(groups.world_size)]
    dist.all_gather_object(gathered, files)
    return {name: record for part in gathered for name, record in sorted(part.items())}


def _metadata(
    parts: TrainerParts, state: TrainerState, files: dict[str, list[int]]
) -> CheckpointMetadata:
    count = None if parts.optimizer is None else optimizer_step(parts.optimizer)
    return CheckpointMetadata(
        step=state.step,
        trainer_version=state.trainer_version,
        skipped_steps=state.skipped_steps,
        optimizer_step=count,
        dtype=_dtype(parts),
        model=model_shape(parts.hf_config),
        layout=_layout(parts.groups),
        software={name: version(name) for name in ("megatron-core", "torch")},
        files=files,
    )


def _layout(groups: ParallelGroups) -> dict[str, int]:
    return {
        "world": groups.world_size,
        "tp": groups.tp_size,
        "pp": groups.pp_size,
        "vpp": groups.num_chunks,
        "cp": groups.cp_size,
        "dp": groups.dp_size,
        "ep": groups.ep_size,
        "etp": groups.etp_size,
    }


def _dtype(parts: TrainerParts) -> str:
    return str(next(parts.chunks[0].parameters()).dtype).removeprefix("torch.")


def load_checkpoint(directory: str | Path, parts: TrainerParts) -> TrainerState:
    """Load the latest checkpoint under `directory`, or the one that it is; a collective of all ranks.

    Everything that can be checked is checked before the first weight changes. Generators are restored exactly on the
    layout of the save; on another one they are seeded from it, the same way every time.
    """
    groups = parts.groups
    errors = _CheckpointErrors(
        parts.device,
        "load it with the model it was saved from, or resume from another step_<number>",
    )
    chosen = _on_first_rank(groups, errors, lambda: directories.resolve(Path(directory)))
    with errors.collecting():
        metadata = directories.read_metadata(chosen)
        _check_fits(chosen, metadata, parts)
        names = sorted(metadata.files)
        directories.check_files(chosen, metadata.files, names[groups.rank :: groups.world_size])
        check_index(chosen / _TENSORS)
        user_state = directories.read_json(chosen / directories.USER_STATE_FILE)
    errors.agree(f"checking the checkpoint {chosen}")
    with errors.collecting():
        wanted = sharded_state(parts.chunks, parts.optimizer, groups, loading=True)
        found = dist_checkpointing.load(wanted, str(chosen / _TENSORS))
        load_sharded_state(found, parts.chunks, parts.optimizer)
        if parts.optimizer is not None and metadata.optimizer_step is not None:
            set_optimizer_step(parts.optimizer, metadata.optimizer_step)
        _restore_rng(chosen, metadata, groups)
    errors.agree(f"loading the checkpoint {chosen}")
    return TrainerState(metadata.step, metadata.trainer_version, metadata.skipped_steps, user_state)


def _check_fits(directory: Path, metadata: CheckpointMetadata, parts: TrainerParts) -> None:
    ours, theirs = model_shape(parts.hf_config), metadata.model
    differing = sorted(name for name in ours.keys() | theirs if ours.get(name) != theirs.get(name))
    if differing:
        pairs = ", ".join(
            f"{name} {theirs.get(name)} (here {ours.get(name)})" for name in differing
        )
        raise CheckpointError(
            f"{directory} was saved from another model: {pairs}; load it with the model it was saved from"
        )
    if metadata.dtype != _dtype(parts):
        raise CheckpointError(
            f"{directory} holds {metadata.dtype} weights but the model has {_dtype(parts)}; "
            f"use --train-dtype {metadata.dtype}"
        )
    if parts.optimizer is not None and metadata.optimizer_step is None:
        raise CheckpointError(
            f"{directory} was saved without an optimizer, and this trainer has one; resume from another "
            "step_<number>"
        )


class _IndexReader(pickle.Unpickler):
    """Builds the classes of torch's index of tensors and refuses every other one."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, if an index needs it."""
        if name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants to build {module}.{name}")


def check_index(directory: Path) -> None:
    """Make sure that the two pickled files of a Megatron checkpoint can only become tensors and their names.

    Megatron reads `.metadata` with plain pickle, and objects that it lists likewise; so neither an unknown class
    nor any object may be in it.
    """
    path = directory / _INDEX_FILE
    try:
        index = _IndexReader(io.BytesIO(path.read_bytes())).load()
        torch.load(directory / COMMON_STATE_FNAME, map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the index of {directory} cannot be read safely: {error}; it is corrupt or was not written by this "
            "software, so do not load it; resume from another step_<number>"
        ) from None
    if not isinstance(index, Metadata):
        raise CheckpointError(f"{path} holds a {type(index).__name__} instead of torch's index")
    entries = index.state_dict_metadata.items()
    objects = [name for name, entry in entries if isinstance(entry, BytesStorageMetadata)]
    if objects:
        raise CheckpointError(
            f"{path} lists pickled objects ({objects[0]}), which this software never writes; do not load it"
        )


def _restore_rng(directory: Path, metadata: CheckpointMetadata, groups: ParallelGroups) -> None:
    if metadata.layout == _layout(groups):
        set_rng_state(load_file(_rng_file(directory, groups.rank)))
        return
    first = load_file(_rng_file(directory, 0))["torch"]
    # 31 bits: Megatron adds small numbers to the seed, and numpy takes 32.
    reseed(zlib.crc32(first.numpy().tobytes()) >> 1, groups)
    if groups.rank == 0:
        logger.warning(
            "%s was saved on layout %s and is resumed on %s: random generators start anew from a seed "
            "taken from the checkpoint",
            directory,
            metadata.layout,
            _layout(groups),
        )
