"""The queue between task, engines and trainer, with the real engine called in this process."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugin.batch_types import RolloutBatch, RolloutSample
from plugin.cluster import assignments
from plugin.cluster.assignments import Assignments
from plugin.config import JobConfig
from plugin.controller.batch import describe_batch, prepare_batch, without_old_tokens
from plugin.controller.local_engine import LocalEngine
from plugin.controller.queue.groups import Attempt, Group, joined
from plugin.controller.queue.rollout_queue import RolloutQueue
from plugin.engines.protocol import GenerationRequest, SamplingParameters
from plugin.engines.transformers.engine import TransformersEngine
from plugin.environments.trajectory import Rollouts, Trajectory, failed
from plugin.errors import ConfigError, EngineError
from plugin.ragged import Stored
from plugin.tasks.copy_digits import ALPHABET, CharacterTokenizer, CopyDigitsTask
from tests.parallel.tiny_models import tiny_qwen3
from tests.unit.engines.tiny_engines import load, loaded_engine
from tests.unit.environments.played_groups import run_single_turn

pytestmark = pytest.mark.usefixtures("jumping_clock")

TASK = CopyDigitsTask(CharacterTokenizer(ALPHABET), seed=1)
PARAMETERS = SamplingParameters(max_response_length=4, stop_token_ids=TASK.stop_token_ids)


class DirectEngines:
    """Engines of this process; a shipment is answered when `work` reaches it, in order.

    dead: shipments that are lost; spoiled: prompts whose next response fails, with how often
    """

    def __init__(self, engines: list[TransformersEngine], patience: float = math.inf) -> None:
        self.engines = engines
        self.assignments = Assignments(patience)
        self.waiting: list[tuple[int, int, dict[int, GenerationRequest], SamplingParameters]] = []
        self.arrived: list[Rollouts] = []
        self.lost: list[int] = []
        self.sent: dict[int, list[int]] = {}
        self.dead: set[int] = set()
        self.starting: set[int] = set()
        self.spoiled: dict[int, int] = {}
        self.replaced: list[tuple[int, str]] = []
        self.served: list[GenerationRequest] = []

    def __len__(self) -> int:
        return len(self.engines)

    def least_loaded(self) -> tuple[int, int] | None:
        for number in range(len(self)):
            self.assignments.set_open(number, number not in self.starting)
        return self.assignments.least_loaded()

    def send(
        self, engine: int, requests: Mapping[int, GenerationRequest], parameters: SamplingParameters
    ) -> None:
        shipment = len(self.sent) + 1
        self.sent[shipment] = list(requests)
        self.assignments.add(engine, requests)
        self.waiting.append((shipment, engine, dict(requests), parameters))

    def cancel_groups(self) -> None:
        self.waiting.clear()
        self.arrived.clear()
        self.assignments.clear()

    def work(self, engine: int | None = None) -> None:
        for item in [w for w in self.waiting if engine is None or w[1] == engine]:
            self.answer(item)

    def answer(self, item: Any, groups: int | None = None) -> None:
        """Answers the first `groups` of a shipment, and loses the rest."""
        self.waiting.remove(item)
        shipment, number, by_group, parameters = item
        sent, requests = self.sent[shipment], list(by_group.values())
        if shipment in self.dead:
            groups = 0
        self.served += requests
        answers = run_single_turn(self.engines[number], requests, parameters)
        spoiled = [self._spoil(*pair) for pair in zip(requests, answers, strict=True)]
        self.arrived.append(Rollouts.of(spoiled[:groups], sent[:groups]))
        self.assignments.remove_answered(number, sent)
        if groups is not None:
            self.lost += sent[groups:]

    def _spoil(self, request: GenerationRequest, answer: list[Trajectory]) -> list[Trajectory]:
        left = self.spoiled.get(request.prompt_index, 0)
        if not left:
            return answer
        self.spoiled[request.prompt_index] = left - 1
        return [*answer[:-1], failed("the tool broke")]

    def receive(self, *, wait_seconds: float) -> tuple[list[Rollouts], list[int]]:
        if wait_seconds and not (self.arrived or self.lost):
            self.work()
        for engine, reason in self.assignments.hung().items():
            self.replaced.append((engine, reason))
            self.waiting = [item for item in self.waiting if item[1] != engine]
            self.lost += self.assignments.remove_lost(engine)
        arrived, lost, self.arrived, self.lost = self.arrived, self.lost, [], []
        return arrived, lost


def make_queue(engines: int = 1, **settings: Any) -> tuple[RolloutQueue, DirectEngines]:
    config = JobConfig(rollout_batch_size=4, n_samples_per_prompt=2, use_tis=True, **settings)
    direct = DirectEngines([loaded_engine() for _ in range(engines)], config.engine_patience)
    return RolloutQueue(TASK, direct, PARAMETERS, config), direct


def responses(group: Group) -> list[list[int]]:
    return [group.rollouts.response(i).tolist() for i in range(group.place.start, group.place.stop)]


def new_weights(engine: TransformersEngine, version: int) -> None:
    load(engine, dict(engine._model.state_dict()), version)


def test_a_batch_is_the_next_prompts_in_order_with_all_their_responses() -> None:
    queue, _ = make_queue()
    groups = queue.take(0)
    assert [group.index for group in groups] == [0, 1, 2, 3]
    columns = joined(groups).batch.columns
    lengths = columns["response_lengths"].tolist()
    for i, (tokens, length) in enumerate(zip(columns["unconcat_tokens"], lengths, strict=True)):
        assert tuple(tokens[:-length].tolist()) == TASK.prompt(i // 2).tokens
    assert [len(group.rewards) for group in groups] == [2, 2, 2, 2] and len(lengths) == 8
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


def test_a_batch_does_not_wait_for_ever_for_engines_without_new_weights() -> None:
    queue, _ = make_queue()
    with pytest.raises(
        EngineError, match=r"weight version 0 or older, the trainer has 1, .*staleness allows 0"
    ):
        queue.take(1)


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


def one_group(*versions: list[int]) -> Group:
    """A group whose responses have tokens of these versions."""
    samples = [
        RolloutSample(
            torch.arange(len(v) + 1), len(v), torch.ones(len(v)), weight_version=torch.tensor(v)
        )
        for v in versions
    ]
    rollouts = Rollouts.of([[Trajectory((sample,), 1.0) for sample in samples]])
    return Group(Attempt(0), rollouts, slice(0, len(samples)))


@pytest.mark.parametrize(
    ("limits", "stale_at"),
    [
        # The oldest token decides: version 3 is 2 versions behind 5.
        ({"max_weight_staleness": 2}, 6),
        # The second response has no token after version 4.
        ({"max_weight_staleness": 2, "max_token_staleness": 2}, 7),
        ({"max_weight_staleness": 2, "max_token_staleness": 0}, 5),
    ],
)
def test_a_group_is_too_old_by_its_oldest_token_or_if_a_response_has_no_young_one(
    limits: dict[str, int], stale_at: int
) -> None:
    queue, _ = make_queue(async_rollouts=True, partial_rollouts=True, **limits)
    for version in range(4, 9):
        queue._taking = version
        dropped = queue._drop_if_stale(one_group([3, 4, 5], [4, 4]))
        assert dropped == (version >= stale_at), version


def test_old_tokens_are_masked_and_count_nowhere() -> None:
    rollouts, share = without_old_tokens(one_group([3, 4, 5], [5, 5]).rollouts, oldest=4)
    assert share == pytest.approx(1 / 5)
    assert [mask.tolist() for mask in rollouts.batch.columns["loss_masks"]] == [[0, 1, 1], [1, 1]]
    described = describe_batch(JobConfig(), rollouts.batch, rollouts, version=5)
    assert described["staleness_max"] == 1 and described["staleness"] == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partial_rollouts": True}, "--partial-rollouts .*--async-rollouts"),
        ({"max_token_staleness": 0}, "--partial-rollouts"),
        ({"partial_rollout_mode": "continue"}, "--partial-rollouts"),
        (
            {"async_rollouts": True, "partial_rollouts": True, "max_token_staleness": 2},
            "--max-token-staleness is 2 and --max-weight-staleness 1: no token gets that old",
        ),
        (
            {
                "async_rollouts": True,
                "partial_rollouts": True,
                "partial_rollout_mode": "continue",
                "rollout_engine": "vllm",
            },
            "--rollout-engine vllm can recompute",
        ),
        (
            {
                "async_rollouts": True,
                "partial_rollouts": True,
                "rollout_engine": "vllm",
                "use_rollout_routing_replay": "ids",
                "embedded_model": "qwen3_moe",
            },
            "--rollout-engine vllm reports the routes of prefilling an interrupted response again",
        ),
    ],
)
def test_partial_rollouts_that_cannot_work_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig.from_sources({**settings, "policy_loss": "icepop"})


LONG = {
    "async_rollouts": True,
    "max_weight_staleness": 2,
    "max_response_length": 4096,
    "policy_loss": "icepop",
}


@pytest.mark.parametrize(
    ("settings", "interrupts"),
    [
        ({}, True),
        ({"rollout_engine": "vllm"}, True),
        ({"rollout_engine": "vllm_server"}, True),
        ({"max_token_staleness": 1}, True),
        # A group with a response over three versions would be dropped.
        ({"max_weight_staleness": 1}, False),
        # Waiting is short.
        ({"max_response_length": 4095}, False),
        ({"async_rollouts": False, "max_weight_staleness": None}, False),
        # It has no such mode, or its servers may have none.
        ({"rollout_engine": "mine.engines:make"}, False),
        (
            {"rollout_engine": "http", "rollout_url": "http://a:1", "rollout_weights_dir": "/w"},
            False,
        ),
        # It would not report the routes that a response was sampled with.
        (
            {
                "rollout_engine": "vllm",
                "use_rollout_routing_replay": "ids",
                "embedded_model": "qwen3_moe",
            },
            False,
        ),
        ({"partial_rollouts": False}, False),
        ({"max_response_length": 8, "partial_rollouts": True}, True),
    ],
)
def test_weights_do_not_wait_for_long_responses_where_pausing_loses_nothing(
    settings: dict[str, Any], interrupts: bool
) -> None:
    assert JobConfig.from_sources(LONG | settings).interrupts_responses == interrupts


def test_prompts_are_shared_out_among_engines() -> None:
    queue, direct = make_queue(engines=2)
    queue._issue()
    assert sorted(item[1] for item in direct.waiting) == [0, 1]


def test_seeds_differ_between_samples_and_repeat_between_runs() -> None:
    first, second = make_queue()[0].take(0), make_queue()[0].take(0)
    for a, b in zip(first, second, strict=True):
        for mine, theirs in zip(responses(a), responses(b), strict=True):
            assert mine == theirs
    assert any(first != second for first, second in map(responses, first))


def test_the_prompts_of_a_lost_engine_are_sent_again_with_the_same_seeds() -> None:
    queue, direct = make_queue(engines=2)
    direct.dead = {1}
    expected, _ = make_queue(engines=2)
    groups, unbroken = queue.take(0), expected.take(0)
    assert [group.index for group in groups] == [0, 1, 2, 3]
    assert [g.rewards.tolist() for g in groups] == [g.rewards.tolist() for g in unbroken]
    assert queue.counts.resent == 2 and queue.counts.issued == queue.counts.taken == 4
    assert len(direct.served) == 6


def test_an_engine_that_is_starting_gets_no_requests() -> None:
    queue, direct = make_queue(engines=2)
    direct.starting = {0}
    assert [group.index for group in queue.take(0)] == [0, 1, 2, 3]
    assert {item[1] for item in direct.waiting} <= {1}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time by which engines count as hung; it stands still."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(assignments, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_hung_engine_is_replaced_and_its_prompts_go_elsewhere(clock: SimpleNamespace) -> None:
    queue, direct = make_queue(engines=2, rollout_timeout=5.0)
    queue._issue()
    direct.work(engine=1)
    clock.now += 5.1
    queue._collect(wait=False)
    assert direct.replaced == [(0, "generated nothing for 5 s (--rollout-timeout)")]
    assert [t.index for t in queue._waiting] == [0, 1]
    direct.starting = {0}
    assert [group.index for group in queue.take(0)] == [0, 1, 2, 3]


def test_an_engine_that_answers_is_not_taken_for_one_that_hangs(clock: SimpleNamespace) -> None:
    queue, direct = make_queue(async_rollouts=True, rollout_timeout=5.0, rollout_max_batch=8)
    queue._issue()
    first, second = direct.waiting
    clock.now += 4.0
    direct.answer(first)
    queue._collect(wait=False)
    clock.now += 4.0
    queue._collect(wait=False)
    assert not direct.replaced and set(direct.sent[second[0]]) <= set(queue._in_flight)


def test_an_engine_busy_with_a_long_response_is_not_taken_for_one_that_hangs(
    clock: SimpleNamespace,
) -> None:
    queue, direct = make_queue(engines=2, rollout_timeout=5.0)
    queue._issue()
    for tokens in (100, 200, 300, 300):
        clock.now += 4.0
        direct.assignments.note_progress(0, tokens)
        direct.assignments.note_progress(1, tokens + clock.now)
        queue._collect(wait=False)
        assert not direct.replaced
    clock.now += 4.0
    direct.assignments.note_progress(0, 300)  # the last token was 8 s ago
    direct.assignments.note_progress(1, 1000)
    queue._collect(wait=False)
    assert [number for number, _ in direct.replaced] == [0]


def test_a_synchronous_shipment_that_is_lost_in_part_is_generated_whole_as_before() -> None:
    queue, direct = make_queue()
    queue._issue()
    direct.answer(direct.waiting[0], groups=3)
    queue._collect(wait=False)
    assert queue.under_way == 4 and [t.index for t in queue._waiting] == [0, 1, 2, 3]
    expected = make_queue()[0].take(0)
    groups = queue.take(0)
    assert [r.prompt_index for r in direct.served] == 2 * [0, 1, 2, 3]
    for name in ("unconcat_tokens", "rollout_log_probs"):
        mine, theirs = (joined(g).batch.columns[name].values for g in (groups, expected))
        assert torch.equal(mine, theirs)


def test_an_asynchronous_shipment_that_is_lost_in_part_keeps_what_came() -> None:
    queue, direct = make_queue(async_rollouts=True)
    queue._issue()
    direct.answer(direct.waiting[0], groups=3)
    queue._collect(wait=False)
    assert [t.index for t in queue._waiting] == [3] and queue.counts.resent == 1


def test_a_group_with_a_failed_response_is_sampled_again_with_other_seeds() -> None:
    queue, direct = make_queue()
    direct.spoiled = {1: 3}
    groups = queue.take(0)
    assert [group.index for group in groups] == [0, 1, 2, 3]
    assert queue.counts.resampled == 3 and queue.counts.issued == 4
    seeds = [request.seeds for request in direct.served if request.prompt_index == 1]
    assert len(set(seeds)) == 4


def test_a_group_is_dropped_after_the_allowed_attempts_and_the_batch_proceeds() -> None:
    said: list[str] = []
    queue, direct = make_queue(max_error_reschedule_attempts=2)
    queue.log = said.append
    direct.spoiled = {1: 100}
    groups = queue.take(0)
    assert [group.index for group in groups] == [0, 2, 3, 4]
    assert queue.counts.dropped_failed == 1 and queue.counts.resampled == 2
    assert queue.take_dropped() == {"failed": [1]} and queue.take_dropped() == {}
    assert "prompt 1 is dropped after 3 failed attempts" in said[-1]
    assert "the tool broke" in said[-1]
    assert queue.counts.issued == 5


def test_no_attempts_drops_at_the_first_failure() -> None:
    queue, direct = make_queue(max_error_reschedule_attempts=0)
    direct.spoiled = {0: 1}
    assert [group.index for group in queue.take(0)] == [1, 2, 3, 4]
    assert queue.counts.resampled == 0


def test_a_queue_put_back_to_an_earlier_state_repeats_its_prompts() -> None:
    queue, direct = make_queue(async_rollouts=True, max_weight_staleness=2)
    queue.take(0)
    queue.pump()
    direct.work()
    queue.pump()
    state = json.loads(json.dumps(queue.state()))
    assert [pending[0] for pending in state["pending"]] == list(range(4, queue.counts.issued))
    before = [group.index for group in queue.take(0)]
    queue.restore(state)
    assert queue.counts.issued == queue.counts.taken + queue.under_way
    assert [group.index for group in queue.take(0)] == before == [4, 5, 6, 7]


def test_a_trainer_that_goes_back_trains_on_the_groups_that_its_engines_have() -> None:
    queue, direct = make_queue(async_rollouts=True, max_weight_staleness=2, rollout_max_batch=8)
    queue.begin()
    direct.work()
    start = json.loads(json.dumps(queue.state()))
    assert [pending[0] for pending in start["pending"]] == list(range(8))
    assert [g.index for g in queue.take(0)] == [0, 1, 2, 3]
    queue.pump()
    direct.work()
    queue.pump()
    # 4 to 11 are finished or running; 0 to 3 were trained after the checkpoint and come again.
    assert queue.restore(start, keep_for=1) == 8 and queue.under_way == 12
    assert queue.counts.issued == 12 and queue.counts.taken == 0
    trained = [[g.index for g in queue.take(1)] for _ in range(3)]
    assert trained[0] == [4, 5, 6, 7] and sorted(trained[1] + trained[2]) == [
        0,
        1,
        2,
        3,
        *range(8, 12),
    ]
    assert len({request.prompt_index for request in direct.served}) == queue.counts.issued
    assert queue.counts.issued == queue.counts.taken + queue.under_way


@pytest.mark.parametrize("parts_are_elsewhere", [False, True])
def test_finished_groups_of_which_parts_may_be_lost_are_generated_again(
    parts_are_elsewhere: bool,
) -> None:
    queue, direct = make_queue(async_rollouts=True, max_weight_staleness=2, rollout_max_batch=8)
    queue.begin()
    direct.work()
    start = json.loads(json.dumps(queue.state()))
    queue.take(0)
    if parts_are_elsewhere:
        for group in queue._ready.values():
            nowhere = Stored([0], np.zeros(len(group.rollouts.batch), int), np.arange(8))
            columns = {**group.rollouts.batch.columns, "rollout_routed_experts": nowhere}
            group.rollouts = replace(group.rollouts, batch=RolloutBatch(columns))
    queue.pump()
    assert len(direct.waiting) > 0 and len(queue._ready) == 4
    queue.forget_stored()
    # 8 to 11 are running and stay in any case.
    assert queue.restore(start, keep_for=1) == (4 if parts_are_elsewhere else 8)
    trained = sorted(g.index for _ in range(3) for g in queue.take(1))
    assert trained == list(range(12))
    asked = [request.prompt_index for request in direct.served]
    twice = [i for i in range(12) if asked.count(i) == 2]
    assert twice == [*range(8 if parts_are_elsewhere else 4)]
    assert queue.counts.issued == queue.counts.taken + queue.under_way


def test_groups_that_are_too_old_for_the_weights_to_come_are_not_kept() -> None:
    queue, direct = make_queue(async_rollouts=True, max_weight_staleness=1)
    start = queue.state()
    queue.take(0)
    queue.pump()
    direct.work()
    queue.pump()
    assert queue.under_way == 4
    assert queue.restore(start, keep_for=2) == 0 and queue.counts.issued == queue.under_way == 0
    new_weights(direct.engines[0], 2)
    assert [group.index for group in queue.take(2)] == [0, 1, 2, 3]


@given(
    losses=st.sets(st.integers(1, 12)),
    spoiled=st.dictionaries(st.integers(0, 20), st.integers(1, 4)),
    limit=st.one_of(st.none(), st.integers(0, 2)),
    staleness=st.integers(0, 3),
    save_at=st.integers(-1, 2),
    goes_back=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_nothing_is_lost_and_nothing_is_doubled_whatever_breaks(
    losses: set[int],
    spoiled: dict[int, int],
    limit: int | None,
    staleness: int,
    save_at: int,
    goes_back: bool,
) -> None:
    queue, direct = make_queue(
        engines=2,
        async_rollouts=staleness > 0,
        max_weight_staleness=staleness or None,
        max_error_reschedule_attempts=limit,
    )
    queue.log = lambda _: None
    direct.dead, direct.spoiled = losses, dict(spoiled)
    trained: list[int] = []
    dropped: list[int] = []
    saved, at = queue.state(), (0, 0)
    for step in range(3):
        trained += [group.index for group in queue.take(0)]
        queue.pump()
        dropped += [index for indices in queue.take_dropped().values() for index in indices]
        if step == save_at:
            saved, at = json.loads(json.dumps(queue.state())), (len(trained), len(dropped))
    if goes_back:
        queue.restore(saved, keep_for=0 if staleness else None)
        trained, dropped = trained[: at[0]], dropped[: at[1]]
        for _ in range(2):
            trained += [group.index for group in queue.take(0)]
            dropped += [index for indices in queue.take_dropped().values() for index in indices]
    counts = queue.counts
    dropped_in_all = counts.dropped_failed + counts.dropped_stale + counts.dropped_uniform
    assert counts.issued == counts.taken + dropped_in_all + queue.under_way
    left = [pending[0] for pending in queue.state()["pending"]]
    # Of what was kept, some may be numbered after prompts that have not been issued yet.
    issued = [*range(counts.issued - len(queue._ahead)), *queue._ahead]
    assert sorted(trained + dropped + left) == sorted(issued)


def test_the_batch_describes_rewards_lengths_and_age() -> None:
    queue, _ = make_queue()
    groups = queue.take(0)
    rollouts = joined(groups)
    batch = prepare_batch(queue.config, rollouts)
    described = describe_batch(queue.config, batch, rollouts, version=3)
    rewards = [reward for group in groups for reward in group.rewards]
    assert described["reward"] == pytest.approx(sum(rewards) / 8)
    assert described["staleness"] == described["staleness_max"] == 3.0
    assert batch.columns["group_index"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert described["interrupted_share"] == 0
    assert tiny_qwen3().vocab_size > len(ALPHABET)


def test_age_counts_unmasked_tokens() -> None:
    mask = torch.tensor([1, 1, 1, 0])
    versions = torch.tensor([2, 2, 4, -1])
    interrupted = RolloutSample(torch.arange(6), 4, mask, weight_version=versions)
    whole = RolloutSample(torch.arange(6), 4, mask, weight_version=4)
    rollouts = Rollouts.of([[Trajectory((interrupted,), 1.0), Trajectory((whole,), 0.0)]])
    described = describe_batch(JobConfig(), rollouts.batch, rollouts, version=5)
    # Three tokens each, behind by 3, 3, 1 and 1, 1, 1
    assert described["staleness"] == pytest.approx(10 / 6)
    assert described["staleness_max"] == 3
    assert described["interrupted_share"] == 0.5


def test_an_engine_drops_what_it_generates_when_its_groups_are_canceled() -> None:
    engine = loaded_engine()
    local = LocalEngine(cast(Any, engine), JobConfig(rollout_max_batch=4))
    local.send(0, {i: GenerationRequest((1, 2), (i,), i) for i in range(6)}, PARAMETERS)
    assert local._server.step() == [] and engine.running > 0
    local.cancel_groups()
    assert engine.running == 0 and len(local._server) == 0
    local.send(0, {7: GenerationRequest((1, 2), (7,), 7)}, PARAMETERS)
    [answer], _ = local.receive(wait_seconds=1)
    assert answer.groups.tolist() == [7]
