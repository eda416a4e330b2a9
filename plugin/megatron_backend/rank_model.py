"""RankModel: one rank's part of a model: its weights, checkpoints and laid out batches.

What is computed with it is in `trainer.py` (the policy), `critic.py` and `teacher.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plugin.batch_types import Microbatch, RolloutBatch
from plugin.config import TrainerConfig
from plugin.errors import BatchError, ReplayError
from plugin.loss.objective import check_loss
from plugin.loss.partial_objective import takes_separable_head
from plugin.megatron_backend.checkpoint.loading import load_checkpoint
from plugin.megatron_backend.checkpoint.saving import (
    CheckpointSaver,
    StagedCheckpoint,
    TrainerParts,
)
from plugin.megatron_backend.hf_weights.export import export_hf_weights, export_own_part
from plugin.megatron_backend.hf_weights.loading import load_hf_weights
from plugin.megatron_backend.lora.adapters import adapters_off, attach_adapters
from plugin.megatron_backend.lora.peft import export_own_adapters, load_adapters
from plugin.megatron_backend.model.builder import (
    build_model,
    build_optimizer,
    reload_main_weights,
    unwrap,
    wrap_with_ddp,
)
from plugin.megatron_backend.model.device_settings import on_this_device
from plugin.megatron_backend.parallel_groups import ParallelGroups
from plugin.megatron_backend.routing.router_replay import RecordedRoutes, share_fingerprint
from plugin.megatron_backend.routing.routes import MicrobatchRoutes, RoutedModel, routes_of
from plugin.megatron_backend.step.batch_share import (
    BatchShare,
    cut_share,
    plan_batch,
    with_stage_routes,
)
from plugin.megatron_backend.step.loss_scaling import LossScale, weigh_samples
from plugin.megatron_backend.step.optimizer_step import GuardedOptimizer, connect
from plugin.megatron_backend.step.preparation import PreparedMicrobatch, prepare
from plugin.megatron_backend.step.rank_agreement import ErrorCollector
from plugin.megatron_backend.step.schedule import Pipeline, gather_responses
from plugin.megatron_backend.step.sequence_packing import SequenceLayout
from plugin.megatron_backend.step.token_budget import fitting_tokens, token_budget
from plugin.ragged import Integers, Ragged, as_integers


def without_replay(config: TrainerConfig) -> TrainerConfig:
    """The configuration of a model with its own routing: recorded routes are the policy's."""
    return config.unchecked_copy(
        use_routing_replay=False, use_rollout_routing_replay=False, detect_routing=False
    )


@dataclass
class PreparedStep:
    """This rank's share, ready for a schedule.

    all_lengths: response lengths of the whole batch where that was given, None if only the share
    """

    share: BatchShare
    microbatches: list[PreparedMicrobatch]
    all_lengths: Integers | None
    routes: list[MicrobatchRoutes] | None = None
    fingerprint: bytes | None = None


