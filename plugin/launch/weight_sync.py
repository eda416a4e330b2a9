"""New weights from the trainer to the engines: over process groups, or through the object store.

Process groups join the sending rank of every pipeline stage with the workers of all engines. The
driver keeps the store at which they meet, watches all of them, and calls a transfer off when one is
lost: the others stop waiting, a lost engine is replaced, and the weights are sent again to those
that do not have them. A lost trainer rank is raised to the caller. An engine that was replaced gets
the trainer's weights as soon as the trainer holds still, and no request before that.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from plugin.config import JobConfig
from plugin.errors import (
    ActorLost,
    EngineError,
    MegatronTisError,
    ParallelError,
    TransferError,
)
from plugin.launch.console import Console
from plugin.launch.engine_pool import EnginePool
from plugin.launch.pulse import SILENCE_SECONDS, Pulse
from plugin.launch.remote_calls import result_of
from plugin.launch.trainer_actor import SentPart
from plugin.launch.trainer_group import TrainerGroup
from plugin.rollout.engines.weight_buckets import NO_WEIGHTS
from plugin.rollout.engines.weight_stream import (
    WeightGroup,
    call_off,
    forget_version,
    open_store,
)

_POLL_SECONDS = 0.02
#: How long members may take to notice that a transfer was called off.
_GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class _Member:
    """An engine that takes part in a transfer: its workers are receivers `first` and up."""

    engine: int
    actor: Any
    first: int = 0
    workers: int = 0


class WeightSync:
    """Sends versions of the trainer's weights the way that --weight-sync says."""

    def __init__(
        self,
        config: JobConfig,
        trainer: TrainerGroup,
        engines: EnginePool,
        console: Console,
    ) -> None:
        self._config, self._trainer, self._engines = config, trainer, engines
        self._console = console
        self._way = config.weight_way
        self._group: WeightGroup | None = None
        self._who: tuple[Any, ...] = ()
        self._store: Any = None
        self._seconds, self._bytes = 0.0, 0
        # An engine may have responses to end first; one that hangs is found as in generation.
        self._patience = min(config.step_timeout, 3 * config.engine_patience)
        self.version = NO_WEIGHTS

    def metrics(self) -> dict[str, Any]:
        """How the newest version was sent, and what that took."""
        return {
            "weight_sync": self._way,
            "weight_sync_bytes": self._bytes,
            "seconds_weight_sync": self._seconds,
        }

    def send(self, version: int, *, wait: bool) -> None:
        """Give the trainer's weights to the engines as `version`.

        wait: until every engine has them, also those that are being replaced
        """
        began = time.monotonic()
        # Engines may have parts of it even if this fails, so the number is taken.
        self.version = version
        self._engines.begin_version(version)
        if self._way == "broadcast":
            self._broadcast()
            while wait and self._engines.lagging():
                self._engines.poll()
                self._broadcast()
                time.sleep(_POLL_SECONDS)
        else:
            buckets, self._bytes = self._trainer.export_weights()
            self._engines.send_weights(buckets)
            if wait:
                self._engines.finish_loads()
        self._seconds = time.monotonic() - began

    @contextmanager
    def trainer_holds_still(self) -> Iterator[None]:
        """Let engines that were replaced catch up while the trainer has the weights sent last."""
        self._engines.catch_up = self._broadcast if self._way == "broadcast" else None
        try:
            yield
        finally:
            self._engines.catch_up = None

    def _broadcast(self) -> None:
        """Send the newest version to the engines that have started and do not have it."""
        for _ in range(1 + self._config.max_restarts):
            members = self._members()
            if not members or self._transfer(members):
                return
        raise EngineError(
            f"weights of version {self.version} could not be sent to engines "
            f"{', '.join(map(str, self._engines.lagging()))} in {1 + self._config.max_restarts} "
            "attempts, the limit of --max-restarts; look for what ends the transfers above"
        )

    def _members(self) -> list[_Member]:
        """The engines that have started and lack the newest version, with their workers."""
        calls: dict[Any, _Member | str] = {
            call: _Member(number, actor) for number, actor, call in self._engines.count_receivers()
        }
        counted = self._finished(_Transfer(calls, self._patience, self._console))
        members, first = [], 0
        for member in sorted(counted.received, key=lambda member: member.engine):
            workers = counted.received[member]
            members.append(replace(member, first=first, workers=workers))
            first += workers
        return members

    def _finished(self, transfer: _Transfer, group: WeightGroup | None = None) -> _Transfer:
        """Wait for all calls, and call off the transfer in `group` when one fails."""
        pulse = Pulse[_Member](lambda member: self._engines.ping(member.actor))
        while transfer.calls:
            transfer.wait(_POLL_SECONDS)
            for member in pulse.silent(transfer.awaited):
                transfer.give_up(member)
            if group is not None and transfer.trouble is not None and not transfer.is_called_off:
                call_off(self._store, group, transfer.trouble)
                transfer.is_called_off = True
            self._trainer.while_idle()
        for member, reason in transfer.lost.items():
            self._engines.replace_unless_done(member.engine, member.actor, reason)
        if transfer.error is not None:
            raise transfer.error
        return transfer

    def _transfer(self, members: list[_Member]) -> bool:
        """Send the newest version to `members`; whether all of them have it."""
        group = self._group_of(members)
        calls: dict[Any, _Member | str] = {
            self._engines.receive_weights(member.engine, member.actor, group, member.first): member
            for member in members
        }
        calls |= self._trainer.send_weights(self.version, group)
        transfer = _Transfer(calls, self._patience, self._console)
        try:
            self._finished(transfer, group)
        finally:
            for member in transfer.received:
                self._engines.has_received(member.engine, member.actor)
            if transfer.trouble is not None:
                self._group = None
        if transfer.trouble is not None:
            return False
        self._bytes = sum(part.nbytes for part in transfer.sent)
        buckets = {part.stage: part.buckets for part in transfer.sent}
        forget_version(self._store, group, self.version, buckets)
        return True

    def _group_of(self, members: list[_Member]) -> WeightGroup:
        """The group of the last transfer, or a new one if its members have changed since."""
        import ray

        who = (*self._trainer.rank_ids(), *members)
        if self._store is None:
            self._store = open_store(ray.util.get_node_ip_address())
        if self._group is None or who != self._who:
            self._who = who
            self._group = WeightGroup(
                self._store.host,
                self._store.port,
                f"megatron-tis-{secrets.token_hex(6)}",
                senders=self._config.pipeline_model_parallel_size,
                receivers=sum(member.workers for member in members),
                timeout=self._config.step_timeout,
            )
        return self._group


