"""Groups of responses on their way from the task through the engines to the trainer.

A group is one prompt with all its responses. Groups are sent in chunks, at most two chunks wait at
an engine, and how many groups may be under way is bounded so that none can be older than allowed
when its turn comes. Those that are nevertheless (an engine that fell behind) are dropped and
counted. Responses are scored as they arrive, while others are still generated. What an engine that
died or hung was working on is sent again as it was; a group with a failed response, or with one
that could not be scored, is sampled again with other seeds.

A synchronous batch does not depend on timing: prompts are issued in rounds, each decided by the
results of the rounds before it, and the batch is the first groups by number. With dynamic sampling
the groups of a round that teach nothing are dropped when the round is complete, and the next round
refills them; asynchronous rollouts drop and refill them as they arrive.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from plugin.config import JobConfig
from plugin.errors import ActorLost, BatchError, EngineError
from plugin.launch.dynamic_sampling import DynamicSampling
from plugin.ragged import ragged_range
from plugin.rollout.conversation.deadline_calls import CallFailure
from plugin.rollout.conversation.trajectory import Rollouts
from plugin.rollout.engines.protocol import GenerationRequest, SamplingParameters
from plugin.rollout.rewards.reward_set import Score
from plugin.rollout.rewards.scorers import DriverScorer, Scorer
from plugin.rollout.tasks.protocol import Prompt, Task, checked_prompt

_CHUNKS_PER_ENGINE = 2
_POLL_SECONDS = 1.0
#: While responses are being scored, which ends at another place.
_SHORT_POLL_SECONDS = 0.01
#: A reward that fails on a row usually fails on it again, and a batch waits for all its groups.
_REWARD_ATTEMPTS = 3
#: Of all that may be under way, so many times over may be too old before a batch is given up.
_STALE_ROUNDS = 4


class Engines(Protocol):
    """What the queue needs of the engines, wherever they run; see `EnginePool`, which has it."""

    def __len__(self) -> int: ...
    def available(self) -> list[int]: ...
    def send(
        self, engine: int, requests: list[GenerationRequest], parameters: SamplingParameters
    ) -> Any: ...
    def finished(self, tickets: list[Any], *, wait_seconds: float) -> list[Any]: ...
    def answer(self, ticket: Any) -> Rollouts: ...
    def replace(self, engine: int, reason: str) -> None: ...


@dataclass(frozen=True)
class Group:
    """The number of a prompt, and its scored responses: trajectories `place` of `rollouts`.

    rollouts: an engine's whole answer, shared by the groups in it
    parts: [n] float64 of every reward before its weight, by name; empty where there is only one
        number, the task's or the environment's
    """

    index: int
    rollouts: Rollouts
    place: slice
    parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[n] float64."""
        return self.rollouts.rewards[self.place]

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """[n] whether the responses were cut off."""
        return self.rollouts.truncated[self.place]

    @property
    def weight_version(self) -> int:
        """The oldest weights that any of the responses came from."""
        return int(self.rollouts.oldest_version[self.place].min())

    @property
    def newest_of_each(self) -> int:
        """The weights of which every response has a token, or a newer one."""
        return int(self.rollouts.newest_version[self.place].min())


@dataclass(frozen=True, order=True)
class _Try:
    """A prompt's number and how often its group has failed before."""

    index: int
    failures: int = 0


@dataclass(frozen=True)
class _Chunk:
    engine: int
    tries: list[_Try]
    prompts: list[Prompt]
    sent: float


@dataclass
class _Scoring:
    """A group whose responses are being scored; `waiting` maps tickets to trajectories."""

    one_try: _Try
    answer: Rollouts
    place: slice
    waiting: dict[int, int] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def group(self) -> Group:
        """The group, all of whose responses have been scored."""
        names = next(iter(self.scores.values())).parts if self.scores else ()
        places = range(self.place.start, self.place.stop)
        parts = {
            name: np.array([self.scores[i].parts[name] for i in places], np.float64)
            for name in names
        }
        return Group(self.one_try.index, self.answer, self.place, parts)


