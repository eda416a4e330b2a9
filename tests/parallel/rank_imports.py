"""What every rank imports; loaded once by the fork server that the workers are forked from."""

import gc

import torch
import transformers

# No thread pool may exist in the process that workers are forked from.
torch.set_num_threads(1)

from plugin.megatron_backend import cpu_runtime  # noqa: E402

cpu_runtime.activate()

from transformers import (  # noqa: E402
    LlamaForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from plugin.megatron_backend import parallel_groups, trainer  # noqa: E402
from plugin.megatron_backend.model import builder as model_builder  # noqa: E402
from plugin.megatron_backend.model import hf_weights  # noqa: E402
from tests.parallel import replay_jobs, schedule_runs, training_jobs  # noqa: E402

# What is here stays: collections in the workers need not look at it.
gc.collect()
gc.freeze()

__all__ = [
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "cpu_runtime",
    "hf_weights",
    "model_builder",
    "parallel_groups",
    "replay_jobs",
    "schedule_runs",
    "torch",
    "trainer",
    "training_jobs",
    "transformers",
]
