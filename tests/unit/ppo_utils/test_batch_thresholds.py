"""Thresholds over a whole batch: by hand, against sorting everything, and cut over ranks in any way."""

from __future__ import annotations

import math
import random
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plugin.config import LossConfig
from plugin.errors import ConfigError
from plugin.loss import load_hook
from plugin.loss.objective import check_loss
from plugin.ppo_utils import (
    batch_statistics,
    ess_tis_function,
    m2po_function,
    microbatch_statistics,
    vanilla_tis_function,
)
from plugin.ppo_utils.batch_statistics import (
    collect_statistics,
    declared_statistics,
    effective_share,
    ess_clip,
    ess_clip_rounds,
    mean_weight,
    moment_round,
    second_moment_rounds,
    tis_bound,
    tis_rounds,
    within_second_moment,
)
from tests.unit.ppo_utils.hook_calls import call_hook, logs


def over_ranks(
    rounds: Callable[..., Tensor | None], parts: Sequence[Tensor], config: Any
) -> tuple[Tensor, ...]:
    """What every rank knows in the end, if each holds one of `parts`."""
    known: list[Tensor] = []
    while True:
        found = [rounds(part, config, known) for part in parts]
        if found[0] is None:
            assert all(part is None for part in found)
            return tuple(known)
        known.append(sum(found))  # type: ignore[arg-type]


def m2po_keeps(log_r: Tensor, threshold: float, cuts: int = 1, seed: int = 0) -> list[bool]:
    config = LossConfig(m2po_threshold=threshold)
    draw = random.Random(seed)
    places = [draw.randrange(cuts) for _ in range(len(log_r))]
    parts = [log_r[[i for i, p in enumerate(places) if p == rank]] for rank in range(cuts)]
    known = over_ranks(second_moment_rounds, parts, config)
    return within_second_moment(log_r, known, threshold).tolist()


def test_m2po_drops_the_largest_squares_until_the_mean_of_the_rest_is_small() -> None:
    # squares 0.09, 0.01, 0.36, 0.04; the smallest 1, 2, 3, 4 have means 0.01, 0.025, 0.0467, 0.125
    log_r = torch.tensor([0.3, -0.1, 0.6, -0.2])
    assert m2po_keeps(log_r, 0.05) == [True, True, False, True]
    assert m2po_keeps(log_r, 0.04) == [False, True, False, True]
    assert m2po_keeps(log_r, 0.2) == [True] * 4
    assert m2po_keeps(log_r, 0.005) == [False] * 4
    assert m2po_keeps(torch.zeros(0), 0.04) == []


def test_m2po_keeps_or_drops_equal_values_together() -> None:
    # squares 0.04, 0.16, 0.16: the mean of two is 0.1, of three 0.12. One 0.16 alone would fit into 0.11.
    assert m2po_keeps(torch.tensor([0.2, 0.4, -0.4]), 0.11) == [True, False, False]
    assert m2po_keeps(torch.tensor([0.2, 0.4, -0.4]), 0.13) == [True, True, True]


VALUES = st.lists(
    st.one_of(
        st.floats(-25, 25, width=32), st.sampled_from([0.0, 0.1, -0.1, 0.2, 1e-20, math.nan])
    ),
    max_size=60,
)


@given(VALUES, st.floats(1e-6, 50), st.integers(1, 5), st.integers(0, 2**31))
def test_m2po_keeps_the_same_tokens_however_they_are_cut(
    values: list[float], threshold: float, cuts: int, seed: int
) -> None:
    log_r = torch.tensor(values)
    kept = m2po_keeps(log_r, threshold)
    assert m2po_keeps(log_r, threshold, cuts, seed) == kept
    # By sorting everything: all values up to the last whose mean with the smaller ones is within the threshold.
    squares = log_r.nan_to_num(nan=20.0).clamp(-20, 20).square()
    fixed = [round(float(x) * 2**24) for x in squares.double()]
    limit = -1.0
    for value in sorted(set(squares.tolist())):
        below = [f for f, x in zip(fixed, squares.tolist(), strict=True) if x <= value]
        if sum(below) > threshold * 2**24 * len(below):
            break
        limit = value
    assert kept == [x <= limit for x in squares.tolist()]


def test_the_effective_share_by_hand() -> None:
    # r = 1, 1, 2: 4^2 / (3 * 6) = 0.8889
    known = collect_statistics(moment_round, logs(1.0, 1.0, 2.0), LossConfig())
    assert effective_share(known) == pytest.approx(16 / 18)
    assert effective_share(collect_statistics(moment_round, torch.zeros(0), LossConfig())) == 1.0


