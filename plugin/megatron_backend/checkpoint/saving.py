"""Saving a trainer with Megatron-Core's distributed checkpoints, in the background if wanted.

A save has two halves. Staging copies what this rank writes to host memory: the trainer waits for
it, and may then change the weights. Writing needs only those copies and a process group of its own,
so that a thread can do it while the trainer trains.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
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
from megatron.core.dist_checkpointing.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.optimizer import MegatronOptimizer
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from plugin.errors import CheckpointError
from plugin.megatron_backend.checkpoint import directory as directories
from plugin.megatron_backend.checkpoint.directory import CheckpointMetadata
from plugin.megatron_backend.checkpoint.rng_state import rng_state
from plugin.megatron_backend.checkpoint.sharded_state import (
    adapter_record,
    optimizer_step,
    sharded_state,
)
from plugin.megatron_backend.model.families import model_shape
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.step.rank_agreement import ErrorCollector

#: The folder of a checkpoint with Megatron's own files.
TENSORS = "model"
_SLOWEST_WRITE = timedelta(days=1)
_FIX = "check space and permissions; the checkpoints before it are untouched"


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


class CheckpointErrors(ErrorCollector):
    """Collects errors, and says what to do about those of files and of writing libraries."""

    def __init__(
        self, device: torch.device, fix: str, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(device, group)
        self._fix = fix

    def is_shared(self, error: Exception) -> bool:
        """True for what torch and Megatron find together, or after their last collective."""
        return isinstance(error, CheckpointError)

    @contextmanager
    def collecting(self, peers: int = 1, what: str = "") -> Iterator[None]:
        """Catch an error of the body, which does `what`, and remember it."""
        with super().collecting(peers):
            try:
                yield
            # torch derives its own from BaseException, which would pass by every other handler.
            except (OSError, SafetensorError, CheckpointException, CheckpointingException) as error:
                doing = f"{what}: " if what else ""
                raise CheckpointError(f"{doing}{_in_words(error)}\n{self._fix}") from error

    @contextmanager
    def agreeing(self, what: str, peers: int = 1) -> Iterator[None]:
        """Collect errors of the body, then raise on every rank if any has one.

        The body of the next one may be collective: a rank that failed must not leave the others
        in it.
        """
        with self.collecting(peers, what):
            yield
        self.agree(what)

    def agree_on_first_rank(self, what: str, path: Path) -> Path:
        """Raise on every rank if rank 0 failed; else rank 0's `path`, on every rank."""
        self.agree(what)
        paths = [path]
        dist.broadcast_object_list(paths, src=0, group=self.group)
        return paths[0]


def _in_words(error: BaseException) -> str:
    """An error's type and text; of torch's collected ones the first that a disk is the cause of."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    for rank, (failure, _) in failures.items():
        if isinstance(failure, OSError):
            return f"rank {rank}: {failure}"
    return f"{type(error).__name__}: {error}"


class _FileWriter(torch_checkpoint.FileSystemWriter):
    """Raises what the disk said, not that an archive which it cut off cannot be closed."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise (cause or error) from None


