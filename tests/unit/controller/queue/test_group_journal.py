"""Finished groups on disk: what a resumed run finds of them, whatever ended the one before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plugin.config import JobConfig
from plugin.controller.queue.group_journal import GroupJournal, read_file, record
from plugin.controller.queue.groups import Attempt, Group, joined, reward_parts
from plugin.controller.queue.rollout_queue import RolloutQueue
from plugin.controller.run_directory import group_key
from plugin.engines.protocol import SamplingParameters
from plugin.errors import ConfigError
from plugin.ragged import Stored
from tests.full_disk import largest_file
from tests.unit.controller.queue.test_dynamic_sampling import Equal, InAnyOrder, adds_up
from tests.unit.controller.queue.test_rollout_queue import DirectEngines, make_queue, new_weights
from tests.unit.test_kills_between_system_calls import killed_everywhere


def journal_in(run_dir: Path, files: int = 3, key: str = "k", **given: Any) -> GroupJournal:
    return GroupJournal(run_dir, key, files, lambda text: None, **given)


def some_groups(count: int = 5) -> list[Group]:
    """Scored groups of two responses each, as an engine gives them."""
    queue, _ = make_queue()
    found = [*queue.take(0), *queue.take(0)][:count]
    for group in found:
        group.parts["format"] = np.array([0.25, 0.5])
    return found


def same(a: Group, b: Group) -> bool:
    """Whether two groups train alike."""
    mine, theirs = joined([a]), joined([b])
    columns = mine.batch.columns
    assert columns.keys() == theirs.batch.columns.keys()
    for name, column in columns.items():
        other = theirs.batch.columns[name]
        if isinstance(column, torch.Tensor):
            assert torch.equal(column, other) and column.dtype == other.dtype, name
        else:
            assert torch.equal(column.values, other.values), name
            assert (
                column.values.dtype == other.values.dtype
                and (column.lengths == other.lengths).all()
            )
    for name in ("rewards", "errors", "turns", "truncated", "samples"):
        assert (getattr(mine, name) == getattr(theirs, name)).all(), name
    assert reward_parts([a]).keys() == reward_parts([b]).keys()
    assert all((v == reward_parts([b])[n]).all() for n, v in reward_parts([a]).items())
    return a.attempt == b.attempt


def test_a_group_comes_back_as_it_was_written(tmp_path: Path) -> None:
    groups, journal = some_groups(), journal_in(tmp_path)
    for group in groups:
        journal.add(group)
    back = journal_in(tmp_path).read()
    assert [group.index for group in back] == [0, 1, 2, 3, 4]
    assert all(map(same, groups, back))
    mates = [mate.index for mate in back[1].attempt.sent_with]
    assert mates == [mate.index for mate in groups[1].attempt.sent_with] and 1 in mates


def test_a_record_that_is_cut_off_anywhere_costs_itself_and_nothing_before_it(
    tmp_path: Path,
) -> None:
    groups, journal = some_groups(2), journal_in(tmp_path)
    for group in groups:
        journal.add(group)
    [file] = journal.paths()
    content = file.read_bytes()
    last = len(record(groups[1]))
    for cut in range(1, last + 1):
        file.write_bytes(content[:-cut])
        assert [group.index for group in read_file(file, "k")] == [0], cut
    # Nor does one that was written in part, as blocks of zeros.
    file.write_bytes(content[: -last // 2] + bytes(last // 2))
    assert [group.index for group in read_file(file, "k")] == [0]


def test_the_journal_holds_the_newest_files_only(tmp_path: Path) -> None:
    journal, groups = journal_in(tmp_path, files=2), some_groups(5)
    for group in groups:
        journal.add(group)
        journal.begin_batch()
        assert len(journal.paths()) <= 2
    assert [group.index for group in journal_in(tmp_path).read()] == [3, 4]


def test_groups_wait_until_the_engines_have_shown_their_weights(tmp_path: Path) -> None:
    proven = False
    journal = journal_in(tmp_path, files=2, proven=lambda: proven)
    groups = some_groups(3)
    journal.add(groups[0])
    assert not journal.paths()
    journal.begin_batch()
    journal.add(groups[1])
    journal.begin_batch()  # the first is too old by now
    proven = True
    journal.add(groups[2])
    assert [group.index for group in journal_in(tmp_path).read()] == [1, 2]


def test_groups_of_other_settings_or_prompts_are_not_read(tmp_path: Path) -> None:
    said: list[str] = []
    journal_in(tmp_path).add(some_groups(1)[0])
    other = GroupJournal(tmp_path, "other", 3, said.append)
    assert other.read() == [] and "made with different settings" in said[0]
    config = JobConfig(use_tis=True)
    key = group_key(config, None)
    assert key != group_key(replace(config, max_response_length=7), None)
    harmless = {"num_rollouts": 7, "num_rollout_engines": 2, "save_interval": 3}
    assert key == group_key(replace(config, **harmless), None)
    data: Any = type("Data", (), {"fingerprint": "rows"})
    assert key != group_key(config, data)


def test_a_full_disk_ends_the_journal_and_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    journal = GroupJournal(tmp_path, "k", 3, said.append)
    groups = some_groups(3)
    journal.add(groups[0])
    [file] = journal.paths()
    whole = file.read_bytes()
    with largest_file(len(whole) + 10):
        journal.add(groups[1])
    journal.add(groups[2])
    journal.begin_batch()
    assert len(said) == 1 and "File too large" in said[0] and "samples again" in said[0]
    assert file.read_bytes() == whole
    assert [group.index for group in journal_in(tmp_path).read()] == [0]


def test_groups_whose_columns_stay_with_the_engines_are_refused(tmp_path: Path) -> None:
    said: list[str] = []
    journal, group = GroupJournal(tmp_path, "k", 3, said.append), some_groups(1)[0]
    one = Stored([object()], np.zeros(len(group.rollouts.batch), int), np.zeros(1, int))
    batch = group.rollouts.batch.with_column("rollout_routed_experts", one)
    journal.add(replace_rollouts(group, batch))
    assert not journal.paths() and "the engines keep rollout_routed_experts" in said[0]
    with pytest.raises(ConfigError, match="--group-journal: groups have routes of experts"):
        JobConfig(group_journal=True, use_rollout_routing_replay=True, embedded_model="qwen3_moe")


def replace_rollouts(group: Group, batch: Any) -> Group:
    return Group(group.attempt, replace(group.rollouts, batch=batch), group.place)


def test_which_jobs_write_a_journal() -> None:
    asynchronous: dict[str, Any] = {"async_rollouts": True, "use_tis": True}
    assert not JobConfig(save_interval=3).keeps_group_journal
    assert JobConfig(save_interval=3, **asynchronous).keeps_group_journal
    assert not JobConfig(**asynchronous).keeps_group_journal, "nothing to resume from"
    assert not JobConfig(save_interval=3, group_journal=False, **asynchronous).keeps_group_journal
    assert JobConfig(group_journal=True).keeps_group_journal
    centered = {"score_centering_topk": 4, "policy_loss": "icepop"}
    assert not JobConfig(save_interval=3, async_rollouts=True, **centered).keeps_group_journal


def test_a_journal_that_is_killed_anywhere_has_every_group_whole_or_not_at_all(
    tmp_path: Path,
) -> None:
    groups, kills = some_groups(5), 0
    kept = journal_in(tmp_path)
    for group in groups[:2]:
        kept.add(group)
    before = {path: path.read_bytes() for path in kept.paths()}

    def go_on() -> None:
        """What a resumed run does: it keeps what it found, adds to it, and takes batches."""
        journal = journal_in(tmp_path)
        journal.replace(journal.read())
        for group in groups[2:]:
            journal.add(group)
            journal.begin_batch()

    seen: set[tuple[int, ...]] = set()
    for _ in killed_everywhere(tmp_path, go_on):
        kills += 1
        back = journal_in(tmp_path).read()
        assert all(same(group, groups[group.index]) for group in back)
        seen.add(tuple(sorted(group.index for group in back)))
        for path in kept.paths():
            path.unlink()
        for path, content in before.items():
            path.write_bytes(content)
    assert kills >= 5
    # Groups 0 and 1 were there at the start; they end with the file they are in, as the newest come.
    assert seen <= {(0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4), (2, 3, 4)}, seen


# -- the queue


def async_queue(run_dir: Path, **settings: Any) -> tuple[RolloutQueue, DirectEngines, GroupJournal]:
    queue, direct = make_queue(async_rollouts=True, max_weight_staleness=2, **settings)
    queue.journal = GroupJournal(run_dir, "k", 4, lambda _: None)
    return queue, direct, queue.journal


def test_a_resumed_queue_trains_on_what_the_journal_has_and_every_prompt_once(
    tmp_path: Path,
) -> None:
    queue, direct, journal = async_queue(tmp_path)
    first = [group.index for group in queue.take(0)]
    queue.pump()
    saved = json.loads(json.dumps(queue.state()))  # a checkpoint, with the batch trained on
    direct.work()
    queue.pump()
    assert len(queue._ready) >= 4
    finished = {group.index: group for group in queue._ready.values()}
    # kill -9; the next process has the checkpoint and the journal.
    again, engines, journal = async_queue(tmp_path)
    assert again.restore(saved, keep_for=1, finished=journal.read()) == len(finished)
    batch = again.take(1)
    assert not engines.served, "nothing was generated for the first batch"
    assert all(same(group, finished[group.index]) for group in batch)
    assert adds_up(again)
    second = [group.index for group in batch]
    later = [group.index for version in (1, 1) for group in again.take(version)]
    trained = first + second + later
    assert sorted(trained) == list(range(16)) and len(set(trained)) == 16


def test_a_resumed_queue_takes_no_group_that_was_trained_on_or_is_too_old(tmp_path: Path) -> None:
    queue, direct, journal = async_queue(tmp_path)
    trained = [group.index for group in queue.take(0)]
    direct.work()
    queue.pump()
    saved = json.loads(json.dumps(queue.state()))
    there = {group.index for group in journal.read()}
    assert there >= set(trained), "they stay until they are too old"
    again, _, journal = async_queue(tmp_path)
    again.restore(saved, keep_for=1, finished=journal.read())
    assert set(again._ready) == there - set(trained)
    assert {group.index for group in journal.read()} == there - set(trained)
    older, _, journal = async_queue(tmp_path)
    assert older.restore(saved, keep_for=3, finished=journal.read()) == 0
    assert adds_up(older) and not journal.paths()
    # From the start, too, prompts are taken in order, and none twice.
    afresh, _, journal = async_queue(tmp_path)
    start = afresh.state()
    queue.journal.replace(list(queue._ready.values()))  # type: ignore[union-attr]
    kept = [group.index for group in journal.read()]
    afresh.restore(start, keep_for=1, finished=journal.read())
    found = [group.index for _ in range(3) for group in afresh.take(1)]
    assert set(kept) <= set(found) and sorted(found) == list(range(12)) and adds_up(afresh)


def test_prompts_issued_ahead_of_others_and_trained_on_are_not_taken_again(tmp_path: Path) -> None:
    queue, _, _ = async_queue(tmp_path)
    group = some_groups(1)[0]
    # Prompt 7 was kept from an earlier part, and trained on before prompts 1 to 6 were issued.
    state = {
        "counts": {**vars(queue.counts), "issued": 2, "taken": 1},
        "pending": [[0, 0]],
        "ahead": [7],
    }
    seven = Group(Attempt(7), group.rollouts, group.place)
    one = Group(Attempt(1), group.rollouts, group.place)
    zero = Group(Attempt(0), group.rollouts, group.place)
    assert queue.restore(state, keep_for=1, finished=[seven, one, zero]) == 2
    assert set(queue._ready) == {0, 1} and adds_up(queue)


def test_groups_dropped_for_equal_rewards_are_not_in_the_journal(tmp_path: Path) -> None:
    config = JobConfig(
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        dynamic_sampling=True,
        use_tis=True,
        async_rollouts=True,
    )
    task, direct = Equal({1, 2}), InAnyOrder(0, 1)
    parameters = SamplingParameters(max_response_length=2, stop_token_ids=task.stop_token_ids)
    queue = RolloutQueue(task, direct, parameters, config, lambda _: None)
    queue.journal = journal_in(tmp_path)
    queue.take(0)
    there = {group.index for group in queue.journal.read()}
    assert not there & {1, 2} and len(there) >= 4


@pytest.mark.parametrize("killed_after", range(1, 9))
def test_a_synchronous_round_goes_on_from_whole_shipments_and_ends_as_it_would_have(
    tmp_path: Path, killed_after: int
) -> None:
    def queue_of(run_dir: Path | None) -> tuple[RolloutQueue, InAnyOrder]:
        config = JobConfig(
            rollout_batch_size=4,
            n_samples_per_prompt=2,
            dynamic_sampling=True,
            over_sampling_batch_size=6,
            use_tis=True,
        )
        task, direct = Equal({1, 2, 4, 7}), InAnyOrder(killed_after, 3)
        parameters = SamplingParameters(max_response_length=2, stop_token_ids=task.stop_token_ids)
        queue = RolloutQueue(task, direct, parameters, config, lambda _: None)
        if run_dir is not None:
            queue.journal = journal_in(run_dir, files=2)
        return queue, direct

    unbroken, all_sent = queue_of(None)
    expected = [group.index for group in unbroken.take(0)]
    queue, _ = queue_of(tmp_path)
    start = json.loads(json.dumps(queue.state()))
    queue.begin()
    for _ in range(killed_after):
        queue.pump()
        queue._issue()
    done = queue.journal.read()  # type: ignore[union-attr]
    again, sent = queue_of(tmp_path)
    again.restore(start, keep_for=0, finished=done)
    assert [group.index for group in again.take(0)] == expected
    assert again.counts == unbroken.counts and again.state() == unbroken.state()
    assert again.take_dropped().keys() == unbroken.take_dropped().keys()
    # What is generated again is generated together with what it was with.
    assert set(sent.chunks) <= set(all_sent.chunks)
    whole = [chunk for chunk in all_sent.chunks if set(chunk) <= {group.index for group in done}]
    assert not set(whole) & set(sent.chunks)


def test_a_synchronous_round_of_other_weights_is_generated_again(tmp_path: Path) -> None:
    queue, _ = make_queue()
    queue.journal = journal_in(tmp_path, files=2)
    start = queue.state()
    queue.take(0)
    again, engines = make_queue()
    assert again.restore(start, keep_for=1, finished=queue.journal.read()) == 0
    new_weights(engines.engines[0], 1)
    again.take(1)
    assert len(engines.served) == 4
