"""Dynamic sampling and over-sampling: which groups are trained on, and what becomes of the others."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugin.config import JobConfig
from plugin.controller.queue.rollout_queue import RolloutQueue
from plugin.engines.protocol import (
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParameters,
)
from plugin.environments.trajectory import Rollouts
from plugin.errors import ConfigError, TrainingError
from plugin.tasks.copy_digits import ALPHABET, CharacterTokenizer, CopyDigitsTask
from plugin.tasks.protocol import Prompt
from tests.unit.controller.queue.test_rollout_queue import DirectEngines


class TwoTokens:
    """An engine without a model; its responses are cut off where nothing can end them."""

    def generate(
        self, requests: Sequence[GenerationRequest], parameters: SamplingParameters
    ) -> list[list[Generation]]:
        reason: FinishReason = "stop" if parameters.stop_token_ids else "length"
        answer = Generation(torch.tensor([1, 2]), reason, 0, torch.zeros(2))
        return [[answer] * len(request.seeds) for request in requests]


class Equal(CopyDigitsTask):
    """The rewards of prompts in `equal` are all 0.5, those of other prompts 0, 1, 0, 1, ..."""

    def __init__(self, equal: set[int]) -> None:
        super().__init__(CharacterTokenizer(ALPHABET), seed=1)
        self.equal, self.calls = equal, Counter[int]()

    def prompt(self, index: int) -> Prompt:
        return Prompt(super().prompt(index).tokens, {"index": index})

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        index = prompt.data["index"]
        self.calls[index] += 1
        return 0.5 if index in self.equal else float(self.calls[index] % 2)


class InAnyOrder(DirectEngines):
    """Answers one group at a time, in an order drawn from `seed`; keeps what was sent together."""

    def __init__(self, seed: int, engines: int) -> None:
        super().__init__([cast(Any, TwoTokens())] * engines)
        self.draw = random.Random(seed)
        self.chunks: list[tuple[int, ...]] = []
        self.single: list[Rollouts] = []

    def send(
        self, engine: int, requests: Mapping[int, GenerationRequest], parameters: SamplingParameters
    ) -> None:
        self.chunks.append(tuple(request.prompt_index for request in requests.values()))
        super().send(engine, requests, parameters)

    def cancel_groups(self) -> None:
        super().cancel_groups()
        self.single.clear()

    def receive(self, *, wait_seconds: float) -> tuple[list[Rollouts], list[int]]:
        self.work()
        assert not self.lost
        for rollouts in self.arrived:
            for group in dict.fromkeys(rollouts.groups.tolist()):
                places = np.flatnonzero(rollouts.groups == group)
                self.single.append(rollouts.select(places, rollouts.groups[places]))
        self.arrived.clear()
        if not self.single:
            return [], []
        return [self.single.pop(self.draw.randrange(len(self.single)))], []


def make_queue(
    equal: set[int], *, order: int = 0, engines: int = 1, **flags: Any
) -> tuple[RolloutQueue, InAnyOrder]:
    sizes: dict[str, Any] = {"rollout_batch_size": 4, "n_samples_per_prompt": 2}
    sizes |= {"dynamic_sampling": True, "use_tis": True}
    config = JobConfig(**{**sizes, **flags})
    task, direct = Equal(equal), InAnyOrder(order, engines)
    parameters = SamplingParameters(max_response_length=2, stop_token_ids=task.stop_token_ids)
    return RolloutQueue(task, direct, parameters, config, lambda _: None), direct


def taken(queue: RolloutQueue, version: int = 0) -> list[int]:
    return [group.index for group in queue.take(version)]


def adds_up(queue: RolloutQueue) -> bool:
    values = queue.metrics()
    dropped = sum(values[f"dropped_{cause}"] for cause in ("stale", "failed", "uniform"))
    return (
        values["prompts_issued"]
        == values["prompts_trained"] + dropped + values["prompts_under_way"]
    )


def test_a_round_ends_with_the_first_useful_groups_where_that_is_asked_for() -> None:
    sizes = {"over_sampling_batch_size": 8, "abort_surplus_groups": True}
    patient, _ = make_queue({1, 6}, over_sampling_batch_size=8)
    assert taken(patient) == [0, 2, 3, 4]
    seen = set()
    for order in range(6):
        queue, direct = make_queue({1, 6}, order=order, **sizes)
        batch = taken(queue)
        seen.add(tuple(batch))
        assert len(batch) == 4 and not {1, 6} & set(batch) and batch == sorted(batch)
        dropped = queue.take_dropped().get("uniform", [])
        others = sorted(set(range(8)) - set(batch) - set(dropped))
        assert not queue._in_flight and [one.index for one in queue._waiting] == others
        assert queue.counts.surplus == len(others) and adds_up(queue)
        assert not direct.waiting and not direct.single, "the engines have nothing left to do"
        # The others are sampled again, before new prompts.
        direct.chunks.clear()
        taken(queue)
        assert set(others) <= set(direct.chunks[0]) and adds_up(queue)
    assert len(seen) > 1, "batches depend on timing, which is why there is a flag"


def test_aborting_a_round_needs_one_with_more_groups_than_the_batch() -> None:
    with pytest.raises(ConfigError, match="--abort-surplus-groups"):
        JobConfig.from_sources({"abort_surplus_groups": True, "dynamic_sampling": True})


def test_groups_with_equal_rewards_are_dropped_and_other_prompts_take_their_place() -> None:
    queue, direct = make_queue({1, 2, 4})
    # 0 and 3 of the first round; 4 and 5 refill 1 and 2; 6 refills 4.
    assert taken(queue) == [0, 3, 5, 6]
    assert direct.chunks == [(0, 1, 2, 3), (4, 5), (6,)]
    assert queue.take_dropped() == {"uniform": [1, 2, 4]}
    assert queue.counts.dropped_uniform == 3 and queue.counts.issued == 7 and adds_up(queue)
    # Rewards of all that was generated: 4 groups of mean 0.5, and 3 of 0.5.
    assert queue.metrics()["reward_generated"] == 0.5


def test_without_the_flag_every_group_is_trained_on() -> None:
    queue, _ = make_queue({1, 2}, dynamic_sampling=False)
    assert taken(queue) == [0, 1, 2, 3] and "reward_generated" not in queue.metrics()


def test_the_batch_is_completed_with_equal_rewards_at_the_limit_of_refills() -> None:
    queue, direct = make_queue(set(range(1, 100)), max_refills_per_rollout=2)
    # 3 are missing and 2 may be replaced, so 1 stays; of the two refills none teaches.
    assert taken(queue) == [0, 1, 4, 5]
    assert direct.chunks == [(0, 1, 2, 3), (4, 5)]
    assert queue.counts.kept_uniform == 3 and queue.counts.dropped_uniform == 2
    assert adds_up(queue)
    assert taken(queue) == [6, 7, 10, 11], "every rollout has its own limit"


def test_the_job_ends_at_the_limit_of_refills_where_that_is_asked_for() -> None:
    queue, _ = make_queue(set(range(100)), max_refills_per_rollout=5, at_refill_limit="error")
    with pytest.raises(
        TrainingError, match=r"5 prompts were sampled in place .* fewer than 4 groups have a spread"
    ):
        queue.take(0)


def test_over_sampled_groups_that_are_not_needed_are_sampled_anew_for_the_next_batch() -> None:
    queue, direct = make_queue({0, 2}, over_sampling_batch_size=8)
    assert taken(queue) == [1, 3, 4, 5]
    assert queue.counts.surplus == 2 and queue.under_way == 2 and adds_up(queue)
    assert [pending[0] for pending in queue.state()["pending"]] == [6, 7]
    # 6 and 7 again, with the next weights, and 6 new ones.
    assert taken(queue) == [6, 7, 8, 9]
    assert direct.chunks[1:] == [tuple(range(6, 14))]
    assert adds_up(queue)


@given(
    equal=st.sets(st.integers(0, 40), max_size=25),
    order=st.integers(1, 1000),
    extra=st.integers(0, 5),
    limit=st.integers(1, 12),
    engines=st.integers(1, 3),
)
@settings(max_examples=25)
def test_a_synchronous_batch_does_not_depend_on_which_answer_comes_first(
    equal: set[int], order: int, extra: int, limit: int, engines: int
) -> None:
    flags = {
        "engines": engines,
        "max_refills_per_rollout": limit,
        "over_sampling_batch_size": 4 + extra if extra else None,
        "rollout_max_batch": 4,
    }
    seen = []
    for queue, direct in (make_queue(equal, order=o, **flags) for o in (0, order)):
        batches = [(taken(queue), queue.take_dropped()) for _ in range(3)]
        # What is generated together, too: rounding depends on it.
        seen.append((batches, sorted(direct.chunks), queue.metrics(), queue.state()))
        trained = [index for batch, _ in batches for index in batch]
        dropped = [index for _, causes in batches for i in causes.values() for index in i]
        left = [pending[0] for pending in queue.state()["pending"]]
        assert sorted(trained + dropped + left) == list(range(queue.counts.issued))
        assert queue.counts.issued <= 3 * (4 + extra + limit)
    assert seen[0] == seen[1]


def test_a_resumed_queue_takes_the_same_groups() -> None:
    queue, _ = make_queue({0, 5, 9}, over_sampling_batch_size=6)
    taken(queue)
    state = json.loads(json.dumps(queue.state()))
    rest = [taken(queue), taken(queue)]
    again, _ = make_queue({0, 5, 9}, over_sampling_batch_size=6)
    again.restore(state)
    assert [taken(again), taken(again)] == rest and again.counts == queue.counts


def test_asynchronous_rollouts_drop_and_refill_while_the_trainer_works() -> None:
    queue, direct = make_queue({1, 5, 6}, async_rollouts=True, max_weight_staleness=1)
    first = taken(queue)
    for _ in range(20):
        queue.pump()
        direct.work()
    # 4 groups for the next batch, none of them with equal rewards.
    assert queue.under_way == len(queue._ready) == 4 and adds_up(queue)
    assert not {1, 5, 6} & {*first, *taken(queue)}


def test_a_group_whose_responses_are_all_masked_teaches_nothing() -> None:
    flags = {"overlong_filtering": True, "max_refills_per_rollout": 1}
    queue, _ = make_queue(set(), **flags)
    queue.parameters = SamplingParameters(max_response_length=2, stop_token_ids=())
    assert len(taken(queue)) == 4 and queue.counts.kept_uniform == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dynamic_sampling": True, "n_samples_per_prompt": 1}, "the one reward of a group has no"),
        (
            {"dynamic_sampling": True, "over_sampling_batch_size": 32},
            "--over-sampling-batch-size is 32, and --rollout-batch-size 32",
        ),
        (
            {
                "dynamic_sampling": True,
                "over_sampling_batch_size": 64,
                "async_rollouts": True,
            },
            "ahead of the trainer already",
        ),
        ({"overlong_buffer_length": 2000}, "longer than --max-response-length 1024"),
    ],
)
def test_sampling_flags_that_cannot_work_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig(**{"advantage_estimator": "reinforce_plus_plus", "use_tis": True, **given})