@dataclass
class StagedCheckpoint:
    """What this rank writes of a checkpoint, in host memory; nothing of it changes any more."""

    directory: Path
    tensors: ShardedStateDict
    generators: dict[str, Tensor]
    metadata: CheckpointMetadata
    keep_last: int | None
    rank: int

    def write(self, group: dist.ProcessGroup | None = None) -> Path:
        """Write the checkpoint and make it the latest; a collective of all ranks over `group`.

        Until the last moment the directory is named `.incomplete`, so a save that dies leaves the
        checkpoints before it as they were. One that fails removes what it wrote.
        """
        try:
            return self._write(group)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what has been written, unless the checkpoint was published."""
        self.tensors = {}
        if self.rank == 0:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _write(self, group: dist.ProcessGroup | None) -> Path:
        device = torch.device("cpu") if group is not None else self._device_of_default_group()
        errors = CheckpointErrors(device, _FIX, group)
        incomplete, files, final = self.directory, {}, Path()
        doing = f"writing {incomplete}"
        with errors.agreeing(doing):
            save_file(self.generators, rng_file(incomplete, self.rank))
        with errors.agreeing(doing, dist.get_world_size()):
            _write_tensors(self.tensors, incomplete / TENSORS, group)
        self.tensors = {}
        with errors.agreeing(doing):
            if self.rank == 0:
                # Every version of `dist_checkpointing.load` accepts the directory with these files:
                # 0.16 needs common.pt, and 0.19 would otherwise look for a pickled object instead.
                torch.save({}, incomplete / TENSORS / COMMON_STATE_FNAME)
                save_config(CheckpointingConfig("torch_dist", 1), str(incomplete / TENSORS))
            files = directories.seal_files(incomplete, self._written())
        gathered: list[Any] | None = [None] * dist.get_world_size() if self.rank == 0 else None
        dist.gather_object(files, gathered, dst=0, group=group)
        with errors.collecting(what=f"publishing {incomplete}"):
            if gathered is not None:
                every = {name: record for part in gathered for name, record in part.items()}
                directories.write_metadata(incomplete, replace(self.metadata, files=every))
                final = directories.publish(incomplete)
                directories.prune(final.parent, self.keep_last)
        return errors.agree_on_first_rank(f"publishing {incomplete}", final)

    def _device_of_default_group(self) -> torch.device:
        return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def _written(self) -> list[str]:
        """The files of this rank; rank 0 has also written the common ones.

        By their names: a rank that lists the directory looks at the files of all others.
        """
        own = [rng_file(Path(), self.rank).as_posix(), f"{TENSORS}/__{self.rank}_0.distcp"]
        if self.rank == 0:
            tensors = (".metadata", COMMON_STATE_FNAME, dist_checkpointing.core.CONFIG_FNAME)
            own += [directories.USER_STATE_FILE, *(f"{TENSORS}/{name}" for name in tensors)]
        return sorted(name for name in own if (self.directory / name).is_file())


class CheckpointSaver:
    """Saves one trainer again and again; at most one save is under way.

    What does not change between saves, which rank writes which tensor, is computed once.
    """

    def __init__(self) -> None:
        self._distribution: ShardDistribution | None = None
        self._checked = False
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def stage(
        self,
        root: Path,
        parts: TrainerParts,
        user_state: dict[str, Any],
        *,
        step: int,
        trainer_version: int,
        skipped_steps: int,
        loss_scale: dict[str, float] | None = None,
        keep_last: int | None = None,
    ) -> StagedCheckpoint:
        """Copy what `<root>/step_<step>` will hold; a collective of all ranks.

        `root` must be one file system that every rank sees.
        """
        groups = parts.groups
        errors = CheckpointErrors(parts.device, _FIX)
        incomplete, tensors = Path(), {}
        with errors.collecting(what=f"starting a checkpoint in {root}"):
            if groups.rank == 0:
                incomplete = _begun(root, step, keep_last, user_state)
        incomplete = errors.agree_on_first_rank("starting a checkpoint", incomplete)
        doing = f"copying the weights for {incomplete}"
        with errors.agreeing(doing, groups.world_size):
            tensors = sharded_state(parts.chunks, parts.optimizer, groups)
        with errors.agreeing(doing, groups.world_size):
            tensors = self._own_tensors(tensors, groups)
        with errors.agreeing(doing):
            _copy_to_host(tensors)
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
            lora=adapter_record(parts.chunks, groups),
        )
        return StagedCheckpoint(incomplete, tensors, rng_state(), metadata, keep_last, groups.rank)

    def _own_tensors(self, state: ShardedStateDict, groups: ParallelGroups) -> ShardedStateDict:
        """The tensors that this rank writes; a collective.

        The first one checks that ranks hold each tensor exactly once, and spreads those that data
        parallel ranks share over them.
        """
        tensors, rest = save_preprocess(state, validate_access_integrity=not self._checked)
        if list(nested_values(rest)):
            raise CheckpointError(
                f"{list(rest)} hold something besides tensors, which would be pickled; wrap it in "
                "LocalNonpersistentObject"
            )
        self._checked = True
        if groups.dp_cp_size > 1:
            if self._distribution is None:
                self._distribution = determine_main_replica_uniform_distribution(
                    tensors, groups.dp_cp_group
                )
            distribute_main_replicas_with_precomputed_distribution(
                tensors, groups.dp_cp_group, self._distribution
            )
        return torch_strategies._replace_state_dict_keys_with_sharded_keys(tensors, True)[0]

    def start(self, write: Callable[[dist.ProcessGroup | None], Any]) -> None:
        """Call `write` in the background, with a process group for it alone; a collective."""
        self.finish()
        if self._group is None:
            # A rank that dies closes its connections; one whose disk is slow may take its time.
            self._group = dist.new_group(backend="gloo", timeout=_SLOWEST_WRITE)

        def run() -> None:
            try:
                write(self._group)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the write that is under way, if any; raises what went wrong with it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


def _begun(root: Path, step: int, keep_last: int | None, user_state: dict[str, Any]) -> Path:
    """A new directory for the files of a checkpoint, with those of the driver in it; or none."""
    incomplete = directories.begin(root, step, keep_last)
    try:
        directories.write_json(incomplete / directories.USER_STATE_FILE, user_state)
        (incomplete / TENSORS).mkdir()
        (incomplete / "rng").mkdir()
    except BaseException:
        shutil.rmtree(incomplete, ignore_errors=True)
        raise
    return incomplete


def rng_file(directory: Path, rank: int) -> Path:
    """Where a rank's generators are stored."""
    return directory / "rng" / f"rank_{rank:05d}.safetensors"


def _copy_to_host(tensors: ShardedStateDict) -> None:
    """Replace tensors by copies; those of a device travel together."""
    on_device = False
    for each in nested_values(tensors):
        assert isinstance(each, ShardedTensor)
        data = each.data.detach()
        if data.is_cuda:
            on_device = True
            copy = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
            each.data = copy.copy_(data, non_blocking=True)
        else:
            each.data = data.clone(memory_format=torch.contiguous_format)
    if on_device:
        torch.cuda.synchronize()


def _write_tensors(
    by_key: ShardedStateDict, directory: Path, group: dist.ProcessGroup | None
) -> None:
    """Write this rank's share as torch_dist; torch gathers failures: all ranks raise or none does.

    Used instead of `dist_checkpointing.save`, whose writers are processes: a daemonic process may
    start none, and forking one that runs gloo, NCCL or Ray threads is a gamble. From megatron-core
    0.19 on it also puts a pickled object among the tensors.
    """
    torch_checkpoint.save(
        torch_strategies.mcore_to_pyt_state_dict(by_key, False),
        # With more threads torch loses the errors of all but one. Sealing syncs the files.
        storage_writer=_FileWriter(directory, thread_count=1, sync_files=False),
        planner=torch_strategies.MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False
        ),
        process_group=group,
    )