class RankModel:
    """Chunks of a model and their optimizer on one rank.

    A rank is given its share of a batch (`BatchShare`), or every rank the same whole batch, of
    which each takes its own share: all ranks compute the same plan without communication.
    """

    def __init__(
        self,
        config: TrainerConfig,
        hf_config: Any,
        groups: ParallelGroups,
        *,
        layout: SequenceLayout = "packed",
        trainable: bool = True,
        seed: int = 1234,
        pipeline: Pipeline | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`pipeline`: runs the schedules; `device`: where batches go; None = the defaults."""
        config = on_this_device(config, hf_config)
        self.config, self.hf_config, self.groups, self.layout = config, hf_config, groups, layout
        self.pipeline = pipeline or Pipeline(groups)
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.version = 0
        # Progress of the updates on the current rollout from `version` to the next one, 0 to 1.
        self.version_progress = 0.0
        self._warned_of_oversize = False
        check_loss(config)
        takes_separable_head(config, groups.tp_size)  # refuses what can never work
        self.chunks: list[Any] = list(build_model(hf_config, config, groups, seed=seed))
        self.fitting_tokens: int | None = None
        if config.max_tokens_per_gpu == "auto":
            self.fitting_tokens = fitting_tokens(
                self.chunks, hf_config, config, groups, self.device
            )
            budget = token_budget(self.fitting_tokens, self.device.type)
            self.config = config = config.unchecked_copy(max_tokens_per_gpu=budget)
        self.optimizer: GuardedOptimizer | None = None
        if trainable:
            if config.lora_rank:
                attach_adapters(self.chunks, config, groups, seed)
            self._add_optimizer()
        watches = config.detect_routing and trainable
        self.routed_model = (
            RoutedModel.of(self.chunks) if watches or config.replays_routes else None
        )
        self.recorded_routes: dict[bytes | None, RecordedRoutes] = {}  # by share
        self._saver = CheckpointSaver()

    def _add_optimizer(self) -> None:
        """Wrap the chunks with DDP and give them an optimizer."""
        self.chunks = list(wrap_with_ddp(self.chunks, self.config, self.groups))
        optimizer = build_optimizer(self.chunks, self.config)
        connect(self.chunks, optimizer)
        self.optimizer = GuardedOptimizer(optimizer, self.config.skip_on_grad_norm)

    def load_hf_weights(self, source: str | Path | Mapping[str, Tensor]) -> None:
        """Take the weights of a Hugging Face directory or state dict; adapters stay as they are."""
        load_hf_weights([unwrap(chunk) for chunk in self.chunks], source, self.groups)
        self._reload_optimizer()

    def load_adapters(self, directory: str | Path) -> None:
        """Take the adapters of a PEFT directory."""
        load_adapters(self.chunks, Path(directory))
        self._reload_optimizer()

    def _reload_optimizer(self) -> None:
        if self.optimizer is not None:
            # The optimizer keeps float32 copies of half-precision weights.
            reload_main_weights(self.optimizer.optimizer)

    def export_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by their Hugging Face names, adapters merged in; a collective."""
        return export_hf_weights(self.chunks, self.groups)

    def export_own_part(
        self, *, round_bytes: int, gathers_experts: bool = False, described: bool = False
    ) -> Iterator[tuple[str, Tensor] | None]:
        """The weights that this rank sends to engines, a round at a time; a collective."""
        return export_own_part(
            self.chunks,
            self.groups,
            round_bytes=round_bytes,
            gathers_experts=gathers_experts,
            described=described,
        )

    def export_adapters(
        self, *, with_base: bool, round_bytes: int, described: bool = False
    ) -> Iterator[tuple[str, Tensor] | None]:
        """As `export_own_part`, adapters by their PEFT names.

        with_base: yield the base weights first
        described: these without memory
        """
        if with_base:
            with adapters_off(self.chunks):
                yield from self.export_own_part(round_bytes=round_bytes, described=described)
        yield from export_own_adapters(self.chunks, self.groups)

    def set_learning_rate(self, value: float) -> None:
        """Use `value` from the next step on."""
        assert self.optimizer is not None
        for group in self.optimizer.optimizer.param_groups:
            group["lr"] = value * group.get("lr_mult", 1.0)

    def save_checkpoint(
        self,
        directory: str | Path,
        step: int,
        user_state: dict[str, Any],
        *,
        keep_last: int | None = None,
        async_save: bool = False,
    ) -> Path:
        """Write `<directory>/step_<step>` with a JSON-able `user_state`; a collective.

        async_save: only copy what it will hold, and write it in the background. It is there when
            `finish_checkpoint` returns; what went wrong is raised by that, or by the next save.
        """
        staged = self.stage_checkpoint(directory, step, user_state, keep_last=keep_last)
        if not async_save:
            return staged.write()
        self._saver.start(staged.write)
        return Path(directory) / f"step_{step:07d}"

    def stage_checkpoint(
        self,
        directory: str | Path,
        step: int,
        user_state: dict[str, Any],
        *,
        keep_last: int | None = None,
    ) -> StagedCheckpoint:
        """Copy what `<directory>/step_<step>` will hold to host memory; a collective."""
        self.finish_checkpoint()
        scaler = None if self.optimizer is None else self.optimizer.scaler
        return self._saver.stage(
            Path(directory),
            self._parts(),
            user_state,
            step=step,
            trainer_version=self.version,
            skipped_steps=0 if self.optimizer is None else self.optimizer.skipped_steps,
            loss_scale=None if scaler is None else scaler.numbers(),
            keep_last=keep_last,
        )

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if any; raises why it is not there."""
        self._saver.finish()

    def load_checkpoint(self, directory: str | Path) -> tuple[int, dict[str, Any]]:
        """Resume from `directory` or its latest checkpoint: (step, user_state); a collective."""
        self.finish_checkpoint()
        metadata, user_state = load_checkpoint(directory, self._parts())
        self.version = metadata.trainer_version
        if self.optimizer is not None:
            self.optimizer.skipped_steps = metadata.skipped_steps
            if self.optimizer.scaler is not None and metadata.loss_scale is not None:
                self.optimizer.scaler.restore(metadata.loss_scale)
        return metadata.step, user_state

    def _parts(self) -> TrainerParts:
        optimizer = None if self.optimizer is None else self.optimizer.optimizer
        return TrainerParts(self.chunks, optimizer, self.hf_config, self.groups, self.device)

    def _prepared(
        self,
        batch: RolloutBatch | BatchShare,
        errors: ErrorCollector,
        *,
        replays_recorded: bool = False,
    ) -> PreparedStep:
        """Lay out this rank's share; errors are raised on all ranks, before a schedule."""
        step: PreparedStep | None = None
        with errors.collecting():
            if isinstance(batch, BatchShare):
                share, all_lengths = batch, None
                self._check_batch(share.batch, share.samples)
            else:
                self._check_batch(batch)
                share = self._share_of(batch)
                all_lengths = as_integers(batch.columns["response_lengths"])
            self._warn_of_oversize(share)
            microbatches = share.microbatches()
            prepared = self._laid_out(microbatches)
            for laid_out, numbers in zip(prepared, share.numbers(), strict=True):
                laid_out.columns["sample_numbers"] = numbers
            fingerprint = share_fingerprint(share) if self.config.use_routing_replay else None
            routes = self._routes(microbatches, prepared, share)
            step = PreparedStep(share, prepared, all_lengths, routes, fingerprint)
            if replays_recorded and fingerprint not in self.recorded_routes:
                raise ReplayError(
                    "--use-routing-replay: the routes were recorded for a different batch, or for "
                    "different microbatches of it; run the log-prob pass on exactly the batch that "
                    "is trained on"
                )
        errors.agree("preparing the batch")
        assert step is not None
        return step

    def _share_of(self, batch: RolloutBatch) -> BatchShare:
        """Plan the whole batch and take this rank's share."""
        groups = self.groups
        plan = plan_batch(
            batch,
            self.config,
            dp_size=groups.dp_size,
            cp_size=groups.cp_size,
            round_size=groups.pp_size if groups.vpp_size else 1,
            hidden_size=self.hf_config.hidden_size,
            longest=self.hf_config.max_position_embeddings,
        )
        batch, weight = weigh_samples(batch, self.config)
        if self.routed_model is not None and self.config.use_rollout_routing_replay:
            batch = with_stage_routes(batch, self.routed_model.route_layers)
        return cut_share(batch, plan, groups.dp_rank, weight=weight)

    def _laid_out(self, microbatches: list[Microbatch]) -> list[PreparedMicrobatch]:
        prepared = prepare(
            microbatches,
            self.groups,
            layout=self.layout,
            transformer_engine=self.config.transformer_impl == "transformer_engine",
            sequence_parallel=self.config.sequence_parallel,
            alignment=self.config.row_alignment,
            equal_rows=not self.config.variable_seq_lengths,
            device=self.device,
        )
        for microbatch in prepared:
            microbatch.columns["trainer_version"] = self.version
            microbatch.columns["current_version"] = self.version + self.version_progress
        return prepared

    def _routes(
        self,
        microbatches: list[Microbatch],
        prepared: list[PreparedMicrobatch],
        share: BatchShare,
    ) -> list[MicrobatchRoutes] | None:
        if self.routed_model is None or not self.config.use_rollout_routing_replay:
            return None
        return [
            routes_of(
                microbatch,
                laid_out.inputs,
                self.routed_model,
                self.groups,
                sequence_parallel=self.config.sequence_parallel,
                with_weights=self.config.replays_route_weights,
                sample_numbers=samples,
            )
            for microbatch, laid_out, samples in zip(
                microbatches, prepared, share.numbers(), strict=True
            )
        ]

    def _check_batch(self, batch: RolloutBatch, numbers: Integers | None = None) -> None:
        """Raise on every rank what would otherwise fail on some of them inside the model.

        numbers: sample numbers in error messages; None = their index in the batch
        """
        vocabulary = self.hf_config.vocab_size
        batch.check(numbers, vocabulary=vocabulary)
        tokens: Ragged = batch.columns["unconcat_tokens"]
        outside = (tokens.values >= vocabulary).nonzero()
        if len(outside):
            place = int(outside[0])
            sample = tokens.place_of(place)[0]
            raise BatchError(
                f"unconcat_tokens of sample {sample if numbers is None else numbers[sample]} holds "
                f"token {int(tokens.values[place])}, the model has {vocabulary}; use the model's "
                "own tokenizer"
            )

    def _warn_of_oversize(self, share: BatchShare) -> None:
        if share.oversize and not self._warned_of_oversize and self.groups.rank == 0:
            self._warned_of_oversize = True
            warnings.warn(
                f"{share.oversize} samples are longer than --max-tokens-per-gpu "
                f"{self.config.max_tokens_per_gpu} allows; each gets a microbatch of its own and "
                "may not fit into memory",
                stacklevel=4,
            )

    def _begin_update(self, step: PreparedStep) -> LossScale:
        """Put the model into training mode, zero gradients, return the factors of the loss."""
        assert self.optimizer is not None
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.optimizer.zero_grad()
        return LossScale(
            per_token=self.config.per_token,
            total_weight=step.share.total_weight,
            num_microbatches=len(step.share.counts),
            dp_cp_size=self.groups.dp_cp_size,
            loss_scale=self.optimizer.loss_scale,
        )

    def _forward_only(self, forward_step: Any, step: PreparedStep) -> list[Any]:
        """Return the results of `forward_step` for this rank's microbatches, without gradients."""
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            return self.pipeline.run(
                forward_step, self.chunks, step.microbatches, forward_only=True
            )

    def _gathered(
        self,
        results: list[Tensor | None],
        step: PreparedStep,
        trailing: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
    ) -> Ragged:
        numbers, groups = step.share.numbers(), self.groups
        lengths, group = step.all_lengths, groups.dp_cp_group
        if lengths is None:
            lengths = as_integers(step.share.batch.columns["response_lengths"])
            numbers = np.split(np.arange(len(lengths)), np.cumsum(step.share.counts)[:-1])
            group = groups.cp_group
        firsts = np.cumsum(lengths) - lengths
        flat = gather_responses(
            results,
            step.microbatches,
            [firsts[samples] for samples in numbers],
            int(lengths.sum()),
            group,
            groups,
            self.device,
            trailing,
            dtype,
        )
        if step.all_lengths is not None:
            flat = self.pipeline.tensor_from_last_stage(flat)
        return Ragged(flat.cpu(), lengths)
