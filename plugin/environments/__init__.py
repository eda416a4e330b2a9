"""Turns: chat rendering, tools, environments, trajectories."""
