"""Commands that a finding names as the next step, with the settings of its job."""

from __future__ import annotations

import shlex

from plugin.config import JobConfig


def bisect_command(config: JobConfig | None) -> str:
    """The `doctor --bisect` that compares the layers of engine and trainer as the job has them."""
    words = ["megatron-tis", "doctor", "--bisect"]
    if config is None:
        return " ".join(words)
    if config.hf_checkpoint is not None:
        words += ["--hf-checkpoint", config.hf_checkpoint]
    else:
        words += ["--embedded-model", config.embedded_model]
    if config.train_dtype != "auto":
        words += ["--train-dtype", config.train_dtype]
    words += ["--rollout-dtype", config.rollout_dtype]
    if config.rollout_quantization != "none":
        words += ["--rollout-quantization", config.rollout_quantization]
    return shlex.join(words)
