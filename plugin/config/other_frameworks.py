"""Flags of other frameworks: their names here, and what their namespaces mean to our loss."""

from __future__ import annotations

import warnings
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any, Literal

from plugin.config.flags import expect, option_name
from plugin.config.loss.corrections import VANILLA_TIS
from plugin.config.loss.loss_config import LossConfig
from plugin.config.loss.policy_loss import POLICY_LOSS_TRAITS
from plugin.errors import ConfigError

#: By field name; the value is what to write instead.
OTHER_SPELLINGS = {
    "bf16": "--train-dtype bfloat16",
    "fp16": "--train-dtype float16",
    "load": "--resume or --hf-checkpoint",
    "save": "--run-dir",
    "lr_warmup_iters": "--lr-warmup-steps",
    "num_layers_per_virtual_pipeline_stage": "--virtual-pipeline-model-parallel-size",
    "actor_num_nodes": "--num-nodes",
    "actor_num_gpus_per_node": "--num-gpus-per-node",
    "rollout_num_gpus": "--num-rollout-engines",
    "ref_load": "--ref-hf-checkpoint",
    "num_rollout": "--num-rollouts",
    "num_epoch": "--num-epochs",
    "num_steps_per_rollout": "--global-batch-size",
    "use_dynamic_batch_size": "--max-tokens-per-gpu",
    "input_key": "--prompt-key",
    "rollout_shuffle": "--shuffle-data",
    "rollout_max_prompt_len": "--max-prompt-length",
    "rollout_max_response_len": "--max-response-length",
    "rm_type": "--reward",
    "rm_url": "--reward-url",
    "custom_rm_path": "--reward-function-path",
    "dynamic_sampling_filter_path": "--dynamic-sampling",
    "partial_rollout": "--partial-rollouts",
    "eval_prompt_data": "--eval-data",
    "eval_max_response_len": "--eval-max-response-length",
    "disable_grpo_std_normalization": "--no-grpo-std-normalization",
}


_ONE_SHAPE = "and packed rows have another length in every pass"

#: Megatron's flags that cannot hold here, by field name: why, and what to do instead.
NOT_HERE = {
    "tp_comm_overlap": "its buffers are allocated for one number of tokens, " + _ONE_SHAPE,
    **dict.fromkeys(
        ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "cuda_graph_scope"),
        "a captured graph runs one shape, " + _ONE_SHAPE,
    ),
    **dict.fromkeys(
        ("fine_grained_activation_offloading", "offload_modules"),
        "Megatron wants as many microbatches in every pass and keeps pinned memory for every "
        "length of a row that it has seen; use --recompute-modules",
    ),
    **dict.fromkeys(
        ("cpu_offloading", "cpu_offloading_num_layers"),
        "Megatron has it for one pipeline stage without recompute only; use --recompute-modules, "
        "and --optimizer-cpu-offload for the optimizer",
    ),
    **dict.fromkeys(
        ("overlap_p2p_comm", "overlap_p2p_communication"),
        "the interleaved schedule then has messages of both directions under way at once, and a "
        "step over gloo was not that of one process",
    ),
    "main_grads_dtype": "gradients add up in float32, so that a step does not depend on its cut",
}


def not_here(name: str) -> str | None:
    """Why Megatron's flag `name` cannot hold here; None if it is no such flag."""
    return NOT_HERE.get(_field(name))


def spelled_here(name: str, fields: Container[str]) -> str | None:
    """Our name of another framework's flag `name`, if it is one of `fields`; else None."""
    here = OTHER_SPELLINGS.get(_field(name))
    return here if here is not None and _field(here.split()[0]) in fields else None


def _field(option: str) -> str:
    return option.lstrip("-").removeprefix("no-").replace("-", "_")


@dataclass(frozen=True)
class SlimeFlag:
    """One flag of slime or miles.

    default: the value it has there when nobody sets it
    state: honored by our loss, refused with any value but the default, or done by the framework
        before or after the loss, whichever loss that is
    note: what to know about it; for a refused flag the reason and the fix
    """

    default: Any
    state: Literal["honored", "refused", "done by slime"]
    note: str = ""


def _honored(default: Any, note: str = "") -> SlimeFlag:
    return SlimeFlag(default, "honored", note)


def _refused(default: Any, reason_and_fix: str) -> SlimeFlag:
    return SlimeFlag(default, "refused", reason_and_fix)