def share_at(log_r: Tensor, bound: float) -> float:
    weight = log_r.double().clamp(-20, 20).exp().clamp(max=bound)
    return float(weight.sum().square() / (len(weight) * weight.square().sum()))


LOG_RATIOS = st.lists(st.floats(-3, 6, width=32), min_size=1, max_size=40)


@given(LOG_RATIOS, st.floats(0.3, 0.98), st.integers(1, 4))
def test_the_automatic_clip_is_the_largest_that_keeps_the_share(
    values: list[float], target: float, cuts: int
) -> None:
    log_r, config = torch.tensor(values), LossConfig(use_tis=True, tis_clip=f"auto:ess={target}")
    bound = ess_clip(over_ranks(ess_clip_rounds, log_r.tensor_split(cuts), config), config)
    if share_at(log_r, 1.0) < target - 1e-9:
        assert bound == 1.0
        return
    assert share_at(log_r, bound) >= target - 1e-9
    unbounded = bound == pytest.approx(math.exp(20))
    assert unbounded or share_at(log_r, bound * (1 + 1e-5)) <= target + 1e-9


def test_the_automatic_clip_by_hand() -> None:
    # weights 1, 1, 1, c: (3 + c)^2 / (4 (3 + c^2)) = 0.9 -> 2.6 c^2 - 6 c + 1.8 = 0 -> c = (6 + sqrt(17.28)) / 5.2
    config, log_r = LossConfig(use_tis=True, tis_clip="auto:ess=0.9"), logs(1.0, 1.0, 1.0, 50.0)
    known = collect_statistics(ess_clip_rounds, log_r, config)
    bound = (6 + math.sqrt(17.28)) / 5.2
    assert ess_clip(known, config) == pytest.approx(bound, rel=1e-5)
    loss, _, metrics = call_hook(
        vanilla_tis_function, train=[log_r], flags=vars(config), batch_statistics=known
    )
    assert loss.tolist() == pytest.approx([1.0, 1.0, 1.0, bound], rel=1e-5)
    assert metrics["tis_clip_found"].tolist() == pytest.approx([bound] * 4, rel=1e-5)
    assert declared_statistics(vanilla_tis_function, LossConfig()) is None, "a number needs nothing"


def test_m2po_weights_what_it_keeps_by_the_ratio() -> None:
    # log-ratios as above, the third is dropped; the batch is known, so tokens can come one by one
    log_r, flags = torch.tensor([0.3, -0.1, 0.6, -0.2]), {"m2po_threshold": 0.05}
    known = collect_statistics(second_moment_rounds, log_r, LossConfig(m2po_threshold=0.05))
    for place in range(4):
        part = [log_r[place : place + 1]]
        loss, _, metrics = call_hook(m2po_function, train=part, flags=flags, batch_statistics=known)
        expected = 0.0 if place == 2 else math.exp(log_r[place])
        assert loss.item() == pytest.approx(expected)
        assert metrics["is_masked"].item() == (place == 2)
        assert metrics["m2"].item() == pytest.approx(float(log_r[place]) ** 2)


