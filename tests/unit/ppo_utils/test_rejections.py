"""The rejecting corrections, by hand: what each drops, at its edges, and how it is reported."""

import math
from typing import Any

import pytest
import torch

from plugin.errors import ConfigError
from plugin.ppo_utils import (
    dppo_tv_mask_function,
    geometric_mask_function,
    opsm_function,
    rejection_function,
    veto_function,
)
from tests.unit.ppo_utils.hook_calls import call_hook, logs


def kept(result: tuple[Any, Any, Any]) -> list[list[int]]:
    """The returned masks, after checking that loss, masks and metric agree about what is dropped."""
    loss, masks, _metrics = result
    flat = torch.cat(list(masks))
    assert torch.equal(loss != 0, flat != 0)
    return [mask.tolist() for mask in masks]


def test_geometric_mask_drops_sequences_by_their_mean_ratio() -> None:
    # means: sqrt(2 * 0.5) = 1 kept; 1.01 edge kept; 1.02 high; 0.98 low
    train = [logs(2.0, 0.5), logs(1.01), logs(1.02), logs(0.98)]
    result = call_hook(geometric_mask_function, train=train)
    assert kept(result) == [[1, 1], [1], [0], [0]]
    metrics = result[2]
    assert metrics["is_masked"].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert metrics["is_masked_high"].tolist() == [0.0, 0.0, 0.0, 1.0, 0.0]
    assert metrics["is_masked_low"].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]
    torch.testing.assert_close(
        metrics["geometric_ratio"], torch.tensor([1.0, 1.0, 1.01, 1.02, 0.98])
    )


# Sample 0 has ratios 0.5, 2 and a masked 1e9; sample 1 has 3; sample 2 has 1, 1.
TRAIN = [logs(0.5, 2.0, 1e9), logs(3.0), logs(1.0, 1.0)]
MASKS = [torch.tensor([1, 1, 0]), torch.tensor([1]), torch.tensor([1, 1])]
L2, L3 = math.log(2), math.log(3)


@pytest.mark.parametrize(
    "rules, expected",
    [
        # the default: token ratios in [0.5, 2], edges kept
        ("token_ratio=0.5:2.0", [[1, 1, 0], [0], [1, 1]]),
        ("token_ratio=0.6:", [[0, 1, 0], [1], [1, 1]]),
        ("token_ratio=:1.9", [[1, 0, 0], [0], [1, 1]]),
        # k1 of d = -log ratio: log 2, -log 2 | -log 3 | 0, 0
        (f"token_k1={-L2}:{L2}", [[1, 1, 0], [0], [1, 1]]),
        ("token_k1=:0.5", [[0, 1, 0], [1], [1, 1]]),
        # k2 = log(r)^2 / 2: 0.2402 | 0.6035 | 0
        ("token_k2=:0.25", [[1, 1, 0], [0], [1, 1]]),
        ("token_k2=:0.24", [[0, 0, 0], [0], [1, 1]]),
        # k3 = r - 1 - log r: 0.1931, 0.3069 | 0.9014 | 0
        ("token_k3=:0.2", [[1, 0, 0], [0], [1, 1]]),
        # geometric mean of ratios: 1 | 3 | 1; product: 1 | 3 | 1
        ("mean_ratio=0.99:1.01", [[1, 1, 0], [0], [1, 1]]),
        ("sum_ratio=:2.9", [[1, 1, 0], [0], [1, 1]]),
        # mean of k2: 0.2402 | 0.6035 | 0; sum of k2: 0.4805 | 0.6035 | 0
        ("mean_k2=:0.3", [[1, 1, 0], [0], [1, 1]]),
        ("sum_k2=:0.3", [[0, 0, 0], [0], [1, 1]]),
        ("mean_k1=-1.0:", [[1, 1, 0], [0], [1, 1]]),
        ("sum_k1=-1.0:", [[1, 1, 0], [0], [1, 1]]),
        # mean of k3: 0.25 | 0.9014 | 0; sum: 0.5 | 0.9014 | 0
        ("mean_k3=:0.26", [[1, 1, 0], [0], [1, 1]]),
        ("sum_k3=:0.49", [[0, 0, 0], [0], [1, 1]]),
        # largest ratio: 2 | 3 | 1; of k1: log 2 | -log 3 | 0; of k3: 0.3069 | 0.9014 | 0
        ("max_ratio=:2.0", [[1, 1, 0], [0], [1, 1]]),
        ("max_k1=:0.5", [[0, 0, 0], [1], [1, 1]]),
        ("max_k2=:0.25", [[1, 1, 0], [0], [1, 1]]),
        ("max_k3=:0.3", [[0, 0, 0], [0], [1, 1]]),
        # every rule has to agree
        ("token_ratio=0.6:,token_ratio=:2.5", [[0, 1, 0], [0], [1, 1]]),
        ("max_k3=:0.5, token_k1=:0.1", [[0, 1, 0], [0], [1, 1]]),
    ],
)
def test_every_level_and_statistic_drops_what_it_should(
    rules: str, expected: list[list[int]]
) -> None:
    result = call_hook(
        rejection_function, train=TRAIN, masks=MASKS, flags={"rejection_rules": rules}
    )
    assert kept(result) == expected


