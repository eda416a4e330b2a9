"""Masks multiply by no ratio: they fit every loss, and leave a loss's own pull and other metrics alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plugin import ppo_utils
from plugin.config import LossConfig
from plugin.config.loss.corrections import MASKS
from plugin.config.loss.policy_loss import ROLLOUT_LOSSES
from plugin.errors import BatchError, ConfigError
from plugin.loss import hook_chain
from tests.unit.loss.sample_batches import TokenResult, logs, random_batch, run, token_loss

GEOMETRIC, VETO = "plugin.ppo_utils.geometric_mask_function", "plugin.ppo_utils.veto_function"
#: The first sample's mean ratio is sqrt(2 x 0.5) = 1, the second's 1.5; the third has one of 1e-6.
CUR = [logs(0.2, 0.05), logs(0.3), logs(0.1, 1e-7)]
ROLLOUT = [logs(0.1, 0.1), logs(0.2), logs(0.1, 0.1)]
ADVANTAGES = [torch.tensor([1.0, 1.0]), torch.tensor([-2.0]), torch.tensor([1.0, 1.0])]


def masked_loss(policy_loss: str, hooks: str, **flags: Any) -> TokenResult:
    config = LossConfig(
        policy_loss=policy_loss, use_tis=True, custom_tis_function_path=hooks, **flags
    )
    return token_loss(config, cur=CUR, rollout_log_probs=ROLLOUT, advantages=ADVANTAGES)


@pytest.mark.parametrize("loss", ROLLOUT_LOSSES)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_goes_with_every_loss_that_compares_with_the_rollout_policy(
    loss: str, mask: str
) -> None:
    path = f"plugin.ppo_utils.{mask}"
    config = LossConfig(policy_loss=loss, use_tis=True, custom_tis_function_path=path)
    value, _, _ = run(config, *random_batch([[1, 1, 0], [1, 0, 1]]))
    assert torch.isfinite(value)


@pytest.mark.parametrize("name", [n for n in ppo_utils.__all__ if n.endswith("_function")])
def test_the_corrections_that_leave_what_they_keep_as_it_is_are_the_masks(name: str) -> None:
    config = LossConfig(
        policy_loss="reinforce", use_tis=True, custom_tis_function_path=f"plugin.ppo_utils.{name}"
    )
    # Nothing is so far off that a mask would drop it, and ratios are not 1.
    found = token_loss(
        config,
        cur=[logs(0.2004)],
        log_probs=[logs(0.1998)],
        rollout_log_probs=[logs(0.2)],
        advantages=[torch.ones(1)],
    )
    unweighted = found.loss.tolist() == (-logs(0.2004)).tolist()
    assert found.kept == [True] and unweighted == (name in MASKS)


def test_a_mask_beside_a_correction_that_weights_is_still_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"counted twice; .* use masks, which multiply by no ratio"
    ):
        masked_loss("icepop", f"{GEOMETRIC},plugin.ppo_utils.vanilla_tis_function")


def test_icepop_with_a_geometric_mask_loses_the_sequences_that_the_mask_drops() -> None:
    found = masked_loss("icepop", GEOMETRIC)
    # -A r of the first sample, r = 2 and 0.5; the others' means are 1.5 and 1e-3
    torch.testing.assert_close(found.loss, torch.tensor([-2.0, -0.5, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(found.gradient, torch.tensor([-2.0, -0.5, 0.0, 0.0, 0.0]))
    assert found.kept == [True, True, False, False, False]
    # icepop itself drops the last token only; what the mask drops has its own name
    assert found.metric("is_masked") == [0, 0, 0, 0, 1]
    assert found.metric("geometric_mask_function/is_masked") == [0, 0, 1, 1, 1]


def test_weights_are_the_losses_own_on_what_the_mask_keeps() -> None:
    config = LossConfig(policy_loss="icepop", use_tis=True, custom_tis_function_path=GEOMETRIC)
    found = token_loss(
        config, cur=CUR, rollout_log_probs=ROLLOUT, advantages=ADVANTAGES, with_weights=True
    )
    term = found.outputs.policy
    torch.testing.assert_close(term.ratio, torch.tensor([2.0, 0.5, 1.5, 1.0, 1e-6]))
    torch.testing.assert_close(term.weight, torch.tensor([2.0, 0.5, 0.0, 0.0, 0.0]))


def test_a_mask_does_not_thin_the_pull_of_dppo_and_dro_and_drops_that_of_ipo_kl() -> None:
    squares = torch.cat([(c - r).square() for c, r in zip(CUR, ROLLOUT, strict=True)])
    dropped = torch.tensor([False, False, True, True, True])
    dppo = masked_loss("dppo", GEOMETRIC, kl_tau=0.1)
    torch.testing.assert_close(dppo.loss[dropped], 0.1 * squares[dropped])
    dro = masked_loss("dro", GEOMETRIC, dro_beta=0.4)
    torch.testing.assert_close(dro.loss[dropped], 0.2 * squares[dropped])
    ipo = masked_loss("ipo_kl", GEOMETRIC, kl_tau=0.1)
    torch.testing.assert_close(ipo.loss[dropped], torch.zeros(3))


def test_masks_compare_the_current_policy_where_the_trainers_log_probs_are_skipped() -> None:
    """The proximal policy is then the rollout policy, and a mask of the two would keep everything."""
    config = LossConfig(
        policy_loss="ppo",
        use_tis=True,
        custom_tis_function_path=f"{GEOMETRIC},{VETO}",
        train_log_probs="rollout",
    )
    found = token_loss(
        config, cur=CUR, log_probs=CUR, rollout_log_probs=ROLLOUT, advantages=ADVANTAGES
    )
    assert found.kept == [True, True, False, False, False]
    with pytest.raises(ConfigError, match="every weight is 1; drop one of the two, or use masks"):
        LossConfig(use_tis=True, train_log_probs="rollout")


def test_a_ratio_metric_keeps_its_meaning_behind_a_mask() -> None:
    """The mean of `tis` is over all tokens with loss, whatever an earlier correction dropped."""
    tis = "plugin.ppo_utils.vanilla_tis_function"
    inputs: dict[str, Any] = {
        "cur": CUR, "log_probs": CUR, "rollout_log_probs": ROLLOUT, "advantages": ADVANTAGES
    }  # fmt: skip
    alone, behind = (
        token_loss(LossConfig(use_tis=True, custom_tis_function_path=path), **inputs)
        for path in (tis, f"{GEOMETRIC},{tis}")
    )
    for name in ("tis", "tis_abs", "tis_clipfrac"):
        assert behind.metric(name) == alone.metric(name)
    assert behind.metric("tis") == pytest.approx([2.0, 0.5, 1.5, 1.0, 1e-6])
    torch.testing.assert_close(behind.loss[2:], torch.zeros(3))


HOOK = """
from plugin.ppo_utils import mask_only

@mask_only
def hook(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss{change}, [mask * 0 for mask in loss_masks], {{}}
"""


def test_a_mask_of_ones_own_goes_with_icepop_once_it_is_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_chain, "_chains", {})
    for name, change in (("good", ""), ("wrong", " * 1.5")):
        (tmp_path / f"{name}.py").write_text(HOOK.format(change=change))
    (tmp_path / "silent.py").write_text(HOOK.format(change="").replace("@mask_only", ""))
    found = masked_loss("icepop", f"{tmp_path}/good.py:hook")
    assert not any(found.kept) and not found.loss.any()
    with pytest.raises(BatchError, match=r"declared @mask_only and turned the loss 1 .* into 1\.5"):
        masked_loss("icepop", f"{tmp_path}/wrong.py:hook")
    with pytest.raises(ConfigError, match="counted twice"):
        masked_loss("icepop", f"{tmp_path}/silent.py:hook")
