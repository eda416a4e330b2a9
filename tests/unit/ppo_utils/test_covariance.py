"""Which tokens couple advantage and log-prob most: by hand, against sorting everything, and cut over ranks in any way."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plugin.config import LossConfig
from plugin.ppo_utils.batch_statistics import collect_statistics, declared_statistics
from plugin.ppo_utils.covariance import (
    among_largest,
    clip_cov_chance,
    clip_cov_rounds,
    covariances,
    hashed_uniform,
    inside_cov_band,
    kl_cov_rounds,
)
from tests.unit.ppo_utils.test_batch_thresholds import over_ranks

#: Log-probs and advantages; means -2 and 0, so covariances 1 * 2, -1 * -2, 0 and 0.
LOG_PROBS, ADVANTAGES = torch.tensor([-1.0, -3.0, -2.0, -2.0]), torch.tensor([2.0, -2.0, 1.0, -1.0])
VALUES = torch.stack([LOG_PROBS, ADVANTAGES])


def test_covariances_by_hand() -> None:
    known = collect_statistics(kl_cov_rounds, VALUES, LossConfig())
    assert covariances(LOG_PROBS, ADVANTAGES, known[0]).tolist() == [2.0, 2.0, 0.0, 0.0]
    assert not covariances(*torch.zeros(2, 0), torch.zeros(3).long()).numel()


@pytest.mark.parametrize(
    "share, chosen", [(1e-9, 2), (0.5, 2), (0.75, 4), (1.0, 4)], ids=["one", "half", "ties", "all"]
)
def test_the_largest_share_has_at_least_one_token_and_equal_ones_together(
    share: float, chosen: int
) -> None:
    config = LossConfig(policy_loss="kl_cov", kl_cov_ratio=share)
    known = collect_statistics(kl_cov_rounds, VALUES, config)
    covariance = covariances(LOG_PROBS, ADVANTAGES, known[0])
    assert int(among_largest(covariance, known, config).sum()) == chosen


def test_the_chance_of_a_token_is_the_wanted_number_over_those_inside_the_band() -> None:
    for ratio, low, high, chance in [
        (0.25, 1.0, 5.0, 0.5),  # 1 of the 2 with covariance 2
        (0.75, 1.0, 5.0, 1.0),  # 3 wanted, 2 there are
        (1e-6, 1.0, 5.0, 0.5),  # at least one
        (0.5, 3.0, 5.0, 1.0),  # none inside
    ]:
        config = LossConfig(policy_loss="clip_cov", clip_cov_ratio=ratio, clip_cov_low=low, clip_cov_high=high)  # fmt: skip
        known = collect_statistics(clip_cov_rounds, VALUES, config)
        assert clip_cov_chance(known, config) == chance
    inside = inside_cov_band(torch.tensor([1.0, 1.1, 4.9, 5.0]), LossConfig())
    assert inside.tolist() == [False, True, True, False]


NUMBERS = st.floats(-8, 8, width=32)
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=60)


@given(TOKENS, st.floats(1e-3, 1), st.integers(1, 5), st.integers(0, 2**31))
def test_the_largest_are_those_of_sorting_however_tokens_are_cut(
    tokens: list[tuple[float, float]], share: float, cuts: int, seed: int
) -> None:
    values = torch.tensor(tokens).T
    config = LossConfig(policy_loss="kl_cov", kl_cov_ratio=share)
    draw = random.Random(seed)
    places = torch.tensor([draw.randrange(cuts) for _ in tokens])
    parts = [values[:, places == rank] for rank in range(cuts)]
    known = over_ranks(kl_cov_rounds, parts, config)
    covariance = covariances(*values, known[0])
    wanted = max(int(len(tokens) * share), 1)
    least = covariance.sort(descending=True).values[wanted - 1]
    assert torch.equal(among_largest(covariance, known, config), covariance >= least)
    one = collect_statistics(kl_cov_rounds, values, config)
    assert torch.equal(known[0], one[0])
    # in float64 from the same numbers
    exact = (values[0].double() - values[0].double().mean()) * (values[1].double() - values[1].double().mean())  # fmt: skip
    torch.testing.assert_close(covariance.double(), exact, rtol=1e-4, atol=1e-4)


def test_hashed_numbers_are_uniform_and_follow_from_the_token_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs, advantages = -torch.rand(40_000, generator=generator), torch.ones(40_000)
    drawn = hashed_uniform(log_probs, advantages)
    assert float(drawn.min()) >= 0 and float(drawn.max()) < 1
    # 40,000 uniform numbers: standard deviation of the mean 0.0014, of each tenth's count 60
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.006)
    assert bool(((drawn * 10).long().bincount() - 4000).abs().max() < 300)
    assert torch.equal(hashed_uniform(log_probs[7:9], advantages[7:9]), drawn[7:9])
    assert not torch.equal(hashed_uniform(log_probs[:9], -advantages[:9]), drawn[:9])


def test_declarations_see_log_probs_and_advantages() -> None:
    def looks(values: Tensor) -> Tensor:
        return values

    looks.batch_statistics = kl_cov_rounds  # type: ignore[attr-defined]
    assert declared_statistics(looks, LossConfig(policy_loss="kl_cov")) is kl_cov_rounds
