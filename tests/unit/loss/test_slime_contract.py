"""Called the way slime calls: its namespace, its keyword arguments, its reducer."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin import ppo_utils
from plugin.adapters.slime import chain
from plugin.config import other_frameworks
from plugin.config.other_frameworks import loss_config_of
from plugin.errors import BatchError, ConfigError, HookLoadError
from plugin.loss import load_function, policy_loss_function
from plugin.ppo_utils import ParallelContext, corrections, use_parallel_context
from tests.unit.loss.sample_batches import random_batch

MASKS = [[1, 0, 1], [1, 1], [0, 0]]
NEEDS_CUR = {"off_policy_is_function", "dppo_tv_mask_function", "opsm_function"}
HOOKS = sorted(name for name in ppo_utils.__all__ if name.endswith("_function"))


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_frameworks, "_warned", set())
    corrections._warn_of_doubled_ratio.cache_clear()


def slime_namespace(**changes: Any) -> Namespace:
    """The fields of slime's arguments that a loss can see; none of the flags that only we have."""
    fields: dict[str, Any] = {
        "advantage_estimator": "grpo",
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "eps_clip_c": None,
        "entropy_coef": 0.0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.001,
        "kl_loss_type": "low_var_kl",
        "kl_coef": 0.0,
        "use_tis": False,
        "tis_clip": 2.0,
        "tis_clip_low": 0,
        "custom_tis_function_path": None,
        "calculate_per_token_loss": False,
        "use_rollout_logprobs": False,
        "get_mismatch_metrics": False,
        "rollout_temperature": 1.0,
        "gamma": 1.0,
        "lambd": 1.0,
        "normalize_advantages": False,
        "loss_type": "custom_loss",
        "custom_loss_function_path": "plugin.loss.policy_loss_function",
        "context_parallel_size": 1,
        "qkv_format": "thd",
    }
    return Namespace(**{**fields, **changes})


def slime_reducer(lengths: list[int], masks: list[Tensor]) -> Callable[[Tensor], Any]:
    """A sum over samples of masked means, by multiplication; an int 0 when there is no sample."""

    def reduce(values: Tensor) -> Any:
        parts = values.split(lengths, dim=0)
        return sum(
            (part * mask).sum() / mask.sum().clamp(min=1)
            for part, mask in zip(parts, masks, strict=True)
        )

    return reduce


def slime_call(args: Namespace, batch: dict[str, Any], logits: Tensor) -> Any:
    function = load_function(args.custom_loss_function_path)
    reduce = slime_reducer(batch["response_lengths"], batch["loss_masks"])
    return function(args, batch, logits, reduce)


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("with_cur", [False, True])
@pytest.mark.filterwarnings("ignore:off_policy_is_function")
def test_every_hook_takes_slimes_call(name: str, with_cur: bool) -> None:
    batch, _ = random_batch(MASKS)
    hook = load_function(f"plugin.ppo_utils.{name}")
    call: dict[str, Any] = {
        "args": slime_namespace(use_tis=True),
        "pg_loss": torch.ones(7, requires_grad=True),
        "train_log_probs": batch["log_probs"],
        "rollout_log_probs": batch["rollout_log_probs"],
        "loss_masks": batch["loss_masks"],
        "total_lengths": batch["total_lengths"],
        "response_lengths": batch["response_lengths"],
    }
    if with_cur:
        call |= {"cur_log_probs": batch["ref_log_probs"], "advantages": batch["advantages"]}
    elif name in NEEDS_CUR:
        with pytest.raises(ConfigError, match="cur_log_probs"):
            hook(**call)
        return
    loss, masks, metrics = hook(**call)
    assert loss.shape == (7,) and loss.requires_grad
    assert [mask.shape for mask in masks] == [mask.shape for mask in batch["loss_masks"]]
    reduce = slime_reducer(batch["response_lengths"], masks)
    assert metrics and all(bool(torch.isfinite(reduce(value))) for value in metrics.values())


def test_unknown_keyword_arguments_of_a_newer_slime_are_accepted() -> None:
    batch, _ = random_batch([[1]])
    ppo_utils.vanilla_tis_function(
        args=slime_namespace(),
        pg_loss=torch.ones(1),
        train_log_probs=batch["log_probs"],
        rollout_log_probs=batch["rollout_log_probs"],
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        qkv_format="thd",
        max_seq_lens=None,
    )


