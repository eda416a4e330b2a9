"""Configuration: frozen dataclasses with every flag, default, help text and check."""

from plugin.config.correction_flags import CorrectionFlags
from plugin.config.data_flags import DataFlags, RewardFlags
from plugin.config.eval_flags import EvalFlags
from plugin.config.flags import FlagGroup, flag
from plugin.config.job_flags import EMBEDDED_DEFAULTS, JobConfig
from plugin.config.launch_flags import LaunchFlags, OutputFlags
from plugin.config.lora_flags import LoraFlags
from plugin.config.loss_flags import LossConfig
from plugin.config.objective_flags import AdvantageFlags, NormalizationFlags, RegularizerFlags
from plugin.config.policy_loss_flags import PolicyLossFlags
from plugin.config.policy_loss_traits import RATIO_LOSSES, ROLLOUT_LOSSES
from plugin.config.rejection_rules import RejectionRule, parse_rejection_rules
from plugin.config.rollout_flags import ConversationFlags, RolloutFlags
from plugin.config.sampling_flags import SamplingFlags
from plugin.config.trainer_flags import (
    BatchingFlags,
    ModelFlags,
    OptimizerFlags,
    ParallelFlags,
    TrainerConfig,
)

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
