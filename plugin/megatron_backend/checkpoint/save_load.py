"""Saving and resuming a trainer, on any layout, with Megatron-Core's distributed checkpoints."""

from __future__ import annotations

import io
import logging
import pickle
import zlib
from collections.abc import Iterator, Sequence
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
from plugin.megatron_backend.checkpoint.directory import USE_ANOTHER, CheckpointMetadata
from plugin.megatron_backend.checkpoint.rng_state import reseed, rng_state, set_rng_state
from plugin.megatron_backend.checkpoint.sharded_state import (
    adapter_record,
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


@dataclass(frozen=True)
class TrainerParts:
    """What a checkpoint is made from and loaded into.

    chunks: this rank's model chunks, wrapped in DDP or not
    optimizer: None saves or loads the model alone
    """

    chunks: Sequence[Any]
    optimizer: MegatronOptimizer | None
    hf_config: Any
    groups: ParallelGroups
    device: torch.device

    @property
    def dtype(self) -> str:
        """Of the weights."""
        return str(next(self.chunks[0].parameters()).dtype).removeprefix("torch.")

    @property
    def layout(self) -> dict[str, int]:
        """Parallel sizes."""
        names = ("tp", "pp", "cp", "dp", "ep", "etp")
        sizes = {name: getattr(self.groups, f"{name}_size") for name in names}
        return {"world": self.groups.world_size, "vpp": self.groups.num_chunks, **sizes}


def save_checkpoint(
    root: str | Path,
    parts: TrainerParts,
    user_state: dict[str, Any],
    *,
    step: int,
    trainer_version: int,
    skipped_steps: int,
    loss_scale: dict[str, float] | None = None,
    keep_last: int | None = None,
) -> Path:
    """Write `<root>/step_<step>` and make it the latest; a collective of all ranks.

    `root` must be one file system that every rank sees. Until the last moment the directory is
    named `.incomplete`, so a save that dies leaves the checkpoints before it as they were.
    """
    groups = parts.groups
    errors = _CheckpointErrors(
        parts.device, "check space and permissions; the checkpoints before it are untouched"
    )
    incomplete, final, tensors, files = Path(), Path(), {}, {}
    with errors.collecting():
        if groups.rank == 0:
            incomplete = directories.begin(Path(root), step, keep_last)
            directories.write_json(incomplete / directories.USER_STATE_FILE, user_state)
            (incomplete / _TENSORS).mkdir()
            (incomplete / "rng").mkdir()
    incomplete = errors.agree_on_first_rank("starting a checkpoint", incomplete)
    doing = f"writing {incomplete}"
    with errors.agreeing(doing):
        save_file(rng_state(), _rng_file(incomplete, groups.rank))
    with errors.agreeing(doing, groups.world_size):
        tensors = sharded_state(parts.chunks, parts.optimizer, groups)
    with errors.agreeing(doing, groups.world_size):
        tensors = _tensors_to_write(tensors)
    with errors.agreeing(doing, groups.world_size):
        _write_tensors(tensors, incomplete / _TENSORS)
    with errors.agreeing(doing):
        if groups.rank == 0:
            # Every version of `dist_checkpointing.load` accepts the directory with these two files:
            # 0.16 needs common.pt, and 0.19 would otherwise look for a pickled object instead.
            torch.save({}, incomplete / _TENSORS / COMMON_STATE_FNAME)
            save_config(CheckpointingConfig("torch_dist", 1), str(incomplete / _TENSORS))
    with errors.agreeing(doing):
        mine = _written_by(groups.rank, directories.files_of(incomplete))
        files = directories.seal_files(incomplete, mine)
    lora = adapter_record(parts.chunks, groups)
    gathered: list[dict[str, list[int]]] = [{} for _ in range(groups.world_size)]
    dist.all_gather_object(gathered, files)
    metadata = CheckpointMetadata(
        step=step,
        trainer_version=trainer_version,
        skipped_steps=skipped_steps,
        loss_scale=loss_scale,
        optimizer_step=None if parts.optimizer is None else optimizer_step(parts.optimizer),
        dtype=parts.dtype,
        model=model_shape(parts.hf_config),
        layout=parts.layout,
        software={name: version(name) for name in ("megatron-core", "torch")},
        files={name: record for part in gathered for name, record in sorted(part.items())},
        lora=lora,
    )
    with errors.collecting():
        if groups.rank == 0:
            directories.write_metadata(incomplete, metadata)
            final = directories.publish(incomplete)
            directories.prune(final.parent, keep_last)
    return errors.agree_on_first_rank(f"publishing {incomplete}", final)


class _CheckpointErrors(ErrorCollector):
    """Collects errors, and says what to do about those of files and of writing libraries."""

    def __init__(self, device: torch.device, fix: str) -> None:
        super().__init__(device)
        self._fix = fix

    def is_shared(self, error: Exception) -> bool:
        """True for what torch and Megatron find together, or after their last collective."""
        return isinstance(error, CheckpointError)

    @contextmanager
    def collecting(self, peers: int = 1) -> Iterator[None]:
        """Catch an error of the body and remember it."""
        with super().collecting(peers):
            try:
                yield
            # torch derives its own from BaseException, which would pass by every other handler.
            except (OSError, SafetensorError, CheckpointException, CheckpointingException) as error:
                raise CheckpointError(f"{type(error).__name__}: {error}\n{self._fix}") from error

    @contextmanager
    def agreeing(self, what: str, peers: int = 1) -> Iterator[None]:
        """Collect errors of the body, then raise on every rank if any has one.

        The body of the next one may be collective: a rank that failed must not leave the others
        in it.
        """
        with self.collecting(peers):
            yield
        self.agree(what)

    def agree_on_first_rank(self, what: str, path: Path) -> Path:
        """Raise on every rank if rank 0 failed; else rank 0's `path`, on every rank."""
        self.agree(what)
        paths = [path]
        dist.broadcast_object_list(paths, src=0)
        return paths[0]


def _rng_file(directory: Path, rank: int) -> Path:
    return directory / "rng" / f"rank_{rank:05d}.safetensors"


def _tensors_to_write(state: ShardedStateDict) -> ShardedStateDict:
    """The tensors of a state; a collective, which checks that ranks hold each one exactly once."""
    tensors, rest = save_preprocess(state)
    if list(nested_values(rest)):
        raise CheckpointError(
            f"{list(rest)} hold something besides tensors, which would be pickled; wrap it in "
            "LocalNonpersistentObject"
        )
    return tensors


def _write_tensors(tensors: ShardedStateDict, directory: Path) -> None:
    """Write this rank's share as torch_dist; torch gathers failures: all ranks raise or none does.

    Used instead of `dist_checkpointing.save`, which starts processes even for a synchronous save: a
    daemonic process may not, and forking one that runs gloo, NCCL or Ray threads is a gamble. From
    megatron-core 0.19 on it also puts a pickled object among the tensors.
    """
    by_key, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(tensors, True)
    torch_checkpoint.save(
        torch_strategies.mcore_to_pyt_state_dict(by_key, False),
        # With more threads torch loses the errors of all but one. Sealing syncs the files.
        storage_writer=torch_checkpoint.FileSystemWriter(
            directory, thread_count=1, sync_files=False
        ),
        planner=torch_strategies.MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False
        ),
    )


