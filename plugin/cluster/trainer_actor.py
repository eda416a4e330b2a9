"""One trainer rank: the body of a Ray actor around `MegatronTrainer`.

Every method is called on all ranks at once. Each rank gets its own share of a batch, and one rank
per share returns its results, as an object that stays on its node; values that are the same
everywhere are returned by rank 0 alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from plugin.batch_types import RolloutBatch
from plugin.cluster.array_transport import (
    BULK,
    Arrays,
    batch_to_arrays,
    fetched,
    from_arrays,
    narrow_arrays,
)
from plugin.cluster.directory_lock import OwnedDirectory
from plugin.cluster.interfaces import set_network
from plugin.cluster.model_source import ModelSource
from plugin.cluster.remote_calls import ReportingActor
from plugin.config import JobConfig
from plugin.config.device_defaults import engine_dtype
from plugin.config.model import DtypeName
from plugin.errors import CheckpointError
from plugin.megatron_backend.checkpoint.directory import complete_checkpoints, resolve
from plugin.megatron_backend.cpu_runtime import import_megatron
from plugin.megatron_backend.model.device_settings import set_cuda_environment
from plugin.megatron_backend.step.batch_share import BatchShare, with_stage_routes
from plugin.ragged import Ragged, Stored
from plugin.vocabulary_ids import HEAD_IDS, HEAD_LOG_PROBS
from plugin.weights import make_sender
from plugin.weights.buckets import BUCKET_BYTES, pack_buckets
from plugin.weights.checksums import Checksums, with_checksums
from plugin.weights.delta import CHUNK_BYTES, Changes, SentCopy, on_device
from plugin.weights.group import Membership, WeightGroup, open_store
from plugin.weights.ipc import device_id
from plugin.weights.lane import bucket_sizes
from plugin.weights.manifest import Manifest

if TYPE_CHECKING:
    from plugin.megatron_backend.offloading import TrainerPart

#: Where a checkpoint keeps the critic, and where that waits until the checkpoint is complete.
_CRITIC, _CRITIC_WAITS = "critic", ".critic"

#: policy, reference, critic, or what `teacher_policy` makes of a teacher's name.
PolicyName = str
_TEACHER = "teacher/"


def teacher_policy(name: str) -> PolicyName:
    """The ranks' name for a teacher."""
    return f"{_TEACHER}{name}"


@dataclass(frozen=True)
class RankPlace:
    """Where an actor runs: for the order of the ranks and for messages."""

    address: str
    node_id: str
    device: int


@dataclass(frozen=True)
class RankPart:
    """Which part of a batch a rank works on.

    dp_rank: whose samples
    reports: whether this rank returns results of its samples: one of each share does
    """

    dp_rank: int
    reports: bool


@dataclass(frozen=True)
class TrainedStep:
    """What an optimizer step returns to the driver.

    skipped: why no weight was changed, if so
    log_probs: the step's own, [response] per sample, where asked for
    seen: what detectors look at, of some samples; log-probs are the batch's, or else the step's own
    live_routes: [tokens, moe_layers, topk] of the first samples, as the trainer's routers choose
    overflow: skipped for a float16 loss scale that is still being lowered
    seconds: from the arrival of the share to the end of the step
    """

    metrics: dict[str, float]
    skipped: str | None
    live_routes: list[Tensor] | None
    overflow: bool = False
    seconds: float = 0.0
    log_probs: Stored | None = None
    seen: RolloutBatch | None = None


@dataclass(frozen=True)
class SentPart:
    """What a rank has sent of a version, and in how many messages.

    checksums: of the tensors it sent, where they were asked for
    changes: of a delta
    """

    sender: int
    nbytes: int
    messages: int
    checksums: Checksums = field(default_factory=dict)
    changes: Changes | None = None


