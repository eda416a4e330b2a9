"""Transports of weights, sender and receiver side by side."""
