"""No flag of slime that changes its loss is ignored by ours."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from examples.check_slime_flags import main as check_flags
from plugin import ppo_utils
from plugin.config.other_frameworks import SLIME_LOSS_FLAGS, loss_config_of
from plugin.errors import ConfigError
from plugin.loss import hook_chain, policy_loss_function
from plugin.ppo_utils.importance_ratio import KL_ESTIMATORS
from tests.unit.loss.sample_batches import random_batch

pytestmark = pytest.mark.hostile


MASKS = [[1, 0, 1], [1, 1], [1, 1]]
HOOK = "plugin.ppo_utils.icepop_function"
#: Another value for every honored flag, and what has to be on for it to count.
OTHER_VALUES: dict[str, dict[str, Any]] = {
    "advantage_estimator": {"advantage_estimator": "gspo"},
    "pg_loss_type": {"pg_loss_type": "reinforce"},
    "eps_clip": {"eps_clip": 0.01},
    "eps_clip_high": {"eps_clip_high": 0.01},
    "eps_clip_c": {"eps_clip_c": 1.01},
    "entropy_coef": {"entropy_coef": 0.1},
    "use_kl_loss": {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "kl_loss_coef": {"kl_loss_coef": 0.2, "use_kl_loss": True},
    "kl_loss_type": {"kl_loss_type": "k2", "use_kl_loss": True, "kl_loss_coef": 0.1},
    "use_unbiased_kl": {"use_unbiased_kl": True, "use_kl_loss": True, "kl_loss_coef": 0.1},
    "use_tis": {"use_tis": True},
    "tis_clip": {"tis_clip": 0.5, "use_tis": True},
    "tis_clip_low": {"tis_clip_low": 1.5, "use_tis": True},
    "custom_tis_function_path": {"custom_tis_function_path": HOOK, "use_tis": True, "tis_clip": 1.1},
    "use_rollout_logprobs": {"use_rollout_logprobs": True},
    "use_opsm": {"use_opsm": True},
    "opsm_delta": {"opsm_delta": 100.0, "use_opsm": True},
    "rollout_temperature": {"rollout_temperature": 2.0},
}  # fmt: skip
#: Honored with fields of the batch: test_sampling_mask_replay.py and test_score_centering.py in tests/unit/loss.
WITH_FIELDS = {"rollout_top_p", "use_score_centering"}
OBSERVING = {"get_mismatch_metrics", "recompute_loss_function", "observe_training_entropy"}
BAD_VALUES = {
    "allgather_cp": True,
    "qkv_format": "bshd",
    "custom_pg_loss_reducer_function_path": "own.reducer",
    "skip_actor_forward_only": True,
    "true_on_policy_mode": True,
}


def slime(**changes: Any) -> Namespace:
    """slime's namespace with nothing set but `changes`."""
    defaults = {name: flag.default for name, flag in SLIME_LOSS_FLAGS.items()}
    return Namespace(**{**defaults, "loss_type": "custom_loss", **changes})


def batch_of_two_updates() -> tuple[dict[str, Any], Tensor]:
    """A batch whose three policies differ.

    A sample pushed up with ratios to the old policy around 1.1, one pushed down that the policy is
    leaving (0.9), one pushed down that it has come closer to (1.6); the engine is 0.3 below.
    """
    batch, logits = random_batch(MASKS)
    cur = [values.detach() for values in current(batch, logits)]
    signs, drifts = (1.0, -1.0, -1.0), (torch.tensor([-0.05, 0, -0.15]), 0.1, -0.5)
    batch["advantages"] = [torch.full((len(m),), s) for m, s in zip(MASKS, signs, strict=True)]
    batch["log_probs"] = [c + drift for c, drift in zip(cur, drifts, strict=True)]
    batch["rollout_log_probs"] = [old - 0.3 for old in batch["log_probs"]]
    return batch, logits.requires_grad_()


