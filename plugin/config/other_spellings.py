"""What flags of Megatron-LM and slime are called here, for the answer to an unknown flag."""

from __future__ import annotations

from collections.abc import Container

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


def spelled_here(name: str, fields: Container[str]) -> str | None:
    """What a flag or key called `name` elsewhere is here, if it is one of `fields`; else None."""
    here = OTHER_SPELLINGS.get(_field(name))
    return here if here is not None and _field(here.split()[0]) in fields else None


def _field(option: str) -> str:
    return option.lstrip("-").removeprefix("no-").replace("-", "_")
