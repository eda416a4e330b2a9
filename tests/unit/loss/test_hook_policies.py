"""What a hook is given under each --train-log-probs: one meaning per name, or an error at set-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plugin.config import LossConfig
from plugin.errors import ConfigError
from plugin.loss import compute_loss, loss_inputs
from plugin.loss.objective import check_loss

CUR = torch.tensor([-2.0, -2.0])
OWN, ROLLOUT = [-1.5, -2.5], [-1.0, -3.0]
#: Version 4 sampled, 5 is the trainer's, 5.5 the current one: alpha = 1 / 1.5.
BETWEEN = [-1 + 2 / 3 * (-2 + 1), -3 + 2 / 3 * (-2 + 3)]
OF_VERSION = [-1.25, -2.75]

REPORTING = """
import torch
from plugin.ppo_utils import mask_only

@mask_only
def report(args, *, pg_loss, loss_masks, {named}**kwargs):
    found = {{k: torch.cat(v).detach() for k, v in {{**kwargs, **{given}}}.items() if k.endswith("_log_probs")}}
    return pg_loss, loss_masks, found
"""


def batch(**changes: Any) -> dict[str, Any]:
    return {
        "total_lengths": [3],
        "response_lengths": [2],
        "loss_masks": [torch.tensor([1, 1])],
        "advantages": [torch.tensor([1.0, -2.0])],
        "rollout_log_probs": [torch.tensor(ROLLOUT)],
        "log_probs": [torch.tensor(OWN)],
        "proximal_log_probs": [torch.tensor(OF_VERSION)],
        "weight_versions": [4],
        "trainer_version": 5,
        "current_version": 5.5,
        **changes,
    }


def hook(tmp_path: Path, *named: str) -> str:
    """A hook that reports the log-probs it was given; a mask, which `rollout` allows."""
    file = tmp_path / f"{'_'.join(named) or 'any'}.py"
    given = "{" + ", ".join(f"{name!r}: {name}" for name in named) + "}"
    file.write_text(REPORTING.format(named="".join(f"{name}, " for name in named), given=given))
    return f"{file}:report"


def corrected(path: str, choice: str) -> LossConfig:
    return LossConfig(
        policy_loss="ppo", use_tis=True, custom_tis_function_path=path, train_log_probs=choice
    )


def found(config: LossConfig, columns: dict[str, Any]) -> dict[str, list[float]]:
    metrics = compute_loss(config, loss_inputs(config, columns, CUR)).metrics
    names = ("train_log_probs", "proximal_log_probs", "rollout_log_probs", "cur_log_probs")
    return {name: metrics[name].values.tolist() for name in names}


@pytest.mark.parametrize(
    "choice, proximal",
    [
        ("recompute", OWN),
        ("engine-version", OF_VERSION),
        ("approximate", BETWEEN),
        ("rollout", ROLLOUT),
    ],
)
@pytest.mark.parametrize("named", [("train_log_probs", "proximal_log_probs"), ()])
def test_train_log_probs_are_the_trainers_own_whatever_the_ratio_is_taken_against(
    tmp_path: Path, choice: str, proximal: list[float], named: tuple[str, ...]
) -> None:
    values = found(corrected(hook(tmp_path, *named), choice), batch())
    assert values["train_log_probs"] == OWN and values["rollout_log_probs"] == ROLLOUT
    assert values["proximal_log_probs"] == pytest.approx(proximal)


def test_without_a_pass_the_trainers_own_are_those_of_the_update(tmp_path: Path) -> None:
    values = found(corrected(hook(tmp_path), "approximate"), batch(log_probs=None))
    assert values["train_log_probs"] == values["cur_log_probs"] == CUR.tolist()
    assert values["proximal_log_probs"] == pytest.approx(BETWEEN)


@pytest.mark.parametrize("choice", ["engine-version", "approximate", "rollout"])
def test_a_hook_that_knows_only_train_log_probs_is_refused_at_set_up(
    tmp_path: Path, choice: str
) -> None:
    path = hook(tmp_path, "train_log_probs")
    check_loss(corrected(path, "recompute"))
    message = f"--train-log-probs {choice}: it names train_log_probs.*proximal_log_probs"
    with pytest.raises(ConfigError, match=message):
        check_loss(corrected(path, choice))
    config = corrected(path, choice)
    with pytest.raises(ConfigError, match=message):  # as where slime calls the loss
        compute_loss(config, loss_inputs(config, batch(), CUR))


def test_a_hook_that_only_observes_compares_the_trainers_own(tmp_path: Path) -> None:
    path = hook(tmp_path, "train_log_probs")
    config = LossConfig(
        get_mismatch_metrics=True, custom_tis_function_path=path, train_log_probs="rollout"
    )
    values = found(config, batch())
    assert values["train_log_probs"] == values["proximal_log_probs"] == OWN