def result(**changes: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    batch, logits = batch_of_two_updates()
    loss, metrics = policy_loss_function(slime(**changes), batch, logits, torch.sum)
    return loss, torch.autograd.grad(loss, logits)[0], metrics


def current(batch: dict[str, Any], logits: Tensor) -> list[Tensor]:
    """Log-probs of the response tokens, sample by sample."""
    rows = logits[0, : sum(batch["total_lengths"])].log_softmax(-1).split(batch["total_lengths"])
    samples = zip(rows, batch["unconcat_tokens"], batch["response_lengths"], strict=True)
    return [row[-n - 1 : -1].gather(-1, tokens[-n:, None])[:, 0] for row, tokens, n in samples]


def test_no_flag_is_left_untried() -> None:
    honored = {name for name, flag in SLIME_LOSS_FLAGS.items() if flag.state == "honored"}
    assert honored == OTHER_VALUES.keys() | OBSERVING | WITH_FIELDS
    refused = {name for name, flag in SLIME_LOSS_FLAGS.items() if flag.state == "refused"}
    assert refused == BAD_VALUES.keys()


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_an_honored_flag_is_not_without_effect(name: str) -> None:
    changes = OTHER_VALUES[name]
    without = {key: value for key, value in changes.items() if key != name}
    assert not torch.allclose(result(**changes)[1], result(**without)[1])


@pytest.mark.parametrize("name", BAD_VALUES)
@pytest.mark.parametrize("own", [{}, {"policy_loss": "reinforce"}], ids=["slime", "with ours"])
def test_a_flag_that_we_do_not_have_is_not_ignored(name: str, own: dict[str, Any]) -> None:
    args = slime(**{name: BAD_VALUES[name]}, context_parallel_size=2, **own)
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is {BAD_VALUES[name]}: "):
        loss_config_of(args)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_opsm": True, "get_mismatch_metrics": True},
        {"pg_loss_type": "ppo", "advantage_estimator": "cispo"},
        {"pg_loss_type": "ppo", "policy_loss": "icepop"},
        {"use_opsm": True, "policy_loss": "icepop"},
        {"pg_loss_type": "reinforce", "use_tis": True, "use_opsm": True},
        {"pg_loss_type": "reinforce", "use_tis": True, "use_unbiased_kl": True},
    ],
)
def test_of_flags_that_exclude_each_other_none_is_ignored(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="drop one of"):
        loss_config_of(slime(**changes))


def test_what_slime_does_itself_is_not_done_twice() -> None:
    values = {"kl_coef": 0.1, "gamma": 0.9, "value_clip": 0.1, "rollout_top_k": 5, "use_opd": True}
    done = {name for name, flag in SLIME_LOSS_FLAGS.items() if flag.state == "done by slime"}
    assert values.keys() <= done
    assert torch.equal(result(**values)[0], result()[0])
    assert torch.equal(result(allgather_cp=True)[0], result()[0])  # one context parallel rank


@pytest.mark.parametrize("path", [None, HOOK, "plugin.ppo_utils.geometric_mask_function"])
def test_observing_the_mismatch_does_not_correct_it(path: str | None) -> None:
    changes = {"custom_tis_function_path": path, "tis_clip": 1.1}
    plain, gradient, before = result()
    loss, same, metrics = result(get_mismatch_metrics=True, **changes)
    assert torch.equal(loss, plain) and torch.equal(same, gradient)
    assert metrics.keys() > before.keys()
    # slime's own loss trains on what the hook returns, also when only its metrics are wanted.
    batch, _ = batch_of_two_updates()
    hook = getattr(ppo_utils, (path or "vanilla_tis_function").rsplit(".", 1)[-1])
    call = {
        "pg_loss": torch.ones(7),
        "train_log_probs": batch["log_probs"],
        "rollout_log_probs": batch["rollout_log_probs"],
        "loss_masks": batch["loss_masks"],
        "total_lengths": batch["total_lengths"],
        "response_lengths": batch["response_lengths"],
    }
    pg_loss, masks, seen = hook(slime(get_mismatch_metrics=True, **changes), **call)
    assert torch.equal(pg_loss, torch.cat(batch["loss_masks"]).float())
    assert masks is batch["loss_masks"]
    corrected, _, applied = hook(slime(use_tis=True, **changes), **call)
    assert not torch.equal(corrected, pg_loss)
    assert all(torch.equal(seen[name], applied[name]) for name in applied)


