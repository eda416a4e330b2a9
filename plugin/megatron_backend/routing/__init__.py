"""MoE routing: replay of recorded routes, recording of live ones."""
