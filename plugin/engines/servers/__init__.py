"""vLLM and SGLang servers: their HTTP interfaces, and servers of the job's own."""
