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
round that teach nothing are dropped when the round is complete, and the next round refills them;
asynchronous rollouts drop and refill them as they arrive.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from plugin.config import JobConfig
from plugin.controller.queue.dynamic_sampling import DynamicSampling
from plugin.controller.queue.group_scoring import GroupScoring, Scored
from plugin.controller.queue.groups import Group, Try
from plugin.controller.queue.groups_in_flight import Engines, GroupsInFlight, SentGroup
from plugin.engines.protocol import GenerationRequest, SamplingParameters
from plugin.environments.trajectory import Rollouts
from plugin.errors import BatchError, EngineError
from plugin.rewards.scorers import DriverScorer, Scorer
from plugin.tasks.protocol import Task, checked_prompt

#: Responses that wait at an engine besides those that fit into its batch, in batches.
_BATCHES_AHEAD = 1
_POLL_SECONDS = 1.0
#: While responses are being scored, which ends at another place.
_SHORT_POLL_SECONDS = 0.01
#: A reward that fails on a row usually fails on it again, and a batch waits for all its groups.
_REWARD_ATTEMPTS = 3
#: Of all that may be under way, so many times over may be too old before a batch is given up.
_STALE_ROUNDS = 4


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

    log: prints a message for a person
    scorer: who computes the rewards; none = the task, on this thread
    """

    task: Task
    engines: Engines
    parameters: SamplingParameters
    config: JobConfig
    log: Callable[[str], None] = print
    scorer: Scorer | None = None
    counts: QueueCounts = field(default_factory=QueueCounts)
    _waiting: deque[Try] = field(default_factory=deque)
    _ready: deque[Group] = field(default_factory=deque)
    _dropped: dict[str, list[int]] = field(default_factory=dict)
    _batch_is_out: bool = False
    _reward_errors: list[str] = field(default_factory=list)
    _generated: dict[int, float] = field(default_factory=dict)  # mean rewards, since the last batch
    _reward_generated: float = math.nan

    def __post_init__(self) -> None:
        self._sampling = DynamicSampling(self.config, lambda text: self.log(text))
        scorer = self.scorer or DriverScorer(self.task, self.config.reward_timeout)
        self._scoring = GroupScoring(scorer)
        self._in_flight = GroupsInFlight(self.engines, self.config.engine_patience)

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
            self._waiting.extend(Try(group.index) for group in rest)
            rest = []
        self._ready = deque(rest)
        self.counts.taken += wanted
        if self.config.dynamic_sampling:
            self.counts.kept_uniform += sum(not self._sampling.teaches(group) for group in batch)
            # In order: the last digit of a sum depends on it, and answers come in any order.
            self._reward_generated = float(np.mean(sorted(self._generated.values()) or [math.nan]))
        self._begin_rollout()
        self._batch_is_out = True
        return batch

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
        scored = len(self._ready) + len(self._scoring.tries)
        return scored + len(self._waiting) + len(self._in_flight)

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
        pending = [Try(group.index) for group in self._ready] + self._scoring.tries
        pending += [*self._in_flight.tries, *self._waiting]
        return {
            "counts": asdict(self.counts),
            "pending": [[t.index, t.failures] for t in sorted(pending)],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to `state`: sample anew what was under way then, forget what came later."""
        self.counts = QueueCounts(**state["counts"])
        self._waiting = deque(Try(*pending) for pending in state["pending"])
        self._ready.clear()
        self._in_flight.clear()
        self._scoring.clear()
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
        share, most = self._shares()
        while self._waiting or self.under_way < self._limit():
            load = self._in_flight.loads()
            # A part of a round goes to an idle engine: what is generated together is then the same
            # however long the engines take.
            free = [
                e for e in self.engines.available() if load[e] < (1 if self._in_rounds else most)
            ]
            if not free:
                return
            engine = min(free, key=load.__getitem__)
            self._send(engine, self._next_tries(min(share, most - load[engine])))

    def _shares(self) -> tuple[int, int]:
        """Groups that are sent together, and those that an engine may have at most."""
        config = self.config
        if self._in_rounds:
            share = -(-config.first_round_size(config.rollout_batch_size) // len(self.engines))
            return share, share
        fits = max(1, config.rollout_max_batch // config.n_samples_per_prompt)
        share = -(-config.rollout_batch_size // len(self.engines))
        return share, (1 + _BATCHES_AHEAD) * fits

    def _next_tries(self, size: int) -> list[Try]:
        tries = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
        new = max(0, min(size, self._limit() - self.under_way) - len(tries))
        start = self.counts.issued
        self.counts.issued += new
        return tries + [Try(index) for index in range(start, start + new)]

    def _send(self, engine: int, tries: list[Try]) -> None:
        longest = self.config.max_prompt_length
        prompts = [checked_prompt(self.task, t.index, longest) for t in tries]
        requests = []
        for one_try, prompt in zip(tries, prompts, strict=True):
            # A response that failed might fail again with the same seed.
            again = f"/{one_try.failures}" if one_try.failures else ""
            draw = random.Random(f"{self.config.seed}/{one_try.index}{again}")
            seeds = [draw.getrandbits(62) for _ in range(self.config.n_samples_per_prompt)]
            requests.append(GenerationRequest(prompt.tokens, tuple(seeds), one_try.index))
        groups = list(zip(tries, prompts, strict=True))
        self._in_flight.send(engine, groups, requests, self.parameters)

    def _collect(self, *, wait: bool) -> None:
        if self._in_flight:
            long = 0.0 if not wait else _SHORT_POLL_SECONDS if self._scoring else _POLL_SECONDS
            for groups, rollouts in self._in_flight.receive(wait_seconds=long):
                if rollouts is None:
                    self._send_again([group for group in groups if group is not None])
                else:
                    self._accept(groups, rollouts)
            self._send_again(self._in_flight.replace_hung_engines())
        elif not self._scoring and wait:  # all engines are starting
            self.engines.receive(wait_seconds=_POLL_SECONDS)
        if self._scoring:
            long = _POLL_SECONDS if wait and not self._in_flight else 0.0
            for scored in self._scoring.finished(long):
                self._scored(scored)

    def _accept(self, sent: Sequence[SentGroup | None], answer: Rollouts) -> None:
        """Have the responses scored that carry no reward yet."""
        # Arrays of another process are read-only, and rewards are filled in here.
        answer = replace(answer, rewards=answer.rewards.copy())
        ends = np.searchsorted(answer.groups, np.arange(len(sent) + 1))
        for number, group in enumerate(sent):
            if group is None:  # of before a restart
                continue
            place = slice(int(ends[number]), int(ends[number + 1]))
            errors = [error for error in answer.errors[place].tolist() if error]
            if errors:
                self._resample_or_drop(group.one_try, errors)
                continue
            self._in_flight.note_answer(group)
            ready = self._scoring.begin(group.one_try, group.prompt, answer, place)
            if ready is not None:
                self._add_ready(ready)

    def _scored(self, scored: Scored) -> None:
        if scored.failures:
            self._count_failed_reward(scored.failures[0])
            self._resample_or_drop(scored.one_try, scored.failures, _REWARD_ATTEMPTS)
            return
        self._reward_errors.clear()
        self._add_ready(scored.group)

    def _add_ready(self, group: Group) -> None:
        """Take a scored group, or drop it if it teaches nothing.

        Those of a round are decided together, when all of it is there.
        """
        self._generated[group.index] = float(group.rewards.mean())
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
        self, failed: Try, errors: list[str], default_limit: int | None = None
    ) -> None:
        self._in_flight.forget_answer(failed)
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
        self._waiting.append(Try(failed.index, failures))

    def _send_again(self, lost: Sequence[SentGroup]) -> None:
        """Have what an engine lost generated once more, in order.

        In rounds also what it had answered of the same shipment: rounding depends on what is
        generated together.
        """
        if not lost:
            return
        again = {group.one_try.index: group.one_try for group in lost}
        if self._in_rounds:
            held = {t.index for t in self._scoring.tries} | {g.index for g in self._ready}
            answered = self._in_flight.answered_with(lost)
            again |= {t.index: t for t in answered if t.index in held}
            self._scoring.withdraw(again.keys())
            self._ready = deque(group for group in self._ready if group.index not in again)
        self.counts.resent += len(again)
        self._waiting = deque(sorted([*again.values(), *self._waiting]))

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