def _done_by_slime(default: Any, note: str) -> SlimeFlag:
    return SlimeFlag(default, "done by slime", note)


SLIME_LOSS_FLAGS: dict[str, SlimeFlag] = {
    "advantage_estimator": _honored("grpo", "the policy loss: gspo, cispo, otherwise PPO"),
    "pg_loss_type": _honored(
        None,
        "with reinforce, TIS weights the current policy; in slime and vime since September 2026, "
        "not in miles",
    ),
    "eps_clip": _honored(0.2),
    "eps_clip_high": _honored(None),
    "eps_clip_c": _honored(None, "PPO and GSPO"),
    "entropy_coef": _honored(0.0),
    "use_kl_loss": _honored(False),
    "kl_loss_coef": _honored(0.0),
    "kl_loss_type": _honored("k1", "low_var_kl is bounded at 10"),
    "use_unbiased_kl": _honored(False),
    "use_tis": _honored(False),
    "tis_clip": _honored(2.0),
    "tis_clip_low": _honored(0.0),
    "custom_tis_function_path": _honored(None, "several, separated by commas, run in order"),
    "get_mismatch_metrics": _honored(
        False, "without TIS the corrections are observed, not applied; slime's loss applies them"
    ),
    "use_rollout_logprobs": _honored(False),
    "use_opsm": _honored(
        False, "opsm_function before the other corrections, token by token as in slime"
    ),
    "opsm_delta": _honored(1e-4),
    "rollout_temperature": _honored(1.0),
    "recompute_loss_function": _honored(False, "the loss may run inside torch's checkpoint"),
    "rollout_top_p": _honored(
        1.0, "log-probs of the nucleus that slime records, the entropy of all, as in slime"
    ),
    "allgather_cp": _refused(
        False, "with context parallelism our loss expects zigzag shards; drop one of the two"
    ),
    "qkv_format": _refused(
        "thd",
        "our loss expects packed samples; drop it: slime has no such flag any more and always "
        "packs, miles does with thd",
    ),
    "use_score_centering": _honored(
        False,
        "--score-centering-topk on reinforce, of what the engine recorded; in slime and vime since "
        "September 2026, which refuse it with custom_loss before a job starts; in miles an open "
        "pull request (3317)",
    ),
    "custom_pg_loss_reducer_function_path": _refused(
        None, "our loss reduces every term with slime's reducer; drop it or use slime's own loss"
    ),
    "skip_actor_forward_only": _refused(
        False,
        "a flag of miles, which skips its log-prob pass for its own loss only and refuses "
        "custom_loss with it; drop it, or use --use-rollout-logprobs, which needs no pass",
    ),
    "true_on_policy_mode": _refused(
        False,
        "a flag of miles; our log-probs are not bitwise those of the engine; drop it or use its "
        "own loss",
    ),
    "observe_training_entropy": _honored(False, "a flag of miles; our loss always reports it"),
    "calculate_per_token_loss": _done_by_slime(False, "the reducer that it gives our loss"),
    "log_probs_chunk_size": _done_by_slime(-1, "its own log-prob passes; ours need no chunks"),
    "log_probs_max_tokens_per_gpu": _done_by_slime(None, "its own log-prob passes"),
    "keep_old_actor": _done_by_slime(False, "its log-prob pass, with the weights that sampled"),
    "use_rollout_entropy": _done_by_slime(False, "its own log-prob passes"),
    "kl_coef": _done_by_slime(0.0, "advantages"),
    "gamma": _done_by_slime(1.0, "advantages"),
    "lambd": _done_by_slime(1.0, "advantages"),
    "normalize_advantages": _done_by_slime(False, "advantages"),
    "grpo_std_normalization": _done_by_slime(True, "advantages"),
    "rewards_normalization": _done_by_slime(True, "advantages"),
    "custom_advantage_function_path": _done_by_slime(None, "advantages; not in miles"),
    "compute_advantages_and_returns": _done_by_slime(True, "our loss needs them in the batch"),
    "use_opd": _done_by_slime(False, "advantages"),
    "opd_type": _done_by_slime(None, "advantages"),
    "opd_kl_coef": _done_by_slime(1.0, "advantages"),
    "ref_update_interval": _done_by_slime(None, "the reference log-probs"),
    "value_clip": _done_by_slime(0.2, "the critic's loss"),
    "score_centering_top_k": _done_by_slime(
        128, "what the engine records; where --use-score-centering is"
    ),
    "rollout_top_k": _done_by_slime(-1, "the engine; slime's loss does not look at it either"),
    "mask_offpolicy_in_partial_rollout": _done_by_slime(False, "the loss masks"),
    "enable_mtp_training": _done_by_slime(False, "the model adds that loss itself"),
    "mtp_loss_scaling_factor": _done_by_slime(0.2, "the model adds that loss itself"),
    "use_routing_replay": _done_by_slime(False, "the model"),
    "use_rollout_routing_replay": _done_by_slime(False, "the model"),
    "loss_type": _done_by_slime("policy_loss", "custom_loss calls ours"),
    "custom_loss_function_path": _done_by_slime(None, "plugin.loss.policy_loss_function is ours"),
}