@dataclass
class QueueCounts:
    """Prompts issued, trained on and dropped; at any time issued = taken + dropped + under way.

    resampled: groups sampled again because a response or its reward failed
    failed_rewards: groups of which a reward failed
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

    say: prints a message for a person
    scorer: who computes the rewards; none = the task, on this thread
    """

    task: Task
    engines: Engines
    parameters: SamplingParameters
    config: JobConfig
    say: Callable[[str], None] = print
    scorer: Scorer | None = None
    counts: QueueCounts = field(default_factory=QueueCounts)
    _waiting: deque[_Try] = field(default_factory=deque)
    _ready: deque[Group] = field(default_factory=deque)
    _in_flight: dict[Any, _Chunk] = field(default_factory=dict)
    _scoring: dict[int, _Scoring] = field(default_factory=dict)
    _last_answer: dict[int, float] = field(default_factory=dict)
    _dropped: dict[str, list[int]] = field(default_factory=dict)
    _batch_is_out: bool = False
    _reward_errors: list[str] = field(default_factory=list)
    _generated: list[float] = field(default_factory=list)  # mean rewards, since the last batch
    _reward_generated: float = math.nan

    def __post_init__(self) -> None:
        self._sampling = DynamicSampling(self.config, lambda text: self.say(text))
        self._scorer = self.scorer or DriverScorer(self.task, self.config.reward_timeout)

    def take(self, version: int) -> list[Group]:
        """The next batch of `rollout_batch_size` groups, oldest prompts first; waits for it.

        version: of the trainer's weights; drops groups more than the staleness limit behind
        """
        self._batch_is_out = False
        wanted = self.config.rollout_batch_size
        dropped = self._drop_stale(version)
        while len(self._ready) < wanted or self._round_is_open():
            self._issue()
            self._collect(wait=True)
            dropped += self._drop_stale(version)
            self._require_progress(dropped, version)
        ordered = sorted(self._ready, key=lambda group: group.index)
        batch, rest = ordered[:wanted], ordered[wanted:]
        if self._in_rounds:  # the next batch is of other weights
            self.counts.surplus += len(rest)
            self._waiting.extend(_Try(group.index) for group in rest)
            rest = []
        self._ready = deque(rest)
        self.counts.taken += wanted
        if self.config.dynamic_sampling:
            self.counts.kept_uniform += sum(not self._sampling.teaches(group) for group in batch)
            # In order: the last digit of a sum depends on it, and answers come in any order.
            self._reward_generated = float(np.mean(sorted(self._generated) or [math.nan]))
        self._begin_rollout()
        self._batch_is_out = True
        return batch

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
        in_flight = sum(len(chunk.tries) for chunk in self._in_flight.values())
        return len(self._ready) + len(self._waiting) + len(self._being_scored) + in_flight

    @property
    def _being_scored(self) -> list[_Try]:
        by_index = {scoring.one_try.index: scoring.one_try for scoring in self._scoring.values()}
        return list(by_index.values())

    def metrics(self) -> dict[str, float]:
        """The prompts' account so far, for metrics.jsonl, and what the last batch was chosen from.

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
        pending = [_Try(group.index) for group in self._ready] + self._being_scored
        pending += [t for chunk in self._in_flight.values() for t in chunk.tries] + [*self._waiting]
        return {
            "counts": asdict(self.counts),
            "pending": [[t.index, t.failures] for t in sorted(pending)],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to `state`: sample anew what was under way then, forget what came later."""
        self.counts = QueueCounts(**state["counts"])
        self._waiting = deque(_Try(*pending) for pending in state["pending"])
        self._ready.clear()
        self._in_flight.clear()
        self._scoring.clear()
        self._scorer.forget()
        self._dropped.clear()
        self._batch_is_out = False
        self._begin_rollout()

    def _begin_rollout(self) -> None:
        self._sampling.begin_rollout()
        self._generated.clear()

    @property
    def _in_rounds(self) -> bool:
        """Whether groups are issued and chosen round by round, for one batch at a time."""
        return self.config.staleness_limit == 0

    def _round_is_open(self) -> bool:
        """Whether groups that the batch may need, or that a refill depends on, are still out."""
        if not self._in_rounds:
            return False
        out = self._in_flight or self._waiting or self._scoring
        return bool(out) or len(self._ready) < self._limit()

    def _limit(self) -> int:
        """How many groups may be under way.

        One that has n groups before it is trained on after n // batch further weight versions, plus
        one if a batch is with the trainer now.
        """
        if self._in_rounds:
            return 0 if self._batch_is_out else self._sampling.round_size
        rounds = self.config.staleness_limit + (0 if self._batch_is_out else 1)
        return rounds * self.config.rollout_batch_size

    def _issue(self) -> None:
        """Send what waits, then new prompts, as far as the limit and the engines allow."""
        while self._waiting or self.under_way < self._limit():
            busy = [chunk.engine for chunk in self._in_flight.values()]
            free = [e for e in self.engines.available() if busy.count(e) < _CHUNKS_PER_ENGINE]
            if not free:
                return
            self._send_chunk(min(free, key=busy.count), self._next_tries())

    def _next_tries(self) -> list[_Try]:
        fair = -(-self.config.rollout_batch_size // len(self.engines))
        fits = max(1, self.config.rollout_max_batch // self.config.n_samples_per_prompt)
        size = min(fair, fits)
        tries = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
        new = max(0, min(size, self._limit() - self.under_way) - len(tries))
        start = self.counts.issued
        self.counts.issued += new
        return tries + [_Try(index) for index in range(start, start + new)]

    def _send_chunk(self, engine: int, tries: list[_Try]) -> None:
        longest = self.config.max_prompt_length
        prompts = [checked_prompt(self.task, t.index, longest) for t in tries]
        requests = []
        for one_try, prompt in zip(tries, prompts, strict=True):
            # A response that failed might fail again with the same seed.
            again = f"/{one_try.failures}" if one_try.failures else ""
            draw = random.Random(f"{self.config.seed}/{one_try.index}{again}")
            seeds = [draw.getrandbits(62) for _ in range(self.config.n_samples_per_prompt)]
            requests.append(GenerationRequest(prompt.tokens, tuple(seeds), one_try.index))
        ticket = self.engines.send(engine, requests, self.parameters)
        self._in_flight[ticket] = _Chunk(engine, tries, prompts, time.monotonic())

    def _collect(self, *, wait: bool) -> None:
        if self._in_flight:
            long = 0.0 if not wait else _SHORT_POLL_SECONDS if self._scoring else _POLL_SECONDS
            for ticket in self.engines.finished(list(self._in_flight), wait_seconds=long):
                self._answered(ticket)
            self._replace_hung_engines()
        elif not self._scoring and wait:  # all engines are starting
            self.engines.finished([], wait_seconds=_POLL_SECONDS)
        self._collect_scores(_POLL_SECONDS if wait and not self._in_flight else 0.0)

    def _answered(self, ticket: Any) -> None:
        chunk = self._in_flight.pop(ticket)
        self._last_answer[chunk.engine] = time.monotonic()
        try:
            answer = self.engines.answer(ticket)
        except ActorLost:
            self._send_again(chunk)
        else:
            self._accept(chunk, answer)

    def _accept(self, chunk: _Chunk, answer: Rollouts) -> None:
        """Have the responses scored that carry no reward yet."""
        # Arrays of another process are read-only, and rewards are filled in here.
        answer = replace(answer, rewards=answer.rewards.copy())
        ends = np.searchsorted(answer.groups, np.arange(len(chunk.tries) + 1))
        for number, (one_try, prompt) in enumerate(zip(chunk.tries, chunk.prompts, strict=True)):
            place = slice(int(ends[number]), int(ends[number + 1]))
            errors = [error for error in answer.errors[place].tolist() if error]
            if errors:
                self._resample_or_drop(one_try, errors)
                continue
            scoring = _Scoring(one_try, answer, place)
            for i in range(place.start, place.stop):
                if np.isnan(answer.rewards[i]):
                    cut = bool(answer.truncated[i])
                    ticket = self._scorer.submit(prompt, answer.response(i), truncated=cut)
                    scoring.waiting[ticket] = i
                    self._scoring[ticket] = scoring
            if not scoring.waiting:
                self._add_ready(scoring.group())

    def _collect_scores(self, wait_seconds: float) -> None:
        if not self._scoring:
            return
        for ticket, score in self._scorer.finished(wait_seconds=wait_seconds):
            scoring = self._scoring.pop(ticket, None)
            if scoring is None:  # of before a restart
                continue
            i = scoring.waiting.pop(ticket)
            if isinstance(score, CallFailure):
                scoring.failures.append(score.reason)
            else:
                scoring.answer.rewards[i] = score.total
                scoring.scores[i] = score
            if not scoring.waiting:
                self._scored(scoring)

    def _scored(self, scoring: _Scoring) -> None:
        if scoring.failures:
            self._count_failed_reward(scoring.failures[0])
            self._resample_or_drop(scoring.one_try, scoring.failures, _REWARD_ATTEMPTS)
            return
        self._reward_errors.clear()
        self._add_ready(scoring.group())

    def _add_ready(self, group: Group) -> None:
        """Take a scored group, or drop it if it teaches nothing.

        Those of a round are decided together, when all of it is there.
        """
        self._generated.append(float(group.rewards.mean()))
        self._ready.append(group)
        dropped: list[int] = []
        if not self._in_rounds:
            dropped = [group.index] if self._sampling.drops_on_arrival(group) else []
        elif not self._round_is_open():
            dropped = self._sampling.drop_from_round(self._ready)
        if dropped:
            self.counts.dropped_uniform += len(dropped)
            self._dropped.setdefault("uniform", []).extend(dropped)
            self._ready = deque(g for g in self._ready if g.index not in set(dropped))

    def _count_failed_reward(self, error: str) -> None:
        """Raise if as many groups as a batch has, and 8 at least, failed with none between them."""
        self.counts.failed_rewards += 1
        self._reward_errors.append(error)
        if len(self._reward_errors) >= max(8, self.config.rollout_batch_size):
            raise BatchError(
                f"no reward could be computed for {len(self._reward_errors)} groups in a row; the "
                f"first error: {self._reward_errors[0]}"
            )

    def _resample_or_drop(
        self, failed: _Try, errors: list[str], default_limit: int | None = None
    ) -> None:
        failures, limit = failed.failures + 1, self.config.max_error_reschedule_attempts
        limit = default_limit if limit is None else limit
        cause = f"{len(errors)} of {self.config.n_samples_per_prompt} responses failed: {errors[0]}"
        if limit is not None and failures > limit:
            self.counts.dropped_failed += 1
            self._dropped.setdefault("failed", []).append(failed.index)
            self.say(f"prompt {failed.index} is dropped after {failures} failed attempts; {cause}")
            return
        # The 1st, 2nd, 4th, 8th, ...: a broken task must not flood the log.
        if failures & (failures - 1) == 0:
            self.say(f"prompt {failed.index} is sampled again (attempt {failures} failed); {cause}")
        self.counts.resampled += 1
        self._waiting.append(_Try(failed.index, failures))

    def _send_again(self, chunk: _Chunk) -> None:
        self.counts.resent += len(chunk.tries)
        # In order, so that what an engine lost is generated together as before: rounding depends
        # on that.
        self._waiting = deque(sorted([*chunk.tries, *self._waiting]))

    def _replace_hung_engines(self) -> None:
        limit = self.config.engine_patience
        now = time.monotonic()
        for engine in {chunk.engine for chunk in self._in_flight.values()}:
            mine = {t: chunk for t, chunk in self._in_flight.items() if chunk.engine == engine}
            # A chunk that waited behind another began when that one was answered.
            began = max(
                min(chunk.sent for chunk in mine.values()), self._last_answer.get(engine, 0.0)
            )
            if now - began > limit:
                for ticket, chunk in mine.items():
                    del self._in_flight[ticket]
                    self._send_again(chunk)
                self.engines.replace(engine, f"did not answer within {limit:g} s")

    def _require_progress(self, dropped: list[Group], version: int) -> None:
        """An `EngineError` if a batch waits for engines whose weights do not get newer.

        What an engine was working on when it fell behind is far less than that.
        """
        if len(dropped) > max(8, _STALE_ROUNDS * self._limit()):
            newest = max(group.weight_version for group in dropped)
            raise EngineError(
                f"{len(dropped)} groups were dropped while one batch was collected: their tokens "
                f"come from weight version {newest} or older, the trainer has {version}, and "
                f"--max-weight-staleness allows {self.config.staleness_limit}. The engines do not "
                "load new weights, or report another version than they were sent"
            )

    def _drop_stale(self, version: int) -> list[Group]:
        stale = [group for group in self._ready if self._is_stale(group, version)]
        if stale:
            self.counts.dropped_stale += len(stale)
            self._dropped.setdefault("stale", []).extend(group.index for group in stale)
            self._ready = deque(g for g in self._ready if not self._is_stale(g, version))
        return stale

    def _is_stale(self, group: Group, version: int) -> bool:
        limit = self.config.max_token_staleness
        if limit is None:
            return group.weight_version < version - self.config.staleness_limit
        # Older tokens are masked; the others of the response are trained on.
        return group.newest_of_each < version - limit


def reward_parts(groups: Sequence[Group]) -> dict[str, NDArray[np.float64]]:
    """[M] of every reward before its weight, in the order of `joined`; empty where one has none."""
    names = groups[0].parts if all(group.parts for group in groups) else ()
    return {name: np.concatenate([group.parts[name] for group in groups]) for name in names}


def joined(groups: Sequence[Group]) -> Rollouts:
    """The rollouts of all groups, numbered from 0 in their order."""
    answers = {id(group.rollouts): group.rollouts for group in groups}
    firsts = dict(zip(answers, np.cumsum([0, *map(len, answers.values())]), strict=False))
    starts = np.array([firsts[id(group.rollouts)] + group.place.start for group in groups])
    counts = np.array([group.place.stop - group.place.start for group in groups])
    everything = Rollouts.concatenated(list(answers.values()))
    return everything.select(
        ragged_range(starts, counts), np.repeat(np.arange(len(groups)), counts)
    )
