"""Log-probs and entropy from logits or hidden states, vocabulary-parallel; torch alone."""
