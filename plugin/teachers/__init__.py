"""Teachers behind HTTP: log-probs of the policy's tokens from vLLM and SGLang servers."""
