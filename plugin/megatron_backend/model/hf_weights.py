"""Public path: Hugging Face weights into and out of Megatron-Core chunks, on every layout."""

from plugin.megatron_backend.hf_weights.export import export_hf_weights, save_hf_checkpoint
from plugin.megatron_backend.hf_weights.loading import load_hf_weights
from plugin.megatron_backend.model.builder import unwrap

__all__ = ["export_hf_weights", "load_hf_weights", "save_hf_checkpoint", "unwrap"]
