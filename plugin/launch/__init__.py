"""Placement, Ray actors and the driver loop of `megatron-tis train`."""
