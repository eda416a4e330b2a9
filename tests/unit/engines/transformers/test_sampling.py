"""Sampling: the reported log-prob is of the distribution that was drawn from."""

from __future__ import annotations

import math

import pytest
import torch

from plugin.engines.protocol import SamplingParameters
from plugin.engines.transformers.sampling import draw, sampling_log_probs, uniform_rows

# Probabilities 0.5, 0.3, 0.15, 0.05.
LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log() + 3.0


def probabilities(**options: float) -> list[float]:
    values = sampling_log_probs(LOGITS, SamplingParameters(**options)).exp()
    return [round(float(value), 5) for value in values[0]]


def test_without_truncation_the_distribution_is_the_softmax() -> None:
    assert probabilities() == [0.5, 0.3, 0.15, 0.05]


def test_temperature_divides_the_logits_once() -> None:
    # Temperature 0.5 squares the probabilities: 0.25, 0.09, 0.0225, 0.0025 over their sum 0.365.
    assert probabilities(temperature=0.5) == [
        round(p / 0.365, 5) for p in (0.25, 0.09, 0.0225, 0.0025)
    ]


def test_top_k_renormalizes_over_the_likeliest() -> None:
    assert probabilities(top_k=2) == [0.625, 0.375, 0.0, 0.0]


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    # 0.5 < 0.6 <= 0.5 + 0.3: two tokens.
    assert probabilities(top_p=0.6) == [0.625, 0.375, 0.0, 0.0]
    assert probabilities(top_p=0.01) == [1.0, 0.0, 0.0, 0.0]


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    # Of 0.5, 0.3, 0.15, 0.05: at least 0.6 and 0.25 times 0.5; an edge is kept.
    assert probabilities(min_p=0.59) == [0.625, 0.375, 0.0, 0.0]
    assert probabilities(min_p=0.25) == [round(p / 0.95, 5) for p in (0.5, 0.3, 0.15)] + [0.0]
    assert probabilities(min_p=0.999) == [1.0, 0.0, 0.0, 0.0]
    # After temperature 0.5, by the squares: 0.09 is 0.36 times 0.25.
    assert probabilities(min_p=0.4, temperature=0.5) == [1.0, 0.0, 0.0, 0.0]
    # Before top-p: of 0.625 and 0.375 the first reaches 0.6; of all four it needs two.
    assert probabilities(min_p=0.59, top_p=0.6) == [1.0, 0.0, 0.0, 0.0]


def test_top_k_is_applied_before_top_p() -> None:
    # Of the top 3, renormalized by 0.95: 0.526, 0.316, 0.158. The first two reach 0.8, all three 0.85.
    assert probabilities(top_k=3, top_p=0.8)[2] == 0.0
    assert probabilities(top_k=3, top_p=0.85)[2] > 0.0


def test_drawing_inverts_the_distribution_function() -> None:
    rows = LOGITS.log_softmax(-1).expand(5, 4)
    tokens, log_probs = draw(rows, torch.tensor([0.0, 0.49, 0.51, 0.94, 0.96], dtype=torch.float64))
    assert tokens.tolist() == [0, 0, 1, 2, 3]
    assert math.isclose(float(log_probs[2]), math.log(0.3), rel_tol=1e-5)


def test_a_large_vocabulary_is_drawn_from_as_a_small_one_is() -> None:
    # 300 tokens are two whole sums of neighbors and a part of one; most have no probability.
    weights = torch.rand(50, 300, generator=torch.Generator().manual_seed(0))
    weights[:, :200] *= weights[:, :200] > 0.9
    weights[0], weights[0, 299] = 0, 1
    log_probs = (weights / weights.sum(-1, keepdim=True)).log()
    uniforms = uniform_rows([3], 50)[0]
    ends = log_probs.exp().double().cumsum(-1)
    expected = (ends <= uniforms[:, None] * ends[:, -1:]).sum(-1)
    assert torch.equal(draw(log_probs, uniforms)[0], expected)
    last, _ = draw(log_probs, torch.full((50,), 1 - 2**-53, dtype=torch.float64))
    assert bool((weights.gather(-1, last[:, None]) > 0).all()) and int(last.min()) > 290


def test_a_nucleus_may_have_more_tokens_than_are_looked_at_first() -> None:
    # 1,000 equal tokens: 0.5 of them, or 0.1 of them.
    flat = torch.zeros(2, 1000)
    for top_p, tokens in ((0.5, 500), (0.1, 100)):
        kept = sampling_log_probs(flat, SamplingParameters(top_p=top_p)).isfinite().sum(-1)
        assert kept.tolist() == pytest.approx([tokens, tokens], abs=1)


def test_a_token_without_probability_is_never_drawn() -> None:
    rows = torch.tensor([[0.0, 1.0, 0.0, 0.0]]).log().expand(2, 4)
    tokens, log_probs = draw(rows, torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 1]
    assert log_probs.tolist() == [0.0, 0.0]


def test_drawn_tokens_have_the_frequencies_of_their_probabilities() -> None:
    rows = LOGITS.log_softmax(-1).expand(20_000, 4)
    tokens, _ = draw(rows, uniform_rows([7], 20_000)[0])
    frequency = tokens.bincount(minlength=4) / 20_000
    assert torch.allclose(frequency, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.015)


def test_random_numbers_depend_on_the_seed_and_not_on_the_company() -> None:
    alone, together = uniform_rows([5], 8), uniform_rows([4, 5, 6], 8)
    assert torch.equal(alone[0], together[1])
    assert not torch.equal(together[0], together[1])
