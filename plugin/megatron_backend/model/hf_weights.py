"""Public path: Hugging Face weights into and out of Megatron-Core chunks, on every layout."""

from plugin.megatron_backend.model.model_chunks import unwrap
from plugin.megatron_backend.model.weight_export import export_hf_weights
from plugin.megatron_backend.model.weight_loading import load_hf_weights
from plugin.megatron_backend.model.weight_saving import save_hf_checkpoint

__all__ = ["export_hf_weights", "load_hf_weights", "save_hf_checkpoint", "unwrap"]
