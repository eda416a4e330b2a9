"""One transfer of weights as the driver sees it: the calls under way and what became of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from plugin.cluster.remote_calls import SILENCE_SECONDS, result_of
from plugin.cluster.trainer_actor import SentPart
from plugin.errors import ActorLost, MegatronTisError, ParallelError, TransferError
from plugin.observe.console import Console

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
    """The calls of one transfer and what has become of them.

    calls: those without a result, of engines and (by name) of trainer ranks
    trouble: why it has to be aborted
    lost: engines that are gone or broken; error: what ends the job, or sends the trainer back to
        its checkpoint
    """

    def __init__(self, calls: dict[Any, Member | str], timeout: float, console: Console) -> None:
        self.calls, self._timeout, self._console = calls, timeout, console
        self._deadline = time.monotonic() + timeout
        self.received: dict[Member, Any] = {}
        self.sent: list[SentPart] = []
        self.lost: dict[Member, str] = {}
        self.error: MegatronTisError | None = None
        self.trouble: str | None = None
        self.is_aborted = False

    def wait(self, seconds: float) -> None:
        """Take the results that come within `seconds`, or notice that time is up."""
        import ray

        calls = list(self.calls)
        done, _ = ray.wait(calls, num_returns=1, timeout=seconds)
        if done:
            # All that are there: none of them may count as late below.
            done, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        for call in done:
            who = self.calls.pop(call, None)
            if who is None:  # a rank that nobody waits for after another one's error
                continue
            name = f"engine {who.engine}" if isinstance(who, Member) else who
            try:
                self._take(who, result_of(call, name, self._console))
            except MegatronTisError as error:
                self._fail(who, name, error)
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

    def _take(self, who: Member | str, result: Any) -> None:
        if isinstance(who, Member):
            self.received[who] = result
        elif result is not None:
            self.sent.append(result)

    def _fail(self, who: Member | str, name: str, error: MegatronTisError) -> None:
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
                f"it took longer than {self._timeout:g} s (--step-timeout, --rollout-timeout)"
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
