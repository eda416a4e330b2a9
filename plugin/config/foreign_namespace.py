"""Reads the namespace of another framework (slime, miles, a user's own) as a `LossConfig`."""

from __future__ import annotations

import warnings
from typing import Any

from plugin.config.correction_flags import VANILLA_TIS
from plugin.config.loss_flags import LossConfig
from plugin.config.policy_loss_traits import POLICY_LOSS_TRAITS
from plugin.config.slime_flags import check_slime_flags
from plugin.errors import ConfigError

_warned: set[str] = set()


def loss_config_of(args: Any) -> LossConfig:
    """The `LossConfig` that `args` means.

    A namespace without `policy_loss` belongs to another framework: its loss follows `pg_loss_type`
    or `advantage_estimator`, switches that are off take their coefficient with them, and a
    correction that is right only on-policy is a warning there, because that framework has already
    accepted it. Flags of slime that would be ignored are refused (`slime_flags.py`).
    """
    if isinstance(args, LossConfig):
        return args
    check_slime_flags(args)
    if hasattr(args, "policy_loss"):
        return LossConfig.from_namespace(args)
    found = {
        name: getattr(args, name)
        for name in LossConfig.setting_names()
        if getattr(args, name, None) is not None
    }
    estimator = found.pop("advantage_estimator", None)
    named = getattr(args, "pg_loss_type", None) or estimator
    if estimator == "gspo" and named == "ppo":
        named = "gspo"  # PPO's clip on GSPO's ratio of the sequence
    found["policy_loss"] = named if named in POLICY_LOSS_TRAITS else "ppo"
    for switch, dependent in (
        ("use_kl_loss", "kl_loss_coef"),
        ("use_rollout_kl_loss", "rollout_kl_loss_coef"),
    ):
        if not found.get(switch):
            found.pop(dependent, None)
    if not found.get("use_tis") and not found.get("get_mismatch_metrics"):
        found.pop("custom_tis_function_path", None)
    if getattr(args, "use_opsm", False):
        masks_and_weights = ["plugin.ppo_utils.opsm_function"]
        if found.get("use_tis"):
            masks_and_weights.append(found.get("custom_tis_function_path") or VANILLA_TIS)
        found |= {"use_tis": True, "custom_tis_function_path": ",".join(masks_and_weights)}
    found.setdefault("calculate_per_token_loss", False)  # reduced by the framework itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return LossConfig(**found)
        except ConfigError as error:
            if "--allow-biased-correction" not in str(error):
                raise
            reason = str(error)
        config = LossConfig(**{**found, "allow_biased_correction": True})
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(reason, stacklevel=2)
    return config