def test_rejection_reports_each_rule_and_the_total() -> None:
    flags = {"rejection_rules": "token_ratio=0.6:,max_ratio=:2.5"}
    _, _, metrics = call_hook(rejection_function, train=TRAIN, masks=MASKS, flags=flags)
    assert metrics["rejected_by_token_ratio"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert metrics["rejected_by_max_ratio"].tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert metrics["is_masked"].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_veto_drops_the_sequence_of_one_impossible_token() -> None:
    # smallest ratios: 0.99e-4 dropped; 1e-4 edge kept; masked 1e-9 does not count
    train = [logs(1.0, 0.99e-4), logs(1.0, 1e-4), logs(1.0, 1e-9)]
    masks = [torch.tensor([1, 1]), torch.tensor([1, 1]), torch.tensor([1, 0])]
    result = call_hook(veto_function, train=train, masks=masks)
    assert kept(result) == [[0, 0], [1, 1], [1, 0]]


def test_veto_threshold_is_a_flag() -> None:
    result = call_hook(veto_function, train=[logs(0.4), logs(0.6)], flags={"veto_threshold": 0.5})
    assert kept(result) == [[0], [1]]


def test_opsm_drops_only_sequences_that_are_pushed_down_and_already_left() -> None:
    # mean(train - cur): 0.2, 0.2, -0.2, 0.05 against delta 0.1
    train = [torch.zeros(2), torch.zeros(2), torch.zeros(1), torch.zeros(1)]
    cur = [
        torch.tensor([-0.4, 0.0]),
        torch.tensor([-0.4, 0.0]),
        torch.tensor([0.2]),
        torch.tensor([-0.05]),
    ]
    advantages = [torch.full_like(c, a) for c, a in zip(cur, [-1.0, 1.0, -1.0, -1.0], strict=True)]
    result = call_hook(
        opsm_function, train=train, cur=cur, advantages=advantages, flags={"opsm_delta": 0.1}
    )
    assert kept(result) == [[0, 0], [1, 1], [1], [1]]
    assert result[2]["opsm_clipfrac"].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "level, expected",
    [
        # drift 0.2 > 0.1 in the first two; mean advantages -1/3, +1/3 and -1/3; the third has not drifted
        ("sequence", [[0, 0, 0], [1, 1, 1], [1, 1, 1]]),
        ("token", [[0, 1, 0], [1, 0, 1], [1, 1, 1]]),
    ],
)
def test_opsm_decides_by_the_mean_advantage_of_a_sequence_or_by_each_tokens_own(
    level: str, expected: list[list[int]]
) -> None:
    advantages = [torch.tensor(a) for a in ([-1.0, 1.0, -1.0], [1.0, -1.0, 1.0], [-1.0, 1.0, -1.0])]
    cur = [torch.full((3,), value) for value in (-0.2, -0.2, -0.05)]
    result = call_hook(
        opsm_function,
        train=[torch.zeros(3)] * 3,
        cur=cur,
        advantages=advantages,
        flags={"opsm_delta": 0.1, "opsm_level": level},
    )
    assert kept(result) == expected


def test_opsm_of_slimes_flag_decides_token_by_token_as_slime_does() -> None:
    result = call_hook(
        opsm_function,
        train=[torch.zeros(2)],
        cur=[torch.tensor([-0.2, -0.2])],
        advantages=[torch.tensor([-2.0, 1.0])],
        flags={"use_opsm": True},
    )
    assert kept(result) == [[0, 1]]


def test_opsm_ignores_the_advantage_of_a_masked_token() -> None:
    # unmasked: 1 > 0; with the masked -5 the mean would be negative
    result = call_hook(
        opsm_function,
        train=[torch.zeros(2)],
        cur=[torch.tensor([-0.2, -0.2])],
        masks=[torch.tensor([1, 0])],
        advantages=[torch.tensor([1.0, -5.0])],
    )
    assert kept(result) == [[1, 0]]


def test_a_sequence_that_opsm_drops_has_no_gradient_not_even_where_its_advantage_is_positive() -> (
    None
):
    cur = torch.tensor([-0.5, -0.5, -0.1, -0.1], requires_grad=True)
    loss, masks, _ = opsm_function(
        None,
        pg_loss=cur,
        train_log_probs=[torch.zeros(2), torch.zeros(2)],
        cur_log_probs=[cur[:2].detach(), torch.zeros(2)],
        advantages=[torch.tensor([-3.0, 1.0])] * 2,
        loss_masks=[torch.ones(2), torch.ones(2)],
    )
    loss.sum().backward()
    assert cur.grad is not None
    assert cur.grad.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert [mask.tolist() for mask in masks] == [[0.0, 0.0], [1.0, 1.0]]


def test_opsm_takes_the_mean_over_unmasked_tokens() -> None:
    # unmasked drift 0.05 is below delta; the masked token would lift the mean to 1.0
    result = call_hook(
        opsm_function,
        train=[torch.zeros(2)],
        cur=[torch.tensor([-0.05, -1.95])],
        masks=[torch.tensor([1, 0])],
        advantages=[torch.tensor([-1.0, -1.0])],
        flags={"opsm_delta": 0.1},
    )
    assert kept(result) == [[1, 0]]