def test_the_whole_loss_takes_slimes_call() -> None:
    batch, logits = random_batch(MASKS)
    logits.requires_grad_()
    loss, metrics = slime_call(slime_namespace(), batch, logits)
    loss.backward()
    assert loss.requires_grad and logits.grad is not None and bool(logits.grad.any())
    wanted = {"loss", "pg_loss", "pg_clipfrac", "ppo_kl", "entropy_loss", "ois"}
    assert wanted <= metrics.keys()
    assert "train_rollout_logprob_abs_diff" in metrics
    assert all(value.dim() == 0 and not value.requires_grad for value in metrics.values())


def test_slimes_multiplying_reducer_sees_zeros_where_masked() -> None:
    batch, logits = random_batch(MASKS)
    clean, _ = slime_call(slime_namespace(use_tis=True), batch, logits)
    for name in ("rollout_log_probs", "log_probs", "advantages"):
        batch[name][0][1] = float("nan")
        batch[name][2][:] = float("-inf")
    dirty, metrics = slime_call(slime_namespace(use_tis=True), batch, logits)
    assert torch.equal(dirty, clean)
    assert all(bool(value.isfinite()) for value in metrics.values())


def test_an_empty_microbatch_of_slime_still_has_a_graph() -> None:
    batch, logits = random_batch([])
    logits.fill_(float("nan")).requires_grad_()  # rows that nobody reads may hold anything
    loss, metrics = slime_call(slime_namespace(use_tis=True, entropy_coef=0.1), batch, logits)
    loss.backward()
    assert loss.item() == 0.0 and logits.grad is not None and not logits.grad.any()
    assert all(value.item() == 0.0 for value in metrics.values())


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, "ppo"),
        ({"advantage_estimator": "gspo"}, "gspo"),
        ({"advantage_estimator": "cispo"}, "cispo"),
        ({"advantage_estimator": "reinforce_plus_plus"}, "ppo"),
        ({"advantage_estimator": "ppo"}, "ppo"),
        ({"pg_loss_type": "reinforce"}, "reinforce"),
    ],
)
def test_the_loss_follows_the_advantage_estimator(fields: dict[str, Any], expected: str) -> None:
    assert loss_config_of(slime_namespace(**fields)).policy_loss == expected


def test_a_namespace_with_our_flag_is_taken_at_its_word() -> None:
    args = slime_namespace(policy_loss="icepop", kl_loss_coef=0.0)
    assert loss_config_of(args).policy_loss == "icepop"
    with pytest.raises(ConfigError, match="--use-kl-loss is off"):
        loss_config_of(slime_namespace(policy_loss="icepop"))


def test_fields_that_are_none_or_switched_off_there_are_ignored() -> None:
    args = slime_namespace(tis_clip=None, custom_tis_function_path="not.used", eps_clip_high=None)
    config = loss_config_of(args)
    assert config.tis_clip == 2.0 and config.clip_high == 0.2
    assert config.kl_loss_coef == 0.0 and config.custom_tis_function_path is None


def test_the_reference_kl_of_slime_is_used_when_switched_on() -> None:
    config = loss_config_of(slime_namespace(use_kl_loss=True))
    assert (config.kl_loss_coef, config.kl_loss_type) == (0.001, "low_var_kl")


def test_the_rollout_temperature_divides_the_logits_once() -> None:
    batch, logits = random_batch([[1, 1]])
    before = logits.clone()
    _, at_two = slime_call(slime_namespace(rollout_temperature=2.0), batch, logits)
    _, halved = slime_call(slime_namespace(), batch, logits / 2)
    torch.testing.assert_close(at_two, halved)
    assert torch.equal(logits, before)  # not in place: somebody else may still need them


