"""The `vllm` engine: vLLM inside the engine's process."""
