"""The queue between task, engines and trainer, with the real engine called in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plugin.config import JobConfig
from plugin.errors import EngineError
from plugin.launch.batch_preparation import describe_batch, prepare_batch
from plugin.launch.rollout_queue import RolloutQueue
from plugin.rollout.character_tokenizer import CharacterTokenizer
from plugin.rollout.copy_digits_task import ALPHABET, CopyDigitsTask
from plugin.rollout.engine_protocol import Generation, GenerationRequest, SamplingParameters
from plugin.rollout.transformers_engine import TransformersEngine
from tests.parallel.tiny_models import tiny_qwen3
from tests.unit.rollout.tiny_engines import load, loaded_engine

TASK = CopyDigitsTask(CharacterTokenizer(ALPHABET), seed=1)
PARAMETERS = SamplingParameters(max_response_length=4, stop_token_ids=TASK.stop_token_ids)


class DirectEngines:
    """Engines of this process; a ticket is answered when `work` reaches it, in order."""

    def __init__(self, engines: list[TransformersEngine]) -> None:
        self.engines = engines
        self.waiting: list[tuple[int, int, list[GenerationRequest], SamplingParameters]] = []
        self.answers: dict[int, list[list[Generation]]] = {}
        self.tickets = 0

    def __len__(self) -> int:
        return len(self.engines)

    def send(
        self, engine: int, requests: list[GenerationRequest], parameters: SamplingParameters
    ) -> int:
        self.tickets += 1
        self.waiting.append((self.tickets, engine, requests, parameters))
        return self.tickets

    def work(self, engine: int | None = None) -> None:
        for item in [w for w in self.waiting if engine is None or w[1] == engine]:
            self.waiting.remove(item)
            ticket, number, requests, parameters = item
            self.answers[ticket] = self.engines[number].generate(requests, parameters)

    def finished(self, tickets: list[int], *, wait_seconds: float) -> list[int]:
        if wait_seconds and not self.answers:
            self.work()
        return [ticket for ticket in tickets if ticket in self.answers]

    def answer(self, ticket: int) -> list[list[Generation]]:
        return self.answers.pop(ticket)


def make_queue(engines: int = 1, **settings: Any) -> tuple[RolloutQueue, DirectEngines]:
    config = JobConfig(rollout_batch_size=4, n_samples_per_prompt=2, **settings)
    direct = DirectEngines([loaded_engine() for _ in range(engines)])
    return RolloutQueue(TASK, direct, PARAMETERS, config), direct


def new_weights(engine: TransformersEngine, version: int) -> None:
    load(engine, dict(engine._model.state_dict()), version)


def test_a_batch_is_the_next_prompts_in_order_with_all_their_responses() -> None:
    queue, _ = make_queue()
    groups = queue.take(0)
    assert [group.index for group in groups] == [0, 1, 2, 3]
    assert [group.prompt for group in groups] == [TASK.prompt(i) for i in range(4)]
    assert all(len(group.generations) == len(group.rewards) == 2 for group in groups)
    assert [group.index for group in queue.take(0)] == [4, 5, 6, 7]


def test_synchronous_rollouts_wait_until_a_batch_is_asked_for() -> None:
    queue, direct = make_queue()
    queue.take(0)
    queue.pump()
    assert not direct.waiting and queue.under_way == 0


def test_asynchronous_rollouts_go_on_while_the_trainer_works_but_not_too_far() -> None:
    queue, direct = make_queue(async_rollouts=True, max_weight_staleness=2)
    queue.take(0)
    for _ in range(10):
        queue.pump()
        direct.work()
    # The batch that trains now makes version 1; two more batches of 4 are then 1 and 2 versions old.
    assert queue.under_way == 8
    queue.take(1)
    for _ in range(10):
        queue.pump()
        direct.work()
    assert queue.under_way == 8


def test_staleness_zero_is_synchronous() -> None:
    queue, direct = make_queue(async_rollouts=True, max_weight_staleness=0)
    queue.take(0)
    queue.pump()
    assert not direct.waiting


def test_no_sample_is_older_than_the_limit_when_one_engine_keeps_up() -> None:
    queue, direct = make_queue(async_rollouts=True, max_weight_staleness=2)
    ages = []
    for version in range(6):
        groups = queue.take(version)
        ages += [version - group.weight_version for group in groups]
        for _ in range(4):
            queue.pump()
            direct.work()
        new_weights(direct.engines[0], version + 1)
    assert max(ages) == 2
    assert queue.counts.dropped_stale == 0


def test_groups_that_are_too_old_are_dropped_counted_and_replaced() -> None:
    queue, direct = make_queue(engines=2, async_rollouts=True, max_weight_staleness=1)
    queue.take(0)
    # Two batches were under way with version 0, one is left; the trainer comes back with version 3.
    assert queue.under_way == 4
    for engine in direct.engines:
        new_weights(engine, 3)
    groups = queue.take(3)
    assert queue.counts.dropped_stale == 4
    assert [group.index for group in groups] == [8, 9, 10, 11]
    assert all(group.weight_version == 3 for group in groups)
    assert queue.counts.issued == queue.counts.taken + queue.counts.dropped_stale + queue.under_way


def test_prompts_are_shared_out_among_engines() -> None:
    queue, direct = make_queue(engines=2)
    queue._issue()
    assert sorted(item[1] for item in direct.waiting) == [0, 1]


def test_seeds_differ_between_samples_and_repeat_between_runs() -> None:
    first, second = make_queue()[0].take(0), make_queue()[0].take(0)
    for a, b in zip(first, second, strict=True):
        for mine, theirs in zip(a.generations, b.generations, strict=True):
            assert torch.equal(mine.tokens, theirs.tokens)
    assert any(not torch.equal(*(g.tokens for g in group.generations)) for group in first)


def test_an_engine_that_does_not_answer_in_time_is_named() -> None:
    queue, direct = make_queue(step_timeout=1e-6)
    direct.finished = lambda tickets, wait_seconds: []  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="engine 0 did not answer within"):
        queue.take(0)


def test_the_batch_describes_rewards_lengths_and_age() -> None:
    queue, _ = make_queue()
    groups = queue.take(0)
    batch = prepare_batch(queue.config, groups)
    described = describe_batch(batch, groups, version=3)
    rewards = [reward for group in groups for reward in group.rewards]
    assert described["reward"] == pytest.approx(sum(rewards) / 8)
    assert described["staleness"] == described["staleness_max"] == 3.0
    assert batch.columns["group_index"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert tiny_qwen3().vocab_size > len(ALPHABET)
