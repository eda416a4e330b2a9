"""The entropy bonus that holds an entropy: by hand, against Skywork-OR1's rule, and what is refused."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from plugin.config import JobConfig
from plugin.errors import ConfigError
from plugin.loss.entropy_control import EntropyBonus

CONFIG = JobConfig(entropy_target=0.5, entropy_coef_step=0.002, entropy_coef_max=0.005)


def test_the_bonus_grows_below_the_target_and_falls_and_rests_above() -> None:
    bonus = EntropyBonus(0.0)
    found = []
    for entropy in (0.4, 0.3, 0.2, 0.6, 0.5, 0.49):
        bonus = bonus.after(entropy, CONFIG)
        found.append((round(bonus.coefficient, 6), bonus.in_force == bonus.coefficient))
    # 0.006 is cut to 0.005; at or above the target it falls and does not act
    assert found == [
        (0.002, True), (0.004, True), (0.005, True), (0.003, False), (0.001, False), (0.003, True)
    ]  # fmt: skip
    assert EntropyBonus(0.001).after(0.9, CONFIG) == EntropyBonus(0.0, False)


def test_an_entropy_that_is_no_number_moves_nothing() -> None:
    for entropy in (math.nan, math.inf):
        assert EntropyBonus(0.003, False).after(entropy, CONFIG) == EntropyBonus(0.003, False)
    assert EntropyBonus(0.003).after(0.1, JobConfig()) == EntropyBonus(0.003)


def test_it_is_skyworks_linear_controller() -> None:
    draw = random.Random(0)
    bonus, value, acts = EntropyBonus(0.001), 0.001, 1
    for _ in range(200):
        entropy = draw.random()
        # value += delta if entropy < target else -delta, clipped; the loss is on while entropy < target
        value = min(max(value + (0.002 if entropy < 0.5 else -0.002), 0.0), 0.005)
        acts = int(entropy < 0.5)
        bonus = bonus.after(entropy, CONFIG)
        assert bonus.in_force == pytest.approx(value * acts, abs=1e-12)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"entropy_coef": 0.1}, "starts at --entropy-coef 0.1, above --entropy-coef-max 0.005"),
        (
            {"loss_denominator": "kept", "policy_loss": "icepop"},
            "--entropy-target 0.5 with --loss-denominator kept",
        ),
    ],
)
def test_what_contradicts_it_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig(entropy_target=0.5, **settings)
