"""Megatron-Core backend: the only package that imports megatron."""
