"""Hugging Face weights into and out of Megatron-Core chunks, on every layout."""