class TrainerRank(ReportingActor):
    """Holds the policy and, where they are needed, the reference, teachers and the critic."""

    def __init__(self, config: JobConfig) -> None:
        super().__init__()
        self._config = config
        self._trainers: dict[PolicyName, Any] = {}
        self._memory: dict[PolicyName, Any] = {}
        self._rank = -1
        self._store: Any = None
        if config.transport_traits.by_device:
            # Memory in expandable segments is shared through calls that containers often forbid.
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
        set_cuda_environment(config)
        self._membership = Membership()
        self._manifests: dict[Any, Manifest] = {}
        self._sent_copy: SentCopy | None = None
        import_megatron()
        # While other actors still import theirs, and before `join`, which waits for all of them.
        import plugin.megatron_backend.trainer  # noqa: F401
        from plugin.megatron_backend.checkpoint.saving import CheckpointSaver

        self._saver = CheckpointSaver()

    def place(self) -> RankPlace:
        """The node and the device of this actor."""
        import ray

        devices = ray.get_gpu_ids()
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        return RankPlace(address, context.get_node_id(), int(devices[0]) if devices else 0)

    def open_rendezvous(self) -> str:
        """A rendezvous address for all ranks; called on rank 0.

        On one node that is a file, which the driver removes; across nodes a TCP store.
        """
        if self._config.num_nodes == 1:
            root = Path(tempfile.gettempdir())
            self._meeting = OwnedDirectory(root, "megatron_tis_", "TMPDIR", 0o700)
            return f"file://{self._meeting.path}/rendezvous"
        address = self.place().address
        # multi_tenant: init_process_group opens the same store in this process and finds this.
        self._store = open_store(address, world_size=self._config.world_size, multi_tenant=True)
        return f"tcp://{address}:{self._store.port}"

    def join(self, rank: int, rendezvous: str) -> RankPart:
        """Become rank `rank` of the process group."""
        from plugin.megatron_backend.parallel_groups import init_parallel

        self._rank = rank
        stays_here = rendezvous.startswith("file:")
        set_network(self._config, self.place().address, gloo_stays_here=stays_here)
        # Ray shows each actor its own GPU only.
        os.environ["LOCAL_RANK"] = "0"
        config = self._config
        os.environ["LOCAL_WORLD_SIZE"] = str(config.ranks_per_node)
        self._groups = init_parallel(
            rank,
            config.world_size,
            init_method=rendezvous,
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            timeout_seconds=config.step_timeout,
        )
        first = self._groups.tp_rank == 0 and self._groups.cp_rank == 0
        self._reports = first and self._groups.is_last_stage
        return RankPart(self._groups.dp_rank, self._reports)

    def fitting_tokens(self) -> int | None:
        """Tokens of a microbatch that fit into memory, if the budget is to be chosen."""
        return self._trainers["policy"].fitting_tokens

    def build(self, name: PolicyName, source: ModelSource) -> None:
        """Build one of the models and load its weights; policy and critic can be trained."""
        from plugin.megatron_backend.model.device_settings import on_this_device
        from plugin.megatron_backend.offloading import TrainerMemory
        from plugin.megatron_backend.rank_model import RankModel
        from plugin.megatron_backend.step.sequence_packing import sequence_layout
        from plugin.megatron_backend.trainer import MegatronTrainer

        config = self._config
        if name == "policy":
            self.use_threads(config, "rank", source.hf_config)
        hf_config, groups = source.as_config(), self._groups
        decided = on_this_device(config, hf_config)
        uses_engine = decided.transformer_impl == "transformer_engine"
        layout = sequence_layout(config, transformer_engine=uses_engine)
        weights = source.directory or source.random_weights()
        self._manifests.clear()
        if name == "critic":
            from plugin.megatron_backend.critic import CriticTrainer

            trainer: RankModel = CriticTrainer(
                *(config, hf_config, groups, weights),
                value_clip=config.value_clip,
                layout=layout,
                seed=config.seed,
            )
        elif name.startswith(_TEACHER):
            from plugin.megatron_backend.teacher import TeacherTrainer

            trainer = TeacherTrainer(
                *(config, hf_config, groups, weights),
                vocab_size=self._trainers["policy"].hf_config.vocab_size,
                layout=layout,
                seed=config.seed,
            )
        else:
            trainable = name == "policy"
            trainer = MegatronTrainer(
                config, hf_config, groups, layout=layout, trainable=trainable, seed=config.seed
            )
            trainer.load_hf_weights(weights)
            if trainable and config.lora_path is not None:
                trainer.load_adapters(config.lora_path)
        self._trainers[name] = trainer
        optimizer = None if trainer.optimizer is None else trainer.optimizer.optimizer
        self._memory[name] = TrainerMemory(trainer.chunks, optimizer)
        if self._rests(name):
            self._memory[name].offload(("weights",))

    def _arrived(self, arrays: Arrays) -> BatchShare:
        """The share with all that this rank needs of it: of routes those of its stage, if any."""
        share = from_arrays(BatchShare, arrays)
        if not self._config.use_rollout_routing_replay:
            batch = share.batch.without_column("rollout_routed_experts")
            return replace(share, batch=fetched(batch.without_column("rollout_routed_weights")))
        layers = self._trainers["policy"].routed_model.route_layers
        batch = with_stage_routes(share.batch, layers)
        return replace(share, batch=fetched(batch, layers=layers))

    def compute(
        self,
        share: Arrays,
        name: PolicyName,
        method: str,
        column: str,
        options: Mapping[str, Any],
    ) -> tuple[None, list[Arrays]]:
        """Nothing, and apart the results of a forward-only method for the share's responses.

        column: its name, where the method returns only one
        """
        # The sampler's likeliest ids are for the loss alone.
        share = {n: a for n, a in share.items() if n not in (HEAD_IDS, HEAD_LOG_PROBS)}
        arrived = self._arrived(share)
        # A resting model is on the device only while it computes.
        rests = self._rests(name)
        with self._memory[name].used("weights") if rests else nullcontext():
            found = getattr(self._trainers[name], method)(arrived, **options)
        columns = found if isinstance(found, dict) else {column: found}
        return None, [self._to_store(arrived, columns)]

    def _to_store(self, share: BatchShare, columns: Mapping[str, Ragged]) -> Arrays:
        """Columns of the share as they are fetched; nothing where another rank reports them."""
        if not self._reports:
            return {}
        lengths = ("total_lengths", "response_lengths")
        return batch_to_arrays(
            RolloutBatch({**{n: share.batch.columns[n] for n in lengths}, **columns})
        )

    def train(
        self,
        share: Arrays,
        version: int,
        progress: float,
        learning_rate: float,
        entropy_coef: float | None,
        with_log_probs: bool,
        every: int,
    ) -> tuple[TrainedStep, list[Arrays]]:
        """One optimizer step; apart from it its own log-probs and what detectors look at.

        version: of the weights before the rollout's first update, counted in weight syncs; ages
            refer to it
        progress: share of the rollout's updates that have been made since
        entropy_coef: from this update on; None = as before
        with_log_probs: of all samples
        every: of which samples detectors see what is light, by their numbers; 0 = none
        """
        trainer = self._trainers["policy"]
        trainer.version, trainer.version_progress = version, progress
        trainer.set_learning_rate(learning_rate)
        if entropy_coef is not None:
            trainer.set_entropy_coef(entropy_coef)
        arrived = self._arrived(share)
        began = time.monotonic()
        result = trainer.train_step(
            arrived,
            with_log_probs=with_log_probs or every > 0,
            with_live_routes=self._config.detect_mismatch and "rollout_routed_experts" in share,
        )
        skipped = None
        if not result.updated:
            skipped = _why_skipped(result, self._config.skip_on_grad_norm)
        parts: list[Arrays] = []
        if with_log_probs:
            parts.append(self._to_store(arrived, {"log_probs": result.log_probs}))
        if every:
            parts.append(self._seen(arrived, result.log_probs, every))
        live_routes = result.live_routes if self._rank == 0 else None
        # The same on every rank; the driver reads those of the first.
        metrics = {} if self._rank else result.metrics
        seconds = time.monotonic() - began
        return TrainedStep(metrics, skipped, live_routes, result.overflow, seconds), parts or [{}]

    def _seen(self, share: BatchShare, log_probs: Ragged, every: int) -> Arrays:
        """What detectors look at of every n-th sample; nothing where another rank reports it."""
        if not self._reports:
            return {}
        batch = share.batch
        light = {n: values for n, values in batch.columns.items() if n not in BULK}
        few = RolloutBatch({"log_probs": log_probs, **light})
        return narrow_arrays(few.select(np.flatnonzero(share.samples % every == 0)))

    def train_critic(self, share: Arrays, learning_rate: float) -> TrainedStep:
        """One optimizer step of the critic."""
        trainer = self._trainers["critic"]
        trainer.set_learning_rate(learning_rate)
        result = trainer.train_critic(self._arrived(share))
        skipped = None
        if not result.updated:
            skipped = f"the gradient norm of the critic is {result.grad_norm:.4g}"
        metrics = {} if self._rank else result.metrics
        return TrainedStep(metrics, skipped, None, result.overflow)

    def device(self) -> str:
        """The device of this rank; see `ipc.device_id`."""
        return device_id()

    def send_weights(
        self,
        version: int,
        group: WeightGroup,
        with_base: bool = True,
        checksum_dtype: DtypeName | None = None,
        since: int | None = None,
    ) -> SentPart | None:
        """Send this rank's part of the policy; None on ranks that only help to gather it.

        With IPC a rank sends all of them.

        with_base: where adapters are sent, also the weights that they belong to
        checksum_dtype: also report checksums of the tensors in this dtype
        since: send only what has changed since this version
        """
        from plugin.megatron_backend.hf_weights.export import sends_own_part

        trainer, groups = self._trainers["policy"], self._groups
        manifest = None
        if group.ipc_ranks:
            exported = trainer.export_hf_weights()
            number, sends = self._rank, self._rank in group.ipc_ranks
        else:
            part = self._own_part(group, with_base)
            exported, manifest = part(), self._manifest(part, group, with_base)
            number, sends = groups.pp_rank * groups.ep_size + groups.ep_rank, sends_own_part(groups)
            if group.to_servers:
                number, sends = groups.pp_rank, sends and groups.ep_rank == 0
        try:
            if not sends:
                return None
            sums: dict[str, int] = {}
            if checksum_dtype is not None:
                exported = with_checksums(exported, getattr(torch, checksum_dtype), sums)
            changes, sent = None, exported
            if self._config.weight_transport == "delta":
                copy = self._copy_of_sent()
                if since is None:
                    sent = exported = copy.remembered(version, exported)
                else:
                    chunks = copy.delta(version, since, exported)
                    sent, manifest = on_device(chunks), Manifest.of(chunks, CHUNK_BYTES)
                    changes = copy.changes
            with self._membership.of(group, lambda: make_sender(group, number)) as sender:
                nbytes, messages = sender.send(version, sent, manifest)
                return SentPart(number, nbytes, messages, sums, changes)
        finally:
            # Also after an error: the others of the stage would wait in the next gather.
            for _ in exported:
                pass

    def _copy_of_sent(self) -> SentCopy:
        """What this rank sent last, which deltas are made from."""
        if self._sent_copy is None:
            dtype = engine_dtype(self._config, cuda=torch.cuda.is_available())
            self._sent_copy = SentCopy(getattr(torch, dtype))
        return self._sent_copy

    def _own_part(self, group: WeightGroup, with_base: bool) -> Callable[..., Iterator[Any]]:
        """What this rank sends, by another export at every call."""
        trainer, size = self._trainers["policy"], BUCKET_BYTES
        if self._config.syncs_adapters:
            return partial(trainer.export_adapters, with_base=with_base, round_bytes=size)
        gathers = group.to_servers
        return partial(trainer.export_own_part, round_bytes=size, gathers_experts=gathers)

    def _manifest(
        self, part: Callable[..., Iterator[Any]], group: WeightGroup, with_base: bool
    ) -> Manifest:
        """That of what this rank sends, made once for a model; a collective with adapters."""
        known, key = self._manifests, (group.to_servers, group.lanes, with_base)
        if key not in known:
            sizes = bucket_sizes(group.lanes, on_gpu=torch.cuda.is_available())
            known[key] = Manifest.of(part(described=True), *sizes)
        return known[key]

    def export_weights(
        self, checksum_dtype: DtypeName | None = None
    ) -> tuple[list[Any], int, Checksums] | None:
        """The policy in the object store, one reference per bucket, its size, and checksums.

        None on other ranks than 0.

        checksum_dtype: of the checksums; None = there are none
        """
        import ray

        exported = self._trainers["policy"].export_hf_weights()
        if self._rank != 0:
            for _ in exported:
                pass
            return None
        references, size, sums = [], 0, dict[str, int]()
        if checksum_dtype is not None:
            exported = with_checksums(exported, getattr(torch, checksum_dtype), sums)
        for bucket in pack_buckets(exported):
            # Ray copies arrays once, into shared memory, and bytes on the way in and out.
            references.append(ray.put(np.frombuffer(bucket, np.uint8)))
            size += len(bucket)
        return references, size, sums

    def offload(self, parts: Sequence[TrainerPart]) -> int:
        """Give up the device memory of `parts` of every model; its bytes."""
        return sum(memory.offload(parts) for memory in self._memory.values())

    def onload(self, parts: Sequence[TrainerPart]) -> None:
        """Take memory for `parts` of every model that does not rest again."""
        for name, memory in self._memory.items():
            if not self._rests(name):
                memory.onload(parts)

    def _rests(self, name: PolicyName) -> bool:
        """Whether a model is on the device only while it computes (--reference-offload)."""
        rests = name == "reference" or name.startswith(_TEACHER)
        return self._config.reference_offload and rests

    def save_hf(self, directory: str, tokenizer_from: str | None, replace: bool) -> None:
        """Write the policy as a Hugging Face directory, from rank 0."""
        from plugin.megatron_backend.hf_weights.export import save_hf_checkpoint

        chunks = self._trainers["policy"].chunks
        save_hf_checkpoint(
            directory, chunks, self._groups, tokenizer_from=tokenizer_from, replace=replace
        )

    def save_checkpoint(self, root: str, step: int, user_state: dict[str, Any], keep: int) -> None:
        """Write `<root>/step_<step>` with the driver's state in it and keep the last `keep`.

        With --async-save it is there when `finish_checkpoint` returns.
        """
        self._saver.finish()
        critic, waiting = self._trainers.get("critic"), Path(root) / _CRITIC_WAITS
        if self._rank == 0:
            _move_waiting_critics(Path(root))  # the next one would take its place
        of_critic = None
        if critic is not None:
            of_critic = critic.stage_checkpoint(waiting, step, {}, keep_last=1)
        try:
            whole = self._trainers["policy"].stage_checkpoint(
                root, step, user_state, keep_last=keep
            )
        except BaseException:
            if of_critic is not None:
                of_critic.discard()
            raise

        def write(group: Any) -> None:
            saved = None
            try:
                saved = None if of_critic is None else of_critic.write(group)
                target = whole.write(group)
            except BaseException:
                whole.discard()
                if saved is not None and self._rank == 0 and not (Path(root) / saved.name).exists():
                    shutil.rmtree(saved, ignore_errors=True)
                raise
            if saved is not None and self._rank == 0:
                saved.rename(target / _CRITIC)
                shutil.rmtree(waiting)

        if self._config.async_save:
            self._saver.start(write)
        else:
            write(None)

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if any; raises why it is not there."""
        self._saver.finish()

    def load_checkpoint(self, root: str) -> dict[str, Any] | None:
        """Load the newest checkpoint in `root`; the driver's state, on rank 0 only."""
        self._saver.finish()
        _, user_state = self._trainers["policy"].load_checkpoint(root)
        if "critic" in self._trainers:
            self._trainers["critic"].load_checkpoint(_critic_of(resolve(Path(root))))
        return user_state if self._rank == 0 else None


