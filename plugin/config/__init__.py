"""Configuration: frozen dataclasses with every flag, default, help text and check."""

from plugin.config.data import DataFlags, RewardFlags
from plugin.config.evaluation import EvalFlags
from plugin.config.flags import FlagGroup, flag
from plugin.config.job_config import EMBEDDED_DEFAULTS, JobConfig
from plugin.config.launch import LaunchFlags, OutputFlags
from plugin.config.loss.corrections import CorrectionFlags, RejectionRule, parse_rejection_rules
from plugin.config.loss.loss_config import (
    AdvantageFlags,
    LossConfig,
    NormalizationFlags,
    RegularizerFlags,
)
from plugin.config.loss.policy_loss import RATIO_LOSSES, ROLLOUT_LOSSES, PolicyLossFlags
from plugin.config.model import LoraFlags, ModelFlags
from plugin.config.rollout import ConversationFlags, RolloutFlags, SamplingFlags
from plugin.config.trainer_config import BatchingFlags, OptimizerFlags, ParallelFlags, TrainerConfig

__all__ = [
    "EMBEDDED_DEFAULTS",
    "RATIO_LOSSES",
    "ROLLOUT_LOSSES",
    "AdvantageFlags",
    "BatchingFlags",
    "ConversationFlags",
    "CorrectionFlags",
    "DataFlags",
    "EvalFlags",
    "FlagGroup",
    "JobConfig",
    "LaunchFlags",
    "LoraFlags",
    "LossConfig",
    "ModelFlags",
    "NormalizationFlags",
    "OptimizerFlags",
    "OutputFlags",
    "ParallelFlags",
    "PolicyLossFlags",
    "RegularizerFlags",
    "RejectionRule",
    "RewardFlags",
    "RolloutFlags",
    "SamplingFlags",
    "TrainerConfig",
    "flag",
    "parse_rejection_rules",
]
