"""Faults seen in public implementations, one test each (or several), numbered as in the project's list."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from plugin.config import LossConfig
from plugin.errors import ConfigError, HookLoadError
from plugin.loss import compute_loss, load_hook, loss_inputs, policy_loss_function
from plugin.ppo_utils.sufficient_statistics import StatisticsTable
from tests.unit.loss.sample_batches import CONFIGS, random_batch, run, token_loss


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_fault_01_a_masked_token_with_a_huge_ratio_makes_neither_loss_nor_gradient_nan(
    name: str,
) -> None:
    config = LossConfig(**CONFIGS[name])
    batch, logits = random_batch([[1, 0, 1]])
    for field in ("rollout_log_probs", "log_probs", "ref_log_probs"):
        batch[field][0][1] = -1e4  # exp(cur + 1e4) = inf, and 0 * inf = NaN
    loss, gradient, _ = run(config, batch, logits)
    assert bool(loss.isfinite()) and bool(gradient.isfinite().all())


def test_fault_01_the_sneaky_form_a_finite_loss_with_a_nan_gradient() -> None:
    # torch.where after exp gives a finite value and a NaN gradient: where(mask, exp(x), 0), x = 1e4
    x = torch.tensor([1e4], requires_grad=True)
    torch.where(torch.tensor([False]), x.exp() * 0.0, torch.zeros(1)).sum().backward()
    assert x.grad is not None and bool(x.grad.isnan().all())  # the trap is real
    result = token_loss(
        LossConfig(policy_loss="icepop"),
        cur=[torch.tensor([0.0, -1.0])],
        rollout_log_probs=[torch.tensor([-1e4, -1.0])],
        masks=[torch.tensor([0, 1])],
        advantages=[torch.ones(2)],
    )
    assert result.gradient.tolist() == [0.0, -1.0]


@pytest.mark.parametrize("poison", [-math.inf, math.nan])
def test_fault_02_a_missing_rollout_log_prob_on_a_masked_token_poisons_no_metric(
    poison: float,
) -> None:
    config = LossConfig(**CONFIGS["chain"])
    batch, logits = random_batch([[1, 0, 1], [0]])
    _, _, expected = run(config, batch, logits)
    batch["rollout_log_probs"][0][1] = poison
    batch["rollout_log_probs"][1][0] = poison
    _, _, metrics = run(config, batch, logits)
    assert all(torch.equal(metrics[key], expected[key]) for key in expected)


def test_fault_03_a_fully_masked_sample_does_not_dilute_a_ratio() -> None:
    # on-policy: every ratio is 1; beside a fully masked sample the mean must stay 1.0, not become 0.5
    config = LossConfig(use_tis=True)
    batch, _logits = random_batch([[1, 1], [0, 0]])
    cur = torch.cat(batch["log_probs"])
    batch["rollout_log_probs"] = batch["log_probs"]
    inputs = loss_inputs(config, batch, cur)
    outputs = compute_loss(config, inputs)
    table = StatisticsTable()
    for name, metric in outputs.metrics.items():
        table.add_mean(name, metric.values, metric.over)
    means = table.means()
    assert means["tis"] == 1.0 and means["ois"] == 1.0
    assert table.sums["tis:count"].item() == 2  # nor does the masked sample count as one token


def test_fault_03_a_fully_masked_sample_adds_nothing_to_the_weights_of_the_step() -> None:
    from plugin.loss.normalization import token_weights
    from plugin.ppo_utils import SequenceShards

    shards = SequenceShards.of([3, 3], [2, 2], torch.device("cpu"))
    masks = [torch.ones(2), torch.zeros(2)]
    weights = token_weights(shards, shards.local_mask(masks), masks, per_token=False)
    assert weights.sum().item() == 1.0  # one sample carries loss, not two


@pytest.mark.parametrize("denominator", ["original", "kept"])
def test_fault_04_a_corrections_mask_does_not_thin_kl_and_entropy(denominator: str) -> None:
    terms: dict[str, Any] = {
        "use_kl_loss": True,
        "kl_loss_coef": 0.5,
        "use_rollout_kl_loss": True,
        "rollout_kl_loss_coef": 0.5,
        "entropy_coef": 0.5,
    }
    batch, logits = random_batch([[1, 1, 1], [1, 0, 1]])
    batch["advantages"] = [torch.zeros(3), torch.zeros(3)]  # only the regularizers are left
    loss, gradient, metrics = run(LossConfig(**terms), batch, logits)
    drop_all = LossConfig(
        use_tis=True,
        custom_tis_function_path="plugin.ppo_utils.rejection_function",
        rejection_rules="token_ratio=1000:",
        loss_denominator=denominator,
        **terms,
    )
    thin_loss, thin_gradient, thin_metrics = run(drop_all, batch, logits)
    assert thin_metrics["is_masked"].item() == pytest.approx(2.0)  # everything is rejected
    assert torch.equal(loss, thin_loss) and torch.equal(gradient, thin_gradient)
    for name in ("kl_loss", "rollout_kl", "entropy_loss"):
        assert torch.equal(metrics[name], thin_metrics[name]) and metrics[name].item() != 0


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_fault_10_the_weight_of_a_token_does_not_depend_on_its_microbatch(name: str) -> None:
    config = LossConfig(**CONFIGS[name])
    batch, logits = random_batch([[1, 1, 1], [1, 0, 1, 1]], prompts=[2, 2])
    whole = run(config, batch, logits)
    first = {key: values[:1] for key, values in batch.items()}
    second = {key: values[1:] for key, values in batch.items()}
    parts = [run(config, first, logits[:, :5]), run(config, second, logits[:, 5:])]
    joined = torch.cat([part[1] for part in parts], dim=1)
    torch.testing.assert_close(joined, whole[1], rtol=1e-5, atol=1e-7)


def test_fault_10_a_maximum_is_the_maximum_not_a_mean_of_maxima() -> None:
    table = StatisticsTable()
    for value in (1.0, 9.0, 2.0):
        table.add_extremes("tis", torch.tensor([value]), torch.tensor([True]))
    assert table.means() == {"tis_max": 9.0, "tis_min": 1.0}


def test_fault_11_a_hook_is_loaded_once_and_its_import_error_is_not_swallowed(
    tmp_path: Path,
) -> None:
    counted = tmp_path / "counted.py"
    counted.write_text(
        "from pathlib import Path\n"
        "log = Path(__file__).with_suffix('.txt')\n"
        "log.write_text((log.read_text() if log.exists() else '') + 'x')\n"
        "def hook(args, *, pg_loss, loss_masks, **kwargs):\n"
        "    return pg_loss, loss_masks, {}\n"
    )
    config = LossConfig(use_tis=True, custom_tis_function_path=f"{counted}:hook")
    for seed in range(3):
        run(config, *random_batch([[1, 1]], seed=seed))
    assert counted.with_suffix(".txt").read_text() == "x"

    broken = tmp_path / "broken.py"
    broken.write_text("from torch import no_such_name\n")
    config = LossConfig(use_tis=True, custom_tis_function_path=f"{broken}:hook")
    with pytest.raises(HookLoadError, match=r"(?s)Traceback.*no_such_name"):
        run(config, *random_batch([[1, 1]]))
    with pytest.raises(HookLoadError, match="no_such_name"):
        load_hook(f"{broken}:hook")  # again, not a half-imported module


def test_fault_12_yaml_is_merged_before_validation_and_cannot_bypass_it(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("tis-clip: 0.5\nuse_tis: true\n")
    # each is valid alone; together the lower bound is above the upper
    assert LossConfig.from_sources({}, file).tis_clip == 0.5
    assert LossConfig.from_sources({"tis_clip_low": 0.6, "tis_clip": 2.0}).tis_clip_low == 0.6
    with pytest.raises(ConfigError, match=r"--tis-clip-low is 0\.6 and --tis-clip is 0\.5"):
        LossConfig.from_sources({"tis_clip_low": 0.6}, file)


@pytest.mark.parametrize(
    "flags",
    [
        {"tis_clip_low": 3.0},
        {"sequence_tis_clip_low": 3.0},
        {"icepop_ratio_low": 6.0},
        {"ipo_ratio_low": 6.0},
        {"geometric_mask_low": 1.5},
        {"rejection_rules": "token_ratio=2:0.5"},
        {"dppo_diff_low": -0.1},
        {"dppo_mask_high": -0.1},
    ],
)
def test_fault_12_bounds_with_low_above_high_are_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LossConfig(**flags)


@pytest.mark.parametrize("missing", ["absent", None])
def test_fault_13_a_correction_without_rollout_log_probs_fails_at_once(missing: Any) -> None:
    batch, logits = random_batch([[1, 1]])
    if missing is None:
        batch["rollout_log_probs"] = None
    else:
        del batch["rollout_log_probs"]
    config = LossConfig(use_tis=True)
    with pytest.raises(ConfigError, match="make the engine return the log-prob"):
        policy_loss_function(config, batch, logits, torch.sum)
    with pytest.raises(ConfigError, match="make the engine return the log-prob"):
        config.require_rollout_log_probs(False)


def test_fault_14_exact_zeros_are_plausible_numbers_that_the_core_does_not_refuse() -> None:
    # A token of probability 1 has log-prob 0; whether many of them are a zero fill is for the detectors.
    batch, logits = random_batch([[1, 1]])
    batch["rollout_log_probs"] = [torch.zeros(2)]
    loss, _, metrics = run(LossConfig(use_tis=True), batch, logits)
    assert bool(loss.isfinite()) and metrics["mismatch_kl"].item() > 0
