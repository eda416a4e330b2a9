"""How far a real model's log-probs are apart between engines, precisions and ways of computing them."""