def test_a_correction_that_is_right_only_on_policy_is_one_warning_there() -> None:
    path = "plugin.ppo_utils.off_policy_is_function"
    args = slime_namespace(use_tis=True, custom_tis_function_path=path)
    batch, logits = random_batch([[1, 1]])
    with pytest.warns(UserWarning, match="counts pi_theta/pi_old twice"):
        slime_call(args, batch, logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slime_call(args, batch, logits)


def test_missing_rollout_log_probs_fail_at_once_there_too() -> None:
    batch, logits = random_batch([[1, 1]])
    del batch["rollout_log_probs"]
    with pytest.raises(ConfigError, match="--use-tis needs rollout_log_probs"):
        slime_call(slime_namespace(use_tis=True), batch, logits)


def test_slimes_per_token_reducer_gives_the_token_sum() -> None:
    batch, logits = random_batch(MASKS)
    flat_mask = torch.cat(batch["loss_masks"])
    args = slime_namespace(calculate_per_token_loss=True)
    loss, _ = policy_loss_function(args, batch, logits, lambda x: (x * flat_mask).sum())
    ours = loss_config_of(args)
    assert ours.per_token
    expected, _ = policy_loss_function(ours, batch, logits, torch.sum)
    torch.testing.assert_close(loss, expected)


def test_a_user_hook_with_slimes_exact_signature_runs_in_our_loss(
    tmp_path: Any,
) -> None:
    file = tmp_path / "narrow.py"
    file.write_text(
        "def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):\n"
        "    return pg_loss * 0.5, loss_masks, {}\n"
    )
    batch, logits = random_batch(MASKS)
    plain, _ = slime_call(slime_namespace(), batch, logits)
    args = slime_namespace(use_tis=True, custom_tis_function_path=f"{file}:tis")
    halved, _ = slime_call(args, batch, logits)
    torch.testing.assert_close(halved, plain * 0.5)


def test_a_bad_batch_is_a_batch_error_there_too() -> None:
    batch, logits = random_batch([[1, 1]])
    batch["rollout_log_probs"][0][1] = float("nan")
    with pytest.raises(BatchError, match="rollout_log_probs is nan at sample 0, position 1"):
        slime_call(slime_namespace(use_tis=True), batch, logits)


def log_probs_by_hand(batch: dict[str, Any], logits: Tensor) -> Tensor:
    """[R] log-probs of all response tokens: slices of the packed logits, shifted by one."""
    rows, offset = [], 0
    for tokens, total, response in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    ):
        end = offset + total
        chunk = logits[0, end - response - 1 : end - 1].log_softmax(-1)
        rows.append(chunk.gather(-1, tokens[total - response :, None])[:, 0])
        offset = end
    return torch.cat(rows)


def surrogate_by_hand(kind: str, batch: dict[str, Any], cur: Tensor) -> Tensor:
    """The textbook formulas of PPO, CISPO and GSPO with clips 0.2 and 0.28, per token [R]."""
    old, advantages = torch.cat(batch["log_probs"]), torch.cat(batch["advantages"])
    log_r = cur - old
    if kind == "gspo":
        lengths = batch["response_lengths"]
        means = [
            (part * mask).sum() / mask.sum().clamp(min=1)
            for part, mask in zip(log_r.split(lengths), batch["loss_masks"], strict=True)
        ]
        whole = torch.cat([mean.expand(n) for mean, n in zip(means, lengths, strict=True)])
        log_r = whole.detach() + cur - cur.detach()
    ratio = log_r.exp()
    clipped = ratio.clamp(0.8, 1.28)
    if kind == "cispo":
        return -clipped.detach() * advantages * cur
    return torch.maximum(-ratio * advantages, -clipped * advantages)


@pytest.mark.parametrize("kind", ["grpo", "cispo", "gspo"])
@pytest.mark.parametrize("use_tis", [False, True])
def test_on_well_behaved_batches_loss_and_gradient_are_the_textbook_formulas(
    kind: str, use_tis: bool
) -> None:
    batch, logits = random_batch(MASKS)
    logits.requires_grad_()
    args = slime_namespace(
        advantage_estimator=kind, use_tis=use_tis, tis_clip=1.5, tis_clip_low=0.5
    )
    loss, metrics = slime_call(args, batch, logits)
    per_token = surrogate_by_hand(kind, batch, log_probs_by_hand(batch, logits))
    if use_tis:
        mismatch = torch.cat(batch["log_probs"]) - torch.cat(batch["rollout_log_probs"])
        per_token = per_token * mismatch.exp().clamp(0.5, 1.5)
    reduce = slime_reducer(batch["response_lengths"], batch["loss_masks"])
    expected = reduce(per_token)
    torch.testing.assert_close(loss, expected)
    mine, theirs = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, expected))
    torch.testing.assert_close(mine, theirs)
    if use_tis:
        torch.testing.assert_close(metrics["tis"], reduce(mismatch.exp()))


