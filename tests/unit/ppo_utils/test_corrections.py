"""The weighting corrections, by hand: weights, gradients, metrics, masks, band edges."""

import math
import warnings
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch

from plugin import ppo_utils
from plugin.errors import BatchError, ConfigError
from plugin.ppo_utils import (
    corrections,
    icepop_function,
    off_policy_is_function,
    segment_tis_function,
    sequence_tis_function,
    vanilla_tis_function,
)
from tests.unit.ppo_utils.hook_calls import GARBAGE, call_hook, logs

REINFORCE = {"policy_loss": "reinforce"}
ALL_HOOKS = [getattr(ppo_utils, name) for name in ppo_utils.__all__ if name.endswith("_function")]


def everything(train: list[torch.Tensor], **changes: Any) -> dict[str, Any]:
    """Arguments that satisfy every hook: cur equal to train, advantages of one."""
    return {
        "train": train,
        "cur": train,
        "advantages": [torch.ones_like(value) for value in train],
        "flags": REINFORCE,
        **changes,
    }


def test_vanilla_tis_truncates_the_mismatch_ratio() -> None:
    # ratios 0.1, 1, 1.5, 3 with the default cap 2 and no floor
    loss, masks, metrics = call_hook(vanilla_tis_function, train=[logs(0.1, 1.0, 1.5, 3.0)])
    torch.testing.assert_close(loss, torch.tensor([0.1, 1.0, 1.5, 2.0]))
    torch.testing.assert_close(metrics["tis"], torch.tensor([0.1, 1.0, 1.5, 3.0]))
    torch.testing.assert_close(metrics["tis_abs"], torch.tensor([0.9, 0.0, 0.5, 2.0]))
    assert metrics["tis_clipfrac"].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert masks[0].tolist() == [1, 1, 1, 1]


def test_vanilla_tis_has_a_floor_and_a_cap() -> None:
    flags = {"tis_clip_low": 0.5, "tis_clip": 1.25}
    loss, _, metrics = call_hook(
        vanilla_tis_function, train=[logs(0.1, 0.5, 1.25, 3.0)], flags=flags
    )
    torch.testing.assert_close(loss, torch.tensor([0.5, 0.5, 1.25, 1.25]))
    # the edges themselves are not clipped
    assert metrics["tis_clipfrac"].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_icepop_drops_what_vanilla_tis_clips() -> None:
    flags = {"tis_clip_low": 0.5, "tis_clip": 2.0}
    loss, masks, metrics = call_hook(
        icepop_function, train=[logs(0.4, 0.5, 1.0, 2.0, 2.1)], flags=flags
    )
    torch.testing.assert_close(loss, torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0]))
    assert metrics["is_masked"].tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert metrics["is_masked_low"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert metrics["is_masked_high"].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert metrics["tis_clipfrac"].tolist() == metrics["is_masked"].tolist()
    assert masks[0].tolist() == [1, 1, 1, 1, 1]  # dropped tokens stay in the denominator


def test_off_policy_is_weighs_with_the_current_policy() -> None:
    # cur / rollout = 0.5, 1, 1.1, 4 in [0.8, 1.2]; train is far away and must not matter
    loss, _, metrics = call_hook(
        off_policy_is_function,
        cur=[logs(0.5, 1.0, 1.1, 4.0)],
        train=[logs(9.0, 9.0, 9.0, 9.0)],
        flags=REINFORCE,
    )
    torch.testing.assert_close(loss, torch.tensor([0.8, 1.0, 1.1, 1.2]))
    torch.testing.assert_close(metrics["tis"], torch.tensor([0.5, 1.0, 1.1, 4.0]))
    assert metrics["tis_clipfrac"].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_eps_clip_of_one_removes_the_lower_bound_of_off_policy_is() -> None:
    flags = {**REINFORCE, "eps_clip": 1.0, "eps_clip_high": 3.0}
    loss, _, _ = call_hook(
        off_policy_is_function, cur=[logs(1e-6, 0.5, 3.9, 5.0)], train=None, flags=flags
    )
    torch.testing.assert_close(loss, torch.tensor([1e-6, 0.5, 3.9, 4.0]))


def test_off_policy_is_without_cur_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"without cur_log_probs.*policy_loss_function"):
        call_hook(off_policy_is_function, train=[logs(1.0)])