def _written_by(rank: int, names: Sequence[str]) -> list[str]:
    """The files that a rank wrote: those with its number; on rank 0 also the common ones."""
    own = (f"{_TENSORS}/__{rank}_", f"rng/rank_{rank:05d}.")
    numbered = (f"{_TENSORS}/__", "rng/rank_")
    return [
        name
        for name in names
        if name.startswith(own) or (rank == 0 and not name.startswith(numbered))
    ]


def load_checkpoint(
    directory: str | Path, parts: TrainerParts
) -> tuple[CheckpointMetadata, dict[str, Any]]:
    """Load the latest checkpoint under `directory`, or itself; return its metadata and user state.

    A collective of all ranks. Everything that can be checked is checked before the first weight
    changes. Generators are restored exactly on the layout of the save; on another one they are
    seeded from it, the same way every time.
    """
    groups, chosen = parts.groups, Path()
    errors = _CheckpointErrors(
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
        check_index(chosen / _TENSORS)
        user_state = directories.read_json(chosen / directories.USER_STATE_FILE)
    wanted, found, doing = {}, {}, f"loading the checkpoint {chosen}"
    with errors.agreeing(doing, groups.world_size):
        wanted = sharded_state(parts.chunks, parts.optimizer, groups, loading=True)
    with errors.agreeing(doing, groups.world_size):
        found = dist_checkpointing.load(wanted, str(chosen / _TENSORS))
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
        set_rng_state(load_file(_rng_file(directory, groups.rank)))
        return
    first = load_file(_rng_file(directory, 0))["torch"]
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