@pytest.mark.parametrize("cp_rank", [0, 1])
def test_under_context_parallelism_values_are_local_and_masks_whole(cp_rank: int) -> None:
    # total 8, response 5: rank 0 predicts the last response token, rank 1 the first four (chunks of 2, zigzag)
    local = {0: slice(4, 5), 1: slice(0, 4)}[cp_rank]
    train, rollout = torch.linspace(-1, -2, 5), torch.linspace(-2, -1.5, 5)
    mask = torch.tensor([1, 0, 1, 1, 1])
    context = ParallelContext(cp_rank=cp_rank, cp_size=2)
    with use_parallel_context(context):
        loss, masks, metrics = ppo_utils.vanilla_tis_function(
            args=slime_namespace(use_tis=True, tis_clip=1.5),
            pg_loss=torch.ones(5)[local],
            train_log_probs=[train[local]],
            rollout_log_probs=[rollout[local]],
            loss_masks=[mask],
            total_lengths=[8],
            response_lengths=[5],
        )
    weights = (train - rollout).exp().clamp(0, 1.5) * mask
    torch.testing.assert_close(loss, weights[local])
    assert masks[0].shape == (5,) and metrics["tis"].shape == loss.shape


def test_a_denominator_over_all_samples_of_a_rollout_is_the_callers() -> None:
    """Newer versions divide by a token count that travels with the batch (`rollout_mask_sums`)."""
    batch, logits = random_batch(MASKS)
    batch["rollout_mask_sums"] = [torch.tensor(4.0) for _ in MASKS]

    def reduce(values: Tensor) -> Tensor:
        parts = values.split(batch["response_lengths"])
        return torch.stack(
            [(x * m).sum() / 4 for x, m in zip(parts, batch["loss_masks"], strict=True)]
        ).sum()

    loss, _ = policy_loss_function(slime_namespace(), batch, logits, reduce)
    cur = log_probs_by_hand(batch, logits)
    torch.testing.assert_close(loss, reduce(surrogate_by_hand("ppo", batch, cur)))


def test_a_chain_that_slimes_loader_can_find_is_ours_of_the_same_list(tmp_path: Path) -> None:
    # slime: module, _, name = path.rpartition("."); getattr(import_module(module), name)
    own = tmp_path / "own_mask.py"
    own.write_text(
        "def halve(args, *, pg_loss, loss_masks, **_):\n"
        "    return 0.5 * pg_loss, loss_masks, {'tis': 0 * pg_loss.detach()}\n"
    )
    paths = f"plugin.ppo_utils.rejection_function,plugin.ppo_utils.vanilla_tis_function,{own}:halve"
    batch, _ = random_batch(MASKS)
    call: dict[str, Any] = {
        "pg_loss": torch.ones(7, requires_grad=True),
        "train_log_probs": batch["log_probs"],
        "rollout_log_probs": batch["rollout_log_probs"],
        "loss_masks": batch["loss_masks"],
        "total_lengths": batch["total_lengths"],
        "response_lengths": batch["response_lengths"],
    }
    args = slime_namespace(use_tis=True, rejection_rules="token_ratio=0.8:1.2")
    loss, masks, metrics = chain(paths)(args=args, **call)
    expected_loss, expected_masks = call["pg_loss"], call["loss_masks"]
    for name in ("rejection_function", "vanilla_tis_function"):
        further = call | {"pg_loss": expected_loss, "loss_masks": expected_masks}
        hook = load_function(f"plugin.ppo_utils.{name}")
        expected_loss, expected_masks, _ = hook(args, **further)
    assert torch.equal(loss, 0.5 * expected_loss) and bool((loss == 0).any())
    assert all(map(torch.equal, masks, expected_masks))
    assert not all(map(torch.equal, masks, call["loss_masks"]))
    assert {"tis", "halve/tis", "is_masked"} <= metrics.keys()
    with pytest.raises(HookLoadError):
        chain("plugin.ppo_utils.vanilla_tis_function,plugin.ppo_utils.nothing")
