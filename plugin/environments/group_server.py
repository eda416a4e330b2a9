"""The groups at one engine: waiting, running and done; and how single-turn groups are played.

A group is a request that the controller's queue has numbered, with all its responses. It keeps that
number from the queue to the engine and back.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from plugin.batch_types import RolloutSample
from plugin.engines.protocol import (
    Answer,
    GenerationFailure,
    GenerationRequest,
    SamplingParameters,
)
from plugin.engines.response_stream import ResponseStream
from plugin.environments.trajectory import Trajectory, failed
from plugin.weights.buckets import NO_WEIGHTS

#: Groups that are done within so many seconds travel together: a call costs milliseconds.
_GATHER_SECONDS = 0.05

#: A group's number and one trajectory per seed.
PlayedGroup = tuple[int, list[Trajectory]]


class Player(Protocol):
    """Turns requests into trajectories, in one turn or several, many at a time."""

    @property
    def open(self) -> int:
        """Groups that were begun and are not done."""
        ...

    def has_room(self, request: GenerationRequest, parameters: SamplingParameters) -> bool:
        """Whether the engine has room for another group."""
        ...

    def begin(self, group: int, request: GenerationRequest, parameters: SamplingParameters) -> None:
        """Begin a group."""
        ...

    def step(self) -> list[PlayedGroup]:
        """Advance everything that is open by one step; returns the groups that are done."""
        ...

    def abort(self) -> None:
        """Drop what is open."""
        ...


class GroupServer:
    """Begins groups in order of arrival, as soon as there is room for each.

    Either its owner calls `step`, or `start` has a thread do so until the process ends, and calls
    come from other threads. Only the one that steps uses the player; what waits is guarded by the
    lock.
    """

    def __init__(self, player: Player) -> None:
        self._player = player
        self._changed = threading.Condition()
        #: Number, request, parameters, and the oldest weights that may sample its tokens.
        self._waiting: deque[tuple[int, GenerationRequest, SamplingParameters, int]] = deque()
        self._done: list[PlayedGroup] = []
        self._version, self._is_held = NO_WEIGHTS, False
        self._is_stepping, self._aborts = False, False
        self._era = 0
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        """Groups that are not done."""
        return len(self._waiting) + self._player.open

    def start(self) -> GroupServer:
        """Step in a thread of its own from now on."""
        threading.Thread(target=self._play, daemon=True).start()
        return self

    def submit(
        self,
        requests: Mapping[int, GenerationRequest],
        parameters: SamplingParameters,
        at_least: int = NO_WEIGHTS,
    ) -> None:
        """Queue groups; none of their tokens is sampled with weights older than `at_least`."""
        with self._changed:
            for group, request in requests.items():
                self._waiting.append((group, request, parameters, at_least))
            self._changed.notify_all()

    def step(self) -> list[PlayedGroup]:
        """Begin waiting groups and advance by one step; returns the groups that are done."""
        self._begin_waiting()
        return self._player.step() if self._player.open else []

    def collect(self, era: int) -> list[PlayedGroup]:
        """Wait for groups of `era` that are done and return them; none if a later one has begun.

        Raises what ended the generation.
        """
        with self._changed:

            def over() -> bool:
                return self._failure is not None or self._era > era

            def idle() -> bool:
                return not self._is_stepping and not len(self)

            # It may come before the call that begins its era: another thread makes that.
            self._changed.wait_for(lambda: (bool(self._done) and self._era == era) or over())
            self._changed.wait_for(lambda: idle() or over(), timeout=_GATHER_SECONDS)
            self._require_alive()
            if self._era > era:
                return []
            done, self._done = self._done, []
            return done

    def cancel(self, era: int) -> None:
        """Drop every group, also finished ones; later groups belong to `era`."""
        with self._changed:
            self._waiting.clear()
            self._done.clear()
            self._era = era
            self._aborts = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def changing(self, version: int, *, last: bool, interrupts: bool) -> Iterator[None]:
        """Pause generation while weights change, from their first part to the last.

        interrupts: the engine does so itself, between two tokens
        """
        if not interrupts:
            self.hold()
        yield
        if last:
            self._version = version
            self._release()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Pause generation inside the body."""
        self.hold()
        yield
        self._release()

    def hold(self) -> None:
        """Begin no further group, and wait until none is running."""
        with self._changed:
            self._is_held = True
            self._changed.wait_for(
                lambda: self._failure is not None or not (self._is_stepping or self._player.open)
            )
            self._require_alive()

    def _release(self) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _may_begin(self) -> bool:
        """Whether the first waiting group may begin."""
        if self._is_held or not self._waiting:
            return False
        _, request, parameters, at_least = self._waiting[0]
        return self._version >= at_least and self._player.has_room(request, parameters)

    def _begin_waiting(self) -> None:
        while self._may_begin():
            group, request, parameters, _ = self._waiting.popleft()
            self._player.begin(group, request, parameters)

    def _play(self) -> None:
        # OpenMP counts threads for each of ours; torch sets the number only at its first operation
        # here, and vLLM plans its attention before that.
        torch.set_num_threads(torch.get_num_threads())
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._aborts or self._player.open > 0 or self._may_begin()
                    )
                    era, self._is_stepping = self._era, True
                    if self._aborts:
                        self._player.abort()
                        self._aborts = False
                    # Under the lock that `era` was read with: what begins here is of this era.
                    self._begin_waiting()
                done = self._player.step() if self._player.open else []
                with self._changed:
                    self._is_stepping = False
                    if self._era == era:
                        self._done += done
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure, self._is_stepping = error, False
                self._changed.notify_all()


class SingleTurnPlayer:
    """A `Player` whose groups are done when the last of their responses is."""

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = stream
        self._groups: dict[int, list[Trajectory | None]] = {}  # one per seed

    @property
    def open(self) -> int:
        """Groups that were begun and are not done."""
        return len(self._groups)

    def has_room(self, request: GenerationRequest, parameters: SamplingParameters) -> bool:
        """Whether the responses would be generated at once."""
        return self._stream.has_room(request, parameters)

    def begin(self, group: int, request: GenerationRequest, parameters: SamplingParameters) -> None:
        """Ask for the responses to a request."""
        self._groups[group] = [None] * len(request.seeds)
        self._stream.add((group, request.prompt), request, parameters)

    def step(self) -> list[PlayedGroup]:
        """Advance what is open; returns the groups that are done."""
        done: list[PlayedGroup] = []
        for (group, prompt), place, answer in self._stream.step():
            self._groups[group][place] = trajectory_of(prompt, answer)
            found = [trajectory for trajectory in self._groups[group] if trajectory is not None]
            if len(found) == len(self._groups[group]):
                del self._groups[group]
                done.append((group, found))
        return done

    def abort(self) -> None:
        """Drop what is open."""
        self._groups.clear()
        self._stream.abort()


def trajectory_of(prompt: tuple[int, ...], answer: Answer) -> Trajectory:
    """The trajectory of one response; a failed one if there is nothing to train on."""
    if isinstance(answer, GenerationFailure):
        return failed(answer.reason)
    if answer.tokens.numel() == 0:
        return failed("empty response")
    sample = RolloutSample(
        tokens=torch.cat([torch.tensor(prompt), answer.tokens]),
        response_length=answer.tokens.numel(),
        loss_mask=torch.ones_like(answer.tokens),
        weight_version=answer.token_versions(),
        rollout_log_probs=answer.log_probs,
        routed_experts=answer.routed_experts,
        sampling_mask=answer.sampling_mask,
        routed_weights=answer.routed_weights,
        head=answer.head,
    )
    return Trajectory((sample,), truncated=answer.finish_reason == "length")
