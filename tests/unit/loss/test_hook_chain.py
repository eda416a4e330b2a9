"""A chain of hooks: order, masks, metrics, and every way a hook can break its contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plugin.config import LossConfig
from plugin.errors import BatchError, HookLoadError
from plugin.loss import compute_loss, hook_chain, loss_inputs
from tests.unit.loss.sample_batches import logs, random_batch, run, token_loss

HookFile = Callable[[str], str]


@pytest.fixture
def hook_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HookFile:
    """Writes the body of a hook to a file and gives its path; no hook counts as checked before."""
    monkeypatch.setattr(hook_chain, "_chains", {})

    def write(body: str) -> str:
        name = f"hook_{len(list(tmp_path.iterdir()))}.py"
        arguments = "args, *, pg_loss, loss_masks, cur_log_probs, rollout_log_probs, **kwargs"
        lines = "\n    ".join(body.strip().splitlines())
        (tmp_path / name).write_text(f"import torch\ndef hook({arguments}):\n    {lines}\n")
        return f"{tmp_path / name}:hook"

    return write


def corrected(path: str, **flags: Any) -> LossConfig:
    return LossConfig(policy_loss="reinforce", use_tis=True, custom_tis_function_path=path, **flags)


def run_hook(path: str, masks: list[list[int]] | None = None) -> Any:
    return run(corrected(path), *random_batch(masks or [[1, 1], [1, 0, 1]]))


@pytest.mark.parametrize(
    "body, error, message",
    [
        ("return pg_loss", HookLoadError, r"must return \(pg_loss, loss_masks, metrics\)"),
        ("return pg_loss, loss_masks", HookLoadError, "it returned a tuple of 2"),
        ("return None", HookLoadError, "it returned a NoneType"),
        ("return 1.0, loss_masks, {}", BatchError, r"its pg_loss is a float, expected .*\(5,\)"),
        ("return pg_loss.sum(), loss_masks, {}", BatchError, r"its pg_loss is a tensor of shape \(\)"),
        ("return pg_loss[:-1], loss_masks, {}", BatchError, r"shape \(4,\), expected .*\(5,\)"),
        ("return pg_loss, loss_masks[:1], {}", BatchError, "a list of 1, expected 2 masks"),
        ("return pg_loss, loss_masks + loss_masks, {}", BatchError, "a list of 4, expected 2 masks"),
        ("return pg_loss, None, {}", BatchError, "its loss_masks are a NoneType"),
        ("return pg_loss, torch.ones(5), {}", BatchError, "its loss_masks are a tensor"),
        ("return pg_loss, [m[:-1] for m in loss_masks], {}", BatchError, "its mask of sample 0 is"),
        ("return pg_loss, [1, 2], {}", BatchError, "its mask of sample 0 is a int"),
        ("return pg_loss, loss_masks, None", HookLoadError, "its metrics are a NoneType"),
        ("return pg_loss, loss_masks, {'a': 1.0}", BatchError, "its metric 'a' is a float"),
        ("return pg_loss, loss_masks, {'a': pg_loss.mean()}", BatchError, "its metric 'a' is a tensor"),
        ("return pg_loss.detach(), loss_masks, {}", BatchError, "without gradient"),
        ("return pg_loss * torch.cat(cur_log_probs).exp(), loss_masks, {}", BatchError,
         "lets gradient flow through its weight"),
    ],
)  # fmt: skip
def test_a_wrong_return_names_the_hook_and_what_is_wrong(
    hook_file: HookFile, body: str, error: type[Exception], message: str
) -> None:
    path = hook_file(body)
    with pytest.raises(error, match=message) as caught:
        run_hook(path)
    assert path in str(caught.value)


def test_gradient_through_a_weight_is_found_even_on_a_batch_that_teaches_nothing(
    hook_file: HookFile,
) -> None:
    # All advantages 0, as in a group of equal rewards: loss and gradient are 0 whatever the weight does.
    path = hook_file("return pg_loss * torch.cat(cur_log_probs).exp(), loss_masks, {}")
    batch, logits = random_batch([[1, 1]])
    batch["advantages"] = [torch.zeros(2)]
    with pytest.raises(BatchError, match="lets gradient flow through its weight"):
        run(corrected(path), batch, logits)


def test_gradient_through_a_clamped_weight_is_found_at_its_bound(hook_file: HookFile) -> None:
    path = hook_file("return pg_loss * torch.cat(cur_log_probs).exp().clamp(2, 3), loss_masks, {}")
    with pytest.raises(BatchError, match="lets gradient flow through its weight"):
        run_hook(path)


def test_a_hook_is_checked_before_the_first_batch_even_if_that_has_no_tokens(
    hook_file: HookFile,
) -> None:
    path = hook_file(
        "return pg_loss * torch.cat([*cur_log_probs, torch.zeros(0)]).exp(), loss_masks, {}"
    )
    with pytest.raises(BatchError, match="lets gradient flow through its weight"):
        run(corrected(path), *random_batch([]))
    with pytest.raises(BatchError, match="lets gradient flow through its weight"):
        run_hook(path)


def test_a_checked_hook_is_called_once_per_microbatch(hook_file: HookFile, tmp_path: Path) -> None:
    log = tmp_path / "calls.txt"
    path = hook_file(
        f"with open({str(log)!r}, 'a') as log: log.write('x')\nreturn pg_loss, loss_masks, {{}}"
    )
    for _ in range(3):
        run_hook(path)
    assert log.read_text() == "x" * (1 + 3)  # the first on example tokens, before any batch


def test_an_exception_inside_a_hook_is_the_users_own(hook_file: HookFile) -> None:
    with pytest.raises(ZeroDivisionError):
        run_hook(hook_file("return 1 / 0"))


def test_hooks_run_left_to_right_on_the_loss_and_masks_of_the_one_before(
    hook_file: HookFile,
) -> None:
    double = hook_file("return pg_loss * 2, loss_masks, {'count': torch.cat(loss_masks).float()}")
    drop_first = hook_file(
        "masks = [m.clone() for m in loss_masks]\nmasks[0][0] = 0\nreturn pg_loss + 1, masks, {}"
    )
    # reinforce with A = 1, cur = log 0.5: -cur = 0.6931
    tokens: dict[str, Any] = {
        "cur": [logs(0.5, 0.5)],
        "rollout_log_probs": [logs(0.5, 0.5)],
        "advantages": [torch.ones(2)],
    }
    first = token_loss(corrected(f"{double},{drop_first}"), **tokens)
    torch.testing.assert_close(first.loss, torch.tensor([0.0, 2 * 0.693147 + 1]))
    assert first.kept == [False, True] and first.metric("count") == [1.0, 1.0]
    second = token_loss(corrected(f"{drop_first}, {double}"), **tokens)
    torch.testing.assert_close(second.loss, torch.tensor([0.0, 2 * (0.693147 + 1)]))
    assert second.metric("count") == [0.0, 1.0]


def test_a_hook_cannot_bring_a_masked_token_back(hook_file: HookFile) -> None:
    path = hook_file("return pg_loss + 5, [torch.ones_like(m) for m in loss_masks], {}")
    result = token_loss(
        corrected(path),
        cur=[logs(0.5, 0.5)],
        rollout_log_probs=[logs(0.5, 0.5)],
        masks=[torch.tensor([1, 0])],
        advantages=[torch.ones(2)],
    )
    assert result.kept == [True, False] and result.loss[1].item() == 0.0


def test_metrics_of_a_hook_may_hold_anything_where_masked(hook_file: HookFile) -> None:
    body = "m = torch.cat(loss_masks) != 0\nreturn pg_loss, loss_masks, {'x': torch.where(m, 2.0, torch.nan)}"
    _, _, metrics = run_hook(hook_file(body))
    assert metrics["x"].item() == pytest.approx(4.0)  # two samples with a mean of 2 each


def test_a_metric_that_two_hooks_report_keeps_both_names(hook_file: HookFile) -> None:
    names = "plugin.ppo_utils.vanilla_tis_function,plugin.ppo_utils.icepop_function"
    _, _, metrics = run(corrected(names), *random_batch([[1]]))
    assert {"tis", "icepop_function/tis"} <= metrics.keys()


def test_mismatch_metrics_change_neither_loss_nor_gradient() -> None:
    batch, logits = random_batch([[1, 1], [1, 0, 1]])
    plain, observed = LossConfig(), LossConfig(get_mismatch_metrics=True)
    loss, gradient, metrics = run(plain, batch, logits)
    same_loss, same_gradient, more = run(observed, batch, logits)
    assert torch.equal(loss, same_loss) and torch.equal(gradient, same_gradient)
    assert more.keys() - metrics.keys() == {"tis", "tis_abs", "tis_clipfrac"}


def test_hooks_are_given_everything_by_name(hook_file: HookFile) -> None:
    body = """
