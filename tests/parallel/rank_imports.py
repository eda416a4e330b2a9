"""What every rank imports; loaded once by the fork server that the workers are forked from."""

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

from plugin.megatron_backend import parallel_groups  # noqa: E402
from plugin.megatron_backend.model import builder as model_builder  # noqa: E402
from plugin.megatron_backend.model import hf_weights  # noqa: E402

__all__ = [
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "cpu_runtime",
    "hf_weights",
    "model_builder",
    "parallel_groups",
    "torch",
    "transformers",
]