@pytest.mark.parametrize(
    "changes", [{"use_tis": True}, {"get_mismatch_metrics": True}, {"use_opsm": True}, {}]
)
def test_a_recomputed_loss_is_not_a_different_graph(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, gradient, _ = result(**changes)
    monkeypatch.setattr(hook_chain, "_chains", {})  # as in a process that has loaded no hook yet
    batch, logits = batch_of_two_updates()
    args = slime(recompute_loss_function=True, **changes)
    loss, _ = checkpoint(policy_loss_function, args, batch, logits, torch.sum, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(loss, logits)[0], gradient)


def test_opsm_does_not_keep_sequences_that_the_policy_has_left() -> None:
    batch, logits = batch_of_two_updates()
    args = slime(use_opsm=True, opsm_delta=0.2, use_tis=True)
    assert loss_config_of(args).hook_names() == [
        "plugin.ppo_utils.opsm_function",
        "plugin.ppo_utils.vanilla_tis_function",
    ]
    batch["log_probs"] = [values.detach() for values in current(batch, logits)]
    batch["log_probs"][1] += torch.tensor([0.1, 0.5])  # mean 0.3 > 0.2, advantage -1
    batch["log_probs"][2] += torch.tensor([0.1, 0.1])  # mean 0.1
    loss, metrics = policy_loss_function(args, batch, logits, torch.sum)
    (gradient,) = torch.autograd.grad(loss, logits)
    rows = gradient[0, : sum(batch["total_lengths"])].split(batch["total_lengths"])
    assert [bool(row.any()) for row in rows] == [True, False, True]
    assert metrics["opsm_clipfrac"] == 2
    # With the engine's log-probs as the old ones it compares with those.
    alone = slime(use_opsm=True, use_rollout_logprobs=True)
    assert loss_config_of(alone).hook_names() == ["plugin.ppo_utils.opsm_function"]


def test_reinforce_with_tis_does_not_weight_the_old_policy() -> None:
    """-A log pi, times exp(cur - rollout) in [0.5, 1.5], as in slime; not exp(old - rollout)."""
    batch, logits = batch_of_two_updates()
    args = slime(pg_loss_type="reinforce", use_tis=True, tis_clip=1.5, tis_clip_low=0.5)
    loss, _ = policy_loss_function(args, batch, logits, torch.sum)
    cur = torch.cat(current(batch, logits))
    weight = (cur - torch.cat(batch["rollout_log_probs"])).exp().clamp(0.5, 1.5).detach()
    mask = torch.cat(batch["loss_masks"])
    torch.testing.assert_close(loss, (-torch.cat(batch["advantages"]) * cur * weight * mask).sum())


def test_score_centering_is_not_of_a_clipped_ratio() -> None:
    for changes in ({}, {"use_tis": True}):
        implied = result_with_heads(use_score_centering=True, **changes)
        named = result_with_heads(use_score_centering=True, pg_loss_type="reinforce", **changes)
        assert torch.equal(implied, named)
        ppo = result_with_heads(use_score_centering=True, pg_loss_type="ppo", **changes)
        assert not torch.equal(implied, ppo)


def result_with_heads(**changes: Any) -> Tensor:
    """The gradient of a batch with the likeliest ids of its sampler."""
    batch, logits = batch_of_two_updates()
    lengths = batch["response_lengths"]
    batch["rollout_topk_token_ids"] = [torch.arange(3).int().expand(n, 3) for n in lengths]
    batch["rollout_topk_log_probs"] = [torch.full((n, 3), -1.5) for n in lengths]
    args = slime(score_centering_top_k=3, **changes)
    loss, _ = policy_loss_function(args, batch, logits, torch.sum)
    return torch.autograd.grad(loss, logits)[0]


def test_ppos_clip_on_gspos_ratio_is_not_token_level() -> None:
    config = loss_config_of(slime(advantage_estimator="gspo", pg_loss_type="ppo"))
    assert config.policy_loss == "gspo"


def test_low_var_kl_is_not_unbounded() -> None:
    # k3 = exp(-d) - 1 + d: at d = -2 it is 7.389 - 3 = 4.389; at d = -3, 20.086 - 4 = 16.086
    difference = torch.tensor([-2.0, -3.0], requires_grad=True)
    values = KL_ESTIMATORS["low_var_kl"](difference)
    torch.testing.assert_close(values, torch.tensor([4.3890562, 10.0]))
    # its slope 1 - exp(-d) is -6.389; there is none beyond the bound
    (slope,) = torch.autograd.grad(values.sum(), difference)
    torch.testing.assert_close(slope, torch.tensor([-6.3890562, 0.0]))
    torch.testing.assert_close(KL_ESTIMATORS["k3"](difference)[1].item(), 16.0855369)


def test_low_var_kl_is_not_bounded_before_its_weight() -> None:
    """slime bounds ratio * k3: a ratio of 1/4 makes 16.086 count 4.021, not 2.5; 3 * 4.389 is 10."""
    batch, logits = random_batch([[1]])
    (cur,) = current(batch, logits)
    for d, ratio, expected in ((-3.0, 0.25, 4.0213842), (-2.0, 3.0, 10.0)):
        batch["ref_log_probs"] = [cur - d]
        batch["log_probs"] = [cur - torch.tensor(ratio).log()]
        changes = {"use_kl_loss": True, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True}
        _, metrics = policy_loss_function(slime(**changes), batch, logits, torch.sum)
        torch.testing.assert_close(float(metrics["kl_loss"]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--tis-clp", "2.0"], "--tis-clp is not a flag of the loss; did you mean --tis-clip?"),
        (["--use_tiss"], "did you mean --use-tis?"),
        (["--eps-clip-hihg=0.28"], "did you mean --eps-clip-high?"),
        (["--qkv-format", "bshd"], "--qkv-format is bshd: "),
        (["--skip-actor-forward-only"], "--skip-actor-forward-only is True: "),
        (
            ["--use-score-centering", "--loss-type", "custom_loss"],
            "--use-score-centering with --loss-type custom_loss: slime and vime",
        ),
    ],
)
def test_the_check_of_slimes_flags_does_not_pass_over(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_flags(flags) == 2
    assert message in capsys.readouterr().err


def test_the_check_of_slimes_flags_does_not_refuse_their_other_flags() -> None:
    others = ["--rollout-stop", "x", "--custom-generate-function-path", "a.b", "--lr", "1e-6"]
    others += ["--disable-grpo-std-normalization", "--use-opsm", "--rollout-top-k", "20"]
    others += ["--use-score-centering", "--loss-mask-type", "qwen", "--lora-type", "lora"]
    assert check_flags(others) == 0
