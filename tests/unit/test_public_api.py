"""The public API of version 0.1: what may not disappear or change its meaning without a new version."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

import plugin
from plugin.cli import COMMANDS

VERSION = "0.1"

PUBLIC: dict[str, set[str]] = {
    "plugin.ppo_utils": {
        *("KL_ESTIMATORS", "ParallelContext", "SequenceShards", "clipped_ratio"),
        *("dppo_tv_mask_function", "gae_advantages", "geometric_log_ratio"),
        *("geometric_mask_function", "grpo_advantages", "icepop_function", "inside_band"),
        *("kl_estimate", "log_ratio", "masked_max", "masked_mean", "masked_min", "masked_sum"),
        *("neutralised", "off_policy_is_function", "opsm_function", "probability_difference"),
        *("reinforce_plus_plus_advantages", "reinforce_plus_plus_baseline_advantages"),
        *("reinforce_plus_plus_returns", "rejection_function", "response_spans"),
        *("rloo_advantages", "safe_exp", "sequence_log_ratio", "sequence_tis_function"),
        *("spread_over_tokens", "token_separable", "use_parallel_context", "vanilla_tis_function"),
        *("veto_function", "whiten", "zero_masked", "ess_tis_function", "kpop_function"),
        *("m2po_function", "segment_tis_function", "batch_statistics", "microbatch_statistics"),
        "mask_only",
    },
    "plugin.loss": {
        *("POLICY_LOSSES", "CorrectionHook", "LossInputs", "LossOutputs", "PolicyTerm"),
        *("RegularizerTerm", "TokenMetric", "compute_loss", "load_function", "load_hook"),
        *("loss_inputs", "loss_traits", "policy_loss_function", "reduce_loss"),
    },
    "plugin.config": {
        *("EMBEDDED_DEFAULTS", "RATIO_LOSSES", "ROLLOUT_LOSSES", "AdvantageFlags"),
        *("BatchingFlags", "ConversationFlags", "CorrectionFlags", "DataFlags", "EvalFlags"),
        *("FlagGroup",),
        *(
            "JobConfig",
            "LaunchFlags",
            "LoraFlags",
            "LossConfig",
            "ModelFlags",
            "NormalizationFlags",
            "OptimizerFlags",
        ),
        *("OutputFlags", "ParallelFlags", "PolicyLossFlags", "RegularizerFlags", "RejectionRule"),
        *("RewardFlags", "RolloutFlags", "SamplingFlags", "TrainerConfig", "flag"),
        "parse_rejection_rules",
    },
}

#: Modules without `__all__` whose named parts are public all the same.
NAMED: dict[str, set[str]] = {
    "plugin.batch_types": {"FIELDS", "Microbatch", "RolloutBatch", "RolloutSample"},
    "plugin.errors": {
        *("MegatronTisError", "ConfigError", "HookLoadError", "BatchError", "ReplayError"),
        *("ParallelError", "WeightError", "CheckpointError", "EngineError", "ClusterError"),
    },
    "plugin.logprobs.vocab_parallel": {"log_probs_and_entropy", "log_probs_of_ids"},
    "plugin.logprobs.fused_lm_head": {"fused_log_probs_and_entropy"},
    "plugin.megatron_backend.vocab_parallel_logprobs": {"log_probs_and_entropy"},
    "plugin.megatron_backend.trainer": {"MegatronTrainer", "StepResult"},
    "plugin.megatron_backend.teacher": {"TeacherTrainer"},
    "plugin.megatron_backend.parallel_groups": {
        *("ParallelGroups", "init_parallel", "destroy_parallel", "read_parallel_groups"),
    },
    "plugin.adapters.padded_loss": {"PaddedBatch", "padded_loss"},
    "plugin.adapters.verl": {
        *("register", "policy_loss", "rollout_correction", "install_rollout_correction"),
    },
    "plugin.adapters.skyrl": {"register", "policy_loss"},
    "plugin.adapters.prime_rl": {"policy_loss"},
}

#: Modules of packages that are gone (a directory of bytecode that stays behind imports by its own name, and is empty).
GONE = (
    *("plugin.launch.job", "plugin.launch.rollout_queue", "plugin.launch.preflight"),
    *("plugin.rollout.engines.protocol", "plugin.rollout.conversation.conversation"),
    *("plugin.plan.search", "plugin.compare.replay", "plugin.doctor.doctor_command"),
)

HOOK_ARGUMENTS = {"pg_loss", "loss_masks", "rollout_log_probs"}


def test_the_list_belongs_to_this_version() -> None:
    assert plugin.__version__.startswith(VERSION + ".")


@pytest.mark.parametrize("module", PUBLIC)
def test_a_package_exports_exactly_its_public_names(module: str) -> None:
    exported = set(importlib.import_module(module).__all__)
    assert exported == PUBLIC[module], "update the list here and the changelog with it"


@pytest.mark.parametrize("module", NAMED)
def test_a_module_has_its_public_names_with_docstrings(module: str) -> None:
    found = importlib.import_module(module)
    for name in NAMED[module]:
        value = getattr(found, name)
        assert not callable(value) or inspect.getdoc(value), f"{module}.{name}"


@pytest.mark.parametrize("module", GONE)
def test_an_old_internal_path_does_not_import(module: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(module)


def test_the_two_signatures_that_other_frameworks_call() -> None:
    from plugin import loss, ppo_utils

    names = list(inspect.signature(loss.policy_loss_function).parameters)
    assert names == ["args", "batch", "logits", "sum_of_sample_mean"]
    for name in (name for name in ppo_utils.__all__ if name.endswith("_function")):
        parameters = inspect.signature(getattr(ppo_utils, name)).parameters
        assert parameters.keys() >= HOOK_ARGUMENTS, name
        assert any(p.kind is p.VAR_KEYWORD for p in parameters.values()), name


def test_the_signature_of_the_log_probs() -> None:
    from plugin.logprobs.vocab_parallel import log_probs_and_entropy

    names = list(inspect.signature(log_probs_and_entropy).parameters)
    assert names[:2] == ["logits", "tokens"]
    options = {"group", "temperature", "with_entropy", "entropy_grad", "inplace_grad"}
    assert options <= set(names[2:])


def test_the_commands() -> None:
    assert {"train", "doctor", "compare", "report", "corrections"} <= COMMANDS.keys()


def test_the_package_is_typed() -> None:
    assert Path(plugin.__file__ or "").with_name("py.typed").exists()
