"""A NaN is traced to the field, loss, hook or regularizer it came from, not to a parameter."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plugin.config import JobConfig, LossConfig
from plugin.controller.step_records import StepRecords
from plugin.errors import TrainingError
from plugin.loss.inputs import KnownTokens
from plugin.loss.interfaces import example_inputs
from plugin.loss.partial_objective import first_non_finite

pytestmark = pytest.mark.hostile


HOOKS = """
import torch

def sound(args, *, pg_loss, loss_masks, **_):
    return pg_loss, loss_masks, {}

def bad_value(args, *, pg_loss, loss_masks, advantages, **_):
    # Fine on the tokens that a hook is tried on.
    weight = torch.where(torch.cat(advantages) == 0.5, float("nan"), 1.0)
    return pg_loss * weight, loss_masks, {}

def bad_gradient(args, *, pg_loss, loss_masks, advantages, **_):
    # The square root of 0 has no derivative, and a mask does not help: 0 * inf is NaN.
    broken = torch.sqrt(pg_loss * 0.0)
    return torch.where(torch.cat(advantages) == 0.5, pg_loss + broken, pg_loss), loss_masks, {}
"""


def known(**changes: Tensor) -> tuple[KnownTokens, Tensor]:
    """Samples of 2 and 3 tokens; the fourth token is masked, the fifth has an advantage of 0.5."""
    inputs = example_inputs()
    names = ("train_log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
    fields: dict[str, Any] = {name: getattr(inputs, name).clone() for name in names}
    fields["advantages"][4] = 0.5
    fields |= changes
    cur = inputs.cur_log_probs.detach()
    return KnownTokens(inputs.mask, inputs.shards, inputs.loss_masks, fields), cur


def spoiled(index: int) -> Tensor:
    values = torch.full((5,), -1.0)
    values[index] = math.nan
    return values


@pytest.mark.parametrize(
    "field", ["advantages", "rollout_log_probs", "ref_log_probs", "train_log_probs"]
)
def test_a_field_is_not_blamed_on_the_loss(field: str) -> None:
    tokens, cur = known(**{field: spoiled(2)})
    found = first_non_finite(LossConfig(), tokens, cur)
    shown = "log_probs" if field == "train_log_probs" else field
    assert found == (shown, 1, 0)
    tokens, cur = known(**{field: spoiled(3)})
    assert first_non_finite(LossConfig(), tokens, cur) is None, "masked"


def test_the_models_own_log_probs_are_named() -> None:
    tokens, _ = known()
    assert first_non_finite(LossConfig(), tokens, spoiled(1)) == ("cur_log_probs", 0, 1)


@pytest.mark.parametrize(
    ("hook", "prefix", "place"),
    [("bad_value", "", (1, 2)), ("bad_gradient", "the gradient of ", (0, 0))],
)
def test_a_hook_is_named_and_the_sound_one_before_it_is_not(
    hook: str, prefix: str, place: tuple[int, int], tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(HOOKS)
    config = LossConfig(use_tis=True, custom_tis_function_path=f"{file}:sound,{file}:{hook}")
    tokens, cur = known()
    assert first_non_finite(config, tokens, cur) == (f"{prefix}hook {file}:{hook}", *place)


def test_skipped_steps_do_not_go_on_for_ever() -> None:
    """The driver's count alone; jobs/test_skipped_steps.py has whole jobs."""
    said: list[str] = []
    files = SimpleNamespace(log_findings=lambda step, findings: said.append(findings[0].evidence))
    records = object.__new__(StepRecords)
    records._config, records._skipped_in_a_row = JobConfig(max_skipped_steps=3), 0
    records._files, records._console = files, SimpleNamespace(log=said.append)
    records._checkpoints = SimpleNamespace(newest=lambda: None)
    for cause in ("a", "b", None, "c", "d"):
        records._note_skipped(7, cause)
    for _ in range(9):
        records._note_skipped(7, "float16 overflows", searching=True)  # ends by itself
    with pytest.raises(TrainingError, match=r"last 3 steps were skipped.*the last one: hook e\. "):
        records._note_skipped(7, "hook e")
    assert JobConfig().max_skipped_steps == 20
    assert "step 7 was skipped: c" in said and "c" in said


def test_a_sound_loss_is_not_accused() -> None:
    tokens, cur = known()
    config = LossConfig(use_tis=True, use_kl_loss=True, kl_loss_coef=0.1)
    assert first_non_finite(config, tokens, cur) is None