class _Transfer:
    """The calls of one transfer and what has become of them.

    calls: those without a result, of engines and (by name) of trainer ranks
    trouble: why it has to be called off
    lost: engines that are gone or broken; error: what ends the job, or sends the trainer back to
        its checkpoint
    """

    def __init__(self, calls: dict[Any, _Member | str], timeout: float, console: Console) -> None:
        self.calls, self._timeout, self._console = calls, timeout, console
        self._deadline = time.monotonic() + timeout
        self.received: dict[_Member, Any] = {}
        self.sent: list[SentPart] = []
        self.lost: dict[_Member, str] = {}
        self.error: MegatronTisError | None = None
        self.trouble: str | None = None
        self.is_called_off = False

    def wait(self, seconds: float) -> None:
        """Take the results that come within `seconds`, or notice that time is up."""
        import ray

        done, _ = ray.wait(list(self.calls), num_returns=1, timeout=seconds)
        for call in done:
            who = self.calls.pop(call)
            name = f"engine {who.engine}" if isinstance(who, _Member) else who
            try:
                self._take(who, result_of(call, name, self._console))
            except MegatronTisError as error:
                self._fail(who, name, error)
        if self.calls and time.monotonic() > self._deadline:
            self._run_out_of_time()

    @property
    def awaited(self) -> list[_Member]:
        """The engines that have not answered yet."""
        return [who for who in self.calls.values() if isinstance(who, _Member)]

    def give_up(self, member: _Member) -> None:
        """Count an engine that does not react as lost."""
        self.lost[member] = f"did not react for {SILENCE_SECONDS:g} s"
        self._call_off(f"engine {member.engine} {self.lost[member]}")
        self.calls = {call: who for call, who in self.calls.items() if who != member}

    def _take(self, who: _Member | str, result: Any) -> None:
        if isinstance(who, _Member):
            self.received[who] = result
        elif result is not None:
            self.sent.append(result)

    def _fail(self, who: _Member | str, name: str, error: MegatronTisError) -> None:
        self._call_off(f"{name}: {str(error).splitlines()[0]}")
        if isinstance(error, TransferError):
            return
        if isinstance(who, _Member) and isinstance(error, ParallelError):
            self.lost[who] = str(error)
            return
        self.error = self.error or error
        # The other ranks may wait for this one in a collective of their own.
        self.calls = {call: who for call, who in self.calls.items() if isinstance(who, _Member)}

    def _call_off(self, reason: str) -> None:
        if self.trouble is None:
            self.trouble = reason
            self._deadline = time.monotonic() + _GRACE_SECONDS

    def _run_out_of_time(self) -> None:
        """Call the transfer off; those that do not answer even then count as lost."""
        if self.trouble is None:
            self._call_off(
                f"it took longer than {self._timeout:g} s (--step-timeout, --rollout-timeout)"
            )
            return
        ranks = [who for who in self.calls.values() if not isinstance(who, _Member)]
        if ranks:
            self.error = self.error or ActorLost(
                f"{', '.join(ranks)} did not end the transfer of weights"
            )
        for who in self.calls.values():
            if isinstance(who, _Member):
                self.lost[who] = "did not end the transfer of weights"
        self.calls = {}
