"""The losses, estimators and corrections that a flag has no effect without."""

from __future__ import annotations

from typing import Any

from plugin.config.estimator_traits import ESTIMATOR_TRAITS
from plugin.config.flags import Needs
from plugin.config.policy_loss_traits import POLICY_LOSS_TRAITS


def needs_loss(*names: str) -> Needs:
    """One of these policy losses, or the user's own, which may read any flag."""
    return Needs(
        f"--policy-loss {' or '.join(names)}",
        lambda config: config.policy_loss in names or config.policy_loss not in POLICY_LOSS_TRAITS,
    )


def needs_estimator(*names: str) -> Needs:
    """One of these estimators, or the user's own."""
    return Needs(
        f"--advantage-estimator {' or '.join(names)}",
        lambda config: (
            config.advantage_estimator in names
            or config.advantage_estimator not in ESTIMATOR_TRAITS
        ),
    )


def needs_hook(*names: str) -> Needs:
    """One of these corrections in use, or one of the user's own."""
    built_in = "plugin.ppo_utils."

    def are_met(config: Any) -> bool:
        paths = [path.replace(":", ".") for path in config.hook_names()]
        return (config.use_tis or config.get_mismatch_metrics) and any(
            not path.startswith(built_in) or path.rsplit(".", 1)[-1] in names for path in paths
        )

    shown = " or ".join(
        f"{name} (the default)" if name == "vanilla_tis_function" else f"{built_in}{name}"
        for name in names
    )
    return Needs(f"--use-tis with {shown}", are_met)
