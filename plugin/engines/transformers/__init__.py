"""The `transformers` engine: continuous batching with exact log-probs."""
