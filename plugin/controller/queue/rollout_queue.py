"""Groups of responses on their way from the task through the engines to the trainer.

A group is one prompt with all its responses. Groups go to the engines one by one and come back as
their last response ends; how many may be under way is bounded so that none can be older than
allowed when its turn comes. Those that are nevertheless (an engine that fell behind) are dropped
and counted. Responses are scored as they arrive, while others are still generated. What an engine
that died or hung was working on is sent again as it was; a group with a failed response, or with
one that could not be scored, is sampled again with other seeds.

A synchronous batch does not depend on timing: prompts are issued in rounds, each decided by the
results of the rounds before it, and the batch is the first groups by number. An idle engine gets
its share of a round at once and nothing else until it has answered, so that what is generated
together follows from the round alone, and rounding with it. With dynamic sampling the groups of a
round that have no reward spread are dropped when the round is complete, and the next round refills
them; asynchronous rollouts drop and refill them as they arrive. With --abort-surplus-groups a batch
does depend on timing: it is the first groups that are finished.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from plugin.config import JobConfig
from plugin.controller.queue.dynamic_sampling import DynamicSampling
from plugin.controller.queue.group_journal import GroupJournal
from plugin.controller.queue.groups import Attempt, Group, GroupScoring
from plugin.engines.protocol import GenerationRequest, SamplingParameters
from plugin.environments.trajectory import Rollouts
from plugin.errors import BatchError, EngineError
from plugin.rewards.scorers import DriverScorer, Scorer
from plugin.tasks.protocol import Task, checked_prompt

#: Batches of responses that may wait at an engine in addition to the one it generates.
_BATCHES_AHEAD = 1
_POLL_SECONDS = 1.0
#: While responses are being scored: their results do not arrive through the engines.
_SHORT_POLL_SECONDS = 0.01
#: A reward that fails on a row usually fails on it again, and a batch waits for all its groups.
_REWARD_ATTEMPTS = 3
#: A batch is given up once this multiple of what may be under way was dropped as too old.
_STALE_ROUNDS = 4


class Engines(Protocol):
    """What the queue needs of the engines, wherever they run; see `EnginePool`, which has it."""

    def __len__(self) -> int: ...
    def least_loaded(self) -> tuple[int, int] | None: ...
    def send(
        self, engine: int, requests: Mapping[int, GenerationRequest], parameters: SamplingParameters
    ) -> None: ...
    def receive(self, *, wait_seconds: float) -> tuple[list[Rollouts], list[int]]: ...
    def cancel_groups(self) -> None: ...


@dataclass
class QueueCounts:
    """Prompts issued, trained on and dropped; at any time issued = taken + dropped + under way.

    resampled: groups sampled again because a response or its reward failed
    failed_rewards: groups in which a reward failed
    resent: groups sent again because an engine died
    surplus: groups of an over-sampled round that were not needed; their prompts are issued again
    kept_uniform: groups without a spread of rewards that were taken at the limit of refills
    """

    issued: int = 0
    taken: int = 0
    dropped_stale: int = 0
    dropped_failed: int = 0
    dropped_uniform: int = 0
    resampled: int = 0
    resent: int = 0
    failed_rewards: int = 0
    surplus: int = 0
    kept_uniform: int = 0


@dataclass
class RolloutQueue:
    """Issues prompts, collects groups, returns batches; single-threaded, driven by the job's loop.

    log: prints a message for a person
    scorer: who computes the rewards; none = the task, on this thread
    journal: keeps scored groups for a resumed run; none = nothing does
    """

    task: Task
    engines: Engines
    parameters: SamplingParameters
    config: JobConfig
    log: Callable[[str], None] = print
    scorer: Scorer | None = None
    counts: QueueCounts = field(default_factory=QueueCounts)
    journal: GroupJournal | None = None
    _waiting: deque[Attempt] = field(default_factory=deque)
    _in_flight: dict[int, Attempt] = field(default_factory=dict)  # by number, at engines
    _ready: dict[int, Group] = field(default_factory=dict)  # by number
    _dropped: dict[str, list[int]] = field(default_factory=dict)
    _batch_is_out: bool = False
    _reward_errors: list[str] = field(default_factory=list)
    _generated: dict[int, float] = field(default_factory=dict)  # mean rewards, since the last batch
    _reward_generated: float = math.nan
    _finite: int | None = None  # groups that `take_all` wants
    # Prompts that were issued before others of lower numbers: kept when the trainer went back.
    _ahead: set[int] = field(default_factory=set)
    _taking: int | None = None  # version for which `take` waits
    _stale: list[Group] = field(default_factory=list)  # dropped while it waits
    # Answers of an earlier part of the run, by the attempts that were sent together.
    _known: dict[tuple[tuple[int, int], ...], list[Group]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sampling = DynamicSampling(self.config, lambda text: self.log(text))
        scorer = self.scorer or DriverScorer(self.task, self.config.reward_timeout)
        self._scoring = GroupScoring(scorer)

    def take(self, version: int) -> list[Group]:
        """The next batch of `rollout_batch_size` groups, oldest prompts first; waits for it.

        version: of the trainer's weights; drops groups more than the staleness limit behind
        """
        self._batch_is_out = False
        if self.journal is not None:
            self.journal.begin_batch()
        wanted = self.config.rollout_batch_size
        self._taking, self._stale = version, []
        for group in list(self._ready.values()):
            self._drop_if_stale(group)
        while len(self._ready) < wanted or self._round_is_open():
            if self._may_abort_round():
                self._abort_round()
                break
            self._issue()
            self._collect(wait=True)
            self._require_progress(version)
        self._taking = None
        ordered = sorted(self._ready.values(), key=lambda group: group.index)
        batch, rest = ordered[:wanted], ordered[wanted:]
        if self._in_rounds:  # the next batch is of other weights
            self.counts.surplus += len(rest)
            self._waiting.extend(Attempt(group.index) for group in rest)
            rest = []
            self._known.clear()
        self._ready = {group.index: group for group in rest}
        self.counts.taken += wanted
        if self.config.dynamic_sampling:
            self.counts.kept_uniform += sum(
                not self._sampling.has_reward_spread(group) for group in batch
            )
            # In order: the last digit of a sum depends on it, and answers come in any order.
            self._reward_generated = float(np.mean(sorted(self._generated.values()) or [math.nan]))
        self._begin_rollout()
        self._batch_is_out = True
        return batch

    def take_all(self, groups: int) -> list[Group]:
        """The groups of the next `groups` prompts, in order; one that keeps failing is left out.

        For a queue of its own that is used once: nothing else is issued, before or after.
        """
        self._finite = groups
        while len(self._ready) < self._limit():
            self._issue()
            self._collect(wait=True)
        return sorted(self._ready.values(), key=lambda group: group.index)

    def begin(self) -> None:
        """Send the prompts of the next batch, which `take` then waits for."""
        self._batch_is_out = False
        self._issue()

    def pump(self) -> None:
        """Collect what is finished and, in asynchronous mode, issue what may be; never waits."""
        self._collect(wait=False)
        if self.config.async_rollouts:
            self._issue()

    def settle(self) -> None:
        """Wait until the engines have answered all they were sent, and send nothing new."""
        while self._in_flight:
            self._collect(wait=True)

    @property
    def under_way(self) -> int:
        """Groups issued and not yet taken."""
        scored = len(self._ready) + len(self._scoring)
        return scored + len(self._waiting) + len(self._in_flight)

    def metrics(self) -> dict[str, float]:
        """The counts of prompts so far, for metrics.jsonl, and what the last batch was chosen from.

        prompts_issued = prompts_trained + dropped_* + prompts_under_way
        """
        counts = self.counts
        values: dict[str, float] = {
            "prompts_issued": counts.issued,
            "prompts_trained": counts.taken,
            "prompts_under_way": self.under_way,
            "dropped_stale": counts.dropped_stale,
            "dropped_failed": counts.dropped_failed,
            "dropped_uniform": counts.dropped_uniform,
            "groups_resampled": counts.resampled,
            "failed_rewards": counts.failed_rewards,
            "groups_resent": counts.resent,
        }
        if self.config.dynamic_sampling:
            values |= {
                "groups_surplus": counts.surplus,
                "groups_kept_uniform": counts.kept_uniform,
                "reward_generated": self._reward_generated,
            }
        return values

    def take_dropped(self) -> dict[str, list[int]]:
        """Numbers of the prompts dropped since the last call, by cause."""
        dropped, self._dropped = self._dropped, {}
        return dropped

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the counts, and the prompts that were issued and not taken."""
        pending = [Attempt(index) for index in self._ready] + self._scoring.attempts
        pending += [*self._in_flight.values(), *self._waiting]
        return {
            "counts": asdict(self.counts),
            "pending": [[t.index, t.failures] for t in sorted(pending)],
            "ahead": sorted(self._ahead),
        }

    def restore(
        self,
        state: dict[str, Any],
        *,
        keep_for: int | None = None,
        finished: Sequence[Group] = (),
    ) -> int:
        """Go back to `state`: resample what was under way then, and drop everything later.

        Returns how many groups are kept.

        keep_for: version of the weights to come; groups that are running, or finished and young
            enough for it, are kept, and prompts of `state` that they do not answer wait behind
        finished: groups of an earlier part of the run, from its journal, of which those are kept
            that were not trained on before `state`
        """
        if keep_for is None:
            self._ready.clear()
            self._in_flight.clear()
            self._scoring.clear()
        young = [group for group in finished if not self._is_stale(group, keep_for or 0)]
        untrained = [group for group in young if not _is_settled(group.index, state)]
        self._known = _shipments(untrained, keep_for) if self._in_rounds else {}
        if not self._in_rounds:
            self._ready |= {group.index: group for group in untrained}
        self._ready = {i: g for i, g in self._ready.items() if not self._is_stale(g, keep_for or 0)}
        kept = {*self._ready, *self._in_flight, *(one.index for one in self._scoring.attempts)}
        pending: dict[int, int] = dict(state["pending"])
        self.counts = QueueCounts(**state["counts"])
        self._ahead = set(state.get("ahead", ()))
        first = self.counts.issued - len(self._ahead)
        later = {index for index in kept if index >= first} - self._ahead
        self._ahead |= later
        self.counts.issued += len(later)
        self._waiting = deque(Attempt(i, failed) for i, failed in pending.items() if i not in kept)
        self._dropped.clear()
        self._batch_is_out, self._taking = False, None
        self._begin_rollout()
        known = [group for groups in self._known.values() for group in groups]
        # What a restart of the trainer keeps is in the journal, as far as its engines are proven.
        if self.journal is not None and (finished or keep_for is None):
            self.journal.replace([*self._ready.values(), *known])
        return len(kept) + len(known)

    def forget_stored(self) -> None:
        """Forget finished groups of which parts are at engines: a node that had such parts is lost.

        Which groups are affected shows only when they are trained on, and each would cost another
        restart of the trainer. For `restore`, which comes next, their prompts are unanswered.
        """
        self._ready = {i: g for i, g in self._ready.items() if not g.rollouts.batch.stored}
        scored = [group for group in self._scoring.groups if group.rollouts.batch.stored]
        self._scoring.withdraw([group.attempt for group in scored])

    def _begin_rollout(self) -> None:
        self._sampling.begin_rollout()
        self._generated.clear()

    @property
    def _in_rounds(self) -> bool:
        """Whether groups are issued and chosen round by round, for one batch at a time."""
        return self.config.staleness_limit == 0

    def _round_is_open(self) -> bool:
        """Whether groups are still out that the batch or a refill may need."""
        if not self._in_rounds:
            return False
        out = self._in_flight or self._waiting or self._scoring
        return bool(out) or len(self._ready) < self._limit()

    def _may_abort_round(self) -> bool:
        """Whether the batch is there before all groups of its round are."""
        if not (self.config.abort_surplus_groups and self._in_rounds):
            return False
        useful = sum(self._sampling.has_reward_spread(group) for group in self._ready.values())
        return useful >= self.config.rollout_batch_size

    def _abort_round(self) -> None:
        """Drop groups without a spread of rewards, and abort those that are not finished."""
        self._drop_uniform(
            [i for i, group in self._ready.items() if not self._sampling.has_reward_spread(group)]
        )
        aborted = [*self._in_flight.values(), *self._scoring.attempts]
        self.counts.surplus += len(aborted)
        self.engines.cancel_groups()
        self._scoring.withdraw(aborted)
        self._in_flight.clear()
        again = [Attempt(one.index, one.failures) for one in aborted]
        self._waiting = deque(sorted([*again, *self._waiting]))

    def _limit(self) -> int:
        """How many groups may be under way.

        One that has n groups before it is trained on after n // batch further weight versions, plus
        one if a batch is with the trainer now.
        """
        if self._finite is not None:
            return self._finite - self.counts.dropped_failed
        if self._in_rounds:
            return 0 if self._batch_is_out else self._sampling.round_size
        rounds = self.config.staleness_limit + (0 if self._batch_is_out else 1)
        return rounds * self.config.rollout_batch_size

    def _room(self) -> int:
        """How many groups may be sent now, those that wait included."""
        new, waiting = self._limit() - self.under_way, len(self._waiting)
        # After a restart more may wait than may be under way without getting too old.
        return max(0, new) + waiting if self._in_rounds else new + waiting

    def _issue(self) -> None:
        """Send waiting attempts, then new prompts, as far as the limit and the engines allow."""
        share, most = self._shares()
        # A part of a round goes to an idle engine: what is generated together is then the same
        # however long the engines take.
        bound = 1 if self._in_rounds else most
        while self._room() > 0:
            chosen = self.engines.least_loaded()
            if chosen is None or chosen[1] >= bound:
                return
            engine, load = chosen
            self._send(engine, self._next_attempts(min(share, most - load)))

    def _shares(self) -> tuple[int, int]:
        """How many groups are sent together, and how many an engine may have at most."""
        config = self.config
        if self._in_rounds:
            share = -(-config.first_round_size(config.rollout_batch_size) // len(self.engines))
            return share, share
        fits = max(1, config.rollout_max_batch // config.n_samples_per_prompt)
        share = -(-config.rollout_batch_size // len(self.engines))
        return share, (1 + _BATCHES_AHEAD) * fits

    def _next_attempts(self, size: int) -> list[Attempt]:
        size = min(size, self._room())
        attempts = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
        new = max(0, min(size, self._limit() - self.under_way) - len(attempts))
        return attempts + [Attempt(self._next_index()) for _ in range(new)]

    def _next_index(self) -> int:
        """Number of the next prompt, which counts as issued."""
        index = self.counts.issued - len(self._ahead)
        self.counts.issued += 1
        while index in self._ahead:
            self._ahead.remove(index)
            index += 1
        return index

    def _send(self, engine: int, attempts: list[Attempt]) -> None:
        known = self._known.pop(tuple((one.index, one.failures) for one in attempts), None)
        if known is not None:
            for group in known:
                self._add_ready(group)
            return
        requests: dict[int, GenerationRequest] = {}
        for attempt in attempts:
            index, failures = attempt.index, attempt.failures
            prompt = checked_prompt(self.task, index, self.config.max_prompt_length)
            # A response that failed might fail again with the same seed.
            again = f"/{failures}" if failures else ""
            draw = random.Random(f"{self.config.seed}/{index}{again}")
            seeds = [draw.getrandbits(62) for _ in range(self.config.n_samples_per_prompt)]
            requests[index] = GenerationRequest(prompt.tokens, tuple(seeds), index)
            self._in_flight[index] = Attempt(index, failures, prompt, attempts)
        self.engines.send(engine, requests, self.parameters)

    def _collect(self, *, wait: bool) -> None:
        # With nothing in flight and nothing to score, all engines are starting: let the pool poll.
        if self._in_flight or (wait and not self._scoring):
            long = 0.0 if not wait else _SHORT_POLL_SECONDS if self._scoring else _POLL_SECONDS
            answers, lost = self.engines.receive(wait_seconds=long)
            for answer in answers:
                self._accept(answer)
            self._send_again(lost)
        if self._scoring:
            long = _POLL_SECONDS if wait and not self._in_flight else 0.0
            for group in self._scoring.finished(long):
                if group.errors:
                    self._count_failed_reward(group.errors[0])
                    self._resample_or_drop(group.attempt, group.errors, _REWARD_ATTEMPTS)
                else:
                    self._reward_errors.clear()
                    self._add_ready(group)

    def _accept(self, answer: Rollouts) -> None:
        """Submit the responses without a reward for scoring."""
        # Arrays of another process are read-only, and rewards are filled in here.
        answer = replace(answer, rewards=answer.rewards.copy())
        starts = np.flatnonzero(np.diff(answer.groups, prepend=-1))
        for start, end in itertools.pairwise([*starts.tolist(), len(answer)]):
            attempt = self._in_flight.pop(int(answer.groups[start]), None)
            if attempt is None:  # from before a restart
                continue
            errors = [error for error in answer.errors[start:end].tolist() if error]
            group = Group(attempt, answer, slice(start, end))
            if errors:
                self._resample_or_drop(attempt, errors)
            elif not self._scoring.begin(group):
                self._add_ready(group)

    def _add_ready(self, group: Group) -> None:
        """Take a scored group, or drop it for lack of reward spread.

        The groups of a round are decided together, when the round is complete.
        """
        self._generated[group.index] = float(group.rewards.mean())
        if self._drop_if_stale(group):
            return
        self._ready[group.index] = group
        dropped: list[int] = []
        if not self._in_rounds:
            dropped = [group.index] if self._sampling.drops_on_arrival(group) else []
        elif not self._round_is_open():
            dropped = self._sampling.drop_from_round(list(self._ready.values()))
        self._drop_uniform(dropped)
        # What is dropped on arrival stays so; what a round drops, the same round drops again.
        if self.journal is not None and (self._in_rounds or not dropped):
            self.journal.add(group)

    def _drop_uniform(self, indices: Sequence[int]) -> None:
        if indices:
            self.counts.dropped_uniform += len(indices)
            self._dropped.setdefault("uniform", []).extend(indices)
        for index in indices:
            del self._ready[index]

    def _count_failed_reward(self, error: str) -> None:
        """Raise after max(8, batch size) failed groups in a row."""
        self.counts.failed_rewards += 1
        self._reward_errors.append(error)
        if len(self._reward_errors) >= max(8, self.config.rollout_batch_size):
            raise BatchError(
                f"no reward could be computed for {len(self._reward_errors)} groups in a row; the "
                f"first error: {self._reward_errors[0]}"
            )

    def _resample_or_drop(
        self, failed: Attempt, errors: list[str], default_limit: int | None = None
    ) -> None:
        failures, limit = failed.failures + 1, self.config.max_error_reschedule_attempts
        limit = default_limit if limit is None else limit
        cause = f"{len(errors)} of {self.config.n_samples_per_prompt} responses failed: {errors[0]}"
        if limit is not None and failures > limit:
            self.counts.dropped_failed += 1
            self._dropped.setdefault("failed", []).append(failed.index)
            self.log(f"prompt {failed.index} is dropped after {failures} failed attempts; {cause}")
            return
        # The 1st, 2nd, 4th, 8th, ...: a broken task must not flood the log.
        if failures & (failures - 1) == 0:
            self.log(f"prompt {failed.index} is sampled again (attempt {failures} failed); {cause}")
        self.counts.resampled += 1
        self._waiting.append(Attempt(failed.index, failures))

    def _send_again(self, lost: Sequence[int]) -> None:
        """Queue the groups that an engine lost once more, in order.

        In rounds also those of the same shipment that it had answered: rounding depends on what is
        generated together.
        """
        again = {self._in_flight.pop(index) for index in lost if index in self._in_flight}
        if not again:
            return
        if self._in_rounds:
            held = {*self._scoring.attempts, *(g.attempt for g in self._ready.values())}
            again |= held.intersection([mate for attempt in again for mate in attempt.sent_with])
            self._scoring.withdraw(again)
            for attempt in again:
                self._ready.pop(attempt.index, None)
        self.counts.resent += len(again)
        self._waiting = deque(sorted([*again, *self._waiting]))

    def _require_progress(self, version: int) -> None:
        """An `EngineError` if a batch waits for engines whose weights do not get newer.

        What an engine was working on when it fell behind is far less than that.
        """
        if len(self._stale) > max(8, _STALE_ROUNDS * self._limit()):
            newest = max(group.weight_version for group in self._stale)
            raise EngineError(
                f"{len(self._stale)} groups were dropped while one batch was collected: their "
                f"tokens come from weight version {newest} or older, the trainer has {version}, "
                f"and --max-weight-staleness allows {self.config.staleness_limit}. The engines do "
                "not load new weights, or report another version than they were sent"
            )

    def _drop_if_stale(self, group: Group) -> bool:
        """Drop a group that is too old for the batch that is waited for; whether it was."""
        if self._taking is None or not self._is_stale(group, self._taking):
            return False
        self._ready.pop(group.index, None)
        self._stale.append(group)
        self.counts.dropped_stale += 1
        self._dropped.setdefault("stale", []).append(group.index)
        return True

    def _is_stale(self, group: Group, version: int) -> bool:
        limit = self.config.max_token_staleness
        if limit is None:
            return group.weight_version < version - self.config.staleness_limit
        # Older tokens are masked; the others of the response are trained on.
        return group.newest_version < version - limit


def _is_settled(index: int, state: Mapping[str, Any]) -> bool:
    """Whether a prompt was trained on, or dropped, before the queue was in `state`."""
    ahead = state.get("ahead", ())
    issued = index < state["counts"]["issued"] - len(ahead) or index in ahead
    return issued and index not in dict(state["pending"])


def _shipments(
    groups: Sequence[Group], version: int | None
) -> dict[tuple[tuple[int, int], ...], list[Group]]:
    """The groups that were sampled with `version`, by what was sent together; whole ones only."""
    found: dict[tuple[tuple[int, int], ...], list[Group]] = {}
    for group in groups:
        if group.weight_version == group.newest_version == version:
            mates = tuple((mate.index, mate.failures) for mate in group.attempt.sent_with)
            found.setdefault(mates, []).append(group)
    return {mates: whole for mates, whole in found.items() if len(whole) == len(mates)}
