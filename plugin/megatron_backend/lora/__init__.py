"""LoRA adapters on Megatron-Core linear layers, and PEFT's format."""
