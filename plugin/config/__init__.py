"""Configuration: frozen dataclasses are the single source of flags, defaults, help and validation."""

from plugin.config.flags import FlagGroup, flag
from plugin.config.loss_flags import (
    RATIO_LOSSES,
    ROLLOUT_LOSSES,
    AdvantageFlags,
    CorrectionFlags,
    LossConfig,
    NormalizationFlags,
    PolicyLossFlags,
    RegularizerFlags,
)
from plugin.config.rejection_rules import RejectionRule, parse_rejection_rules

__all__ = [
    "RATIO_LOSSES",
    "ROLLOUT_LOSSES",
    "AdvantageFlags",
    "CorrectionFlags",
    "FlagGroup",
    "LossConfig",
    "NormalizationFlags",
    "PolicyLossFlags",
    "RegularizerFlags",
    "RejectionRule",
    "flag",
    "parse_rejection_rules",
]
