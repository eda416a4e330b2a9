"""From tokens to one scalar: policy losses, regularizers, loadable corrections, in pure torch."""

from plugin.config.import_paths import load_function
from plugin.config.loss.policy_loss import loss_traits
from plugin.loss.hook_chain import load_hook
from plugin.loss.inputs import loss_inputs
from plugin.loss.interfaces import (
    CorrectionHook,
    LossInputs,
    LossOutputs,
    PolicyTerm,
    RegularizerTerm,
    TokenMetric,
)
from plugin.loss.objective import compute_loss
from plugin.loss.policy_loss import policy_loss_function, reduce_loss
from plugin.loss.policy_losses import POLICY_LOSSES

__all__ = [
    "POLICY_LOSSES",
    "CorrectionHook",
    "LossInputs",
    "LossOutputs",
    "PolicyTerm",
    "RegularizerTerm",
    "TokenMetric",
    "compute_loss",
    "load_function",
    "load_hook",
    "loss_inputs",
    "loss_traits",
    "policy_loss_function",
    "reduce_loss",
]
