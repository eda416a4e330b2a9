"""A rollout is stored once; passes and updates on it send numbers and references, and leave their results there."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plugin.batch_types import RolloutBatch
from plugin.cluster import array_transport, trainer_group
from plugin.cluster.array_transport import fetched, only
from plugin.cluster.trainer_actor import RankPart, TrainerRank
from plugin.cluster.trainer_group import TrainerGroup
from plugin.config import JobConfig
from plugin.megatron_backend.step.batch_share import BatchShare
from plugin.megatron_backend.trainer import StepResult
from plugin.ragged import Ragged, Stored

DP = 3


class Store:
    """Ray's object store in this process; an object is known by its number."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def put(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def get(self, references: list[int]) -> list[Any]:
        return [self.objects[reference] for reference in references]


class Rank:
    """A rank with its own code but for the model; two ranks share a share.

    The log-prob of a sample's tokens is its first token.
    """

    def __init__(self, store: Store, reports: bool) -> None:
        self._store = store
        self.seen: list[tuple[str, RolloutBatch]] = []
        actor: Any = object.__new__(TrainerRank)
        actor._config = SimpleNamespace(
            use_rollout_routing_replay=False, reference_offload=False, detect_mismatch=False
        )
        model = SimpleNamespace(
            compute_log_probs=lambda share, **_: self._pass("compute", share),
            train_step=self._train_step,
            set_learning_rate=lambda rate: None,
            kept_weights=None,
        )
        actor._trainers = dict.fromkeys(("policy", "reference"), model)
        actor._reports, actor._rank, actor._memory = reports, 0, {}
        self._actor = actor
        self._returns = 1
        self.call_apart = self.call = self

    def options(self, num_returns: int) -> Rank:
        self._returns = num_returns
        return self

    def remote(self, method: str, share: int, *arguments: Any) -> Any:
        if method == "train_critic":
            return None
        head, parts = getattr(self._actor, method)(self._store.objects[share], *arguments)
        assert len(parts) == self._returns - 1
        return head, *map(self._store.put, parts)

    def _pass(self, method: str, share: BatchShare) -> Ragged:
        share.batch.check(share.samples)
        self.seen.append((method, share.batch))
        firsts = [-tokens[0].float() for tokens in share.batch.columns["unconcat_tokens"]]
        lengths = share.batch.columns["response_lengths"]
        return Ragged(torch.tensor(firsts).repeat_interleave(lengths), lengths)

    def _train_step(self, share: BatchShare, *, with_log_probs: bool, **_: Any) -> Any:
        own = self._pass("train", share)
        return StepResult({"loss": 1.0}, True, 1.0, log_probs=own if with_log_probs else None)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    import ray

    store = Store()
    monkeypatch.setattr(ray, "put", store.put)
    monkeypatch.setattr(array_transport, "_of_ray", store.get)
    monkeypatch.setattr(trainer_group, "wait_for_all", lambda calls, *_, **__: calls)
    return store