assert all(v.requires_grad for v in cur_log_probs)
assert not any(v.requires_grad for v in rollout_log_probs + kwargs["train_log_probs"])
assert [len(v) for v in kwargs["advantages"]] == kwargs["response_lengths"] == [2, 3]
assert kwargs["total_lengths"] == [3, 5] and [len(m) for m in loss_masks] == [2, 3]
assert args.eps_clip == 0.2 and pg_loss.shape == (5,)
return pg_loss, loss_masks, {}
"""
    run_hook(hook_file(body))


def test_the_chain_reports_ratio_and_weight_of_every_token_from_one_call(
    hook_file: HookFile, tmp_path: Path
) -> None:
    log = tmp_path / "calls.txt"
    path = hook_file(
        f"with open({str(log)!r}, 'a') as log: log.write('x')\n"
        "w = torch.tensor([0.5, 3.0, 0.0, 1.0, 2.0])\n"
        "masks = [m.clone() for m in loss_masks]\nmasks[1][2] = 0\n"
        "return pg_loss * w, masks, {'tis': w + 1}"
    )
    config = corrected(path)
    batch, _ = random_batch([[1, 1], [1, 0, 1]])
    batch["advantages"] = [torch.zeros(2), torch.zeros(3)]  # a loss of 0 hides no weight
    inputs = loss_inputs(config, batch, torch.zeros(5).sub(1).requires_grad_())
    calls = len(log.read_text()) if log.exists() else 0
    outputs = compute_loss(config, inputs, with_weights=True)
    assert len(log.read_text()) == calls + 2  # once on example tokens, once here
    assert outputs.policy.weight is not None and outputs.policy.ratio is not None
    assert outputs.policy.weight.tolist() == [
        0.5,
        3.0,
        0.0,
        0.0,
        0.0,
    ]  # masked, and dropped by the hook
    assert outputs.policy.ratio.tolist() == [1.5, 4.0, 1.0, 2.0, 3.0]
    with torch.no_grad():
        assert torch.equal(
            compute_loss(config, inputs, with_weights=True).policy.weight, outputs.policy.weight
        )


def test_a_hook_that_communicates_is_tried_out_where_there_is_no_process_group(
    hook_file: HookFile,
) -> None:
    path = hook_file(
        "count = torch.ones(())\n"
        "torch.distributed.all_reduce(count)\n"
        "assert torch.distributed.get_world_size() == int(count) == 1\n"
        "return pg_loss, loss_masks, {}"
    )
    hook_chain.hook_chain(corrected(path))
    assert not torch.distributed.is_initialized()