def test_off_policy_is_warns_once_on_a_base_that_carries_a_ratio() -> None:
    corrections._warn_of_doubled_ratio.cache_clear()
    arguments: dict[str, Any] = {"train": [logs(1.0)], "cur": [logs(1.0)]}
    with pytest.warns(UserWarning, match="counts pi_theta/pi_old twice"):
        call_hook(off_policy_is_function, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call_hook(off_policy_is_function, **arguments)  # warns once
        corrections._warn_of_doubled_ratio.cache_clear()
        call_hook(off_policy_is_function, **arguments, flags=REINFORCE)
        call_hook(off_policy_is_function, **arguments, flags={"allow_biased_correction": True})


def test_sequence_tis_gives_all_tokens_the_product_of_their_ratios() -> None:
    # sample 0: 0.5 * (masked) * 3 = 1.5; sample 1: 4 * 2 = 8, capped at 2
    train = [logs(0.5, 100.0, 3.0), logs(4.0, 2.0)]
    masks = [torch.tensor([1, 0, 1]), torch.tensor([1, 1])]
    loss, _, metrics = call_hook(sequence_tis_function, train=train, masks=masks)
    torch.testing.assert_close(loss, torch.tensor([1.5, 0.0, 1.5, 2.0, 2.0]))
    torch.testing.assert_close(metrics["tis"], torch.tensor([1.5, 0.0, 1.5, 8.0, 8.0]))
    assert metrics["tis_clipfrac"].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_sequence_tis_at_the_geometric_level_does_not_grow_with_length() -> None:
    # sample 0: sqrt(0.5 * 2) = 1; sample 1: sqrt(4 * 1) = 2
    flags = {"sequence_tis_level": "geometric"}
    loss, _, _ = call_hook(
        sequence_tis_function, train=[logs(0.5, 2.0), logs(4.0, 1.0)], flags=flags
    )
    torch.testing.assert_close(loss, torch.tensor([1.0, 1.0, 2.0, 2.0]))


def test_sequence_tis_of_a_long_mismatched_sequence_neither_overflows_nor_vanishes() -> None:
    flags = {"sequence_tis_clip": 1e9}
    train = [
        torch.full((500,), 3.0),
        torch.full((500,), -3.0),
    ]  # sums +-1500: exp overflows float64
    loss, _, metrics = call_hook(sequence_tis_function, train=train, flags=flags)
    torch.testing.assert_close(loss[0].item(), math.exp(20), rtol=1e-5, atol=0)
    torch.testing.assert_close(loss[-1].item(), math.exp(-20), rtol=1e-5, atol=0)
    assert all(bool(value.isfinite().all()) for value in metrics.values())


def test_sequence_tis_has_a_floor() -> None:
    flags = {"sequence_tis_clip_low": 0.5}
    loss, _, _ = call_hook(sequence_tis_function, train=[logs(0.1, 0.1)], flags=flags)
    torch.testing.assert_close(loss, torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("hook", ALL_HOOKS)
def test_weights_are_detached_and_the_loss_passes_its_gradient_times_the_weight(
    hook: Callable[..., Any],
) -> None:
    cur = [logs(0.9, 1.05, 1.1).requires_grad_()]
    pg_loss = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    loss, _, metrics = call_hook(hook, **everything(cur, pg_loss=pg_loss))
    loss.sum().backward()
    weight = loss.detach() / pg_loss.detach()
    assert pg_loss.grad is not None
    torch.testing.assert_close(pg_loss.grad, weight)
    assert cur[0].grad is None
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("hook", ALL_HOOKS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_garbage_changes_nothing_in_any_hook(
    hook: Callable[..., Any], garbage: float
) -> None:
    mask = [torch.tensor([1, 0, 1]), torch.tensor([0])]
    clean = [logs(0.9, 1.0, 1.1), logs(1.0)]
    dirty = [logs(0.9, 1.0, 1.1), logs(1.0)]
    dirty[0][1], dirty[1][0] = garbage, garbage
    expected = call_hook(hook, **everything(clean, masks=mask))
    loss = torch.tensor([1.0, garbage, 1.0, garbage], requires_grad=True)
    result = call_hook(hook, **everything(dirty, masks=mask, rollout=[d * 0 for d in dirty], pg_loss=loss))  # fmt: skip
    result[0].sum().backward()
    assert torch.equal(result[0].detach(), expected[0])
    assert loss.grad is not None and loss.grad[[1, 3]].tolist() == [0.0, 0.0]
    assert result[2].keys() == expected[2].keys()
    assert all(torch.equal(result[2][name], expected[2][name]) for name in expected[2])


@pytest.mark.parametrize("hook", ALL_HOOKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_log_probs_are_computed_in_float32(
    hook: Callable[..., Any], dtype: torch.dtype
) -> None:
    half = [torch.tensor([-0.25, 0.125, 0.0], dtype=dtype)]
    full = [half[0].float()]
    expected, result = (call_hook(hook, **everything(values)) for values in (full, half))
    assert torch.equal(result[0], expected[0]) and result[0].dtype == torch.float32
    assert all(torch.equal(result[2][name], expected[2][name]) for name in expected[2])


@pytest.mark.parametrize("hook", ALL_HOOKS)
@pytest.mark.parametrize("lengths", [[], [0], [2, 0, 1]])
def test_empty_samples_and_empty_lists_are_fine(
    hook: Callable[..., Any], lengths: list[int]
) -> None:
    train = [torch.zeros(length) for length in lengths]
    loss, masks, metrics = call_hook(hook, **everything(train))
    assert loss.tolist() == [1.0] * sum(lengths)
    assert [len(mask) for mask in masks] == lengths
    assert all(len(value) == sum(lengths) for value in metrics.values())


@pytest.mark.parametrize("hook", ALL_HOOKS)
def test_a_fully_masked_sample_has_zero_loss_and_zero_metrics(hook: Callable[..., Any]) -> None:
    masks = [torch.zeros(2, dtype=torch.int64), torch.ones(1, dtype=torch.int64)]
    loss, _, metrics = call_hook(hook, **everything([logs(50.0, 50.0), logs(1.0)], masks=masks))
    assert loss.tolist() == [0.0, 0.0, 1.0]
    assert all(value[:2].tolist() == [0.0, 0.0] for value in metrics.values())


@pytest.mark.parametrize("hook", ALL_HOOKS)
def test_lengths_that_do_not_fit_are_batch_errors(hook: Callable[..., Any]) -> None:
    two = [logs(1.0, 1.0)]
    with pytest.raises(BatchError, match="rollout_log_probs has lengths"):
        call_hook(hook, **everything(two, rollout=[torch.zeros(3)]))
    with pytest.raises(BatchError, match="pg_loss has 3 tokens"):
        call_hook(hook, **everything(two, pg_loss=torch.ones(3)))
    with pytest.raises(BatchError, match=r"lengths \[3\] but the responses \[2\]"):
        hook(
            Namespace(**REINFORCE),
            pg_loss=torch.ones(2),
            train_log_probs=two,
            rollout_log_probs=two,
            cur_log_probs=two,
            advantages=two,
            loss_masks=[torch.ones(3)],
            response_lengths=[2],
        )


@pytest.mark.parametrize("hook", ALL_HOOKS)
def test_a_hook_changes_none_of_its_inputs(hook: Callable[..., Any]) -> None:
    train = [logs(0.01, 50.0), logs(1.0)]
    masks = [torch.ones(2, dtype=torch.int64), torch.ones(1, dtype=torch.int64)]
    pg_loss = torch.ones(3)
    before = [t.clone() for t in (*train, *masks, pg_loss)]
    call_hook(hook, **everything(train, masks=masks, pg_loss=pg_loss))
    assert all(torch.equal(a, b) for a, b in zip((*train, *masks, pg_loss), before, strict=True))


def test_a_flag_that_is_none_in_another_namespace_takes_its_default() -> None:
    flags = {"tis_clip": None, "tis_clip_low": None}
    loss, _, _ = call_hook(vanilla_tis_function, train=[logs(3.0)], flags=flags)
    assert loss.tolist() == [2.0]


def test_segment_tis_by_turn_multiplies_the_ratios_of_a_turn() -> None:
    masks = [torch.tensor([1, 1, 0, 1])]
    train = [logs(1.5, 0.8, 1e9, 0.5)]
    flags = {"segment_tis_length": "turn", "sequence_tis_clip": 5.0}
    loss, _, metrics = call_hook(segment_tis_function, train=train, masks=masks, flags=flags)
    torch.testing.assert_close(loss, torch.tensor([1.2, 1.2, 0.0, 0.5]))
    torch.testing.assert_close(metrics["tis"], torch.tensor([1.2, 1.2, 0.0, 0.5]))
