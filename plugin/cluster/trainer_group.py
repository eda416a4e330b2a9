"""All trainer ranks as one object on the driver."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from plugin.batch_types import FIELDS, RolloutBatch
from plugin.cluster.array_transport import BLOCK_BYTES, BULK, store, stored_in, to_arrays
from plugin.cluster.model_source import ModelSource
from plugin.cluster.placement import Reservation, ResourcePlan
from plugin.cluster.remote_calls import wait_for_all
from plugin.cluster.trainer_actor import PolicyName, RankPart, TrainedStep, TrainerRank
from plugin.config import JobConfig
from plugin.config.device_defaults import trainer_dtype
from plugin.config.model import DtypeName
from plugin.megatron_backend.offloading import TrainerPart
from plugin.megatron_backend.step.batch_share import cut_share, plan_batch
from plugin.megatron_backend.step.loss_scaling import weigh_samples
from plugin.megatron_backend.step.microbatching import MicrobatchPlan
from plugin.megatron_backend.step.token_budget import token_budget
from plugin.observe.console import Console
from plugin.observe.findings import MAX_TOKENS
from plugin.ragged import Integers, Ragged, Stored, as_integers
from plugin.vocabulary_ids import TOPK_IDS, TOPK_LOG_PROBS
from plugin.weights.checksums import Checksums
from plugin.weights.group import WeightGroup

#: How long Ray may take to notice that a process is gone.
_DEATH_SECONDS = 5.0
#: Of what the driver stores, about: a token, its mask, version, log-prob and advantage.
_BYTES_PER_TOKEN = 16


class TrainerGroup:
    """Starts the ranks, orders them by node and device, and calls all of them together."""

    def __init__(
        self, config: JobConfig, plan: ResourcePlan, reservation: Reservation, console: Console
    ) -> None:
        self._config, self._console = config, console
        self._plan, self._reservation = plan, reservation
        self._idle: Callable[[], None] | None = None
        self._rendezvous = ""
        self._built: dict[PolicyName, ModelSource] = {}
        self._fewest_microbatches = 1
        self._plans: dict[bytes, MicrobatchPlan] = {}  # of a rollout, by the samples' lengths
        self._ranks = self._start()

    def _start(self) -> list[Any]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor: Any = ray.remote(TrainerRank)
        group = self._reservation.trainer
        return [
            actor.options(
                num_cpus=self._plan.rank["CPU"],
                num_gpus=self._plan.rank.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
            ).remote(self._config)
            for bundle in self._reservation.trainer_nodes
            for _ in range(self._config.ranks_per_node)
        ]

    def restart(self) -> None:
        """Restart every rank and rebuild the models, on other nodes if some have left."""
        self.close()
        idle, self._idle = self._idle, None
        self._reservation.wait_for_nodes(self._config.start_timeout)
        self._ranks = self._start()
        self.join()
        for name, source in self._built.items():
            self.build(name, source)
        self._idle = idle

    def dead_ranks(self) -> list[str]:
        """Names of the ranks whose process is gone; one that is busy or blocked counts as alive."""
        import ray

        calls = {r.call.remote("place"): n for r, n in zip(self._ranks, self._names(), strict=True)}
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_DEATH_SECONDS)
        dead = []
        for call in done:
            try:
                ray.get(call)
            except ray.exceptions.RayError:
                dead.append(calls[call])
        return dead

    def join(self) -> None:
        """Number the ranks by node and device, and connect them."""
        names = [f"trainer actor {number}" for number in range(len(self._ranks))]
        places = self._wait([rank.call.remote("place") for rank in self._ranks], names)
        nodes = list(dict.fromkeys(place.node_id for place in places))
        order = sorted(
            range(len(places)), key=lambda i: (nodes.index(places[i].node_id), places[i].device, i)
        )
        self._ranks = [self._ranks[i] for i in order]
        self.places = [places[i] for i in order]
        [self._rendezvous] = self._wait([self._ranks[0].call.remote("open_rendezvous")], ["rank 0"])
        calls = [
            rank.call.remote("join", i, self._rendezvous) for i, rank in enumerate(self._ranks)
        ]
        self._parts: list[RankPart] = self._wait(calls, self._names())

    def _wait(self, calls: list[Any], names: list[str]) -> list[Any]:
        return wait_for_all(calls, names, self._console, timeout=self._config.start_timeout)

    def build(self, name: PolicyName, source: ModelSource) -> None:
        """Build a model on every rank and load its weights."""
        import ray

        self._built[name] = source
        self._call("build", name, ray.put(source), timeout=self._config.load_patience)
        if name == "policy":
            self._choose_token_budget(source)

    def _choose_token_budget(self, source: ModelSource) -> None:
        """Replace `--max-tokens-per-gpu auto` by a number; a restart keeps it."""
        config = self._config
        if config.max_tokens_per_gpu != "auto":
            return
        fitting = self._call("fitting_tokens", timeout=config.load_patience)[0]
        longest = min(config.longest_sample, source.hf_config["max_position_embeddings"])
        budget = token_budget(fitting, "cuda" if self.on_gpu else "cpu", longest)
        self._config = config.unchecked_copy(max_tokens_per_gpu=budget)
        stages = config.pipeline_model_parallel_size
        self._fewest_microbatches = 4 * stages if stages > 1 else 1
        self._console.log(
            f"--max-tokens-per-gpu auto: {budget} tokens per microbatch (memory for {fitting}, "
            f"longest sample {longest})"
        )

    def while_waiting(self, pump: Callable[[], None] | None) -> None:
        """Set what the driver does while the ranks work: keep the engines busy."""
        self._idle = pump

    def stored(
        self, batch: RolloutBatch, parts: Sequence[Integers | None] = (None,)
    ) -> RolloutBatch:
        """A rollout's batch with what is per token in the object store, for all that is done on it.

        A rank fetches its samples from there for every pass and update, so a pass over the batch
        sends it numbers and references alone. An object holds samples of one rank in that pass,
        and of one mini-batch where these are large enough.

        parts: the samples of every mini-batch of an epoch; None = all
        """
        if isinstance(batch.columns.get("unconcat_tokens"), Ragged):
            self._plans.clear()  # another rollout; else it is something more of the same
        orders = self._planned(batch).orders()
        order = np.concatenate(orders)
        rank = np.repeat(np.arange(len(orders)), [len(samples) for samples in orders])
        number = np.zeros(len(batch), np.int64)
        for k, part in enumerate(parts):
            number[slice(None) if part is None else part] = k
        order = order[np.lexsort((number[order], rank))]
        tokens = as_integers(batch.columns["total_lengths"])[order]
        ends = np.cumsum(tokens) * _BYTES_PER_TOKEN // BLOCK_BYTES
        new = (np.diff(rank) != 0) | (np.diff(ends) != 0)
        return store(batch, np.split(order, np.flatnonzero(new) + 1))

    def log_probs(
        self, name: PolicyName, batch: RolloutBatch, *, keep_routes: bool = False
    ) -> Stored:
        """One [response] tensor per sample, by a forward-only pass of one of the policies.

        As of every pass, they stay on the nodes of the ranks that computed them.

        keep_routes: see `MegatronTrainer.compute_log_probs`
        """
        column = "ref_log_probs" if name == "reference" else "log_probs"
        if name == "reference" and self._config.reference_is_base:
            return self._computed("policy", "compute_base_log_probs", batch, [column])[column]
        options = {"keep_routes": keep_routes}
        return self._computed(name, "compute_log_probs", batch, [column], options)[column]

    def scores(self, name: PolicyName, batch: RolloutBatch) -> dict[str, Stored]:
        """The columns that the teacher `name` fills in."""
        columns = ["teacher_log_probs"]
        if self._config.distill_topk:
            columns += [TOPK_IDS, TOPK_LOG_PROBS]
        return self._computed(name, "compute_scores", batch, columns)

    def values(self, batch: RolloutBatch) -> Stored:
        """The critic's values, one [response] tensor per sample."""
        return self._computed("critic", "compute_values", batch, ["values"])["values"]

    def _computed(
        self,
        name: PolicyName,
        method: str,
        batch: RolloutBatch,
        columns: Sequence[str],
        options: Mapping[str, Any] | None = None,
    ) -> dict[str, Stored]:
        """The columns that a forward-only method of a model fills in."""
        plan, shares = self._delivered(batch)
        arguments = (name, method, columns[0], options or {})
        _, [parts] = self._call_apart("compute", *arguments, shares=shares)
        return dict.fromkeys(columns, self._located(parts, plan.orders()))

    def train(
        self,
        batch: RolloutBatch,
        version: int,
        progress: float,
        learning_rate: float,
        entropy_coef: float | None = None,
    ) -> TrainedStep:
        """One optimizer step; the arguments are those of `TrainerRank.train`."""
        plan, shares = self._delivered(batch)
        comparable, every = "rollout_log_probs" in batch, 0
        dumped = comparable and self._config.dump_log_probs is not None
        if comparable and self._config.detect_mismatch:
            every = max(1, -(-int(batch.columns["response_lengths"].sum()) // MAX_TOKENS))
        arguments = (version, progress, learning_rate, entropy_coef, dumped, every)
        parts = max(1, dumped + (every > 0))
        results, found = self._call_apart("train", *arguments, shares=shares, parts=parts)
        step: TrainedStep = results[0]
        if dumped:
            step = replace(step, log_probs=self._located(found[0], plan.orders()))
        return replace(step, seen=self._seen(batch, plan, found[-1], every)) if every else step

    def _seen(
        self, batch: RolloutBatch, plan: MicrobatchPlan, parts: Sequence[Any], every: int
    ) -> RolloutBatch:
        """Every n-th sample of a batch, with what is light in what the ranks return."""
        orders = [order[order % every == 0] // every for order in plan.orders()]
        few = batch.select(np.arange(0, len(batch), every))
        stored = dict.fromkeys(["log_probs", *few.columns], self._located(parts, orders))
        return RolloutBatch(
            {
                name: few.columns[name] if FIELDS[name].shape == "scalar" else column
                for name, column in stored.items()
                if name not in BULK
            }
        )

    def train_critic(self, batch: RolloutBatch, learning_rate: float) -> TrainedStep:
        """One optimizer step of the critic."""
        _, shares = self._delivered(batch)
        step: TrainedStep = self._call("train_critic", learning_rate, shares=shares)[0]
        return step

    def _planned(self, batch: RolloutBatch) -> MicrobatchPlan:
        """The microbatches of a batch; one plan for all passes and updates on its samples."""
        lengths = as_integers(batch.columns["total_lengths"]).tobytes()
        if lengths not in self._plans:
            config, hf_config = self._config, self._built["policy"].hf_config
            stages = config.pipeline_model_parallel_size
            self._plans[lengths] = plan_batch(
                batch,
                config,
                dp_size=1 + max(part.dp_rank for part in self._parts),
                cp_size=config.context_parallel_size,
                round_size=stages if config.virtual_pipeline_model_parallel_size else 1,
                hidden_size=hf_config["hidden_size"],
                longest=hf_config["max_position_embeddings"],
                fewest=self._fewest_microbatches,
            )
        return self._plans[lengths]

    def _delivered(self, batch: RolloutBatch) -> tuple[MicrobatchPlan, list[Any]]:
        """Put one share per data-parallel rank into the object store; a reference for every rank.

        Ranks of one share (tensor, context and pipeline parallel ones) get the same object, and
        each fetches what of its columns is elsewhere.
        """
        import ray

        plan = self._planned(batch)
        batch, weight = weigh_samples(batch, self._config)
        if "rollout_routed_weights" in batch and not self._config.replays_route_weights:
            batch = batch.without_column("rollout_routed_weights")  # they are for the dump only
        objects = [
            ray.put(to_arrays(cut_share(batch, plan, rank, weight=weight)))
            for rank in range(len(plan.ranks))
        ]
        return plan, [objects[part.dp_rank] for part in self._parts]

    def _located(self, parts: Sequence[Any], orders: Sequence[Integers]) -> Stored:
        """A column in what the ranks return, one object from each share.

        orders: the numbers of the samples in each
        """
        by_share = {
            part.dp_rank: found
            for part, found in zip(self._parts, parts, strict=True)
            if part.reports
        }
        return stored_in([by_share[rank] for rank in range(len(orders))], orders)

    @property
    def dtype(self) -> DtypeName:
        """Of the ranks' weights and activations."""
        return trainer_dtype(self._config, cuda=self.on_gpu)

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks compute on GPUs."""
        return self._plan.uses_gpus

    def export_weights(
        self, checksum_dtype: DtypeName | None = None
    ) -> tuple[list[Any], int, Checksums]:
        """References to the policy's weight buckets in the object store, their size, checksums.

        checksum_dtype: see `TrainerRank.export_weights`
        """
        return self._call("export_weights", checksum_dtype)[0]

    def send_weights(
        self,
        version: int,
        group: WeightGroup,
        *,
        with_base: bool = True,
        checksum_dtype: DtypeName | None = None,
        since: int | None = None,
    ) -> dict[Any, str]:
        """The calls by which every rank sends its part of the weights, with the ranks' names.

        with_base, checksum_dtype, since: see `TrainerRank.send_weights`
        """
        arguments = (version, group, with_base, checksum_dtype, since)
        return {
            rank.call.remote("send_weights", *arguments): name
            for rank, name in zip(self._ranks, self._names(), strict=True)
        }

    def devices(self) -> list[str]:
        """The device of every rank, to pair ranks with the engines that share it."""
        return self._call("device")

    def rank_ids(self) -> list[Any]:
        """Identifies the current ranks; differs after a restart."""
        return list(self._ranks)

    def while_idle(self) -> None:
        """Do what the driver does while the ranks work."""
        if self._idle is not None:
            self._idle()

    def save_checkpoint(self, root: str, step: int, user_state: dict[str, Any]) -> None:
        """Write policy, optimizer and the driver's state as the newest checkpoint in `root`.

        With --async-save it is there when `finish_checkpoint` returns.
        """
        self._call("save_checkpoint", root, step, user_state, self._config.keep_checkpoints)

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if any; raises why it is not there."""
        self._call("finish_checkpoint")

    def load_checkpoint(self, root: str) -> dict[str, Any]:
        """Load the newest checkpoint in `root` and return the driver's state."""
        return self._call("load_checkpoint", root, timeout=self._config.load_patience)[0]

    def offload(self, parts: Sequence[TrainerPart]) -> None:
        """Give up the device memory of `parts` on every rank."""
        self._call("offload", tuple(parts))

    def onload(self, parts: Sequence[TrainerPart]) -> None:
        """Take memory for `parts` again."""
        self._call("onload", tuple(parts))

    def save_hf(self, directory: str, tokenizer_from: str | None, *, replace: bool) -> None:
        """Write the policy as a Hugging Face directory."""
        self._call("save_hf", directory, tokenizer_from, replace)

    def close(self) -> None:
        """End the actors; what they compute is lost."""
        import ray

        for rank in self._ranks:
            ray.kill(rank)
        if self._rendezvous.startswith("file://"):
            # On a machine other than the driver's, the next job there removes it.
            directory = Path(self._rendezvous.removeprefix("file://")).parent
            shutil.rmtree(directory, ignore_errors=True)

    def _call(
        self,
        method: str,
        *arguments: Any,
        shares: list[Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Results of all ranks; with `shares`, each rank gets its own as the first argument."""
        calls = [
            rank.call.remote(method, *mine, *arguments) for rank, mine in self._with_own(shares)
        ]
        return self._results(calls, timeout)

    def _call_apart(
        self, method: str, *arguments: Any, shares: list[Any], parts: int = 1
    ) -> tuple[list[Any], list[list[Any]]]:
        """Heads of all ranks' results; and for each part of a result, references of all ranks.

        The driver owns the parts, so they outlive the rank; they are lost only with its node.
        """
        calls = [
            rank.call_apart.options(num_returns=1 + parts).remote(method, *mine, *arguments)
            for rank, mine in self._with_own(shares)
        ]
        heads, *found = map(list, zip(*calls, strict=True))
        return self._results(heads), found

    def _with_own(self, shares: list[Any] | None) -> list[tuple[Any, tuple[Any, ...]]]:
        """Every rank, with its share as an argument."""
        own = [()] * len(self._ranks) if shares is None else [(share,) for share in shares]
        return list(zip(self._ranks, own, strict=True))

    def _results(self, calls: list[Any], timeout: float | None = None) -> list[Any]:
        return wait_for_all(
            calls,
            self._names(),
            self._console,
            timeout=timeout or self._config.step_timeout,
            while_waiting=self._idle,
        )

    def places_as_text(self) -> str:
        """How many ranks run on each address, for messages."""
        counts = Counter(place.address for place in self.places)
        return ", ".join(f"{count} on {address}" for address, count in counts.items())

    def _names(self) -> list[str]:
        return [f"rank {i} on {place.address}" for i, place in enumerate(self.places)]
