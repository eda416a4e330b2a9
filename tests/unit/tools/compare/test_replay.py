"""Replays: gradient weights by hand, unbiasedness, and recommendations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plugin.errors import ConfigError
from plugin.loss.hook_chain import batch_declarations
from plugin.tools.compare.dump_columns import DumpBlock
from plugin.tools.compare.replay import (
    Method,
    MethodStatistics,
    all_methods,
    replay_block,
    replay_inputs,
    token_gradients,
)
from plugin.tools.compare.sweeps import parse_sweeps


def block(
    rollout: list[float],
    train: list[float],
    advantages: list[float],
    *,
    cur: list[float] | None = None,
    lengths: list[int] | None = None,
    mask: list[int] | None = None,
) -> DumpBlock:
    lengths = lengths or [len(rollout)]
    unknown = np.full(len(lengths), -1, np.int64)
    return DumpBlock(
        np.array(lengths, np.int64),
        np.array(mask or [1] * len(rollout)) != 0,
        *(np.array(values, np.float32) for values in (rollout, train, cur or train, advantages)),
        unknown,
        unknown,
        unknown,
    )


def random_block(samples: int = 60, length: int = 20, spread: float = 0.3) -> DumpBlock:
    generator = np.random.default_rng(3)
    rollout = -4 * generator.random(samples * length) - 0.5
    train = rollout + spread * generator.standard_normal(samples * length)
    cur = train + 0.1 * generator.standard_normal(samples * length)
    advantages = np.repeat(generator.standard_normal(samples), length)
    return block(
        *(values.tolist() for values in (rollout, train, advantages)),
        cur=cur.tolist(),
        lengths=[length] * samples,
    )


def summary(data: DumpBlock, method: Method) -> dict[str, float]:
    statistics = MethodStatistics(method)
    replay_block(data, [statistics])
    return statistics.summary()


def test_vanilla_tis_weights_are_the_clipped_ratios() -> None:
    # ratios 4, 1, 1/2 at cur = train: weights min(., 2) = 2, 1, 1/2; A = 1, -1, 1
    rollout, train = [-2.0, -1.0, -1.0], [-2.0 + math.log(4), -1.0, -1.0 - math.log(2)]
    row = summary(block(rollout, train, [1, -1, 1]), Method.of("ppo", "vanilla_tis"))
    assert row["weight_mean"] == pytest.approx(3.5 / 3)
    assert row["weight_max"] == pytest.approx(2)
    assert row["clipped_share"] == pytest.approx(1 / 3)
    assert row["ess_share"] == pytest.approx(3.5**2 / (4 + 1 + 0.25) / 3)
    # g - g* = 2 - 4, 0, 0 and |g*| = 4, 1, 1/2
    assert row["bias"] == pytest.approx(-2 / 3)
    assert row["bias_bound"] == pytest.approx(2 / 5.5)


def test_icepop_removes_the_advantage_of_tokens_outside_its_band() -> None:
    # ratios 8 (dropped), 1, 1/8 (dropped) with A = 3, 1, -2: of 4 positive 3 are gone, of 2 negative all
    rollout = [-3.0, -1.0, -1.0]
    train = [-3.0 + math.log(8), -1.0, -1.0 - math.log(8)]
    row = summary(block(rollout, train, [3, 1, -2]), Method.of("icepop"))
    assert row["kept_share"] == pytest.approx(1 / 3)
    assert row["positive_removed"] == pytest.approx(3 / 4)
    assert row["negative_removed"] == pytest.approx(1)


def test_reinforce_forgets_the_ratio_and_its_bias_says_so() -> None:
    # g = A = 1, 1; g* = 2, 1
    row = summary(block([-2.0, -1.0], [-2.0 + math.log(2), -1.0], [1, 1]), Method.of("reinforce"))
    assert row["bias"] == pytest.approx(-0.5)
    assert row["relative_bias"] == pytest.approx(-0.5 / 1.5)


def test_an_unclipped_correction_has_no_bias() -> None:
    data = random_block()
    for method in (
        Method.of("ppo", "vanilla_tis", tis_clip=1e6, eps_clip=0.999, eps_clip_high=1e6),
        Method.of("reinforce", "off_policy_is", eps_clip=1.0, eps_clip_high=1e6),
        Method.of("icepop", icepop_ratio_low=0.0, icepop_ratio_high=1e6),
    ):
        row = summary(data, method)
        assert row["bias_bound"] < 1e-5, method.name
        assert row["bias_low"] <= row["bias"] <= row["bias_high"]


def test_masked_tokens_are_in_no_number() -> None:
    whole = block([-2.0, -1.0], [-1.5, -1.2], [1, -1])
    with_masked = block([-2.0, 0.0, -1.0], [-1.5, 0.0, -1.2], [1, 0, -1], mask=[1, 0, 1])
    for method in all_methods():
        assert summary(whole, method) == pytest.approx(summary(with_masked, method)), method.name


def test_the_interval_comes_from_the_spread_between_sequences() -> None:
    # Two sequences of two tokens; g - g* per token is -1, -1 and 0, 0 (ratios 2, 2, 1, 1 under reinforce).
    rollout, up = [-2.0] * 4, -2.0 + math.log(2)
    row = summary(
        block(rollout, [up, up, -2.0, -2.0], [1] * 4, lengths=[2, 2]), Method.of("reinforce")
    )
    # bias -1/2; deviations of the sequence sums from bias * length: -2 + 1 and 0 + 1; error sqrt(2) / 4
    assert row["bias"] == pytest.approx(-0.5)
    assert row["bias_high"] - row["bias"] == pytest.approx(1.96 * math.sqrt(2) / 4)


def test_blocks_add_up() -> None:
    data = random_block()
    half = 30 * 20
    parts = [
        DumpBlock(
            data.lengths[rows],
            *(values[tokens] for values in (data.mask, data.rollout, data.train, data.cur)),
            data.advantages[tokens],
            data.step[rows],
            data.trainer_version[rows],
            data.weight_versions[tokens],
        )
        for rows, tokens in (
            (slice(0, 30), slice(0, half)),
            (slice(30, 60), slice(half, 2 * half)),
        )
    ]
    # Of a threshold over the whole batch, the batch is the block.
    apart = [method for method in all_methods() if not batch_declarations(method.config)]
    assert len(all_methods()) - len(apart) == 4, "m2po, ess_tis, clip_cov, kl_cov"
    for method in apart:
        whole, cut = MethodStatistics(method), MethodStatistics(method)
        replay_block(data, [whole])
        for part in parts:
            replay_block(part, [cut])
        assert cut.summary() == pytest.approx(whole.summary(), rel=1e-5, abs=1e-7), method.name


def test_every_loss_and_every_correction_is_replayed() -> None:
    names = {method.name for method in all_methods()}
    assert {
        "ppo",
        "reinforce",
        "cispo",
        "gspo",
        "icepop",
        "dppo_tv",
        "dppo",
        "ipo_kl",
        "sapo",
    } <= names
    assert "reinforce + off_policy_is" in names and "ppo + veto" in names
    assert len(all_methods(every_pair=True)) > len(names)


def test_the_gradient_is_that_of_the_loss_itself() -> None:
    # cispo: -sg(clip(r)) A cur has g = clip(r) A with r = exp(cur - train) = 2, clipped to 1.2
    inputs = replay_inputs(block([-1.0], [-1.0], [3.0], cur=[-1.0 + math.log(2)]))
    assert float(token_gradients(Method.of("cispo"), inputs).g) == pytest.approx(3.6, rel=1e-5)


def test_a_sweep_recommends_the_least_biased_value_that_reaches_the_target() -> None:
    [sweep, _] = parse_sweeps(["tis-clip=1.1,2,50"], {})
    replay_block(random_block(spread=0.8), sweep.statistics)
    points = sweep.points()
    assert points[0]["ess_share"] > points[1]["ess_share"] > points[2]["ess_share"]
    assert points[0]["bias_bound"] > points[1]["bias_bound"] > points[2]["bias_bound"]
    target = (points[1]["ess_share"] + points[2]["ess_share"]) / 2
    assert sweep.recommendation(target)["value"] == 2
    impossible = sweep.recommendation(1.01)
    assert not impossible["reached"] and impossible["value"] == 1.1


def test_sequence_thresholds_are_judged_by_length() -> None:
    generator = np.random.default_rng(0)
    lengths = [8] * 40 + [400] * 40
    count = sum(lengths)
    rollout = -3 * generator.random(count) - 0.5
    train = rollout + 0.1 * generator.standard_normal(count)
    data = block(rollout.tolist(), train.tolist(), [1.0] * count, lengths=lengths)
    sweep = parse_sweeps(["sequence-tis-clip=1.2:20:5"], {})[-1]
    assert sweep.method == "ppo + sequence_tis"
    replay_block(data, sweep.statistics)
    by_length = sweep.recommendation(0.9)["by_length"]
    # Summed log-ratios spread with the square root of the length: 0.28 for 8 tokens, 2 for 400.
    assert by_length["0-63"]["reached"]
    assert not by_length["256-1023"]["reached"]
    loosest = sweep.points()[-1]["by_length"]
    assert loosest[0]["ess_share"] > loosest[-1]["ess_share"]


def test_sweeps_that_cannot_be_understood_say_how_to_write_them() -> None:
    for text in ("tis-clip", "nonsense=1:2", "tis-clip=a:b", "tis-clip=5:1", "tis-clip="):
        with pytest.raises(ConfigError, match="--sweep"):
            parse_sweeps([text], {})