def test_opsm_without_advantages_or_cur_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"needs cur_log_probs.*advantages"):
        call_hook(opsm_function, train=[logs(1.0)])


def test_opsm_works_without_rollout_log_probs() -> None:
    _, masks, _ = opsm_function(
        None,
        pg_loss=torch.ones(1),
        train_log_probs=[torch.zeros(1)],
        cur_log_probs=[torch.tensor([-1.0])],
        advantages=[torch.tensor([-1.0])],
        loss_masks=[torch.ones(1)],
    )
    assert masks[0].tolist() == [0.0]


def test_dppo_tv_mask_drops_by_probability_not_by_ratio() -> None:
    # differences 0.7 - 0.5 = 0.2 edge; 0.8 - 0.5 = 0.3 high; 0.3 - 0.5 = -0.2 edge; 0.2 - 0.5 low;
    # 0.011 - 0.001: ratio 11 but the probability hardly moved
    cur, rollout = [logs(0.7, 0.8, 0.3, 0.2, 0.011)], [logs(0.5, 0.5, 0.5, 0.5, 0.001)]
    result = call_hook(dppo_tv_mask_function, train=None, cur=cur, rollout=rollout)
    assert kept(result) == [[1, 0, 1, 0, 1]]
    assert result[2]["is_masked_high"].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert result[2]["is_masked_low"].tolist() == [0.0, 0.0, 0.0, 1.0, 0.0]
    torch.testing.assert_close(result[2]["prob_diff_abs"], torch.tensor([0.2, 0.3, 0.2, 0.3, 0.01]))


def test_dppo_tv_mask_has_two_bounds() -> None:
    flags = {"dppo_diff_low": 0.05, "dppo_diff_high": 0.4}
    result = call_hook(
        dppo_tv_mask_function, train=None, cur=[logs(0.8, 0.4)], rollout=[logs(0.5, 0.5)], flags=flags
    )  # fmt: skip
    assert kept(result) == [[1, 0]]


def test_dppo_tv_mask_without_cur_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"dppo_tv_mask_function.*without cur_log_probs"):
        call_hook(dppo_tv_mask_function, train=[logs(1.0)])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16])
def test_masks_of_any_dtype_keep_their_dtype(dtype: torch.dtype) -> None:
    masks = [torch.ones(2, dtype=dtype)]
    _, new_masks, _ = call_hook(rejection_function, train=[logs(1.0, 9.0)], masks=masks)
    assert new_masks[0].dtype == dtype and new_masks[0].bool().tolist() == [True, False]
    assert masks[0].bool().tolist() == [True, True]


#: A conversation: two turns of the policy with an answer of a tool between them, then one sample of a single turn.
TURNS = [torch.tensor([1, 1, 0, 0, 1]), torch.tensor([0, 1, 1])]
TURN_TRAIN = [logs(2.0, 0.5, 1e9, 1e-9, 3.0), logs(1e9, 1.1, 1.1)]


def test_segment_rules_drop_a_turn_and_keep_the_rest_of_its_conversation() -> None:
    # k1 of d = -log r, means by turn: 0; -log 3 = -1.0986; -log 1.1 = -0.0953
    flags = {"rejection_rules": "segment_k1=-0.5:0.5", "segment_tis_length": "turn"}
    result = call_hook(rejection_function, train=TURN_TRAIN, masks=TURNS, flags=flags)
    assert kept(result) == [[1, 1, 0, 0, 0], [0, 1, 1]]


def test_segments_of_equal_length_are_dropped_one_by_one() -> None:
    # means of log r over pairs: 0 | log 3 | log 1.5
    train = [logs(2.0, 0.5, 3.0, 3.0, 1.5)]
    flags = {"rejection_rules": "segment_ratio=0.5:2.0", "segment_tis_length": 2}
    assert kept(call_hook(rejection_function, train=train, flags=flags)) == [[1, 1, 0, 0, 1]]


def test_the_multiplicative_error_of_a_sequence_is_the_mean_of_exp_of_the_distance() -> None:
    # ratios 2 and 0.5 are both off by a factor of 2; 1.2 and 1 by 1.1 on average
    train = [logs(2.0, 0.5), logs(1.2, 1.0)]
    flags = {"rejection_rules": "mean_error=:1.5"}
    assert kept(call_hook(rejection_function, train=train, flags=flags)) == [[0, 0], [1, 1]]


def test_differences_of_probabilities_spare_rare_tokens() -> None:
    # rollout 1e-6 and train 1e-4 differ by 1e-4; 0.3 and 0.5 by 0.2; 0.5 and 0.3 by -0.2
    rollout, train = [logs(1e-6), logs(0.3), logs(0.5)], [logs(1e-4), logs(0.5), logs(0.3)]
    flags = {"rejection_rules": "token_diff=-0.25:0.1"}
    result = call_hook(rejection_function, train=train, rollout=rollout, flags=flags)
    assert kept(result) == [[1], [0], [1]]