def _move_waiting_critics(root: Path) -> None:
    """Put critics where they belong that a job which died has not moved."""
    for critic in complete_checkpoints(root / _CRITIC_WAITS):
        whole = root / critic.name
        if whole.is_dir() and not (whole / _CRITIC).exists():
            with contextlib.suppress(OSError):  # it is still found where it is
                critic.rename(whole / _CRITIC)


def _critic_of(checkpoint: Path) -> Path:
    """The critic's part of a checkpoint; it waits elsewhere if a job died before it was moved."""
    places = (checkpoint / _CRITIC, checkpoint.parent / _CRITIC_WAITS / checkpoint.name)
    for place in places:
        if place.is_dir():
            return place
    raise CheckpointError(
        f"{checkpoint} holds no critic; resume from a checkpoint of a run with "
        "--advantage-estimator gae, or start a new run"
    )


def _why_skipped(result: Any, largest: float | None) -> str:
    if math.isfinite(result.grad_norm):
        return f"the gradient norm is {result.grad_norm:.4g}, above --skip-on-grad-norm {largest}"
    if result.cause is not None:
        return f"{result.cause}; the gradient norm is {result.grad_norm}"
    if result.overflow:
        return (
            f"gradients overflow float16 at a loss scale of {result.metrics['loss_scale']:g}, "
            f"which is being lowered; the first is that of {result.bad_parameter}"
        )
    return (
        f"the gradient norm is {result.grad_norm} although the loss and its inputs are finite; the "
        f"first such gradient is that of {result.bad_parameter}"
    )