def slime_option(name: str) -> str:
    """The option that sets a field of slime's namespace to something else than its default."""
    disables = SLIME_LOSS_FLAGS[name].default is True
    return option_name(f"disable_{name}" if disables else name)


def pg_loss_type(args: Any) -> str | None:
    """slime's `pg_loss_type`; with score centering it is REINFORCE unless set."""
    given: str | None = getattr(args, "pg_loss_type", None)
    centers = getattr(args, "use_score_centering", False)
    return "reinforce" if given is None and centers else given


def check_slime_flags(args: Any) -> None:
    """Raise a `ConfigError` for flags in a foreign namespace that our loss would ignore."""
    given = {
        name: value
        for name, flag in SLIME_LOSS_FLAGS.items()
        if (value := getattr(args, name, None)) is not None and value != flag.default
    }
    if getattr(args, "context_parallel_size", 1) == 1:
        given.pop("allgather_cp", None)
    for name, value in given.items():
        flag = SLIME_LOSS_FLAGS[name]
        expect(flag.state != "refused", f"{option_name(name)} is {value}: {flag.note}")
    expect(
        not ("use_opsm" in given and "get_mismatch_metrics" in given and "use_tis" not in given),
        "--use-opsm with --get-mismatch-metrics and without --use-tis: one masks, the other only "
        "observes; add --use-tis or drop one of the two",
    )
    own = getattr(args, "policy_loss", None)
    for name in ("use_opsm", "pg_loss_type") if own is not None else ():
        expect(
            name not in given,
            f"{option_name(name)} is {given.get(name)} with --policy-loss {own}, which is read as "
            "ours; drop one of the two (opsm_function is a correction by path)",
        )
    estimator, loss = given.get("advantage_estimator"), given.get("pg_loss_type")
    expect(
        loss is None or estimator != "cispo" or loss == "cispo",
        f"--pg-loss-type is {loss} with --advantage-estimator cispo, which is a different loss; "
        "drop one of the two",
    )
    old_is_used = [name for name in ("use_opsm", "use_unbiased_kl") if name in given]
    expect(
        not (loss == "reinforce" and "use_tis" in given and old_is_used),
        f"{', '.join(map(option_name, old_is_used))} with --pg-loss-type reinforce and --use-tis: "
        "TIS then compares the current policy with the engine's, and the old policy is unknown; "
        "drop one of them",
    )


_warned: set[str] = set()


def loss_config_of(args: Any) -> LossConfig:
    """The `LossConfig` that `args` means.

    A namespace without `policy_loss` belongs to another framework: its loss follows `pg_loss_type`
    or `advantage_estimator`, switches that are off take their coefficient with them, and a
    correction that is right only on-policy is a warning there, because that framework has already
    accepted it. Flags of slime that would be ignored are refused (`check_slime_flags`).
    """
    if isinstance(args, LossConfig):
        return args
    check_slime_flags(args)
    centers = getattr(args, "use_score_centering", False)
    topk = int(getattr(args, "score_centering_top_k", None) or 128)
    if hasattr(args, "policy_loss"):
        config = LossConfig.from_namespace(args)
        if centers and not config.score_centering_topk:
            config = replace(config, score_centering_topk=topk)
        return config
    found = {
        name: getattr(args, name)
        for name in LossConfig.setting_names()
        if getattr(args, name, None) is not None
    }
    if centers:
        found["score_centering_topk"] = topk
    estimator = found.pop("advantage_estimator", None)
    named = pg_loss_type(args) or estimator
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
    found.setdefault("calculate_per_token_loss", False)  # the framework brings its reducer
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
