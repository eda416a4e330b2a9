"""Flags of the loss: policy losses, corrections, and what surrounds them."""
