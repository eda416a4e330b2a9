"""Teachers behind HTTP: what vLLM and SGLang servers say of tokens that the policy sampled."""