def group_over(store: Store, **settings: Any) -> tuple[TrainerGroup, list[Any]]:
    group: Any = object.__new__(TrainerGroup)
    ranks = [Rank(store, reports=number % 2 == 1) for number in range(2 * DP)]
    group._config = JobConfig(use_tis=True, micro_batch_size=2, **settings)
    group._console = group._idle = None
    group._ranks = ranks
    group._parts = [RankPart(number // 2, number % 2 == 1) for number in range(2 * DP)]
    group.places = [SimpleNamespace(address="here")] * len(ranks)
    sizes = {"hidden_size": 64, "max_position_embeddings": 10_000}
    group._built = {"policy": SimpleNamespace(hf_config=sizes)}
    group._fewest_microbatches, group._plans = 1, {}
    return group, ranks


def batch_of(samples: int) -> RolloutBatch:
    """Sample i holds the token i; responses of different lengths, every third token masked."""
    totals = [300 + 7 * (i % 5) for i in range(samples)]
    responses = [total - 2 for total in totals]
    masks = [(torch.arange(n) % 3 > 0).long() for n in responses]
    return RolloutBatch(
        {
            "unconcat_tokens": [torch.full((n,), i) for i, n in enumerate(totals)],
            "total_lengths": totals,
            "response_lengths": responses,
            "loss_masks": masks,
            "advantages": [torch.full((n,), i / 8) for i, n in enumerate(responses)],
            "rollout_log_probs": [torch.full((n,), -i / 4) for i, n in enumerate(responses)],
            "weight_versions": [torch.full((n,), 3) for n in responses],
        }
    )


def put_bytes(objects: list[Any]) -> int:
    """Bytes of the arrays of objects; a column that is elsewhere is its numbers."""
    arrays = [array for held in objects for array in held.values()]
    return sum(
        a.owner.nbytes + a.place.nbytes if isinstance(a, Stored) else a.nbytes for a in arrays
    )


def test_after_a_rollout_is_stored_passes_and_updates_send_numbers_of_samples_alone(
    store: Store,
) -> None:
    group, ranks = group_over(store, dump_log_probs="dump", detect_mismatch=False)
    halves = [np.arange(0, 12), np.arange(12, 24)]
    whole = batch_of(24)
    batch = group.stored(whole, halves)
    assert not any(isinstance(values, Ragged) for values in batch.columns.values())
    stored = len(store.objects)
    assert stored == DP, "an object per rank where it is small"
    # 300 tokens a sample: int32 ids, uint8 masks, two float32 columns; versions are stretches.
    assert put_bytes(store.objects) < 24 * 330 * 14
    batch = batch.with_column("log_probs", group.log_probs("policy", batch))
    batch = batch.with_column("ref_log_probs", group.log_probs("reference", batch))
    steps = [group.train(batch.select(half), 0, 0.0, 1e-3) for half in halves]
    shares = [held for held in store.objects[stored:] if "/counts" in held]
    assert len(shares) == 4 * DP and put_bytes(shares) < 4 * 24 * 200
    for name in ("log_probs", "ref_log_probs"):
        values = only(batch, name).columns[name]
        assert [row.unique().tolist() for row in values] == [[-float(i)] for i in range(24)]
    own = only(batch.select(halves[1]).with_column("log_probs", steps[1].log_probs), "log_probs")
    assert [row[0].item() for row in own.columns["log_probs"]] == [-float(i) for i in halves[1]]
    for rank in ranks:
        method, seen = rank.seen[-1]
        assert method == "train"
        assert seen.columns["unconcat_tokens"].values.dtype == torch.int64
        for name, column in seen.columns.items():  # what was cut from the whole batch before
            numbers = [int(tokens[0]) for tokens in seen.columns["unconcat_tokens"]]
            if name in whole:
                mine = whole.select(numbers).columns[name]
                values = (c.values if isinstance(c, Ragged) else c for c in (column, mine))
                assert torch.equal(*values), name


def test_a_plan_is_made_once_for_all_passes_over_the_same_samples(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []
    real = trainer_group.plan_batch

    def counting(batch: RolloutBatch, *arguments: Any, **options: Any) -> Any:
        planned.append(len(batch))
        return real(batch, *arguments, **options)

    monkeypatch.setattr(trainer_group, "plan_batch", counting)
    group, _ = group_over(store)
    batch = group.stored(batch_of(24))
    for name in ("policy", "reference"):
        group.log_probs(name, batch)
    group.train(batch.select(range(12)), 0, 0.0, 1e-3)
    group.train_critic(batch.select(range(12)), 1e-3)
    assert planned == [24, 12]
    group.stored(batch_of(24))
    assert planned == [24, 12, 24], "plans of an earlier rollout are forgotten"


def test_objects_hold_samples_of_one_rank_and_are_cut_where_a_rank_has_much(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_group, "BLOCK_BYTES", 16 * 1000)  # about three samples
    group, ranks = group_over(store)
    halves = [np.arange(0, 12), np.arange(12, 24)]
    batch = group.stored(batch_of(24), halves)
    assert 8 <= len(store.objects) <= 8 + DP
    held = [np.unique(arrays["unconcat_tokens"]).tolist() for arrays in store.objects]
    group.log_probs("policy", batch)
    for part, rank in zip(group._parts, ranks, strict=True):
        [(_, seen)] = rank.seen
        numbers = {int(tokens[0]) for tokens in seen.columns["unconcat_tokens"]}
        own = [samples for samples in held if numbers & set(samples)]
        assert set().union(*own) == numbers, f"share {part.dp_rank} fetches nothing of others"
        mixed = [samples for samples in own if samples[0] < 12 <= samples[-1]]
        assert len(mixed) <= 1, "mini-batches lie apart"


@pytest.mark.parametrize("dumps", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_detectors_get_every_nth_sample_of_a_large_step_from_the_ranks(
    store: Store, monkeypatch: pytest.MonkeyPatch, dumps: bool, second: bool
) -> None:
    """second: an update after the first, which has the log-probs of before that as a column."""
    monkeypatch.setattr(trainer_group, "MAX_TOKENS", 6 * 300)
    group, _ = group_over(store, dump_log_probs="dump" if dumps else None)
    whole = batch_of(24)
    batch = group.stored(whole)
    if second:
        old = whole.columns["rollout_log_probs"]
        away = store_column(store, whole.with_column("log_probs", old.like(old.values - 1)))
        batch = batch.with_column("log_probs", away)
    before = len(store.objects)
    trained = group.train(batch, 0, 0.5, 1e-3)
    assert trained.seen is not None and (trained.log_probs is not None) == dumps
    read = store.objects[before + DP :]
    seen = fetched(trained.seen)
    # 24 samples of 300 tokens, at most 1,800: every fifth, as the lengths go.
    assert [int(tokens[0]) for tokens in seen.columns["unconcat_tokens"]] == [0, 5, 10, 15, 20]
    for name in ("loss_masks", "rollout_log_probs", "advantages", "weight_versions"):
        mine = whole.select(range(0, 24, 5)).columns[name]
        assert torch.equal(seen.columns[name].values, mine.values), name
    own = [row.unique().tolist() for row in seen.columns["log_probs"]]
    assert own == [[-i / 4 - 1] if second else [-float(i)] for i in range(0, 24, 5)]
    seen.check()
    if not dumps:
        assert put_bytes(read) < 6 * 330 * 30, "nothing of the others comes back"


def store_column(store: Store, batch: RolloutBatch) -> Any:
    """Log-probs as a pass leaves them with the ranks."""
    names = ("total_lengths", "response_lengths", "log_probs")
    part = RolloutBatch({name: batch.columns[name] for name in names})
    return array_transport.store(part, [np.arange(len(batch))], store.put).columns["log_probs"]


def test_a_step_without_detectors_and_dump_returns_no_values(store: Store) -> None:
    group, _ = group_over(store, detect_mismatch=False)
    batch = group.stored(batch_of(24))
    before = len(store.objects)
    trained = group.train(batch, 0, 0.0, 1e-3)
    assert trained.seen is None and trained.log_probs is None
    assert all(held == {} for held in store.objects[before + DP :])
