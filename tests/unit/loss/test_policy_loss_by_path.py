"""A policy loss of one's own, named by import path: resolved, checked and tried before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plugin.config import LossConfig, TrainerConfig
from plugin.config.loss.policy_loss import POLICY_LOSS_TRAITS
from plugin.errors import ConfigError, HookLoadError
from plugin.loss import POLICY_LOSSES
from plugin.loss.objective import check_loss
from plugin.loss.partial_objective import takes_separable_head
from tests.unit.loss.sample_batches import logs, random_batch, run, token_loss

LossFile = Callable[[str], str]


@pytest.fixture
def loss_file(tmp_path: Path) -> LossFile:
    """Writes a module with a function `loss` and gives its path."""

    def write(text: str) -> str:
        file = tmp_path / f"loss_{len(list(tmp_path.iterdir()))}.py"
        head = "import torch\nfrom plugin.loss import PolicyTerm, loss_traits\n"
        file.write_text(
            head + "from plugin.ppo_utils import log_ratio, safe_exp, token_separable\n" + text
        )
        return f"{file}:loss"

    return write


SQUARED = """
@token_separable
@loss_traits(compares_with="rollout", per_token=True)
def loss(inputs, config):
    log_r = log_ratio(inputs.cur_log_probs, inputs.rollout_log_probs, inputs.mask)
    return PolicyTerm(-inputs.advantages * safe_exp(log_r) ** 2, inputs.mask, {"mine": log_r})
"""


def test_a_loss_of_ones_own_is_computed_with_its_metrics(loss_file: LossFile) -> None:
    # A = 2, r = 0.5 / 0.25 = 2: loss -2 * 4 = -8, and d/d cur = -2 * 2 * 4 = -16
    found = token_loss(
        LossConfig(policy_loss=loss_file(SQUARED)),
        cur=[logs(0.5)],
        rollout_log_probs=[logs(0.25)],
        advantages=[torch.tensor([2.0])],
    )
    torch.testing.assert_close(found.loss, torch.tensor([-8.0]))
    torch.testing.assert_close(found.gradient, torch.tensor([-16.0]))
    assert found.metric("mine") == pytest.approx([0.693147])


def test_its_declared_traits_are_those_of_a_built_in_loss(loss_file: LossFile) -> None:
    path = loss_file(SQUARED)
    config = LossConfig(policy_loss=path)
    assert config.per_token and config.needs_rollout_log_probs() == [f"--policy-loss {path}"]
    with pytest.raises(ConfigError, match="mismatch would be counted twice"):
        LossConfig(policy_loss=path, use_tis=True)


def test_without_a_declaration_it_counts_as_a_ratio_loss_over_sample_means(
    loss_file: LossFile,
) -> None:
    text = "def loss(inputs, config):\n    return PolicyTerm(-inputs.cur_log_probs, inputs.mask)"
    config = LossConfig(policy_loss=loss_file(text))
    assert not config.per_token and config.loss_traits.compares_with == "train"
    loss, _, _ = run(config, *random_batch([[1, 1], [1, 0, 1]]))
    assert torch.isfinite(loss)


def test_a_declared_separable_one_is_fused_with_the_lm_head(loss_file: LossFile) -> None:
    assert takes_separable_head(TrainerConfig(policy_loss=loss_file(SQUARED)), 1)
    plain = loss_file(SQUARED.replace("@token_separable\n", ""))
    assert not takes_separable_head(TrainerConfig(policy_loss=plain), 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def loss(inputs):\n    return 1", r"cannot be called as fn\(inputs, config\)"),
        ("def loss(inputs, config):\n    return inputs.mask", "it returned a Tensor"),
        (
            "def loss(inputs, config):\n    return PolicyTerm(inputs.cur_log_probs.sum(), inputs.mask)",
            "its loss is not one value per token",
        ),
        (
            "def loss(inputs, config):\n    return PolicyTerm(inputs.advantages, inputs.mask)",
            "its loss has no gradient",
        ),
    ],
)
def test_a_wrong_one_is_refused_at_set_up(loss_file: LossFile, text: str, message: str) -> None:
    path = loss_file(text)
    with pytest.raises(HookLoadError, match=message) as caught:
        check_loss(LossConfig(policy_loss=path))
    assert path in str(caught.value)


def test_a_name_that_is_neither_built_in_nor_a_path_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"choose one of ppo, .* import path of your own"):
        LossConfig(policy_loss="pppo")


def test_every_built_in_loss_has_traits() -> None:
    assert POLICY_LOSSES.keys() == POLICY_LOSS_TRAITS.keys()