def test_without_the_batch_a_microbatch_stands_for_it_and_that_is_said_once() -> None:
    sys.modules["plugin.ppo_utils.batch_statistics"]._warn_of_microbatches.cache_clear()  # type: ignore[attr-defined]
    log_r, flags = [torch.tensor([0.3, -0.1, 0.6, -0.2])], {"m2po_threshold": 0.05}
    with pytest.warns(UserWarning, match="microbatch by microbatch"):
        loss, _, _ = call_hook(m2po_function, train=log_r, flags=flags)
    assert [bool(x) for x in loss] == [True, True, False, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call_hook(m2po_function, train=log_r, flags=flags)
        # a masked token does not count, whatever it holds
        masked, masks = [torch.tensor([0.3, -0.1, math.inf, -0.2])], [torch.tensor([1, 1, 0, 1])]
        kept, _, _ = call_hook(m2po_function, train=masked, flags=flags, masks=masks)
    assert [bool(x) for x in kept] == [True, True, False, True]


def test_ess_tis_caps_at_the_share() -> None:
    # r = 1, 1, 2: the share 16/18 is the cap
    known = collect_statistics(moment_round, logs(1.0, 1.0, 2.0), LossConfig())
    train = [logs(1.0, 0.5, 2.0)]
    loss, _, metrics = call_hook(ess_tis_function, train=train, batch_statistics=known)
    torch.testing.assert_close(loss, torch.tensor([16 / 18, 0.5, 16 / 18]))
    assert metrics["tis_clipfrac"].tolist() == [1.0, 0.0, 1.0]
    assert metrics["ess_share"].tolist() == pytest.approx([16 / 18] * 3)


def mean_of_batch(log_ratios: Tensor, config: Any, known: Sequence[Tensor]) -> Tensor | None:
    """[2]: sum and count."""
    if known:
        return None
    return torch.stack([log_ratios.double().sum(), torch.ones_like(log_ratios).double().sum()])


@batch_statistics(mean_of_batch)
def centered_function(
    args: Any, *, pg_loss: Tensor, loss_masks: Any, batch_statistics: Any = None, **_: Any
) -> Any:
    total, count = batch_statistics[0].tolist()
    return pg_loss * math.exp(-total / count), loss_masks, {}


def test_a_hook_of_ones_own_receives_what_it_declares() -> None:
    path = f"{__name__}:centered_function"
    check_loss(LossConfig(use_tis=True, custom_tis_function_path=path))
    lists = ("train_log_probs", "rollout_log_probs", "loss_masks", "cur_log_probs", "advantages")
    loss, _, _ = load_hook(path)(
        Namespace(),
        pg_loss=torch.ones(2),
        **{name: [torch.zeros(2)] for name in lists},
        total_lengths=[3],
        response_lengths=[2],
        batch_statistics=(torch.tensor([4.0, 2.0]),),
    )
    torch.testing.assert_close(loss, torch.full((2,), math.exp(-2.0)))
    found = microbatch_statistics(mean_of_batch, torch.tensor([1.0, 3.0]), Namespace())
    assert found[0].tolist() == [4.0, 2.0]


@pytest.mark.parametrize("clip", ["auto", "auto:ess=0", "auto:ess=1", "auto:ess=x", "ess=0.9"])
def test_a_clip_that_is_no_number_and_no_rule_is_refused(clip: str) -> None:
    with pytest.raises(ConfigError, match="auto:ess=SHARE"):
        LossConfig(use_tis=True, tis_clip=clip)


def test_an_automatic_clip_fits_clipped_weights_alone() -> None:
    icepop = "plugin.ppo_utils.icepop_function"
    with pytest.raises(ConfigError, match="icepop_function, which drops"):
        LossConfig(use_tis=True, tis_clip="auto:ess=0.9", custom_tis_function_path=icepop)
    with pytest.raises(ConfigError, match="a bound of at least 1"):
        LossConfig(use_tis=True, tis_clip="auto:ess=0.9", tis_clip_low=1.5)
    assert LossConfig(use_tis=True, tis_clip="3").tis_clip == 3.0


@pytest.mark.parametrize("hook", ["m2po_function", "ess_tis_function"])
def test_statistics_of_the_whole_batch_need_recomputed_log_probs(hook: str) -> None:
    config = LossConfig(
        use_tis=True,
        custom_tis_function_path=f"plugin.ppo_utils.{hook}",
        train_log_probs="approximate",
    )
    with pytest.raises(ConfigError, match="whole batch before the training pass"):
        check_loss(config)


def test_normalized_weights_have_a_mean_of_one_over_the_batch() -> None:
    # clipped ratios 0.5, 1, 2 (of 8): mean 3.5 / 3
    flags = {"tis_batch_normalize": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, _, metrics = call_hook(vanilla_tis_function, train=[logs(0.5, 1.0, 8.0)], flags=flags)
    torch.testing.assert_close(loss, torch.tensor([0.5, 1.0, 2.0]) / (3.5 / 3))
    assert loss.mean().item() == pytest.approx(1.0)
    torch.testing.assert_close(metrics["tis_mean_weight"], torch.full((3,), 3.5 / 3))
    torch.testing.assert_close(metrics["tis"], torch.tensor([0.5, 1.0, 8.0]))  # before the clip


def test_normalized_weights_of_a_found_clip() -> None:
    config = LossConfig(use_tis=True, tis_clip="auto:ess=0.9", tis_batch_normalize=True)
    log_r = logs(1.0, 1.0, 1.0, 50.0)
    known = collect_statistics(tis_rounds, log_r, config)
    # as above: weights 1, 1, 1, c
    bound = (6 + math.sqrt(17.28)) / 5.2
    assert tis_bound(known, config) == pytest.approx(bound, rel=1e-5)
    assert mean_weight(known) == pytest.approx((3 + bound) / 4, rel=1e-5)
