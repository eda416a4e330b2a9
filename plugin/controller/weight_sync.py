"""New weights from the trainer to the engines: from rank to worker, or through the object store.

Process groups join every rank that sends a part of the model with the workers of all engines; on
shared devices engines read the memory of the ranks beside them (IPC). The driver keeps the store at
which they meet, watches all of them, and aborts a transfer when one is lost: the others stop
waiting, a lost engine is replaced, and the weights are sent again to those that do not have them. A
lost trainer rank is raised to the caller. An engine that was replaced gets the trainer's weights as
soon as the trainer is not changing them, and no request before that.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from plugin.cluster.engine_pool import EnginePool
from plugin.cluster.remote_calls import SILENCE_SECONDS, EndedCalls, Heartbeat, result_of
from plugin.cluster.trainer_actor import SentPart
from plugin.cluster.trainer_group import TrainerGroup
from plugin.config import JobConfig
from plugin.config.device_defaults import engine_dtype
from plugin.config.model import DtypeName
from plugin.controller.weight_deltas import DeltaBases
from plugin.engines.weight_changes import ProbeAnswer, wrong_tensors
from plugin.errors import (
    ActorLost,
    DeltaError,
    EngineError,
    FindingError,
    MegatronTisError,
    ParallelError,
    TransferError,
)
from plugin.observe.console import Console
from plugin.observe.probe_diagnosis import checksum_finding
from plugin.weights.buckets import NO_WEIGHTS
from plugin.weights.checksums import Checksums
from plugin.weights.delta import Changes
from plugin.weights.group import WeightGroup, abort, forget_version, open_store

_POLL_SECONDS = 0.02
#: How long members may take to notice that a transfer was aborted.
_GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class Member:
    """An engine that takes part in a transfer: its workers are receivers `first` and up.

    devices: IPC: of the workers
    """

    engine: int
    actor: Any
    first: int = 0
    workers: int = 0
    devices: tuple[str, ...] = ()


class Transfer:
    """The calls of one transfer and their results.

    calls: those without a result, of engines and (by name) of trainer ranks
    trouble: why it has to be aborted
    inexact: engines whose weights a delta did not make the trainer's, and how that was noticed
    lost: engines that are gone or broken; error: what ends the job, or sends the trainer back to
        its checkpoint
    """

    def __init__(self, calls: dict[Any, Member | str], timeout: float, console: Console) -> None:
        self.calls, self._timeout, self._console = calls, timeout, console
        self._watched = EndedCalls(calls)
        self._deadline = time.monotonic() + timeout
        self.received: dict[Member, Any] = {}
        self.sent: list[SentPart] = []
        self.inexact: dict[Member, str] = {}
        self.lost: dict[Member, str] = {}
        self.error: MegatronTisError | None = None
        self.trouble: str | None = None
        self.is_aborted = False

    def wait(self, seconds: float) -> None:
        """Collect the results that arrive within `seconds`, or time out."""
        for call, ended in self._watched.take(seconds).items():
            who = self.calls.pop(call, None)
            if who is None:  # a rank that nobody waits for after another one's error
                continue
            name = f"engine {who.engine}" if isinstance(who, Member) else who
            try:
                result = result_of(call, name, self._console, ended)
            except MegatronTisError as error:
                self._fail(who, name, error)
                continue
            if isinstance(who, Member):
                self.received[who] = result
            elif result is not None:
                self.sent.append(result)
        if self.calls and time.monotonic() > self._deadline:
            self._run_out_of_time()

    @property
    def awaited(self) -> list[Member]:
        """The engines that have not answered yet."""
        return [who for who in self.calls.values() if isinstance(who, Member)]

    def give_up(self, member: Member) -> None:
        """Count an engine that does not react as lost."""
        self.lost[member] = f"did not react for {SILENCE_SECONDS:g} s"
        self._abort(f"engine {member.engine} {self.lost[member]}")
        self.calls = {call: who for call, who in self.calls.items() if who != member}

    def _fail(self, who: Member | str, name: str, error: MegatronTisError) -> None:
        if isinstance(who, Member) and isinstance(error, DeltaError):
            self.inexact[who] = str(error)
            return
        self._abort(f"{name}: {str(error).splitlines()[0]}")
        if isinstance(error, TransferError):
            return
        if isinstance(who, Member) and isinstance(error, ParallelError):
            self.lost[who] = str(error)
            return
        self.error = self.error or error
        # The other ranks may wait for this one in a collective of their own.
        self.calls = {call: who for call, who in self.calls.items() if isinstance(who, Member)}

    def _abort(self, reason: str) -> None:
        if self.trouble is None:
            self.trouble = reason
            self._deadline = time.monotonic() + _GRACE_SECONDS

    def _run_out_of_time(self) -> None:
        """Abort the transfer; those that do not answer even then count as lost."""
        if self.trouble is None:
            self._abort(
                f"it took longer than {self._timeout:g} s (--weight-timeout, --rollout-timeout)"
            )
            return
        ranks = [who for who in self.calls.values() if not isinstance(who, Member)]
        if ranks:
            self.error = self.error or ActorLost(
                f"{', '.join(ranks)} did not end the transfer of weights"
            )
        for who in self.calls.values():
            if isinstance(who, Member):
                self.lost[who] = "did not end the transfer of weights"
        self.calls = {}


class WeightSync:
    """Sends versions of the trainer's weights over the transport of --weight-sync."""

    def __init__(
        self,
        config: JobConfig,
        trainer: TrainerGroup,
        engines: EnginePool,
        console: Console,
    ) -> None:
        self._config, self._trainer, self._engines = config, trainer, engines
        self._console = console
        self._traits = config.transport_traits
        self._group: WeightGroup | None = None
        self._who: tuple[Any, ...] = ()
        self._store: Any = None
        self._seconds, self._bytes = 0.0, 0
        #: The trainer's checksums of the newest version, where an engine was asked for its own.
        self.checksums: Checksums = {}
        #: How often an engine got a version again, because its checksums were not the trainer's.
        self.repairs = 0
        # The engines that got the newest version again.
        self._repaired: set[Any] = set()
        # Engines that have the weights which adapters (--lora-sync) belong to.
        self._have_base: set[Any] = set()
        sends_deltas = config.weight_transport == "delta"
        self._deltas = DeltaBases(config.full_weights_every) if sends_deltas else None
        self._changes: Changes | None = None
        self._patience = config.transfer_patience
        self.version = NO_WEIGHTS

    def metrics(self) -> dict[str, Any]:
        """Transport, bytes and seconds of the newest version, and of a delta what has changed."""
        found = {
            "weight_sync": self._config.weight_transport,
            "weight_sync_bytes": self._bytes,
            "weight_repairs": self.repairs + self._engines.repairs,
            "seconds_weight_sync": self._seconds,
        }
        if self._changes is not None:
            found["weight_changed_share"] = self._changes.share
        return found

    def send(self, version: int, *, wait: bool) -> None:
        """Give the trainer's weights to the engines as `version`.

        wait: until every engine has them, also those that are being replaced
        """
        began = time.monotonic()
        # Engines may have parts of it even if this fails, so the number is taken.
        self.version, self.checksums = version, {}
        self._repaired.clear()
        self._engines.begin_version(version)
        if self._traits.from_ranks:
            self._send_to_lagging()
            if wait:
                self._wait_for_lagging()
        else:
            buckets, self._bytes, self.checksums = self._trainer.export_weights(
                self._checksum_dtype()
            )
            self._engines.send_weights(buckets, self.checksums)
            if wait:
                self._engines.finish_loads()
        self._seconds = time.monotonic() - began

    def close(self) -> None:
        """Let the members of the last group leave it before its store is gone."""
        if self._group is not None:
            abort(self._store, self._group, "the job has ended")
            self._group = None

    def _checksum_dtype(self) -> DtypeName | None:
        """The dtype of the checksums that engines report now; None if they do not."""
        config = self._config
        reports = config.engine_traits.reports_checksums and not config.syncs_adapters
        exact = reports and config.rollout_quantization == "none"
        if not (exact and self._engines.any_probe_due):
            return None
        return engine_dtype(config, cuda=self._trainer.on_gpu)

    @contextmanager
    def trainer_holds_still(
        self, sending: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Let engines that were replaced catch up while the trainer has the weights sent last.

        sending: has trainer and engines hold their weights; see `SharedDevices`
        """
        if self._traits.by_device:
            self._engines.catch_up = partial(self._send_again, sending)
        elif self._traits.from_ranks:
            self._engines.catch_up = self._send_to_lagging
        try:
            yield
        finally:
            self._engines.catch_up = None

    def _send_again(self, sending: Callable[[], AbstractContextManager[None]]) -> None:
        """Have all engines wait while the trainer, which had given its memory away, sends again."""
        if not self._engines.lagging_and_started():
            return
        catch_up, self._engines.catch_up = self._engines.catch_up, None
        with sending():
            self._wait_for_lagging()
        self._engines.catch_up = catch_up

    def _wait_for_lagging(self) -> None:
        """Send to engines as they start, until all have the newest version."""
        while self._engines.lagging():
            self._engines.poll()
            self._send_to_lagging()
            if self._engines.lagging():  # some have not started yet
                time.sleep(_POLL_SECONDS)

    def _send_to_lagging(self) -> None:
        """Send the newest version to the engines that have started and do not have it."""
        attempts = 1 + self._config.max_restarts
        while attempts:
            members = self._members()
            before = self.repairs
            if not members or self._transfer(members):
                return
            # An engine is repaired once, whatever --max-restarts says.
            attempts -= self.repairs == before
        raise EngineError(
            f"weights of version {self.version} could not be sent to engines "
            f"{', '.join(map(str, self._engines.lagging()))} in {1 + self._config.max_restarts} "
            "attempts, the limit of --max-restarts; look for what ends the transfers above"
        )

    def _members(self) -> list[Member]:
        """The engines that have started and lack the newest version, with their workers."""
        by_device = self._traits.by_device
        asked = self._engines.ask_lagging("weight_devices" if by_device else "weight_receivers")
        calls: dict[Any, Member | str] = {
            call: Member(number, actor) for number, actor, call in asked
        }
        counted = self._finished(Transfer(calls, self._patience, self._console))
        members, first = [], 0
        for member in sorted(counted.received, key=lambda member: member.engine):
            answer = counted.received[member]
            devices = tuple(answer) if by_device else ()
            workers = len(devices) if by_device else answer
            members.append(replace(member, first=first, workers=workers, devices=devices))
            first += workers
        return members

    def _finished(self, transfer: Transfer, group: WeightGroup | None = None) -> Transfer:
        """Wait for all calls, and abort the transfer in `group` when one fails."""
        heartbeat = Heartbeat[Member](lambda member: self._engines.ping(member.actor))
        while transfer.calls:
            transfer.wait(_POLL_SECONDS)
            for member in heartbeat.silent(transfer.awaited):
                transfer.give_up(member)
            if group is not None and transfer.trouble is not None and not transfer.is_aborted:
                abort(self._store, group, transfer.trouble)
                transfer.is_aborted = True
            self._trainer.while_idle()
        for member, reason in transfer.lost.items():
            self._engines.replace_unless_done(member.engine, member.actor, reason)
        if transfer.error is not None:
            raise transfer.error
        return transfer

    def _transfer(self, members: list[Member]) -> bool:
        """Send the newest version to `members`; whether all of them have it."""
        group = self._group_of(members)
        calls: dict[Any, Member | str] = {
            self._engines.receive_weights(
                *(member.engine, member.actor, group, member.first),
                again=member.actor in self._repaired,
            ): member
            for member in members
        }
        since = None
        if self._deltas is not None:
            actors = [member.actor for member in members]
            since = self._deltas.begin(actors, self._trainer.rank_ids())
        with_base = any(member.actor not in self._have_base for member in members)
        calls |= self._trainer.send_weights(
            self.version,
            group,
            with_base=with_base,
            checksum_dtype=self._checksum_dtype(),
            since=since,
        )
        transfer = Transfer(calls, self._patience, self._console)
        try:
            self._finished(transfer, group)
        finally:
            for part in transfer.sent:
                self.checksums = {**self.checksums, **part.checksums}
            before = self.repairs
            if transfer.trouble is not None:
                self._group = None
            for member, answers in transfer.received.items():
                if not self._is_to_be_repaired(member, answers or ()):
                    self._engines.has_received(member.engine, member.actor, answers)
                    self._have_base.add(member.actor)
                    if self._deltas is not None:
                        self._deltas.has_received(member.actor, self.version)
        if transfer.trouble is not None:
            return False
        if self._deltas is not None:
            self._deltas.has_sent(self.version)
            self._note_changes(transfer, self._deltas)
        self._bytes = sum(part.nbytes for part in transfer.sent)
        messages = {part.sender: part.messages for part in transfer.sent}
        forget_version(self._store, group, self.version, messages)
        return self.repairs == before

    def _note_changes(self, transfer: Transfer, deltas: DeltaBases) -> None:
        """Count what a delta changed; engines that it failed on get a full version."""
        of_parts = [part.changes for part in transfer.sent if part.changes is not None]
        self._changes = Changes.sum_of(of_parts) if of_parts else None
        for member, reason in transfer.inexact.items():
            deltas.has_failed(member.actor, reason)
            self.repairs += 1
            self._console.warn(f"{reason}; it gets all of version {self.version}")
        if transfer.inexact:  # they have left the group
            assert self._group is not None
            abort(self._store, self._group, "a delta did not lead to the trainer's weights")
            self._group = None

    def _is_to_be_repaired(self, member: Member, answers: Sequence[ProbeAnswer]) -> bool:
        """Whether an engine's checksums are not the trainer's, for the first time at this version.

        It gets the version again. If they still differ then, the verification ends the job, or a
        `FindingError` where the engine generated nothing that could be verified.
        """
        wrong = wrong_tensors(answers, self.checksums)
        if not wrong:
            return False
        if member.actor in self._repaired:
            if not any(answer.answers for answer in answers):
                name = f"engine {member.engine}"
                raise FindingError(checksum_finding(name, wrong, self._config).text)
            return False
        self._repaired.add(member.actor)
        self.repairs += 1
        if self._deltas is not None:  # all of the version, not what has changed in it
            self._deltas.has_failed(member.actor, f"engine {member.engine}: wrong checksums")
        self._console.warn(
            f"engine {member.engine}: {len(wrong)} tensors of weight version {self.version} are "
            f"not the trainer's, the first of them {wrong[0]}; it gets the version again"
        )
        return True

    def _group_of(self, members: list[Member]) -> WeightGroup:
        """The group of the last transfer, or a new one if its members have changed since."""
        import ray

        who = (*self._trainer.rank_ids(), *members)
        if self._store is None:
            self._store = open_store(ray.util.get_node_ip_address())
        if self._group is not None and who != self._who:
            abort(self._store, self._group, "its members have changed")
            self._group = None
        if self._group is None:
            self._who = who
            self._group = WeightGroup(
                self._store.host,
                self._store.port,
                f"megatron-tis-{secrets.token_hex(6)}",
                receivers=sum(member.workers for member in members),
                firsts=tuple(member.first for member in members),
                timeout=self._config.transfer_patience,
                **self._senders(members),
            )
        return self._group

    def _senders(self, members: list[Member]) -> dict[str, Any]:
        """Which ranks send to `members`: those on their devices, or all that hold a part."""
        config = self._config
        if not self._traits.by_device:
            stages, experts = config.pipeline_model_parallel_size, config.expert_model_parallel_size
            traits = config.engine_traits
            servers = traits.asks_servers or traits.starts_servers is not None
            if servers:  # which know one sender of a group
                return {"senders": stages, "to_servers": True}
            # gloo would also send what one sender has to the others of its lane. With NCCL these
            # are on other network cards of the same node, all of which a lane then uses.
            lane = experts if self._trainer.on_gpu else 1
            return {"senders": stages * experts, "per_stage": experts, "per_lane": lane}
        ranks: dict[str, int] = {}
        for rank, device in enumerate(self._trainer.devices()):
            ranks.setdefault(device, rank)
        for member in members:
            if missing := set(member.devices) - set(ranks):
                raise EngineError(
                    f"--weight-sync ipc: engine {member.engine} is on {sorted(missing)[0]}, where "
                    "no trainer rank is that could hand it its weights; use --weight-sync "
                    "object-store"
                )
        ipc_ranks = tuple(ranks[device] for member in members for device in member.devices)
        return {"senders": len(set(ipc_ranks)), "ipc_ranks": ipc_ranks}
