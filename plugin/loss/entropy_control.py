"""The entropy bonus that holds the policy's entropy at a target: how its coefficient moves.

What a run keeps between two updates is one `EntropyBonus`; the loss reads `entropy_coef` as ever.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from plugin.config import TrainerConfig


class EntropyBonus(NamedTuple):
    """Where the controller is; `acts`: whether the entropy was last below the target."""

    coefficient: float
    acts: bool = True

    @property
    def in_force(self) -> float:
        """The coefficient of the next update."""
        return self.coefficient if self.acts else 0.0

    def after(self, entropy: float, config: TrainerConfig) -> EntropyBonus:
        """The bonus after an update with this mean entropy, in nats.

        The coefficient grows by --entropy-coef-step where the entropy is below --entropy-target and
        falls by it elsewhere, between 0 and --entropy-coef-max; above the target it does not act
        (adaptive entropy control, Skywork-OR1, arXiv 2505.22312, as in its code). An entropy that
        is not a number, of a step without tokens or with a bad gradient, changes nothing.
        """
        if config.entropy_target is None or not math.isfinite(entropy):
            return self
        below = entropy < config.entropy_target
        step = config.entropy_coef_step if below else -config.entropy_coef_step
        moved = min(max(self.coefficient + step, 0.0), config.entropy_coef_max)
        return EntropyBonus(moved, below)
